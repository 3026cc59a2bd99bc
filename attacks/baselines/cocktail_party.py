"""`cocktail-party`: the features of a batch by independent component analysis of the head's gradient, and images."""

# Known are the gradients of the head, G = ∂ℓ/∂W = Σ_i r_i f_iᵀ (C × D) and h = ∂ℓ/∂b = Σ_i r_i (C). Sought are the
# features f_i of B images, and images that have them.
# 1. `_unmix` takes the D entries of a feature for D samples of a source, and separates the B sources by FastICA.
# 2. The scale and sign of each source follow from h.
# 3. The search for images is that of `head-inversion`, which this class extends.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from privlab.attacks.gradients.head_inversion import HeadInversion
from privlab.base import AtLeast1, PrivlabError, draw_for
from privlab.release import each_release, undecayed
from privlab.threat import Observation
from privlab.victims import hash_of

_WEIGHT, _BIAS = "head.weight", "head.bias"

_RANK = 1e-6  # singular values of the head's gradient below this share of the largest one are rounding
_LEAST_SCALE = 1e-6  # scales below this share of the largest one tell no features: the image hardly moved the bias
_SETTLED = 1e-10  # change of the unmixing matrix, as 1 − |cos|, from which it is at rest


@dataclass(frozen=True)
class CocktailParty(HeadInversion):
    """Unmix the features f_i of a batch from ∂ℓ/∂W = Σ_i r_i f_iᵀ as independent sources, and search for their images.

    Idea: The gradient of the classifier mixes the features of all images of a batch. Independent component analysis
    looks for the mixtures that are least like a normal distribution, and takes these for the features of single images.
    The gradient of the bias gives their scales, and a search finds images that have them.

    Steps: whiten ∂ℓ/∂W of the head → unmix by negentropy → search images that have f

    Algorithm:

    1. Each row of ∂ℓ/∂W mixes the B features, D samples of B sources. Centred and whitened, they are unmixed by FastICA
       (Hyvärinen 1999): the orthonormal mixtures of largest negentropy, by its contrast log cosh, all together.
    2. A source comes without scale and sign. ∂ℓ/∂b = Σ_i r_i is the same mixture of ones, which gives both (`_unmix`).
    3. Images with these features are searched for as in `head-inversion`.

    Labels are not needed. B may be as large as the rank of the gradient, at most C − 1 classes and D: beyond what
    `privlab.release.told_images` gives exactly (2 B ≤ C − 2). Where the head alone trains, so may the steps of SGD be
    as many as they are, since its features stay the same. D samples do not separate sources of a few hundred.

    Exact if: the features are independent of each other over their D samples. The search for images has no guarantee.

    Fails if: the features depend on each other: on those of trained ViTs it is far from exact at every batch size that
    was tried, and dividing a label's row of ∂ℓ/∂W by its entry of ∂ℓ/∂b is nearer. It needs B < C classes and B ≤ D.

    Studies: baselines

    Args:
        iterations: the most steps of the fixed-point iteration.
        seed: seed of the first unmixing matrix.

    Source: Kariyappa et al. (ICML 2023), without their priors of images and of features that are sparse and positive,
    and with FastICA's orthonormal mixtures in the place of a penalty for dependent ones. [@kariyappa2023cocktail]
    """

    name: ClassVar[str] = "cocktail-party"
    paper: ClassVar[str] = "Cocktail Party Attack (Kariyappa et al., ICML 2023)"
    order: ClassVar[int] = 220

    iterations: AtLeast1 = 500
    seed: int = 0

    def beyond(self, seen: Observation) -> str | None:
        """Return what violates B < C and B ≤ D, with the numbers."""
        B, (classes, width) = seen.images_per_release, seen.gradients[_WEIGHT].shape[1:]
        found = [f"B = {B} ≥ C = {classes}"] if classes <= B else []
        return " and ".join(found + ([f"B = {B} > D = {width}"] if width < B else [])) or None

    def _sums(self, seen: Observation) -> list[dict[str, Tensor]]:
        # Where the head alone trains, features stay the same in all steps, so that Σ_s a_s g_s is such a sum too.
        # Otherwise they move with the weights, and B images of T steps have B T features.
        client, B = seen.client, seen.images_per_release
        if client is None:
            return each_release(seen)
        if client.total_steps > 1 and client.trains != "head" and B > 1:
            raise PrivlabError(
                f"{self.name} reads several images from one whole step, or where the head alone trains. Found {B} "
                f"images, client.steps={client.total_steps} and client.trains={client.trains}. That it does not apply "
                "is no evidence of privacy."
            )
        # A common factor of G and h cancels in the features, so that rates are not divided out.
        return [undecayed(seen.model, own, client) for own in each_release(seen)]

    def _separated(self, head: nn.Linear, own: Mapping[str, Tensor], count: int) -> Float[Tensor, "k d"]:
        # The first unmixing matrix is drawn with a seed that depends on the release.
        draw = draw_for(self.seed, hash_of({name: own[name] for name in (_BIAS, _WEIGHT)}), self.name)
        return _unmix(own[_WEIGHT].double(), own[_BIAS].double(), count, draw, self.iterations)


@torch.no_grad()
def _unmix(
    G: Float[Tensor, "y d"], h: Float[Tensor, " y"], count: int, draw: Generator, iterations: int
) -> Float[Tensor, "b d"]:
    """Return the sources f_i of G = Σ_i r_i f_iᵀ and h = Σ_i r_i, in no order: at most `count`, and the rank of G.

    Source: FastICA (Hyvärinen, IEEE Transactions on Neural Networks 1999), symmetric, with tanh.
    """
    # The rows of V_n = S⁻¹ Uᵀ G (n × D) mix the features: V_n = M F, with M of the columns
    # S⁻¹ Uᵀ r_i. The same map of h is M 1.
    U, S, V = torch.linalg.svd(G, full_matrices=False)
    n = min(count, int((_RANK * S[0] < S).sum()))
    mixed, ones = V[:n], U[:, :n].mT @ h / S[:n]
    # Whitening makes the n mixtures uncorrelated with variance one. What is left to find is then an orthonormal matrix.
    centred = mixed - mixed.mean(1, keepdim=True)
    variance, axes = torch.linalg.eigh(centred @ centred.mT / centred.shape[1])
    whiten = axes / variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt() @ axes.mT
    Z = whiten @ centred
    W = _orthonormal(torch.randn(n, n, generator=draw, dtype=Z.dtype).to(Z))
    for _ in range(iterations):
        # FastICA's fixed point for each row w: w ← E[z tanh(wᵀ z)] − E[1 − tanh²(wᵀ z)] w,
        # then all rows are made orthonormal.
        y = (W @ Z).tanh()
        new = _orthonormal(y @ Z.mT / Z.shape[1] - (1 - y.square()).mean(1, keepdim=True) * W)
        # A row at rest may change its sign from step to step, so that |cos| counts.
        change = 1 - (new * W).sum(1).abs()
        W = new
        if bool(change.max() < _SETTLED):
            break
    # W · whiten · M = diag(s) up to the order: the same map of M 1 gives s, and of the uncentred mixtures s_i f_i.
    scale = W @ whiten @ ones
    told = scale.abs() > _LEAST_SCALE * scale.abs().max()
    return (W @ whiten @ mixed)[told] / scale[told, None]


def _orthonormal(W: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return the nearest orthonormal matrix, (W Wᵀ)^(−1/2) W."""
    U, _, V = torch.linalg.svd(W)
    return U @ V
