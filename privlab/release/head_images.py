"""The images of a batch from the gradients of the whole head: the label of each, and the features that the head read.

B images whose losses are summed release G = Σᵢ rᵢ fᵢᵀ for the weight W of the head and h = Σᵢ rᵢ for its bias b, where
fᵢ is what the head reads of image i, and rᵢ = softmax(W fᵢ + b) − yᵢ. One image has f = Gᵀ h / ‖h‖². Several are found

1. together, for guessed labels (`_together`): with R = [r₁ … r_B], [G h] = R [f₁ … f_B; 1 … 1]ᵀ. Least squares for the
   second factor, each row divided by its last entry, and softmax for the first one are taken in turn. Softmax gives no
   class a negative probability, so classes with h_c < 0 are labels; if one label is missing, what the others leave of h
   tells it. It is exact when nothing of G is left but its errors.
2. one by one, where that leaves something (`_one_by_one`): r is in the column space of G, f in its row space, fᵀ G⁺ r =
   1, and taking an image away leaves a G of one rank less (Wedderburn). For a guessed label r is a function of f, which
   has B unknowns under C − 1 equations: Levenberg and Marquardt's method solves them from fᵢ ≈ G_c / h_c. Its equations
   are those of the direction r / ‖r‖, or else images that the model is sure of would lead to r = 0. What is found is
   the start of another search for all of them together.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError

_MOST_IMAGES, _MOST_TOGETHER = 32, 128
"""Images of a batch that are looked for one by one, at a cost that grows with their cube, and together."""

_DEVIATIONS, _MOST_LEFT = 5.0, 10.0
"""How many of their standard deviations the errors of an entry may have, and those of all entries of G together: the
rounding of a whole batch's gradient is not a sum of independent errors."""

_TOLERANCE, _MOST_TOLERANCE = 1e-3, 0.02
"""‖r − its projection onto the columns of G‖ / ‖r‖ below which an image counts as found; rounding leaves 1e-5. Errors
of G raise it, up to the second."""

_WEIGHT_TOLERANCE = 0.02  # how far fᵀ G⁺ r may be from 1
_EVIDENCE = 6.0  # −log₁₀ of the chance that a wrong label meets as many equations as well, below which it is ruled out

_SAME_IMAGE = 0.05
"""The distance of two f of one class, relative to f, below which they are one image that was found twice."""

_SPREADS = (0.3, 0.6, 1.0)
"""How far starts are scattered, relative to f: images of one class start from their mean, which leads to none."""

_IDLE_ROUNDS = 3  # rounds of scattered starts without a find, after which no more are tried

_STEPS, _MEMORY, _TRIED = 40, 6, 4
"""Steps of a search for all images together, how many of them Anderson's acceleration combines, and the guesses of a
missing label that are tried."""


@dataclass(frozen=True, eq=False)
class Head:
    """The head, logits = W f + b, and what B images whose losses are summed release of it: h of b and G of W."""

    W: Float[Tensor, "y d"]
    b: Float[Tensor, " y"]
    h: Float[Tensor, " y"]
    G: Float[Tensor, "y d"]
    batch_size: int

    @classmethod
    def of(cls, head: nn.Linear, gradients: Mapping[str, Tensor], batch_size: int) -> "Head":
        """Return a head and what is released of it, in float64.

        Args:
            head: the model's classifier, with the weights of that step.
            gradients: those of the mean loss, by name: `head.weight` and `head.bias`.
            batch_size: B.
        """
        h, G = (gradients[name].double() * batch_size for name in ("head.bias", "head.weight"))
        return cls(head.weight.detach().double(), head.bias.detach().double(), h, G, batch_size)

    def __call__(self, f: Float[Tensor, "s d"]) -> Float[Tensor, "s y"]:
        """Return the probabilities of the classes."""
        return (f @ self.W.T + self.b).softmax(1)

    def images(self, labels: Int[Tensor, " m"], f: Float[Tensor, "m d"]) -> "HeadImages":
        """Return the images of these labels and features."""
        return HeadImages(labels, self(f) - F.one_hot(labels, len(self.b)).to(f), f)

    def left(self, images: "HeadImages") -> tuple[Float[Tensor, " y"], Float[Tensor, "y d"]]:
        """Return what images leave of h and G."""
        return self.h - images.r.sum(0), self.G - images.r.T @ images.f


