"""`plug-and-play`: embedded patches behind noise, with a learned prior that comes with privlab.

Known are noisy rows z and the noise's σ; sought are all patches X of an image. Each round denoises the image with a
network at a falling level of noise (`plug_and_play`), and draws each patch back to its row in closed form.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.features.map_inversion import MapInversion, NoisyRows, without_noise
from privlab.attacks.rows import WHITE_BOX, effects, warn_of_moves
from privlab.attacks.solvers import patch_statistics, plug_and_play
from privlab.base import AtLeast1, Checked, Positive
from privlab.patches import patchify
from privlab.threat import Capability, FeatureObservation, Reconstruction


@dataclass(frozen=True)
class PlugAndPlay(Checked):
    """Minimise ‖W x + β − z‖² / 2σ² − log p(x) over a whole image, with p learned by a denoiser.

    Idea: A network that removes noise of any strength from photographs knows which images are likely. The attack knows
    how strong the noise on the features is. It denoises its estimate of the image and draws it back to the features, in
    turn, with less and less noise.

    Steps: estimate each patch → denoise the image → draw each patch back to its row, repeat

    Algorithm: It begins at Wiener's estimate of each patch. In round k the network D of privlab gives u = D(x, s_k),
    and x is the minimum of ‖W x + β − z‖² / 2σ² + weight ‖x − u‖² / 2 s_k², one linear system of a patch's size. The
    s_k fall in equal ratios, from `first` to a share of the error that the first estimate has. D was trained on 12,000
    photographs of Tiny ImageNet; nothing is trained for a victim or a defense. Rows that the defense moves are placed
    as `pe-assignment` does.

    Exact if: never: noise stays. Without noise it is `least-squares`.

    Fails if: the noise is not white, not known, or not on the embedding's rows; images are not photographs, or have
    neither one nor three colours. Moved rows need position embeddings.

    Cost: 0.3 s an image of 32 pixels on one core, in proportion to the pixels.

    Studies: published

    Example: privlab attack --model cifar_vit --attack plug-and-play --defense gaussian-noise --limit 8

    Args:
        rounds: how often the image is denoised.
        first: the noise's standard deviation that the first round expects, of pixels in [0, 1].
        last: that of the last round, in units of the error that Wiener's estimate has on average, known from the noise.
        weight: weight of the prior.

    Source: [@zhang2021dpir]
    """

    name: ClassVar[str] = "plug-and-play"
    paper: ClassVar[str] = "DPIR (Zhang et al., TPAMI 2021), against noise on features"
    order: ClassVar[int] = 345
    knows: ClassVar[frozenset[str]] = MapInversion.knows
    undefended: ClassVar[str] = "least-squares"
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX
    effort: ClassVar[str] = "full"
    named_only: ClassVar[bool] = True

    rounds: AtLeast1 = 16
    first: Positive = 1.0
    last: Positive = 0.4
    weight: Positive = 0.4

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images that the client embedded."""
        model = seen.model
        if effects(seen).noise_std == 0:
            return without_noise(seen)
        warn_of_moves(self.name, seen, rows=Capability.POSITION_EMBEDDINGS in seen.grants)
        noisy = NoisyRows.of(seen)
        # Patches are normalised: a pixel's deviation s is s / std there, so the prior's precision is weight std² / s².
        std = patchify(model.std.double().expand(1, *model.image_shape), model.patch)[0, 0]

        def nearest(u: Float[Tensor, "b c h w"], s: float) -> Float[Tensor, "b c h w"]:
            """Return the images of (A + Λ) x = pull + Λ u, with Λ the prior's precisions."""
            precisions = self.weight * std**2 / s**2
            wanted = noisy.pull + patchify(model.normalise(u), model.patch) * precisions
            # A is symmetric, so that rows of patches are solved for from the right.
            return model.to_images(torch.linalg.solve(noisy.A + torch.diag(precisions), wanted, left=False))

        # The last level is a share of the error that Wiener's estimate has on average: P is its covariance in a patch.
        _, S = patch_statistics(model, seen.public)
        P = torch.linalg.inv(noisy.A + torch.linalg.inv(S).to(noisy.A))
        last = self.last * float((P.diagonal() * std**2).mean().sqrt())
        sigmas = torch.logspace(math.log10(self.first), math.log10(min(last, self.first)), self.rounds)
        images = plug_and_play(nearest, model.to_images(noisy.X), sigmas)
        return Reconstruction(images.clamp(0, 1), noisy.order)
