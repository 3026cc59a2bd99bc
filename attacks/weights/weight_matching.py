"""Weight matching: the key of an encrypted model, recovered from the public model that it was made from.

Every column of a public weight is still in the encrypted model, in another place. With e_j the values that the
encrypted model holds for feature j of the residual stream and b_i those that the public one holds for feature i, both
scaled to variance 1,

    e_j = α b_c(j) + √(1 − α²) ε,

where c is the key's order. α is 1 for the untouched model, and less after fine-tuning, noise, pruning or quantisation.

1. Features that no order of heads or units changes: norm weights, biases, and the first three moments and products
   of the columns of all matrices. Their inner products S make an assignment problem over c (Hungarian), and estimate α.
2. If that is not certain: a soft order R of the stream (Sinkhorn of S · α / (1 − α²), the log-likelihood) determines a
   soft order P of each layer's units, and all P determine a new S. Units are matched on one half of the features and
   score the other half; otherwise they would confirm the noise that they were matched on.
3. Given the stream's order, those of heads and units: Hungarian within each pair of heads, then over heads.

The adversary needs the encrypted weights and the public ones; neither the owner's embedding nor any image.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.base import PrivlabError, linear_sum_assignment
from privlab.keys import VIT, ModelKey, ModelShape, WeightLayout
from privlab.threat import Capability

CERTAIN_PROBABILITY = 1 - 1e-6
"""Posterior probability, in [0, 1], from which an entry is certain; no refinement is needed if every entry has it."""


@dataclass(frozen=True, eq=False)
class WeightObservation:
    """Everything that a thief of an encrypted model has: its weights and a public model's, of one shape and layout."""

    encrypted: Mapping[str, Tensor]
    base: Mapping[str, Tensor]
    shape: ModelShape
    layout: WeightLayout = VIT


@dataclass(frozen=True, eq=False)
class RecoveredOrder:
    """An estimate of the residual stream's order.

    `confidence[j]` in [0, 1] is the posterior probability of `residual[j]`; `agreement` is α, the correlation of the
    encrypted weights, put back in order, with the public ones; `rounds` counts the refinements of step 2.
    """

    residual: Int[Tensor, " d"]
    confidence: Float[Tensor, " d"]
    agreement: float
    rounds: int


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer: for each kind of unit, k matrices of u units × d features, and vectors of u units."""

    matrices: dict[str, Float[Tensor, "_ _ d"]]
    vectors: dict[str, Float[Tensor, "_ _"]]


@dataclass(frozen=True, eq=False)
class _Weights:
    """The layers of a backbone, and all of its vectors over the residual stream."""

    layers: list[_Layer]
    residual: Float[Tensor, "_ d"]


@dataclass(frozen=True)
class WeightMatching:
    """Match the features of an encrypted model with those of a public one.

    Args:
        rounds: the most refinements of step 2.
    """

    name: ClassVar[str] = "weight-matching"
    paper: ClassVar[str] = "ours, against Permutation Equivariance (2024), Section 5.3"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.KNOWS_WEIGHTS, Capability.KNOWS_DEFENSE})
    parameters: ClassVar[tuple[str, ...]] = ()

    rounds: int = 20

    def __call__(self, seen: WeightObservation) -> RecoveredOrder:
        """Recover the order of the residual stream.

        Raises:
            PrivlabError: if the two models do not hold the same tensors, or values that are not finite.
        """
        # Step 1: S_ji = Σ over the invariant features of e_j b_i (d × d), its best
        # assignment, and α as the correlation under it.
        encrypted, base = _both(seen)
        have, want = _features(encrypted), _features(base)
        first = have.T @ want
        residual, done = _assign(first), 0
        alpha = _correlation(have, want, residual)
        order = _posterior(first, alpha)
        # Step 2, as long as an entry of the order is uncertain and the order still changes.
        while done < self.rounds and order.gather(1, residual[:, None]).min() < CERTAIN_PROBABILITY:
            # The new S is the sum of that of step 1 and of what all units of all layers say under their soft orders. α
            # stays that of step 1.
            scores = first + sum(
                _feature_scores(e, b, kind, order, alpha)
                for e, b in zip(encrypted.layers, base.layers, strict=True)
                for kind in e.matrices
            )
            before, residual, order = residual, _assign(scores), _posterior(scores, alpha)
            done += 1
            if torch.equal(before, residual):
                break
        confidence = order.gather(1, residual[:, None])[:, 0]
        return RecoveredOrder(residual, confidence, _correlation(have, want, residual), done)

    def whole_key(self, seen: WeightObservation, residual: Int[Tensor, " d"]) -> ModelKey:
        """Recover the orders of heads and units too, given that of the residual stream (step 3).

        Raises:
            PrivlabError: if the two models do not hold the same tensors.
        """
        encrypted, base = _both(seen)
        # Step 3, layer by layer: the stream's order is known now.
        layers = [_inner(e, b, residual, seen.shape) for e, b in zip(encrypted.layers, base.layers, strict=True)]
        heads, qk, value, hidden = (torch.stack(orders) for orders in zip(*layers, strict=True))
        return ModelKey(residual, heads, qk, value, hidden)


def recovered_fraction(recovered: Int[Tensor, " d"], truth: Int[Tensor, " d"]) -> float:
    """Return the share of a key's entries that were recovered, in [0, 1]; a random guess recovers 1 / d."""
    return (recovered == truth).double().mean().item()