@dataclass(frozen=True, eq=False)
class HeadImages:
    """The images of a batch that the head's gradient separates: label, r = ∂ℓ/∂logits, and the features f it read."""

    labels: Int[Tensor, " m"]
    r: Float[Tensor, "m y"]
    f: Float[Tensor, "m d"]

    def has(self, label: Tensor, f: Float[Tensor, " d"]) -> bool:
        """Return whether an image of this label and these features is among them."""
        return bool(((self.labels == label) & ((self.f - f).norm(dim=1) < _SAME_IMAGE * f.norm())).any())

    def plus(self, more: "HeadImages") -> "HeadImages":
        """Return these images and more."""
        labels, r, f = (torch.cat(of) for of in ((self.labels, more.labels), (self.r, more.r), (self.f, more.f)))
        return HeadImages(labels, r, f)

    def take(self, rows: Int[Tensor, " s"]) -> "HeadImages":
        """Return some of them."""
        return HeadImages(self.labels[rows], self.r[rows], self.f[rows])


def told_images(head: nn.Linear, gradients: Mapping[str, Tensor], batch_size: int) -> HeadImages:
    """Return the images of a batch that the head's gradient separates, in the order of their labels.

    Args:
        head: the model's classifier, with the weights of that step.
        gradients: those of one release, by name, of the mean loss: `head.weight` and `head.bias`.
        batch_size: B. Those that are not found are missing.

    Raises:
        PrivlabError: if the gradient of the bias is zero.
    """
    released = Head.of(head, gradients, batch_size)
    h, G = released.h, released.G
    if not h.any():
        raise PrivlabError("The gradient of the head's bias is zero: it shows no image. Give the gradient of a step.")
    if batch_size == 1:
        return HeadImages(h.argmin()[None], h[None], (h @ G / h.square().sum())[None])
    found = find_images(released)
    return found.take(found.labels.argsort(stable=True))


def find_images(head: Head) -> HeadImages:
    """Return the images that are found, all or some of B ≥ 2: they explain G, but others might (`beyond_chance`)."""
    batch_size, (y, d) = head.batch_size, head.G.shape
    found = head.images(torch.zeros(0, dtype=torch.long, device=head.h.device), head.G.new_zeros(0, d))
    if batch_size > _MOST_TOGETHER or 2 * batch_size > y - 2 or not head.G.isfinite().all():
        return found
    for spreads in ((), (0.0,), _SPREADS):
        if spreads and (batch_size > _MOST_IMAGES or batch_size > d):
            break
        if spreads:
            found = _one_by_one(head, found, spreads)
        for of_labels in (True, False):
            if (every := _together(head, found, of_labels=of_labels)) is not None:
                return every
    return found


def beyond_chance(found: HeadImages, head: Head) -> Bool[Tensor, " m"]:
    """Return for each image that was found whether no image of another label explains G as well by chance.

    An image adds r_c f to row c of G, and that is an equation. What is found may leave an error e of G, so a wrong
    image meets the equation by chance with a probability of about e / (|r_c| ‖f‖ / √d), where that is below 1. It can
    choose its f in the space of the images that are not yet proven, with k unknowns if these are k, and its scale: so
    the k + 1 equations that are the hardest to meet prove nothing. The product of the others' probabilities must be
    below 10⁻⁶. A sure model leaves r_c ≈ 0 for most classes, and a coarse format a large e; both leave too few
    equations, however well the image fits.
    """
    sizes = found.r.abs() * found.f.square().mean(1, keepdim=True).sqrt()
    digits = (sizes / (_MOST_LEFT * _error(head))).log10().clamp(min=0)
    digits = digits.sort(dim=1, descending=True).values
    batch_size, unproven = head.batch_size, head.batch_size + 1
    proven = torch.zeros_like(found.labels, dtype=torch.bool)
    while batch_size - int(proven.sum()) < unproven:
        unproven = batch_size - int(proven.sum())
        proven = digits[:, unproven + 1 :].sum(1) > _EVIDENCE
    return proven


def negative_classes(head: Head) -> Bool[Tensor, " y"]:
    """Return the classes whose entry of the bias is negative beyond its errors."""
    h, G = head.h, head.G
    return h < -_DEVIATIONS * torch.maximum(_deviation(G), _deviation(h[:, None]))


def _deviation(G: Float[Tensor, "y d"]) -> Float[Tensor, ""]:
    """Return the standard deviation of an entry's error: without any, the rows of G add up to zero, as r's entries."""
    return (G.sum(0).square().mean() / len(G)).sqrt()


def _error(head: Head) -> Float[Tensor, ""]:
    """Return the size of the error of an entry of G: as its sums over classes show, or the rounding of float64."""
    h, G = head.h, head.G
    rounding = torch.finfo(G.dtype).eps * (head.batch_size * G.square().mean()).sqrt()  # of the sum of so many images
    return torch.stack([_deviation(G), _deviation(h[:, None]), rounding]).amax()


