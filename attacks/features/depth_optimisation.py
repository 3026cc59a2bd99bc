"""`depth-optimisation`: features behind the first blocks inverted by an adversary that knows these blocks.

Known are the rows z behind ℓ blocks and the weights of these blocks; sought are the images. A linear map gives the
start, and Adam changes whitened patches v until the features of the images agree with z.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.rows import WHITE_BOX, undone, warn_of_moves
from privlab.attacks.solvers import patch_statistics, total_variation
from privlab.base import AtLeast0, Checked, NotNegative, gradients_enabled
from privlab.patches import patchify, unpatchify
from privlab.threat import Capability, FeatureObservation, Reconstruction
from privlab.victims import VictimModel

MOST_IMAGES = 256  # the most public images to which the linear start is fitted
AT_A_TIME = 16  # public images that pass through the client's blocks together
RIDGE = 1e-2  # is added to every variance of a row's entries, relative to their mean: public images may be few


@dataclass(frozen=True)
class DepthOptimisation(Checked):
    """Minimise ‖F_ℓ(x) − z‖² / (N D s²) + prior ‖v‖² / (N K) + tv TV(x) over whitened patches v, by Adam.

    Idea: The client runs the first blocks of the model too, and the attack knows their weights. It starts from the
    image that a linear map of public images gives, and changes it until its own features behind these blocks are the
    released ones. The deeper the cut, the more images have nearly the same features.

    Steps: linear map from public images → match the features behind the cut → patches as in photographs, smooth

    Algorithm: F_ℓ is the embedding and the first ℓ blocks, and s² the variance of an entry of the rows of public
    images. The N patches of x are μ + S^½ v, with the mean μ and the covariance S of public patches: steps are long
    where photographs vary, and ‖v‖² is the patches' Gaussian prior. TV(x) is the mean absolute difference of
    neighbouring pixels. The search starts where the affine map leads that takes the rows of public images to their
    patches with the least squared error. The learning rate decays by a cosine.

    Exact if: no condition is known: it is a search without a guarantee.

    Fails if: rows are permuted, because it takes them in the order in which they were sent, or noise was added, which
    it does not know. Behind eight blocks of ViT-Ti it is weaker than a trained decoder.

    Cost: 4 to 14 s an image behind 0 to 12 blocks (ViT-Ti, 160 pixels, one busy core).

    Studies: depth

    Args:
        steps: number of steps of Adam; 0 returns the start.
        learning_rate: step size of Adam for v at the first step.
        prior: weight of the patches' prior.
        tv: weight of the total variation.

    Source: ours, after Mahendran and Vedaldi (CVPR 2015), Equations 1 and 3; the prior as in `invert_rows`.
    [@mahendran2015understanding]
    """

    name: ClassVar[str] = "depth-optimisation"
    paper: ClassVar[str] = "ours, after Mahendran and Vedaldi (CVPR 2015), Equations 1 and 3"
    order: ClassVar[int] = 370
    short: ClassVar[Mapping[str, Any]] = {"steps": 1}
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX - {Capability.KNOWS_DEFENSE, Capability.EMBEDDED_ROWS}
    stands_in_for: ClassVar[tuple[str, ...]] = ("least-squares", "feature-optimisation")
    at_full: ClassVar[Mapping[str, int]] = {"steps": 1000}

    steps: AtLeast0 = 200
    learning_rate: NotNegative = 0.05
    prior: NotNegative = 0.1
    tv: NotNegative = 1.0

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images that the client fed."""
        model, prefix = seen.model, seen.model.vit.num_prefix_tokens
        warn_of_moves(self.name, seen)
        # The start: each row mapped affinely to a patch, by the map fitted to public images.
        z = undone(seen)[:, prefix:].to(model.mean)
        coefficients, variance = _fit_rows(model, seen.public, seen.cut_layer)
        start = (z.double() @ coefficients[1:] + coefficients[0]).to(z)
        μ, S = patch_statistics(model, seen.public)
        # S = V Λ Vᵀ: v = Λ^(−½) Vᵀ (x − μ), and x = μ + V Λ^½ v. In the code patches are rows.
        values, V = torch.linalg.eigh(S)
        forth, back, μ = (x.to(z) for x in ((V / values.sqrt()), (V * values.sqrt()).mT, μ))
        v = ((start - μ) @ forth).requires_grad_()
        adam = torch.optim.Adam([v], lr=self.learning_rate)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(1, self.steps))
        for _ in range(self.steps):
            with gradients_enabled():
                images = unpatchify(v @ back + μ, model.image_shape) * model.std + model.mean
                rows = model.client_blocks(model.embed(images), seen.cut_layer)[:, prefix:]
                # The three terms of the class docstring, one value for each image; the images are
                # independent, so their sum is differentiated.
                misfit = (rows - z).square().mean((1, 2)) / variance
                cost = misfit + self.prior * v.square().mean((1, 2)) + self.tv * total_variation(images)
            (v.grad,) = torch.autograd.grad(cost.sum(), [v])
            adam.step()
            decay.step()
        return Reconstruction(model.to_images(v.detach() @ back + μ))


def _fit_rows(
    model: VictimModel, public: Float[Tensor, "m c h w"], cut_layer: int
) -> tuple[Float[Tensor, "e k"], float]:
    """Return the affine map from a row behind ℓ blocks to its normalised patch, and the variance of a row's entries.

    With the variance s², it minimises Σ ‖(1, z) C − x‖² + `RIDGE` m s² ‖slopes of C‖² over the m rows of the first
    `MOST_IMAGES` public images. C has e = D + 1 rows, in float64; the first is the constant, which is not shrunk.
    """
    prefix = model.vit.num_prefix_tokens
    images = public[:MOST_IMAGES].to(model.mean)
    with torch.no_grad():
        made = [model.client_blocks(model.embed(part), cut_layer)[:, prefix:] for part in images.split(AT_A_TIME)]
    Z = torch.cat(made).flatten(0, 1).double()
    X = patchify(model.normalise(images), model.patch).flatten(0, 1).double()
    mean, centre = Z.mean(0), X.mean(0)
    # Ridge regression on centred rows: slopes = (Zᵀ Z + ridge · I)⁻¹ Zᵀ X. The constant follows from the means.
    A = (Z - mean).mT @ (Z - mean)
    variance = A.diagonal().mean()
    A += RIDGE * variance * torch.eye(len(A), dtype=A.dtype, device=A.device)
    slopes = torch.linalg.solve(A, (Z - mean).mT @ (X - centre))
    return torch.cat([(centre - mean @ slopes)[None], slopes]), float(variance / len(Z))
