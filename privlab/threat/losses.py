"""The losses that clients minimise, by `Client.loss`, and the private targets of those that have no class labels."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor
from torchvision.ops import sigmoid_focal_loss

from privlab.base import PrivlabError, check_range, full_precision, one_line
from privlab.threat.client import Client
from privlab.victims import VictimModel, check_classifies

_SCALE, _BIAS = 10.0, -10.0
"""t and b of the contrastive loss, as SigLIP's training begins."""

_STUDENT, _TEACHER = 0.1, 0.04
"""Temperatures of DINO's student and teacher."""


def client_loss(client: Client, outputs: Float[Tensor, "b y"], targets: Tensor) -> Float[Tensor, ""]:
    """Return the mean loss of a batch, by `client.loss`.

    With o the model's outputs, logits or, without a classifier, the pooled features, and p the softmax of o:

    - "cross-entropy": −log p_y for the class y, with `client.label_smoothing` and `client.class_weights` w; of these it
      is Σ_i −w_yi log p_yi / Σ_i w_yi;
    - "focal": the mean of −w_y (1 − p_y)^γ log p_y;
    - "binary": the mean over the classes of −w y log σ(o) − (1 − y) log σ(−o), for each class separately, with w of
      `client.pos_weight`;
    - "binary-focal": the same without w, times (1 − p_t)^γ and α or 1 − α, with p_t = σ(o) for y = 1, else σ(−o);
    - "regression": the mean of (o − y)²; "l1": of |o − y|; "smooth-l1": of e²/2 where e = |o − y| < 1, else e − 1/2;
    - "contrastive": −(1/b) Σ_ij log σ(z_ij (t ô_i·ŷ_j + b)) over all pairs, with z_ij = 1 for i = j, else −1, and unit
      vectors ô and ŷ (t = 10, b = −10);
    - "dino": −Σ y log softmax(o / 0.1), with y the teacher's probabilities;
    - a function: what it returns.

    Args:
        client: the public settings.
        outputs: of the model on the batch.
        targets: class indices, or what `private_targets` returns of the batch; the first is that of fused slices.

    Raises:
        PrivlabError: if the function fails, or returns something else than one finite number with a gradient.

    Source: SigLIP (Zhai et al., ICCV 2023), Algorithm 1; DINO (Caron et al., ICCV 2021), Algorithm 1; focal losses (Lin
    et al., ICCV 2017), Equation 5.
    """
    targets = targets[:1] if client.fuses else targets  # of all slices
    if not isinstance(client.loss, str):
        return _of_function(client, outputs, targets)
    weights = None if client.class_weights is None else outputs.new_tensor(client.class_weights)
    if client.loss == "cross-entropy":
        return F.cross_entropy(outputs, targets, weight=weights, label_smoothing=client.label_smoothing)
    if client.loss == "focal":
        return _focal(outputs, targets, client.gamma, weights)
    targets = targets.to(outputs)
    match client.loss:
        case "binary":
            positive = None if client.pos_weight is None else outputs.new_tensor(client.pos_weight)
            return F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=positive)
        case "binary-focal":
            alpha = -1 if client.alpha is None else client.alpha  # torchvision's sign for none
            return sigmoid_focal_loss(outputs, targets, alpha, client.gamma, "mean")
        case "regression":
            return F.mse_loss(outputs, targets)
        case "l1":
            return F.l1_loss(outputs, targets)
        case "smooth-l1":
            return F.smooth_l1_loss(outputs, targets)
        case "contrastive":
            return _contrastive(outputs, targets)
        case _:
            return _dino(outputs, targets)


def linear_loss(outputs: Float[Tensor, "b y"], gradients: Float[Tensor, "b y"]) -> Float[Tensor, ""]:
    """Return (1/b) Σ_i ⟨h_i, o_i⟩: the loss whose gradient at the outputs of image i is h_i / b, whatever they are.

    A step of any loss ℓ is one of this loss with h_i = b ∂ℓ/∂o_i, as ∂ℓ/∂θ = Σ_i (∂o_i/∂θ)ᵀ ∂ℓ/∂o_i.

    Args:
        outputs: o, of the model on the batch.
        gradients: h, of each image.
    """
    return (outputs * gradients).sum() / len(outputs)