def _both(seen: WeightObservation) -> tuple[_Weights, _Weights]:
    encrypted, base = (_backbone(state, seen.layout) for state in (seen.encrypted, seen.base))
    check_alike(encrypted, base)
    return _read(encrypted, seen), _read(base, seen)


def check_alike(encrypted: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> None:
    """Raise PrivlabError if two models do not hold the same tensors, or values that are not finite."""
    for name in sorted(encrypted.keys() | base.keys()):
        shapes = [tuple(of[name].shape) if name in of else "none" for of in (encrypted, base)]
        if shapes[0] != shapes[1]:
            raise PrivlabError(
                "The encrypted and the public model must have one architecture. "
                f"Found '{name}' of shape {shapes[0]} and {shapes[1]}."
            )
        if not all(of[name].isfinite().all() for of in (encrypted, base)):
            raise PrivlabError(f"Weights that are not finite cannot be matched. Found NaN or infinity in '{name}'.")


def _backbone(state: Mapping[str, Tensor], layout: WeightLayout) -> dict[str, Tensor]:
    """Return the tensors that a key permutes, by name in a fixed order."""
    names = (n for n in sorted(state) if n in layout.outer or layout.layer.fullmatch(n))
    return {name: state[name].detach().float().cpu() for name in names}


def _read(state: Mapping[str, Tensor], seen: WeightObservation) -> _Weights:
    """Return the tensors by layer and by the kind of units along their axes."""
    residual, layers = [], []
    for index in range(seen.shape.depth):
        matrices: dict[str, list[Tensor]] = {}
        vectors: dict[str, list[Tensor]] = {}
        for axes, tensor in _of_layer(state, index, seen.layout):
            if axes == ("residual",):
                residual.append(tensor)
                continue
            # Units along the rows, features of the stream along the columns: u × d.
            units = tensor.T if axes[0] == "residual" else tensor
            for kind, part in _parts(axes[0] if axes[0] != "residual" else axes[1], units, seen.shape):
                (matrices if len(axes) == 2 else vectors).setdefault(kind, []).append(part)
        layers.append(
            _Layer(
                {kind: _scale(torch.stack(found)) for kind, found in matrices.items()},
                {kind: _standard(torch.stack(found)) for kind, found in vectors.items()},
            )
        )
    residual += [state[name] for name in seen.layout.outer if name in state]
    return _Weights(layers, _standard(torch.stack(residual)))


def _of_layer(
    state: Mapping[str, Tensor], index: int, layout: WeightLayout
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    for name, tensor in state.items():
        found = layout.layer.fullmatch(name)
        if found and int(found[1]) == index and (axes := layout.inner.get(found[2])):
            yield axes, tensor


def _parts(axis: str, units: Tensor, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Split along the units if an axis holds several kinds of them, or several of one kind."""
    if axis == "qkv":
        yield from zip(("qk", "qk", "value"), units.chunk(3), strict=True)
    elif axis == "up":
        yield from (("hidden", half) for half in units.chunk(2 if shape.glu else 1))
    elif axis == "head":
        yield "qk", units.repeat(shape.heads)
    else:
        yield axis, units


def _standard(rows: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
    """Return the rows scaled to mean 0 and variance 1; a constant row holds no information, and becomes 0."""
    centred = rows - rows.mean(1, keepdim=True)
    return centred / centred.square().mean(1, keepdim=True).sqrt().clamp_min(1e-12)


def _scale(matrices: Float[Tensor, "k u d"]) -> Float[Tensor, "k u d"]:
    return matrices / matrices.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-12)


def _features(weights: _Weights) -> Float[Tensor, "m d"]:
    """Return one row for each number of a feature of the stream that does not depend on the order of the units."""
    rows = [weights.residual]
    for layer in weights.layers:
        for kind, M in layer.matrices.items():
            # Means over the u units do not depend on their order: three moments of each
            # matrix, and products of two matrices.
            i, j = torch.triu_indices(len(M), len(M), 1)
            rows += [M.mean(1), M.square().mean(1), M.pow(3).mean(1), (M[i] * M[j]).mean(1)]
            if kind in layer.vectors:
                # A vector over the units is permuted with them, so its product with a matrix is invariant too.
                rows.append((layer.vectors[kind] @ M).flatten(0, 1))
    return _standard(torch.cat(rows))


def _assign(scores: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """Return the order c that maximises Σ scores[j, c[j]]."""
    best = scores.argmax(1)
    if len(best.unique()) == len(best):  # no two rows have the same best column: no assignment can be better
        return best
    return torch.from_numpy(linear_sum_assignment(scores.numpy(), maximize=True)[1])


def _correlation(have: Float[Tensor, "m d"], want: Float[Tensor, "m d"], order: Int[Tensor, " d"]) -> float:
    product = (have * want[:, order]).sum(dtype=torch.float64)  # a sum of so many terms in float32 may exceed one
    return (product / (have.norm(dtype=torch.float64) * want.norm(dtype=torch.float64)).clamp_min(1e-12)).item()


def _posterior(scores: Float[Tensor, "n n"], alpha: float) -> Float[Tensor, "n n"]:
    """Return the soft order: scores as log-likelihoods, made doubly stochastic (Sinkhorn); rows sum to 1 exactly."""
    # −(e − α b)² / 2(1 − α²) has the cross term e b · α / (1 − α²); the other terms depend
    # on j or i alone and cancel in Sinkhorn.
    alpha = min(max(alpha, 0.01), 0.99)
    logits = scores * (alpha / (1 - alpha**2))
    for _ in range(10):
        # Sinkhorn in logarithms: columns, then rows, are scaled to the sum 1.
        logits = logits - _log_sum(logits, 0)
        logits = logits - _log_sum(logits, 1)
    return logits.clamp_min(-60).exp()


def _log_sum(logits: Float[Tensor, "n n"], dim: int) -> Tensor:
    """Return log Σ exp along `dim`, without denormal numbers, which are slow and have no effect."""
    top = logits.amax(dim, keepdim=True)
    return top + (logits - top).clamp_min_(-80).exp_().sum(dim, keepdim=True).log()


def _feature_scores(e: _Layer, b: _Layer, kind: str, order: Float[Tensor, "d d"], alpha: float) -> Float[Tensor, "d d"]:
    """Return how well each feature of the one model fits each of the other, in one kind of units (step 2)."""
    # E and B are k × u × d. B Rᵀ is what the public model is expected to hold for the encrypted features.
    E, B = e.matrices[kind], b.matrices[kind]
    expected, halves = B @ order.T, (slice(0, None, 2), slice(1, None, 2))
    by_bias = e.vectors[kind].T @ b.vectors[kind] if kind in e.vectors else 0
    # u × u fits of the units, from the even and from the odd features of the encrypted model.
    fits = [torch.einsum("kud,kvd->uv", E[..., half], expected[..., half]) for half in halves]
    scores = torch.empty_like(order)
    for judged, other in zip(halves, reversed(fits), strict=True):
        # Features of one half are judged under the order P that the other half found: scores_de = Σ_ku E_kud (P B)_kue.
        units = _posterior(other + by_bias, alpha)
        scores[judged] = torch.einsum("kud,kue->de", E[..., judged], units @ B)
    return scores


def _inner(e: _Layer, b: _Layer, residual: Int[Tensor, " d"], shape: ModelShape) -> tuple[Tensor, ...]:
    """Return the orders of heads, qk, value and hidden of one layer."""
    fits = {}
    for kind, E in e.matrices.items():
        # With the stream's order applied to B, the fit of two units is the product of their rows.
        B = b.matrices[kind][..., residual]
        fits[kind] = torch.einsum("kud,kvd->uv", E, B)
        if kind in e.vectors:
            fits[kind] += e.vectors[kind].T @ b.vectors[kind]
    h, size = shape.heads, shape.head_dim
    # fit[i, j] is the size × size fit between the units of encrypted head i and public head j.
    qk, value = (fits[kind].view(h, size, h, size).transpose(1, 2) for kind in ("qk", "value"))
    # A pair of heads is worth what its best orders of units are worth; an assignment over heads maximises the sum.
    heads = _assign(torch.tensor([[_best(qk[i, j]) + _best(value[i, j]) for j in range(h)] for i in range(h)]))
    pairs = torch.arange(h), heads
    # The norm's weights are shared by all heads, so all heads have one order of units: their fits add up.
    if shape.qk_norm:
        qk = qk[pairs].sum(0).expand(h, h, size, size)
    return heads, _each(qk[pairs]), _each(value[pairs]), _assign(fits["hidden"])


def _best(scores: Float[Tensor, "n n"]) -> float:
    return scores.gather(1, _assign(scores)[:, None]).sum().item()


def _each(scores: Float[Tensor, "h n n"]) -> Int[Tensor, "h n"]:
    return torch.stack([_assign(s) for s in scores])
