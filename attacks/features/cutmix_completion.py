"""`cutmix-completion`: which rectangle of an image is another's, by an adversary that sees all images of the batch.

Known are the inverted, mixed images of a batch; sought is, for each pixel of each image, the image it came from.

1. `_Search.of`: what pixels and borders say, as log-likelihood ratios, so that a rectangle's value is a sum over it.
2. `_Search.run`: from several starts, choose the best rectangle of one image at a time (`_best`).
3. `complete`: take back what other images show of a covered part, and `fill` what no image shows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import scipy.sparse as sparse
import torch
from jaxtyping import Bool, Float, Int
from scipy.sparse.linalg import spsolve
from torch import Generator, Tensor
from torch.nn.functional import pad

from privlab.attacks.features.depth_optimisation import DepthOptimisation
from privlab.attacks.features.feature_inversion import LeastSquares
from privlab.attacks.rows import WHITE_BOX, warn_of_moves
from privlab.base import AtLeast1, Checked
from privlab.threat import Capability, FeatureObservation, Reconstruction

MOST_IMAGES = 4  # the most public photographs on which the adversary measures what its images of rows are like
HALF_A_LEVEL = 0.5 / 255  # the least error of a pixel that is reckoned with: images have 256 levels

LEAST = -8.0
"""The least that one pixel may say against two images being the same there: the model of errors has no long tails."""

TOLERANCES = (0.0, 0.3, 1.0, 3.0, -LEAST)
"""The most that one pixel may say against it in the first rounds of a start; starts take these in turn."""

ROUNDS = 3
"""How often, at most, every rectangle is chosen again with the tolerance of a start, and then without one."""

_Rectangle = tuple[int, int] | None
"""The other image and the number of the rectangle that it covers; None if nothing of another image is seen."""


@dataclass(frozen=True)
class CutMixCompletion(Checked):
    """Find the origins s_i(p) of all pixels, take parts that other images show from there, and fill the rest smoothly.

    Idea: The rectangle that covers a part of each image comes from another one in the same batch, so the two look the
    same there, and it has sharp borders. The attack finds all rectangles of the batch together. It takes what other
    images show of a covered part from them, and fills pixels that no image shows smoothly.

    Steps: invert the rows → find the rectangles → take back, and fill

    Algorithm: The images y_i that the rows give are those of `least-squares`, and of `depth-optimisation` behind
    blocks. s_i(p) is another image within one rectangle, which CutMix may draw, and i elsewhere. The rectangles
    maximise

        Σ_{i<k} Σ_{p: s_i(p) = s_k(p)} log [φ(y_i − y_k; 2σ²) / λ(y_i − y_k; β)] + Σ_i Σ_borders log [λ(δ; β) / λ(δ; α)]

    in the mean over the colours. The first sum compares images at each place, the second one the differences δ of
    adjacent pixels across the borders of the rectangles. φ is the normal density and λ Laplace's. Public photographs,
    inverted likewise, give σ, the mean absolute difference α of adjacent pixels and β of unrelated ones. A start takes
    the best rectangle of all, then the best of the other images and so on, some with one image put last; then one after
    the other is set to its best over all the others. A pixel that another image shows in its rectangle comes from
    there; the pixels that no image shows are harmonic.

    Exact if: the rectangles are found and W has full column rank, except for rounding, and for pixels that no image of
    the batch shows.

    Fails if: no image of the batch shows a pixel: it is guessed smoothly. Behind blocks the images are inverted with
    errors, and few rectangles are found exactly. Images have at most 64 × 64 pixels.

    Cost: It grows with the cube of the number of images of a batch, and with the number of rectangles.

    Studies: published

    Args:
        starts: the number of starts, of which the likeliest end is taken, at least 1.

    Source: ours, the likelihood of CutMix (Yun et al., ICCV 2019), Equations 1 and 2, over the images of a batch.
    [@yun2019cutmix; @baek2022cutmix]
    """

    name: ClassVar[str] = "cutmix-completion"
    paper: ClassVar[str] = "ours, against CutMix (Yun et al. 2019) in split learning"
    order: ClassVar[int] = 330
    knows: ClassVar[frozenset[str]] = frozenset({"cutmix"})
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX - {Capability.EMBEDDED_ROWS} | {Capability.MIXED_IMAGES}
    undefended: ClassVar[str] = "least-squares"
    at_full: ClassVar[Mapping[str, int]] = {"starts": 60}

    starts: AtLeast1 = 15

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images before they were mixed."""
        warn_of_moves(self.name, seen)
        # Public photographs are embedded and inverted like the client's images: their errors calibrate the model.
        invert = DepthOptimisation() if seen.cut_layer else LeastSquares()
        public = seen.public[:MOST_IMAGES].to(seen.model.mean)
        with torch.no_grad():
            rows = seen.model.client_blocks(seen.model.embed(public), seen.cut_layer)
        known = invert(replace(seen, features=rows, defense=())).images.double()
        shown = invert(seen).images
        # σ is the error of an inverted pixel, α the mean |δ| of adjacent pixels, and β the mean |δ| of unrelated ones,
        # taken from two photographs of which one is turned by 180°.
        σ = max(HALF_A_LEVEL, float((known - public).square().mean().sqrt()))
        α = float(torch.cat([known.diff(dim=2).flatten(), known.diff(dim=3).flatten()]).abs().mean())
        β = float((known - known.roll(1, 0).flip(-1, -2)).abs().mean())  # turned, as there may be one photograph alone
        # Without α < β borders carry no evidence for a rectangle, and the images stay as they are.
        if not 0 < α < β:
            return Reconstruction(shown)
        found = _origins(shown.double(), σ, α, β, self.starts)
        return Reconstruction(complete(shown, found))