def private_targets(
    model: VictimModel, client: Client, images: Float[Tensor, "m c h w"], labels: Tensor, draw: Generator
) -> Tensor:
    """Return what a client's loss compares its images with; it is private, as they are.

    Class indices for a loss of one class; one-hot labels for one of each class; values drawn from N(0, 1) for numeric
    targets that are not given, and for "contrastive" as the embeddings of texts; for "dino" the probabilities
    softmax(o / 0.04) of the server's model, the teacher, on the mirrored images. Targets that are given in place of
    labels are taken as they are. A function gets the labels or targets that are given.

    Args:
        model: the server's model.
        client: the public settings.
        images: the client's images, in [0, 1].
        labels: their class indices, or their targets (m, y); read where the loss has labels or numeric targets, or is a
            function.
        draw: the client's generator; drawn from where the loss has other values.

    Raises:
        PrivlabError: if the loss has labels, and the model no classifier, or there are weights of another number of
            classes, or numeric targets of another number of outputs.
    """
    given = labels.to(model.mean) if labels.is_floating_point() else labels
    if client.has_labels:
        check_classifies(model)
        for name in ("class_weights", "pos_weight"):
            count = len(getattr(client, name) or ()) or model.classes
            one_for_all = name == "pos_weight" and count == 1
            right = f"one number for each of the model's {model.classes} classes"
            check_range(one_for_all or count == model.classes, f"client.{name}", right, count)
        if given.ndim == 2 or client.is_of_class:
            return given
        return F.one_hot(labels, model.classes).to(model.mean)
    if not isinstance(client.loss, str):
        return given
    width = model.classes or model.vit.num_features
    if client.is_numeric and given.ndim == 2:
        right = f"a row of {width} numbers for each image, one for each output of the model"
        check_range(given.shape[1] == width, f"Targets of client.loss={client.loss}", right, given.shape[1])
        return given
    if client.loss == "dino":
        with torch.no_grad(), full_precision():
            return (model(images.flip(-1)) / _TEACHER).softmax(1)
    return torch.randn(len(images), width, generator=draw).to(model.mean)


def _of_function(client: Client, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return what the client's own function makes of a batch."""
    right = f"client.loss={client.loss_name} must be a function of logits and targets that returns one finite number"
    try:
        loss = client.loss(outputs, targets)  # pyright: ignore[reportCallIssue]
    except Exception as error:  # whatever it raises
        raise PrivlabError(f"{right}. It failed: {one_line(error)}.") from error
    if not isinstance(loss, Tensor) or loss.ndim:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise PrivlabError(f"{right}. Found {found}.")
    if outputs.isfinite().all() and not loss.isfinite():
        raise PrivlabError(f"{right}. Found {loss.item():g} for finite logits.")
    if not loss.requires_grad and outputs.requires_grad:
        raise PrivlabError(f"{right}. Found one that does not depend on the logits by PyTorch's operations.")
    return loss


def _focal(o: Tensor, y: Tensor, gamma: float, weights: Tensor | None) -> Tensor:
    shares = y.to(o) if y.ndim == 2 else F.one_hot(y, o.shape[1]).to(o)
    shares = shares if weights is None else shares * weights
    logs = o.log_softmax(1)
    return -(shares * (1 - logs.exp()) ** gamma * logs).sum(1).mean()


def _contrastive(o: Tensor, y: Tensor) -> Tensor:
    alike = _SCALE * F.normalize(o, dim=1) @ F.normalize(y, dim=1).mT + _BIAS
    sign = 2 * torch.eye(len(o)).to(o) - 1
    return -F.logsigmoid(sign * alike).sum() / len(o)


def _dino(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o / _STUDENT, y)
