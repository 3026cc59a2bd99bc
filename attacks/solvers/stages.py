"""The likeliest patches behind the gradients of a network's first blocks, whatever follows these blocks.

Known are the model, what was released of the gradients of its parameters, and what is known of each entry's error.
Sought are the normalised patches X, and with them Δ = ∂ℓ/∂z_L behind the first L blocks.

1. A `Stage` takes the gradients of all parameters before block L, which are ∂⟨Δ, z_L(X)⟩/∂θ. Given X they are linear
   in Δ, so that `Stage.start` finds the first Δ by least squares.
2. Damped Gauss-Newton steps move X and Δ (`Stage.step`): `_direction` solves for the step by conjugate gradients, and
   of four lengths the one of least objective is taken.
3. Where signs alone were released, each entry shall have its sign, and at least a share of the size of its row of the
   gradients. Each step takes the sizes of rows from where it begins (`Stage._scaled`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

from privlab.attacks.solvers.first_blocks import as_rows, names_before, twice_derivable
from privlab.attacks.solvers.linear import conjugate_gradients, linearised
from privlab.attacks.solvers.noisy_gradients import Likelihood, distance
from privlab.attacks.solvers.prior import Smoothness
from privlab.base import gradients_enabled
from privlab.patches import unpatchify
from privlab.victims import VictimModel

_RELATIVE = 1e-2
"""The least standard deviation of an entry's error, relative to the root mean square of the stage's exact entries.

Rounding is far smaller; but it is the same image that explains all exact entries, whatever they weigh.
"""

_BEHIND = 0.3
"""The root mean square of Δ that is expected, relative to that of ∂ℓ/∂E_pos (0.24 to 0.33 behind a block, cifar_vit).

Where logits depend on few tokens alone, as behind the last block, as large a norm is expected of these.
"""

_PROBES = 8  # random vectors by which the curvature is estimated
_AGAIN = 15  # steps of conjugate gradients for a Δ that does not move with X
_LENGTHS = (1.0, 0.5, 0.2, 0.0)  # the shares of a step that are tried

_MARGIN = 0.6
"""The least magnitude of an entry whose sign alone is known, in root mean squares of its row; 0.1 to 1 were tried."""

_MEAN_SIZE = 0.8  # the mean magnitude of a normal entry, in its standard deviations
_REFITS = 4  # how many times the first Δ is fitted again, with the sizes of rows that the last fit gave
_LEAST_SIZE = 1e-3  # the least size of a row, relative to the root mean square of all entries

_LOWERED, _RAISED, _FIRST_DAMPING, _LEAST_DAMPING = 0.25, 6.0, 1e-2, 1e-9
"""The factors of the damping after a step that was taken whole and after none, and its first and least value."""

Flat = Float[Tensor, "b e"]
Unknowns = Float[Tensor, "b 1 u"]


class _Tokens(nn.Module):
    """The tokens behind the first blocks of one image, by its normalised patches."""

    def __init__(self, model: VictimModel, blocks: int) -> None:
        super().__init__()
        self.model, self.blocks = model, blocks

    def forward(self, X: Float[Tensor, "n k"]) -> Float[Tensor, "t d"]:
        """Return z_L."""
        model = self.model
        images = unpatchify(X[None], model.image_shape) * model.std + model.mean
        return model.client_blocks(model.embed(images), self.blocks)[0]


@dataclass(frozen=True, eq=False)
class Point:
    """Normalised patches X, the gradient Δ behind the stage's blocks in units of its `size`, and the next damping."""

    X: Float[Tensor, "b n k"]
    Δ: Float[Tensor, "b t d"]
    damping: Float[Tensor, " b"]