def _together(head: Head, start: HeadImages, *, of_labels: bool) -> HeadImages | None:
    """Return all images, from some that are found and the classes with h_c < 0; None if something of G is left."""
    batch_size, error = head.batch_size, _error(head)
    least, enough = -_DEVIATIONS * error, _MOST_LEFT * error

    def size(found: HeadImages) -> float:
        return float(head.left(found)[1].square().mean().sqrt() / enough)

    h_left, G_left = head.left(start)
    signs = (head.h < least) & (h_left < least)
    signs[start.labels] = False
    more = signs.nonzero()[:, 0]
    more = more[head.h[more].argsort()][: batch_size - len(start.labels)]
    found = start.plus(head.images(more, G_left[more] / h_left[more, None]))
    if not len(found.labels):
        return None
    found = _settle(head, found, of_labels=of_labels)
    while len(found.labels) < batch_size:
        h_left, G_left = head.left(found)
        guesses = h_left.topk(_TRIED, largest=False).indices
        guesses = guesses[h_left[guesses] < least]
        tried = [head.images(c[None], (G_left[c] / h_left[c])[None]) for c in guesses]
        if not tried:
            return None
        found = min((_settle(head, found.plus(one), of_labels=of_labels) for one in tried), key=size)
    seen = found.r.gather(1, found.labels[:, None]) < least  # else the image adds nothing to G, and may be any
    return found if size(found) <= 1 and bool(seen.all()) else None


def _settle(head: Head, found: HeadImages, *, of_labels: bool) -> HeadImages:
    """Return the images where least squares and softmax, taken in turn, come to rest, by Anderson's acceleration.

    The equations are all rows, or those of the labels alone: each of the two comes to rest where the other may not.

    Source: Walker and Ni (SIAM Journal on Numerical Analysis, 2011), Anderson acceleration, Equation 2.1.
    """
    Gh, f = torch.cat([head.G, head.h[:, None]], 1), found.f
    labels, best, least = found.labels, found.f, torch.inf
    rows_read = labels if of_labels else torch.arange(len(Gh), device=Gh.device)
    points: list[Tensor] = []
    images: list[Tensor] = []
    for _ in range(_STEPS):
        r = head.images(labels, f).r
        scale = r.norm(dim=1, keepdim=True).clamp(min=torch.finfo(r.dtype).tiny)
        rows = torch.linalg.lstsq((r / scale).T[rows_read], Gh[rows_read]).solution / scale
        last = rows[:, -1:]
        moved = rows[:, :-1] / last
        moved = torch.where((last > 1e-3) & moved.isfinite().all(1, keepdim=True), moved, f)
        change = float(((moved - f).norm(dim=1) / f.norm(dim=1)).max())
        if change < least:
            best, least = moved, change
        if not change > 1e-9:
            break
        points, images = [*points, f.flatten()][-_MEMORY:], [*images, moved.flatten()][-_MEMORY:]
        steps = torch.stack(images) - torch.stack(points)
        f = moved
        if len(points) > 1:
            weights = torch.linalg.lstsq(steps.diff(dim=0).T, steps[-1][:, None]).solution[:, 0]
            f = (images[-1] - weights @ torch.stack(images).diff(dim=0)).view_as(moved)
    return head.images(labels, best)


def _one_by_one(head: Head, found: HeadImages, spreads: tuple[float, ...]) -> HeadImages:
    """Return the images that are found, and more that starts so scattered lead to."""
    batch_size, draw, idle = head.batch_size, Generator().manual_seed(0), 0
    space = _Space.of(head.G, batch_size, draw)
    while (missing := batch_size - len(found.labels)) and idle < (_IDLE_ROUNDS if spreads == _SPREADS else 1):
        h_left, G_left = head.left(found)
        classes = (h_left < -1e-6 * batch_size).nonzero()[:, 0]
        classes = classes[h_left[classes].argsort()[: 2 * missing]]
        if not len(classes):
            break
        tried, off = _solve(head, space, *_starts(classes, h_left, G_left, space, spreads, draw))
        idle += 1
        for i in off.argsort().tolist():
            one = tried.take(torch.tensor([i], device=off.device))
            new = not found.has(one.labels[0], one.f[0])
            if new and len(found.labels) < batch_size and space.holds(one.r[0], one.f[0], off[i]):
                found, idle = found.plus(one), 0
    return found