def complete(shown: Float[Tensor, "b c h w"], origin: Int[Tensor, "b h w"]) -> Float[Tensor, "b c h w"]:
    """Return each image from the pixels of which it is the origin, wherever they are shown, and fill the others."""
    made = []
    for i in range(len(shown)):
        # `own` marks the pixels of image i that are known. Where image k shows
        # pixels of image i, they are taken from k.
        image, own = shown[i].clone(), origin[i] == i
        for k in range(len(shown)):
            lent = (origin[k] == i) & ~own
            image[:, lent] = shown[k][:, lent]
            own |= lent
        made.append(fill(image, own))
    return torch.stack(made)


def fill(image: Float[Tensor, "c h w"], known: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"]:
    """Return the image whose unknown pixels are the mean of those next to them; it stays if none is known."""
    if known.all() or not known.any():
        return image
    _, h, w = image.shape
    # One edge of the graph for each pair of adjacent pixels, down and across.
    number = np.arange(h * w).reshape(h, w)
    here = np.concatenate([number[1:].ravel(), number[:, 1:].ravel()])
    there = np.concatenate([number[:-1].ravel(), number[:, :-1].ravel()])
    edge, one = np.arange(len(here)), np.ones(len(here))
    shape = (len(here), h * w)
    # With D the differences along the edges, L = Dᵀ D is the graph's Laplacian: ‖D x‖² is least
    # where L x = 0 at the unknown pixels.
    slope = sparse.csr_matrix((one, (edge, here)), shape) - sparse.csr_matrix((one, (edge, there)), shape)
    laplacian, kept = (slope.T @ slope).tocsr(), known.flatten().cpu().numpy()
    pixels = image.flatten(1).mT.double().cpu().numpy()
    # L_uu x_u = −L_uk x_k, with u the unknown and k the known pixels; all colours are solved for at once.
    pixels[~kept] = spsolve(laplacian[~kept][:, ~kept].tocsc(), -laplacian[~kept][:, kept] @ pixels[kept]).reshape(
        -1, len(image)
    )
    return torch.from_numpy(pixels).mT.reshape(image.shape).to(image)


def _origins(shown: Float[Tensor, "b c h w"], σ: float, α: float, β: float, starts: int) -> Int[Tensor, "b h w"]:
    """Return which image of the batch each pixel is likeliest of, as the class says."""
    b, _, h, w = shown.shape
    if b == 1:
        return torch.zeros(1, h, w, dtype=torch.long, device=shown.device)
    # The likeliest of the ends of all starts is taken: coordinate ascent finds local maxima only.
    search = _Search.of(shown, σ, α, β)
    found = [search.run(start) for start in range(starts)]
    return search.origins(max(found, key=search.likelihood))


@lru_cache(maxsize=4)
def rectangles(h: int, w: int) -> Int[Tensor, "4 m"]:
    """Return top, bottom, left and right of all rectangles with the image's ratio of sides, cut at its border.

    A rectangle of the relative side s, 0 < s ≤ 1, covers s·h ± 1 rows and s·w ± 1 columns; where the border cuts it,
    at least half of them, since its centre is in the image.
    """
    # All spans [a, b) with a < b along each side; a rectangle is a pair of spans whose
    # ranges of the relative side s overlap.
    down, across = (torch.combinations(torch.arange(n + 1)) for n in (h, w))
    (low_down, high_down), (low_across, high_across) = _sides(down, h), _sides(across, w)
    fits = torch.maximum(low_down[:, None], low_across) <= torch.minimum(high_down[:, None], high_across)
    i, j = fits.nonzero(as_tuple=True)
    return torch.cat([down[i], across[j]], 1).mT.contiguous()


def _sides(spans: Int[Tensor, "m 2"], n: int) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """Return the least and the largest relative side of a rectangle that covers a span of n pixels."""
    # A whole side of s · n ± 1 pixels gives (L − 1) / n ≤ s ≤ (L + 1) / n for a span of L. A span that the border cuts
    # may be half of the side, and then s ≤ (2 L + 1) / n.
    length, cut = (spans[:, 1] - spans[:, 0]).double(), (spans[:, 0] == 0) | (spans[:, 1] == n)
    return (length - 1) / n, torch.where(cut, (2 * length + 1) / n, (length + 1) / n)


@dataclass(frozen=True, eq=False)
class _Search:
    """What the pixels of a batch say: `same` that two images are one at a place, `border` of rectangles' borders."""

    same: Float[Tensor, "b b h w"]
    border: Float[Tensor, "m b"]
    corners: Int[Tensor, "4 m"]  # where sums over the pixels above and left of a corner lie: ±, for the sum within

    @classmethod
    def of(cls, shown: Float[Tensor, "b c h w"], σ: float, α: float, β: float) -> "_Search":
        """Return it for mixed images."""
        h, w = shown.shape[2:]
        boxes = rectangles(h, w).to(shown.device)
        top, bottom, left, right = boxes
        # log [φ(y_i − y_k; 2σ²) / λ(y_i − y_k; β)] for all pairs of images,
        # b × b × h × w, in the mean over the colours.
        apart = shown[:, None] - shown
        same = (_normal(apart, 2 * σ**2) - _laplace(apart, β)).mean(2).clamp_min(LEAST)
        # log [λ(δ; β) / λ(δ; α)]: positive where adjacent pixels differ as if they were
        # unrelated, as at a rectangle's border.
        down, across = (_laplace(δ, β) - _laplace(δ, α) for δ in (shown.diff(dim=2), shown.diff(dim=3)))
        rows = pad(down.mean(1), (1, 0, 1, 1)).cumsum(2)  # rows[:, y, x]: the edges above row y, left of column x
        columns = pad(across.mean(1), (1, 1, 1, 0)).cumsum(1)
        # Running sums along an edge give each side of a rectangle as a difference of two entries; four sides, b × m.
        sides = [rows[:, y, right] - rows[:, y, left] for y in (top, bottom)]
        sides += [columns[:, bottom, x] - columns[:, top, x] for x in (left, right)]
        # Places, in the flattened (h + 1) × (w + 1) table of sums, of the corners with the signs +, −, −, +.
        corners = torch.stack([y * (w + 1) + x for x in (right, left) for y in (bottom, top)])
        return cls(same, torch.stack(sides).sum(0).mT.contiguous(), corners)

    def run(self, start: int) -> list[_Rectangle]:
        """Return the rectangles that a start ends at.

        Its first ones count what pixels say for an origin, and not what they said for the one before.
        """
        b, draw = len(self.same), Generator().manual_seed(start)
        found: list[_Rectangle] = [None] * b
        # The tolerance limits what a single pixel may say against a rectangle, so that a few errors do not
        # rule out the right one in the first rounds.
        tolerant = self.same.clamp_min(-TOLERANCES[start % len(TOLERANCES)])
        last = {int(torch.randint(b, (), generator=draw))} if start >= len(TOLERANCES) else set()
        # Greedy start: of all images without a choice yet, the one with the largest gain gets its best rectangle.
        for left in ({*range(b)} - last, last):
            while left:
                best = {i: self._best(i, found, tolerant, first=True) for i in sorted(left)}
                i = max(best, key=lambda i: best[i][0])
                found[i] = best[i][1]
                left.remove(i)
        # Coordinate ascent: each image in random order gets its best rectangle given
        # all others, first tolerant, then not.
        for same in (tolerant, self.same):
            for _ in range(ROUNDS):
                before = list(found)
                for i in torch.randperm(b, generator=draw).tolist():
                    found[i] = self._best(i, found, same)[1]
                if found == before:
                    break
        return found

    def _best(
        self, i: int, found: Sequence[_Rectangle], same: Float[Tensor, "b b h w"], *, first: bool = False
    ) -> tuple[float, _Rectangle]:
        """Return what the best rectangle of image i gains, given those of the others, and that rectangle."""
        # The origins in all other images; −1 keeps image i from being compared with itself.
        others = self.origins([None if k == i else each for k, each in enumerate(found)])
        others[i] = -1
        # gains[j] (h × w): what the other images say for the origin j of each pixel of image i.
        gains = torch.stack([(same[i] * (others == j)).sum(0) for j in range(len(same))])
        # A rectangle replaces the origin i, so what is said for i is taken off.
        if not first:
            gains -= gains[i].clone()
        # Sums over all rectangles at once from a table of sums: + lower right − upper
        # right − lower left + upper left, m × b.
        sums = pad(gains.cumsum(1).cumsum(2), (1, 0, 1, 0)).flatten(1).mT.contiguous()
        ends = [sums.index_select(0, corner) for corner in self.corners]
        score = ends[0] - ends[1] - ends[2] + ends[3] + self.border[:, i, None]
        # A rectangle from image i itself changes nothing and is left out. Where no score is positive, the image is
        # better explained without a rectangle.
        score[:, i] = -math.inf
        box, j = divmod(int(score.argmax()), len(same))
        gain = float(score[box, j])
        return (gain, (j, box)) if gain > 0 else (0.0, None)

    def origins(self, found: Sequence[_Rectangle]) -> Int[Tensor, "b h w"]:
        """Return the image that each pixel comes from under these rectangles."""
        b, _, h, w = self.same.shape
        origin = torch.arange(b, device=self.same.device)[:, None, None].repeat(1, h, w)
        for i, each in enumerate(found):
            if each is not None:
                top, bottom, left, right = rectangles(h, w)[:, each[1]].tolist()
                origin[i, top:bottom, left:right] = each[0]
        return origin

    def likelihood(self, found: Sequence[_Rectangle]) -> float:
        """Return the logarithm of the likelihood of these rectangles, except for a constant."""
        origin = self.origins(found)
        # Σ over the pixels where images i and k have one origin; each pair i < k counts once.
        alike = (self.same * (origin[:, None] == origin)).sum((2, 3))
        borders = sum(float(self.border[each[1], i]) for i, each in enumerate(found) if each is not None)
        return float(alike.triu(1).sum()) + borders


def _normal(x: Float[Tensor, "*s"], variance: float) -> Float[Tensor, "*s"]:
    return -x.square() / (2 * variance) - 0.5 * math.log(2 * math.pi * variance)


def _laplace(x: Float[Tensor, "*s"], scale: float) -> Float[Tensor, "*s"]:
    return -x.abs() / scale - math.log(2 * scale)