@dataclass(frozen=True, eq=False)
class Stage:
    """The embedding and the first L blocks, and what their parameters released of b images.

    Whatever follows block L, ∂ℓ/∂θ = ∂⟨Δ, z_L(X)⟩/∂θ for each parameter θ before it. So minimise

        Σ r²/v + T (2 Σ_p √(ε² + δ_pᵀ Γ⁻¹ δ_p) + ‖Δ‖²/σ²)

    over X and Δ. r is the distance of an entry of the gradients from what was released of it, v the variance of its
    error, and T the mean of r²/v where a step begins, so that the priors weigh as much as the misfit lets them: under
    noise T comes to 1, and to 0 if all released entries are exact.

    If `signs` is true, what was released of each entry is its sign.
    """

    tokens: _Tokens
    parameters: Mapping[str, Tensor]
    released: Flat
    weight: Flat
    edge: Flat
    size: Float[Tensor, "b 1 1"]
    heard: Bool[Tensor, "b t 1"]
    jointly: bool
    prior: Smoothness
    epsilon: float
    signs: bool = False

    @classmethod
    def of(cls, model: VictimModel, blocks: int, likelihood: Likelihood, prior: Smoothness, epsilon: float) -> "Stage":
        """Return the first blocks of a copy of a model.

        Args:
            model: the model; it is left as it is.
            blocks: L, at least 0.
            likelihood: what was released of each parameter's gradient.
            prior: the prior of edges.
            epsilon: its ε, in standard deviations of the differences of adjacent pixels, > 0.
        """
        # The attention must not be fused, because its gradient is differentiated again.
        tokens = _Tokens(twice_derivable(model), blocks)
        released, full = likelihood.released, "model.vit.{}".format
        own = dict(tokens.named_parameters())
        # Parameters before block L are joined to one row of e entries for each image. E_unk is the victim's, and no
        # image uses it here.
        names = sorted(name for name in names_before(blocks, released) if full(name) in own)
        edge = torch.cat([likelihood.edge[name].flatten(1) for name in names], 1)
        variance = torch.cat([likelihood.variance[name].flatten(1) for name in names], 1)
        G = torch.cat([released[name].flatten(1) for name in names], 1)
        # Each σ is at least a hundredth of the root mean square of the exact entries, although their rounding is far
        # smaller: one image explains all exact entries, whatever they weigh.
        least = _RELATIVE * _mean_square(G, edge == 0).sqrt()
        # The expected size of Δ comes from ∂ℓ/∂E_pos, less the variance of noise, and at
        # least a hundredth of it is taken.
        pe = _mean_square(released["pos_embed"].flatten(1), likelihood.edge["pos_embed"].flatten(1) == 0)
        signal = torch.maximum(pe - likelihood.variance["pos_embed"].flatten(1).mean(1, keepdim=True), 0.01 * pe)
        # If logits depend on some tokens alone, Δ is zero at all others, and its norm is expected in those few.
        heard = _heard(tokens, len(G))
        few = heard.shape[1] / heard.sum(1, keepdim=True)
        return cls(
            tokens=tokens,
            parameters={full(name): own[full(name)].detach() for name in names},
            released=G,
            weight=variance.sqrt().maximum(least).reciprocal(),
            edge=edge,
            size=_BEHIND * (few * signal[..., None]).sqrt(),
            heard=heard,
            jointly=bool(heard.float().mean() > 0.5),
            prior=prior,
            epsilon=epsilon,
            signs=likelihood.signs,
        )

    def start(self, X: Float[Tensor, "b n k"], steps: int) -> Point:
        """Return a point with these patches, and with the Δ that explains best what was released."""
        return Point(X, self._explain(X, steps), X.new_full((len(X),), _FIRST_DAMPING))

    def search(
        self, X: Float[Tensor, "b n k"], rounds: int, steps: int, draw: Callable[[int], Generator]
    ) -> Float[Tensor, "b n k"]:
        """Return the patches after some damped Gauss-Newton steps.

        Args:
            X: normalised patches, where the search begins.
            rounds: the steps, at least 0.
            steps: steps of conjugate gradients in each, at least 1.
            draw: gives the generator of a step by its number.
        """
        point = self.start(X, steps)
        for number in range(rounds):
            point = self.step(point, steps, draw(number))
        return point.X

    def step(self, at: Point, steps: int, draw: Generator) -> Point:
        """Return the point after one damped Gauss-Newton step, of the tried length of least objective.

        It moves X and Δ together. Where logits depend on few tokens alone it moves X, and then Δ is solved for:
        conjugate gradients of both need more steps there.

        Args:
            at: the point.
            steps: steps of conjugate gradients, at least 1.
            draw: of the probes of the curvature.
        """
        # T and the sizes of rows stay as they were at the start of the step, so that the tried lengths are compared by
        # one objective.
        here = self._scaled(at) if self.signs else self
        δX, δΔ, T = here._direction(at, steps, draw)
        tried = [(at.X + share * δX, at.Δ + share * δΔ) for share in _LENGTHS]
        values = torch.stack([here._objective(*each, T) for each in tried])
        best, rows = values.nan_to_num(torch.inf).argmin(0), torch.arange(len(at.X), device=at.X.device)
        # `best` holds the number of a length for each image. Length 0 is among them, so that no tried step
        # raises the objective.
        X, Δ = (torch.stack(each)[best, rows] for each in zip(*tried, strict=True))
        # A whole step lowers the damping to a quarter, a step of length 0 raises it sixfold.
        factor = torch.where(best == 0, _LOWERED, torch.where(best == len(tried) - 1, _RAISED, 1.0))
        # If Δ did not move with X, it is solved for at the new X, from exact entries.
        if not self.jointly:
            Δ = self._explain(X, _AGAIN)
        return Point(X, Δ, (at.damping * factor).clamp_min(_LEAST_DAMPING))

    def _direction(
        self, at: Point, steps: int, draw: Generator
    ) -> tuple[Float[Tensor, "b n k"], Float[Tensor, "b t d"], Float[Tensor, " b"]]:
        """Return a damped Gauss-Newton step of X and of Δ, which is zero where Δ is solved for, and T."""
        X, Δ, μ = at.X, at.Δ, at.damping
        moved, still = ((X, Δ), ()) if self.jointly else ((X,), (Δ,))

        # The gradients of the stage are a function of what moves: X and Δ, or X alone.
        def made(*moved: Tensor) -> Flat:
            return self._gradients(*moved, *still)

        image, forth, back = linearised(made, moved)
        # r is the distance of an entry from what was released, or from the interval of one that is not exact.
        off = distance(image, self.released, self.edge)
        # T is the mean of r² / v at this point: it lets the priors weigh as much as the misfit does.
        T = (self.weight * off).square().mean(1).clamp_min(torch.finfo(X.dtype).tiny)
        counted = self._counted(image, off, T)
        squares = counted.square()
        # H bounds the Hessian of the edges' energy at X; H X is its gradient. The prior of Δ in its units is ‖Δ‖².
        # Steps count the edges twice, the objective once: once in both has 1.2 dB less under rounding (docs/studies).
        H = self.prior.curvature(X, self.epsilon)
        priors = (lambda V: 2 * T[:, None, None] * H(V), lambda V: T[:, None, None] * V)
        # For the preconditioner the priors count by their mean diagonal, and JᵀJ by eight random probes of it.
        ridges = (2 * T * _mean_diagonal(H, X, draw), T)
        grams = [_Gram.of(each) for each in _probe(back, counted, draw)]

        # The matrix is Jᵀ W² J + priors + μ · (mean diagonal of Jᵀ W² J) · I, with the last two for X and Δ separately.
        def product(V: Unknowns) -> Unknowns:
            parts = _apart(V, moved)
            along = back(squares * forth(*parts))
            terms = zip(along, parts, priors, grams, strict=False)
            return _together(a + prior(v) + (μ * gram.mean)[:, None, None] * v for a, v, prior, gram in terms)

        # The preconditioner leaves out what couples X to Δ, and takes a Kronecker product for each.
        def precondition(V: Unknowns) -> Unknowns:
            terms = zip(_apart(V, moved), grams, ridges, strict=False)
            return _together(gram.solve(v, μ, ridge) for v, gram, ridge in terms)

        # The right-hand side is −(Jᵀ W² r + the slopes of the priors).
        terms = zip(back(squares * off), moved, priors, strict=False)
        slope = _together(each + prior(part) for each, part, prior in terms)
        found = _apart(conjugate_gradients(product, -slope, steps, precondition), moved)
        return found[0], found[1] if self.jointly else torch.zeros_like(Δ), T

    def _scaled(self, at: Point) -> "Stage":
        """Return the stage in which each entry has its sign, and at least a share of the size of its row at a point."""
        sizes = self._sizes(at.X, at.Δ)
        known = self.released != 0
        edge = torch.where(known, -1.0, torch.inf)
        return replace(self, released=_MARGIN * sizes * self.released, weight=known / sizes, edge=edge)

    def _sizes(self, X: Float[Tensor, "b n k"], Δ: Float[Tensor, "b t d"]) -> Flat:
        """Return for each entry of the gradients the root mean square of its row, which signs do not show."""
        made = self._gradients(X, Δ)
        own = {name.removeprefix("model.vit."): each for name, each in self.parameters.items()}
        parts = zip(own.items(), made.split([each.numel() for each in own.values()], 1), strict=True)
        rows = [part.unflatten(1, as_rows(name, each).shape) for (name, each), part in parts]
        sizes = [part.square().mean(2, keepdim=True).sqrt().expand_as(part).flatten(1) for part in rows]
        least = _LEAST_SIZE * made.square().mean(1, keepdim=True).sqrt()
        return torch.cat(sizes, 1).maximum(least.clamp_min(torch.finfo(made.dtype).tiny))

    def _explain(self, X: Float[Tensor, "b n k"], steps: int) -> Float[Tensor, "b t d"]:
        """Return the Δ that explains exact entries best, with ‖Δ‖² added; the gradients are linear in it."""
        if not self.signs:
            return self._fitted(X, steps)

        # The mean magnitude of a normal variable is 0.8 of its standard deviation.
        def fit(sizes: Flat) -> Tensor:
            wanted, weight = _MEAN_SIZE * sizes * self.released, self.released.abs() / sizes
            return replace(self, released=wanted, weight=weight)._fitted(X, steps)

        # The first fit takes one size for all rows, and each later one the sizes that the last fit gave.
        Δ = fit(torch.ones_like(self.released))
        for _ in range(_REFITS):
            Δ = fit(self._sizes(X, Δ))
        return Δ

    def _fitted(self, X: Float[Tensor, "b n k"], steps: int) -> Float[Tensor, "b t d"]:
        zero = X.new_zeros(*self.heard.shape[:2], self.tokens.model.vit.embed_dim)

        # Given X the gradients are linear in Δ: M Δ, with the weights in M. A missing entry has no number to explain.
        def made(Δ: Tensor) -> Flat:
            return self.weight * self._gradients(X, Δ)

        _, _, back = linearised(made, (zero,))
        exact = (self.edge == 0).to(X)
        # (Mᵀ M + I) Δ = Mᵀ W g with g what was released of the exact entries: least squares with ‖Δ‖² added.
        wanted = back(exact * self.weight * self.released)[0]
        return conjugate_gradients(lambda V: back(exact * made(V))[0] + V, wanted, steps)

    def _gradients(self, X: Float[Tensor, "b n k"], Δ: Float[Tensor, "b t d"]) -> Flat:
        """Return ∂⟨Δ, z_L(X)⟩/∂θ of each image."""

        # The function is ⟨Δ, z_L(X)⟩ of one image, and is differentiated by the parameters.
        # Δ is in units of `size` until here.
        def value(parameters: dict[str, Tensor], x: Tensor, δ: Tensor) -> Tensor:
            return (functional_call(self.tokens, parameters, (x,)) * δ).sum()

        found = vmap(grad(value), (None, 0, 0))(dict(self.parameters), X, self.size * self.heard * Δ)
        return torch.cat([found[name].flatten(1) for name in self.parameters], 1)

    def _counted(self, image: Flat, off: Flat, T: Float[Tensor, " b"]) -> Flat:
        """Return W = diag(1 / √v), less for entries within their intervals.

        An entry within an interval about zero has the weight 0. One beyond its bound by m, that a step may bring back,
        has 1 / √(1 + m² / (v T)) of its weight: without it, steps swing between two sets of violated bounds.
        """
        beyond = self.weight * (image - self.released)
        near = (1 + beyond.square() / T[:, None]).rsqrt()
        return self.weight * torch.where(off != 0, 1.0, torch.where(self.edge < 0, near, 0.0))

    def _objective(self, X: Tensor, Δ: Tensor, T: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        off = distance(self._gradients(X, Δ), self.released, self.edge)
        fit = (self.weight * off).square().sum(1)
        return fit + T * (2 * self.prior.sparse_energy(X, self.epsilon) + Δ.square().sum((1, 2)))


@dataclass(frozen=True, eq=False)
class _Gram:
    """JᵀJ about C ⊗ E / mean: C the mean over the columns of the unknowns, E that over their rows, by eigenvectors."""

    mean: Float[Tensor, " b"]
    rows: tuple[Float[Tensor, "b n"], Float[Tensor, "b n n"]]
    columns: tuple[Float[Tensor, "b d"], Float[Tensor, "b d d"]]

    @classmethod
    def of(cls, Q: Float[Tensor, "p b n d"]) -> "_Gram":
        # The rows of Q are Jᵀ v of p random signs v, so that the mean of their outer products is JᵀJ. It is averaged
        # over the columns of the unknowns to E (n × n), and over their rows to C (d × d).
        p, _, n, d = Q.shape
        rows = torch.einsum("pbnd,pbmd->bnm", Q, Q) / (p * d)
        columns = torch.einsum("pbnd,pbne->bde", Q, Q) / (p * n)
        mean = rows.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(Q.dtype).tiny)
        (λ, U), (κ, V) = torch.linalg.eigh(rows), torch.linalg.eigh(columns)
        return cls(mean, (λ.clamp_min(0), U), (κ.clamp_min(0), V))

    def solve(
        self, R: Float[Tensor, "b n d"], damping: Float[Tensor, " b"], more: Float[Tensor, " b"]
    ) -> Float[Tensor, "b n d"]:
        """Return about (JᵀJ + (damping · mean + more) I)⁻¹ R."""
        # In the eigenbases of E and C the matrix is diagonal: λ_i κ_j / mean + what is added. The 1e-3 keeps it
        # positive where eight probes show no curvature.
        (λ, U), (κ, V) = self.rows, self.columns
        added = (damping + 1e-3) * self.mean + more
        inside = λ[:, :, None] * κ[:, None] / self.mean[:, None, None] + added[:, None, None]
        return U @ ((U.mT @ R @ V) / inside) @ V.mT


