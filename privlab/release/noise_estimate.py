"""How much of an update is noise: sums of gradients that cancel in any training, and in noise do not."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from privlab.release.local_training import rounding_of
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


@dataclass(frozen=True, eq=False)
class _Law:
    """Terms that add up to zero in what gradients move, m for each of n sums, of an update of these parameters.

    The noise is compared with `whole`, in the shape of `terms`: the terms themselves, or more entries of one kind.
    """

    names: tuple[str, ...]
    terms: Callable[[Mapping[str, Tensor]], Float[Tensor, "m n"]]
    whole: Callable[[Mapping[str, Tensor]], Float[Tensor, "m _"]] | None = None


def noise_of_update(seen: Observation) -> Noise | None:
    """Return the noise of a client's update, as sums that cancel in any training show it; None where there is none.

    1. The class token and its position embedding are added up, so they have one gradient, and move equally by any
       optimiser that treats entries one by one.
    2. The position embeddings of the patches and the projection's bias are added up too: Σ_n ∂ℓ/∂e_n = ∂ℓ/∂b.
    3. A key's bias adds one number to all logits of a query, so softmax gives it no gradient.
    4. The rows of ∂ℓ/∂W_head of a cross-entropy add up to zero, as the probabilities add up to one.

    2 to 4 hold for SGD, which moves weights by a linear map of gradients. Noise of one size on all parameters shows one
    deviation in all of these sums, and moves each parameter by that at least. Masks, pruning, another loss, noise by
    layer and weights of two models do not, and then None is returned; so it is where the head alone shows it, as a loss
    other than cross-entropy does.
    """
    noises = [_noise(seen, law) for law in _laws(seen)]
    found = sorted((noise for noise in noises if noise is not None), key=lambda each: each.deviation)
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
    law = _law_of_head(seen)
    return None if law is None else _noise(seen, law)


def _noise(seen: Observation, law: _Law) -> Noise | None:
    """Return the noise in the sums of a law; None where a parameter is not released, or nothing moved.

    Decay moves all weights in proportion to θ_0, so the part along the same sums of θ_0's is left out.
    """
    if not {*law.names} <= seen.gradients.keys():
        return None
    update = {name: seen.gradients[name][0].double() for name in law.names}
    weights = {name: seen.model.vit.get_parameter(name).detach().double() for name in law.names}
    rounding = {name: rounding_of(seen, name) for name in law.names}
    whole = law.whole or law.terms
    power, of_rounding = (float(whole(own).square().sum(0).mean()) for own in (update, rounding))
    if power == 0:
        return None
    terms, θ = law.terms(update), law.terms(weights).sum(0)
    moved, size = terms.sum(0), θ.square().sum()
    along = moved @ θ / size if size > 0 else 0.0
    variance = float((moved - along * θ).square().mean())
    return Noise((variance / len(terms)) ** 0.5, variance / power, variance <= _ROUNDING * of_rounding)


def _laws(seen: Observation) -> Iterator[_Law]:
    """Yield the laws that hold for a client's optimiser and its model, as `noise_of_update` lists them."""
    client, model = seen.client, seen.model
    assert client is not None
    if client.optimiser == "adam" and client.weight_decay:  # it divides the decay by the gradient
        return
    if model.pe_of_every_token:
        both = ("pos_embed", "cls_token")
        yield _Law(both, lambda own: torch.stack([own["pos_embed"][0, 0], -own["cls_token"][0, 0]]))
    if client.optimiser != "sgd":
        return
    if model.unk_embed is None and isinstance(getattr(model.vit.patch_embed, "norm", None), nn.Identity):
        count, bias = model.vit.patch_embed.num_patches, "patch_embed.proj.bias"
        yield _Law(("pos_embed", bias), lambda own: torch.cat([own["pos_embed"][0, -count:], -own[bias][None]]))
    names = tuple(name for name in seen.gradients if name.endswith(".attn.qkv.bias"))
    if names and _keys_are_free(model):
        yield _Law(
            names,
            lambda own: torch.stack([own[name].chunk(3)[1] for name in names]).view(1, -1),
            whole=lambda own: torch.stack([own[name] for name in names]).view(1, -1),
        )
    if (head := _law_of_head(seen)) is not None:
        yield head


def _law_of_head(seen: Observation) -> _Law | None:
    client, name = seen.client, "head.weight"
    assert client is not None
    of_softmax = client.optimiser == "sgd" and client.is_of_class
    return _Law((name,), lambda own: own[name]) if of_softmax else None


def _keys_are_free(model: VictimModel) -> bool:
    """Return whether a key's bias adds one number to all logits of a query: keys are neither normalised nor turned."""
    norms = [module for path, module in model.vit.named_modules() if path.endswith("attn.k_norm")]
    return all(isinstance(norm, nn.Identity) for norm in norms) and getattr(model.vit, "rope", None) is None
