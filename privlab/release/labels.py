"""The labels of a batch, one image after the other, from the gradients of the whole head: exact where they are found.

B images whose losses are summed release G = Σᵢ rᵢ fᵢᵀ for the weight W of the head and h = Σᵢ rᵢ for its bias b, where
fᵢ is what the head reads of image i, and rᵢ = softmax(W fᵢ + b) − yᵢ. So each image is a pair (r, f) with r in the
column space of G, f in its row space and fᵀ G⁺ r = 1, and taking it away leaves a G of one rank less (Wedderburn). For
a guessed label, r is a function of f, and f has B unknowns under C − 1 equations: Levenberg and Marquardt's method
solves them from fᵢ ≈ G_c / h_c, which is exact where class c has one image that alone gives it any probability.

What is not found is estimated as in Ma et al. (ICLR 2023, Instance-wise Batch Label Restoration via Gradients).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from privlab.release.label_of_bias import certain_counts, labels_of, likely_labels, listed

__all__ = ["Told", "told_labels"]

_MOST_IMAGES = 32
"""Images of a batch that are looked for one by one; the cost grows with their cube."""

_TOLERANCE = 1e-3
"""‖r − its projection onto the columns of G‖ / ‖r‖ below which an image counts as found; rounding leaves 1e-5."""

_WEIGHT_TOLERANCE = 0.02
"""How far fᵀ G⁺ r may be from 1."""

_LEAST_CHANGE = 1e-2
"""The least change of r, relative to it, by any change of f of its own size: a saturated softmax determines no f."""

_SPREADS = (0.0, 0.3, 0.6, 1.0)
"""How far starts are scattered, relative to f: images of one class start from their mean, which leads to none."""

_IDLE_ROUNDS = 3
"""Rounds of starts without a find, after which no more are tried."""


@dataclass(frozen=True)
class Told:
    """The labels of a batch in ascending order: as many as it has images, of which `certain` are beyond doubt."""

    labels: tuple[int, ...]
    certain: tuple[int, ...]

    @property
    def all_certain(self) -> bool:
        """Return whether no label is a guess."""
        return self.labels == self.certain


def told_labels(head: nn.Module, gradients: Mapping[str, Tensor], batch_size: int) -> Told | None:
    """Return the labels that a gradient of a batch's mean loss tells; None where that of the head's bias is not given.

    Args:
        head: the model's classifier, a linear layer, with the weights of that step.
        gradients: those of one release, by name; without `head.weight` the bias alone is asked.
        batch_size: B.

    Raises:
        PrivlabError: if the batch size is below 1, or the gradient is not finite.
    """
    if "head.bias" not in gradients:
        return None
    h = gradients["head.bias"].double() * batch_size
    counts = certain_counts(h, batch_size)
    if (alone := labels_of(h, batch_size)) is not None:
        return Told(tuple(alone), tuple(alone))
    if "head.weight" not in gradients or not isinstance(head, nn.Linear) or batch_size == 1:
        return Told(tuple(likely_labels(h, batch_size)), tuple(listed(counts)))
    layer = _Layer(head.weight.detach().double(), head.bias.detach().double())
    G = gradients["head.weight"].double() * batch_size
    found, h, G = _find(layer, h, G, batch_size)
    counts = torch.maximum(counts, found)
    rest = _estimate(layer, h, G, counts - found, batch_size - int(found.sum()))
    return Told(tuple(listed(found + rest)), tuple(listed(counts)))


@dataclass(frozen=True, eq=False)
class _Layer:
    """The head: logits = W f + b."""

    W: Float[Tensor, "y d"]
    b: Float[Tensor, " y"]

    def __call__(self, f: Float[Tensor, "s d"]) -> Float[Tensor, "s y"]:
        """Return the probabilities of the classes."""
        return (f @ self.W.T + self.b).softmax(1)


def _find(
    layer: _Layer, h: Float[Tensor, " y"], G: Float[Tensor, "y d"], batch_size: int
) -> tuple[Int[Tensor, " y"], Float[Tensor, " y"], Float[Tensor, "y d"]]:
    """Return how many images of each class are found for certain, and what they leave of h and G."""
    counts, left = torch.zeros_like(h, dtype=torch.long), batch_size
    y, d = G.shape
    if batch_size > _MOST_IMAGES or 2 * batch_size > y - 2 or batch_size > d or not G.isfinite().all():
        return counts, h, G
    draw, failures = Generator().manual_seed(0), 0
    while left and failures < _IDLE_ROUNDS:
        classes = (h < -1e-6 * batch_size).nonzero()[:, 0]
        if not len(classes):
            break
        space = _Space.of(G, left, draw)
        c, f = _starts(classes, h, G, space, draw)
        r, f, off = _solve(layer, space, c, f)
        failures += 1
        for i in off.argsort().tolist():
            if not left or off[i] > _TOLERANCE or not space.holds(r[i], f[i]):
                continue
            h, G = h - r[i], G - r[i, :, None] * f[i]
            counts[c[i]] += 1
            left, failures = left - 1, 0
            space = _Space.of(G, left, draw) if left else space
    return counts, h, G


@dataclass(frozen=True, eq=False)
class _Space:
    """The column and the row space of G = U S Vᵀ."""

    U: Float[Tensor, "y k"]
    S: Float[Tensor, " k"]
    V: Float[Tensor, "d k"]

    @classmethod
    def of(cls, G: Float[Tensor, "y d"], rank: int, draw: Generator) -> "_Space":
        """Return the column and the row space of G, which has at most that rank: random products span its columns."""
        Q = torch.linalg.qr(G @ torch.randn(G.shape[1], rank, generator=draw, dtype=G.dtype).to(G)).Q
        U, S, Vt = torch.linalg.svd(Q.T @ G, full_matrices=False)
        k = max(1, int((1e-6 * S[0] < S).sum()))
        return cls(Q @ U[:, :k], S[:k], Vt[:k].T)

    def outside(self, r: Float[Tensor, "... y _"]) -> Float[Tensor, "... y _"]:
        """Return the part of the columns that is not in the column space."""
        return r - self.U @ (self.U.T @ r)

    def holds(self, r: Float[Tensor, " y"], f: Float[Tensor, " d"]) -> bool:
        """Return whether G − r fᵀ has one rank less, but for rounding."""
        inside = bool(self.outside(r[:, None]).norm() < _TOLERANCE * r.norm())
        inside &= bool((f - self.V @ (self.V.T @ f)).norm() < _TOLERANCE * f.norm())
        return inside and abs(float((f @ self.V / self.S) @ (r @ self.U)) - 1) < _WEIGHT_TOLERANCE


def _starts(
    classes: Int[Tensor, " m"], h: Float[Tensor, " y"], G: Float[Tensor, "y d"], space: _Space, draw: Generator
) -> tuple[Int[Tensor, " s"], Float[Tensor, "s d"]]:
    """Return a guessed class and a guessed f for each start: G_c / h_c, and scattered around it in the row space."""
    f = G[classes] / h[classes, None]
    size, k = f.norm(dim=1, keepdim=True), space.V.shape[1]
    noise = torch.randn(len(_SPREADS), len(classes), k, generator=draw, dtype=f.dtype).to(f) @ space.V.T
    spread = torch.tensor(_SPREADS, dtype=f.dtype, device=f.device)[:, None, None] * size / k**0.5
    return classes.repeat(len(_SPREADS)), (f + spread * noise).flatten(0, 1)


def _solve(
    layer: _Layer, space: _Space, classes: Int[Tensor, " s"], f: Float[Tensor, "s d"], steps: int = 30
) -> tuple[Float[Tensor, "s y"], Float[Tensor, "s d"], Float[Tensor, " s"]]:
    """Return r and f of each start after some steps, and its residual, infinite where that leaves f undetermined."""
    a, WV = f @ space.V, layer.W @ space.V
    target = F.one_hot(classes, len(WV)).to(f)

    def residual(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r = (a @ WV.T + layer.b).softmax(1) - target
        outside = space.outside(r[..., None])[..., 0]
        return r, outside, outside.norm(dim=1) / r.norm(dim=1).clamp(min=1e-30)

    damping = torch.full_like(a[:, 0], 1e-3)
    r, outside, off = residual(a)
    for _ in range(steps):
        p = r + target
        J = space.outside(p[:, :, None] * (WV - (p @ WV)[:, None]))
        H = J.mT @ J
        diagonal = H.diagonal(dim1=1, dim2=2)
        H = H + torch.diag_embed(damping[:, None] * diagonal + 1e-14 * (1 + diagonal.amax(1, keepdim=True)))
        next_a = a - torch.linalg.solve(H, J.mT @ outside[..., None])[..., 0]
        next_r, next_outside, next_off = residual(next_a)
        better = next_off < off
        a, r = torch.where(better[:, None], next_a, a), torch.where(better[:, None], next_r, r)
        outside, off = torch.where(better[:, None], next_outside, outside), torch.where(better, next_off, off)
        damping = torch.where(better, damping / 5, damping * 5).clamp(1e-12, 1e6)
    p = r + target
    J = space.outside(p[:, :, None] * (WV - (p @ WV)[:, None]))
    least = torch.linalg.eigvalsh(J.mT @ J)[:, 0].clamp(min=0).sqrt()
    moved = least * a.norm(dim=1) / r.norm(dim=1).clamp(min=1e-30)
    return r, a @ space.V.T, off.where(moved > _LEAST_CHANGE, torch.inf)


def _estimate(
    layer: _Layer, h: Float[Tensor, " y"], G: Float[Tensor, "y d"], least: Int[Tensor, " y"], batch_size: int
) -> Int[Tensor, " y"]:
    """Return the counts of the classes: what is certain, and the rest by Σ_c n_c (p̄_c − e_c) = h, Σ_c n_c = B.

    p̄_c, the mean prediction for images of class c, is that for G_c / h_c.
    """
    if int(least.sum()) >= batch_size:
        return least
    classes = (h < -1e-4 * batch_size).nonzero()[:, 0]
    wanted = torch.zeros_like(h)
    if len(classes):
        equations = (layer(G[classes] / h[classes, None]) - F.one_hot(classes, len(h)).to(h)).T
        equations = torch.cat([equations, torch.ones_like(equations[:1])])
        right = torch.cat([h, h.new_tensor([batch_size])])
        wanted[classes] = torch.linalg.lstsq(equations, right[:, None]).solution[:, 0]
    counts = least.clone()
    for _ in range(batch_size - int(least.sum())):
        counts[(wanted - counts).argmax()] += 1
    return counts