def _mean_square(G: Flat, exact: Bool[Tensor, "b e"]) -> Float[Tensor, "b 1"]:
    """Return the mean square of the exact entries, or the least positive number."""
    mean = (G * exact).square().sum(1, keepdim=True) / exact.sum(1, keepdim=True).clamp_min(1)
    return mean.clamp_min(torch.finfo(G.dtype).tiny ** 0.5)


def _together(parts: Iterable[Float[Tensor, "b _ _"]]) -> Unknowns:
    return torch.cat([part.flatten(1) for part in parts], 1)[:, None]


def _apart(V: Unknowns, like: Sequence[Tensor]) -> list[Float[Tensor, "b _ _"]]:
    sizes = [part[0].numel() for part in like]
    return [part.view_as(of) for part, of in zip(V[:, 0].split(sizes, 1), like, strict=True)]


def _probe(
    back: Callable[[Flat], tuple[Tensor, ...]], counted: Flat, draw: Generator
) -> list[Float[Tensor, "p b _ _"]]:
    """Return Jᵀ v of random signs v, for each part of the unknowns."""
    found = []
    for _ in range(_PROBES):
        signs = torch.randint(0, 2, counted.shape[1:], generator=draw).to(counted) * 2 - 1
        found.append(back(counted * signs))
    return [torch.stack(each) for each in zip(*found, strict=True)]


def _mean_diagonal(H: Callable[[Tensor], Tensor], like: Tensor, draw: Generator) -> Float[Tensor, " b"]:
    """Return about the mean diagonal of a symmetric map, by one random vector of signs."""
    signs = (torch.randint(0, 2, like.shape[1:], generator=draw).to(like) * 2 - 1).expand_as(like)
    return (signs * H(signs)).mean((1, 2)).clamp_min(0)


def _heard(tokens: _Tokens, images: int) -> Bool[Tensor, "b t 1"]:
    """Return the tokens behind the blocks that logits depend on: behind the last one, often the class token alone."""
    model = tokens.model
    # Tokens that the logits do not depend on have a gradient of exactly zero, on a grey image as on any other.
    grey = model.mean.expand(1, *model.image_shape)
    with gradients_enabled():
        z = model.client_blocks(model.embed(grey), tokens.blocks).detach().requires_grad_()
        (slope,) = torch.autograd.grad(model.head(model.backbone(z, tokens.blocks)).square().sum(), z)
    return (slope != 0).any(2, keepdim=True).expand(images, -1, -1)