@dataclass(frozen=True, eq=False)
class _Space:
    """The column and the row space of G = U S Vᵀ, whose entries have errors of this standard deviation."""

    U: Float[Tensor, "y k"]
    S: Float[Tensor, " k"]
    V: Float[Tensor, "d k"]
    deviation: Float[Tensor, ""]

    @classmethod
    def of(cls, G: Float[Tensor, "y d"], rank: int, draw: Generator) -> "_Space":
        """Return the column and the row space of G, which has at most that rank: random products span its columns."""
        Q = torch.linalg.qr(G @ torch.randn(G.shape[1], rank, generator=draw, dtype=G.dtype).to(G)).Q
        U, S, Vt = torch.linalg.svd(Q.T @ G, full_matrices=False)
        k = max(1, int((1e-6 * S[0] < S).sum()))
        return cls(Q @ U[:, :k], S[:k], Vt[:k].T, _deviation(G))

    def outside(self, r: Float[Tensor, "... y _"]) -> Float[Tensor, "... y _"]:
        """Return the part of the columns that is not in the column space."""
        return r - self.U @ (self.U.T @ r)

    def holds(self, r: Float[Tensor, " y"], f: Float[Tensor, " d"], off: Float[Tensor, ""]) -> bool:
        """Return whether G − r fᵀ has one rank less, except for the errors of G.

        For a true pair r = (G − N) g with g = G⁺ r and N the errors, so that N g is all of r outside the columns of G:
        `off`, relative to r.
        """
        g = self.U.T @ r / self.S
        allowed = _DEVIATIONS * self.deviation * len(r) ** 0.5 * g.norm() / r.norm()
        near = bool(off <= allowed.clamp(_TOLERANCE, _MOST_TOLERANCE))
        return near and abs(float((f @ self.V) @ g) - 1) < _WEIGHT_TOLERANCE


def _starts(
    classes: Int[Tensor, " m"],
    h: Float[Tensor, " y"],
    G: Float[Tensor, "y d"],
    space: _Space,
    spreads: tuple[float, ...],
    draw: Generator,
) -> tuple[Int[Tensor, " s"], Float[Tensor, "s d"]]:
    """Return a guessed class and a guessed f for each start: G_c / h_c, and scattered around it in the row space."""
    f = G[classes] / h[classes, None]
    size, k = f.norm(dim=1, keepdim=True), space.V.shape[1]
    noise = torch.randn(len(spreads), len(classes), k, generator=draw, dtype=f.dtype).to(f) @ space.V.T
    spread = torch.tensor(spreads, dtype=f.dtype, device=f.device)[:, None, None] * size / k**0.5
    return classes.repeat(len(spreads)), (f + spread * noise).flatten(0, 1)


def _solve(
    head: Head, space: _Space, classes: Int[Tensor, " s"], f: Float[Tensor, "s d"], steps: int = 30
) -> tuple[HeadImages, Float[Tensor, " s"]]:
    """Return the image of each start after some steps, and ‖r − its projection onto the columns of G‖ / ‖r‖."""
    a, WV = f @ space.V, head.W @ space.V
    target = F.one_hot(classes, len(WV)).to(f)

    def residual(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r = (a @ WV.T + head.b).softmax(1) - target
        outside = space.outside(F.normalize(r, eps=1e-30)[..., None])[..., 0]
        return r, outside, outside.norm(dim=1)

    damping = torch.full_like(a[:, 0], 1e-2)
    r, outside, off = residual(a)
    for _ in range(steps):
        p, size, u = r + target, r.norm(dim=1).clamp(min=1e-30), F.normalize(r, eps=1e-30)
        J = p[:, :, None] * (WV - (p @ WV)[:, None]) / size[:, None, None]
        J = space.outside(J - u[:, :, None] * (u[:, None] @ J))
        H = J.mT @ J
        diagonal = H.diagonal(dim1=1, dim2=2)
        H = H + torch.diag_embed(damping[:, None] * diagonal + 1e-14 * (1e-6 + diagonal.amax(1, keepdim=True)))
        next_a = a - torch.linalg.solve(H, J.mT @ outside[..., None])[..., 0]
        next_r, next_outside, next_off = residual(next_a)
        better = next_off < off
        a, r = torch.where(better[:, None], next_a, a), torch.where(better[:, None], next_r, r)
        outside, off = torch.where(better[:, None], next_outside, outside), torch.where(better, next_off, off)
        damping = torch.where(better, damping / 5, damping * 5).clamp(1e-12, 1e6)
    return HeadImages(classes, r, a @ space.V.T), off
