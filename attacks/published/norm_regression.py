"""`norm-regression`: the image that is expected from the lengths of all parameters' gradients, which CENSOR keeps."""

# Known are the model, public images, and the length ‖g_l‖ of the gradient of each of the p parameters. Sought is x.
# 1. `_log_norms` takes log ‖g_l‖ of each public image and its mirror image, without a defense: n rows.
# 2. `KernelRidge.fit` whitens these rows, and solves for the weights of a kernel ridge regression onto the images.
# 3. The regression is applied to the lengths of the release under attack.

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from privlab.attacks.decoders import Trained
from privlab.base import full_precision
from privlab.release import observe
from privlab.threat import Capability, Gradients, Observation
from privlab.victims import VictimModel

WIDTH = 2.0  # squared width of the kernel, where the mean squared distance of two rows is one
RIDGE = 1.0  # λ, where a row has the kernel one with itself
FLOOR = 0.03  # what is added to the deviation of a principal component, so that rounding is not made large
AT_A_TIME = 32  # public images whose gradients are computed together


@dataclass(frozen=True)
class NormRegression(Trained["KernelRidge"]):
    """Return the image that kernel ridge regression expects from log ‖g_l‖ of all released parameters.

    Idea: Whatever CENSOR draws, each released gradient is as long as the true one. The adversary computes these lengths
    for public images, and regresses images on them. Brightness and colours come back in part, structure does not.

    Steps: lengths of public images' gradients → kernel ridge regression → apply it to the release

    Algorithm: x = x̄ + k(f)ᵀ (K + λ I)⁻¹ (X − x̄), with f = (log ‖g_l‖)_l, standardised and whitened by its principal
    components, and a Gaussian kernel. X are the public images and their mirror images, x̄ their mean. Width and λ were
    chosen on 500 photographs of Tiny ImageNet and 200 of CIFAR-10 that are in no result. The public images have the
    classes that the model predicts.

    Exact if: no condition is known: a length for each parameter does not determine an image.

    Fails if: the defense changes the lengths, or there are few public images.

    Cost: Three minutes for 2,000 public images on one busy core, once, and a second for each batch (`cifar_vit`).

    Studies: published

    Source: ours; that lengths are released follows from CENSOR's projection. [@zhang2025censor]
    """

    name: ClassVar[str] = "norm-regression"
    kind: ClassVar[str] = "norms"
    paper: ClassVar[str] = "ours, against CENSOR (Zhang et al. 2025)"
    order: ClassVar[int] = 181
    knows: ClassVar[frozenset[str]] = frozenset({"censor"})
    undefended: ClassVar[str] = "patch-gradient"
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {
            *(Capability.KNOWS_WEIGHTS, Capability.BATCH_SIZE_ONE, Capability.AUXILIARY_IMAGES),
            *(Capability.KNOWS_DEFENSE, Capability.GRADIENT_DEFENSE, Capability.CLASS_LABELS),
        }
    )
    effort: ClassVar[str] = "full"
    named_only: ClassVar[bool] = True
    parameters: ClassVar[tuple[str, ...]] = ("*",)

    seed: int = 0

    def beyond(self, seen: Observation) -> str | None:
        """Return which defense may have changed the lengths."""
        others = [part.name for part in seen.defense if part.name != "censor"]
        return f"{others[0]} may change the lengths of gradients" if others else None

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed."""
        regression = self.network(seen)
        with torch.no_grad():
            return regression(_log_norms(seen.gradients)).clamp(0, 1).to(seen.model.mean)

    def form(self, seen: Observation) -> tuple[str, ...]:
        """Return the version of the regressions, and the released parameters."""
        return ("privlab-norm-regression/1", *sorted(seen.gradients))

    def made(self, seen: Observation) -> "KernelRidge":
        """Return a regression that is not fitted yet."""
        assert seen.public is not None  # the capability auxiliary_images says so
        return KernelRidge(2 * len(seen.public), len(seen.gradients), seen.model.image_shape)

    def trained(self, seen: Observation) -> "KernelRidge":
        """Return the regression on the lengths of public images and their mirror images."""
        assert seen.public is not None
        images = torch.cat([seen.public, seen.public.flip(3)]).to(seen.model.mean)
        names = tuple(sorted(seen.gradients))
        with full_precision():
            parts = [_of_public(seen.model, some, names) for some in images.split(AT_A_TIME)]
            regression = self.made(seen).to(images.device)
            regression.fit(torch.cat(parts), images.double())
        return regression


def _of_public(model: VictimModel, images: Float[Tensor, "b c h w"], names: tuple[str, ...]) -> Float[Tensor, "b p"]:
    with torch.no_grad():
        labels = model(images).argmax(1)
    return _log_norms(observe(model, images, labels, names).gradients)


def _log_norms(gradients: Gradients) -> Float[Tensor, "b p"]:
    """Return log ‖g_l‖ of each parameter, in the order of their names, in double precision."""
    norms = [gradients[name].flatten(1).double().norm(dim=1) for name in sorted(gradients)]
    return torch.stack(norms, 1).clamp_min(torch.finfo(torch.float32).tiny).log()


class KernelRidge(nn.Module):
    """Kernel ridge regression from p numbers to images of a shape, by n rows."""

    centre: Tensor
    axes: Tensor
    rows: Tensor
    mean: Tensor
    weights: Tensor
    spread: Tensor

    def __init__(self, n: int, p: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        shapes = {"centre": (p,), "axes": (p, p), "rows": (n, p), "mean": shape, "weights": (n, *shape), "spread": ()}
        for name, own in shapes.items():
            self.register_buffer(name, torch.zeros(own, dtype=torch.float64))

    def fit(self, numbers: Float[Tensor, "n p"], images: Float[Tensor, "n c h w"]) -> None:
        """Whiten the rows of numbers, and solve for the weights of the images."""
        # A log-norm is standardised, and each principal component is divided by its deviation.
        centre, deviation = numbers.mean(0), numbers.std(0).clamp_min(1e-6)
        values, axes = torch.linalg.eigh(((numbers - centre) / deviation).T.cov())
        self.centre.copy_(centre)
        self.axes.copy_(axes / (values.clamp_min(0).sqrt() + FLOOR) / deviation[:, None])
        self.rows.copy_((numbers - centre) @ self.axes)
        # The mean squared distance of two rows is twice the sum of the variances.
        self.spread.copy_(2 * WIDTH * self.rows.var(0).sum())
        self.mean.copy_(images.mean(0))
        # (K + λ I) weights = X − x̄, of n × n kernels.
        kernels = self._kernels(self.rows) + RIDGE * torch.eye(len(images)).to(self.rows)
        wanted = (images - self.mean).flatten(1)
        self.weights.copy_(torch.cholesky_solve(wanted, torch.linalg.cholesky(kernels)).view_as(images))

    def forward(self, numbers: Float[Tensor, "b p"]) -> Float[Tensor, "b c h w"]:
        """Return the images that are expected; pixels may leave [0, 1]."""
        kernels = self._kernels((numbers - self.centre) @ self.axes)
        return self.mean + torch.einsum("bn,nchw->bchw", kernels, self.weights)

    def _kernels(self, rows: Float[Tensor, "b p"]) -> Float[Tensor, "b n"]:
        return torch.exp(-torch.cdist(rows, self.rows).square() / self.spread)
