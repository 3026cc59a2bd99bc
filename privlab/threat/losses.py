"""The losses that clients minimise, by `Client.loss`, and the private targets of those that have no class labels."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import full_precision
from privlab.threat.client import Client
from privlab.victims import VictimModel, check_classifies

_SCALE, _BIAS = 10.0, -10.0
"""t and b of the contrastive loss, as SigLIP's training begins."""

_STUDENT, _TEACHER = 0.1, 0.04
"""Temperatures of DINO's student and teacher."""


def client_loss(client: Client, outputs: Float[Tensor, "b y"], targets: Tensor) -> Float[Tensor, ""]:
    """Return the mean loss of a batch, by `client.loss`.

    With o the model's outputs, logits or, without a classifier, the pooled features:

    - "cross-entropy": −log softmax(o)_y for the class y, with `client.label_smoothing`;
    - "binary": the mean over the classes of −y log σ(o) − (1 − y) log σ(−o), for each class by itself;
    - "regression": the mean of (o − y)²;
    - "contrastive": −(1/b) Σ_ij log σ(z_ij (t ô_i·ŷ_j + b)) over all pairs, with z_ij = 1 for i = j, else −1, and unit
      vectors ô and ŷ (t = 10, b = −10);
    - "dino": −Σ y log softmax(o / 0.1), with y the teacher's probabilities.

    Args:
        client: the public settings.
        outputs: of the model on the batch.
        targets: class indices, or what `private_targets` returns of the batch.

    Source: SigLIP (Zhai et al., ICCV 2023), Algorithm 1; DINO (Caron et al., ICCV 2021), Algorithm 1.
    """
    if client.loss == "cross-entropy":
        return F.cross_entropy(outputs, targets, label_smoothing=client.label_smoothing)
    return _LOSSES[client.loss](outputs, targets.to(outputs))


def private_targets(
    model: VictimModel, client: Client, images: Float[Tensor, "m c h w"], labels: Tensor, draw: Generator
) -> Tensor:
    """Return what a client's loss compares its images with; it is private, as they are.

    Class indices for cross-entropy; one-hot labels for "binary"; values drawn from N(0, 1) for "regression", and for
    "contrastive" as the embeddings of texts; for "dino" the probabilities softmax(o / 0.04) of the server's model,
    the teacher, on the mirrored images. Targets that are given in place of labels are taken as they are.

    Args:
        model: the server's model.
        client: the public settings.
        images: the client's images, in [0, 1].
        labels: their class indices, or their targets (m, y); read where the loss has labels.
        draw: the client's generator; drawn from where the loss has values of its own.

    Raises:
        PrivlabError: if the loss has labels, and the model no classifier.
    """
    if client.has_labels:
        check_classifies(model)
        if labels.ndim == 2:
            return labels.to(model.mean)
        return labels if client.loss == "cross-entropy" else F.one_hot(labels, model.classes).to(model.mean)
    with torch.no_grad(), full_precision():
        if client.loss == "dino":
            return (model(images.flip(-1)) / _TEACHER).softmax(1)
        width = model.classes or model.vit.num_features
    return torch.randn(len(images), width, generator=draw).to(model.mean)


def _contrastive(o: Tensor, y: Tensor) -> Tensor:
    alike = _SCALE * F.normalize(o, dim=1) @ F.normalize(y, dim=1).mT + _BIAS
    sign = 2 * torch.eye(len(o)).to(o) - 1
    return -F.logsigmoid(sign * alike).sum() / len(o)


def _dino(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o / _STUDENT, y)


_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary": F.binary_cross_entropy_with_logits,
    "regression": F.mse_loss,
    "contrastive": _contrastive,
    "dino": _dino,
}
