"""How much of an update is noise: sums of gradients that cancel in any training, and in noise do not."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from privlab.release.local_training import rounding_deviation
from privlab.threat import Observation
from privlab.victims import VictimModel

_ROUNDING = 16.0  # how many times the variance of rounding a variance may be to be taken for that of rounding

_ALIKE = 1.5
"""The ratio up to which deviations count as those of one noise; those of the recipes that were tried agree to 1.1."""

_EVERYWHERE, _FEWEST = 0.5, 32
"""The least root mean square of an update, in deviations of its noise, of each parameter with as many entries."""

_LEAST_SHARE = 0.01  # The share of the squared update from which noise is named. Gradients in bf16 come to 1e-4


@dataclass(frozen=True)
class Noise:
    """Noise that entries of an update have: its standard deviation, and its share of the sum of their squares."""

    deviation: float
    share: float
    rounding: bool = False

    @property
    def is_large(self) -> bool:
        """Return whether the noise is large enough to be named, and is not that of rounding."""
        return self.share > _LEAST_SHARE and not self.rounding


def noise_of_update(seen: Observation) -> Noise | None:
    """Return the noise of a client's update, as sums that cancel in any training show it; None where there is none.

    1. The class token and its position embedding are added up, so they have one gradient, and move alike by any
       optimiser that treats entries one by one.
    2. The position embeddings of the patches and the projection's bias are added up too: Σ_n ∂ℓ/∂e_n = ∂ℓ/∂b.
    3. A key's bias adds one number to all logits of a query, so softmax gives it no gradient.
    4. The rows of ∂ℓ/∂W_head of a cross-entropy add up to zero, as the probabilities add up to one.

    2 to 4 hold for SGD, which moves weights by a linear map of gradients. Noise of one size on all parameters shows one
    deviation in all of these sums, and moves each parameter by that at least. Masks, pruning, another loss, noise by
    layer and weights of two models do not, and then None is returned; so it is where the head alone shows it, as a loss
    other than cross-entropy does.
    """
    found = sorted(_noises(seen), key=lambda each: each.deviation)
    if not found or all(name.startswith("head.") for name in seen.gradients):
        return None
    middle = found[len(found) // 2]
    moved = [u[0].double().square() for u in seen.gradients.values()]
    least = min((float(u.mean().sqrt()) for u in moved if u.numel() >= _FEWEST), default=0.0)
    if found[-1].deviation > _ALIKE * found[0].deviation or least < _EVERYWHERE * middle.deviation:
        clean = all(each.share <= _LEAST_SHARE for each in found)
        return middle if clean else None
    share = middle.deviation**2 * sum(u.numel() for u in moved) / sum(float(u.sum()) for u in moved)
    return Noise(middle.deviation, share, any(each.rounding for each in found))


def noise_of_head(seen: Observation) -> Noise | None:
    """Return the noise of the update of the head under cross-entropy and SGD; None where it does not show it."""
    return next(_head(seen), None)


def _noise(moved: Tensor, weights: Tensor, power: float, rounding: float, terms: int) -> Iterator[Noise]:
    """Yield the noise of a vector that is zero in what gradients move; none where it says nothing.

    Its entries are signed sums of so many terms, and `weights` are the same sums of θ_0's: decay moves all weights in
    proportion to θ_0, so the part along these is left out. `power` is the mean over the entries of the sum of the
    squares of the terms, `rounding` that of the variances of rounding.
    """
    if power == 0:
        return
    size = weights.square().sum()
    along = moved @ weights / size if size > 0 else 0.0
    variance = float((moved - along * weights).square().mean())
    yield Noise((variance / terms) ** 0.5, variance / power, variance <= _ROUNDING * rounding)


def _noises(seen: Observation) -> Iterator[Noise]:
    client = seen.client
    assert client is not None
    if client.optimiser == "adam" and client.weight_decay:  # it divides the decay by the gradient
        return
    yield from _class_token(seen)
    if client.optimiser == "sgd":
        yield from _patches(seen)
        yield from _keys(seen)
        yield from _head(seen)


def _class_token(seen: Observation) -> Iterator[Noise]:
    model, names = seen.model, ("pos_embed", "cls_token")
    if not model.pe_of_every_token or not {*names} <= seen.gradients.keys():
        return
    (e, t), (θ_e, θ_t), (r_e, r_t) = ((own["pos_embed"][0, 0], own["cls_token"][0, 0]) for own in _of(seen, names))
    power, rounding = (float((x.square() + y.square()).mean()) for x, y in ((e, t), (r_e, r_t)))
    yield from _noise(e - t, θ_e - θ_t, power, rounding, 2)


def _patches(seen: Observation) -> Iterator[Noise]:
    model, names = seen.model, ("pos_embed", "patch_embed.proj.bias")
    plain = model.unk_embed is None and isinstance(getattr(model.vit.patch_embed, "norm", None), nn.Identity)
    if not plain or not {*names} <= seen.gradients.keys():
        return
    count = model.vit.patch_embed.num_patches
    (e, b), (θ_e, θ_b), (r_e, r_b) = ((own[names[0]][0, -count:], own[names[1]]) for own in _of(seen, names))
    power, rounding = (float((x.square().sum(0) + y.square()).mean()) for x, y in ((e, b), (r_e, r_b)))
    yield from _noise(e.sum(0) - b, θ_e.sum(0) - θ_b, power, rounding, count + 1)


def _keys(seen: Observation) -> Iterator[Noise]:
    if not _keys_are_free(seen.model):
        return
    names = [name for name in seen.gradients if name.endswith(".attn.qkv.bias")]
    if not names:
        return
    u, θ, rounding = (torch.stack([own[name] for name in names]).unflatten(1, (3, -1)) for own in _of(seen, names))
    power, error = (float(x.square().mean()) for x in (u, rounding))
    yield from _noise(u[:, 1].flatten(), θ[:, 1].flatten(), power, error, 1)


def _keys_are_free(model: VictimModel) -> bool:
    """Return whether a key's bias adds one number to all logits of a query: keys are neither normalised nor turned."""
    norms = [module for path, module in model.vit.named_modules() if path.endswith("attn.k_norm")]
    return all(isinstance(norm, nn.Identity) for norm in norms) and getattr(model.vit, "rope", None) is None


def _head(seen: Observation) -> Iterator[Noise]:
    client, names = seen.client, ("head.weight",)
    assert client is not None
    if client.optimiser != "sgd" or client.loss != "cross-entropy" or names[0] not in seen.gradients:
        return
    W, θ, rounding = (own[names[0]] for own in _of(seen, names))
    power, error = (float(x.square().sum(0).mean()) for x in (W, rounding))
    yield from _noise(W.sum(0), θ.sum(0), power, error, len(W))


def _of(seen: Observation, names: tuple[str, ...] | list[str]) -> tuple[dict[str, Tensor], ...]:
    """Return the update of these parameters, θ_0, and the standard deviations of rounding, in float64."""
    assert seen.client is not None
    moved = {name: seen.gradients[name][0].double() for name in names}
    weights = {name: seen.model.vit.get_parameter(name).detach() for name in names}
    rounding = {name: rounding_deviation(weights[name], seen.gradients[name][0], seen.client) for name in names}
    return moved, {name: θ.double() for name, θ in weights.items()}, rounding
