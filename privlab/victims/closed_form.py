"""The gradients of a victim's parameters by closed forms, for each release.

One forward and one backward pass run through the activations only; the gradient of a weight then is a product
of what its layer read and what flowed back into it, over the tokens of one release. No weight gradient is summed
over releases and none is computed that nobody asked for.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from privlab.base import PrivlabError, check_name, first, gradients_enabled
from privlab.patches import patchify
from privlab.victims.model import VictimModel, check_classifies

Rule = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(layer, its input a, the gradient δ of its output) ↦ the gradient of one of its parameters, per release."""


class _Fed(NamedTuple):
    """What the model is fed, as `VictimModel.embed` takes it."""

    images: Tensor
    masked_pe: Tensor | None
    replacement: Literal["unknown", "zero"]


def released_parameters(model: VictimModel) -> frozenset[str]:
    """Return the names of the parameters whose gradients a client of `model` releases and we can compute."""
    layers = {
        f"{path}.{name}"
        for path, layer in model.vit.named_modules()
        for name in _rules(layer)
        if path not in model.silent and getattr(layer, name) is not None
    }
    held = {name.removeprefix("vit.") for name, _ in model.named_parameters()}
    return frozenset((layers | (_EMBEDDING.keys() & held)) - model.frozen)


def parameter_gradients(
    model: VictimModel,
    images: Float[Tensor, "n c h w"],
    labels: Int[Tensor, " n"] | Float[Tensor, "n y"],
    parameters: Iterable[str],
    images_per_release: int = 1,
    *,
    masked_pe: Bool[Tensor, "n s"] | None = None,
    replacement: Literal["unknown", "zero"] = "unknown",
    create_graph: bool = False,
) -> dict[str, Float[Tensor, "r ..."]]:
    """Return ∂ℓ/∂θ of each release for each named parameter θ, by the formulas of `released_gradients`.

    Args:
        model: the victim; it is left as it is.
        images: the n images in [0, 1] as the clients feed them.
        labels: the class index of each image, or a probability of each class.
        parameters: names out of `released_parameters(model)`.
        images_per_release: B, a divisor of n.
        masked_pe: as `VictimModel.embed` takes it.
        replacement: as `VictimModel.embed` takes it.
        create_graph: whether the result can be differentiated by the images.

    Raises:
        PrivlabError: as `released_gradients` does, or if a replaced method skips a layer.
    """
    B = images_per_release
    if B < 1 or len(labels) % B:
        raise PrivlabError(f"images_per_release must be a divisor of the {len(labels)} images. Found {B}.")
    check_classifies(model)
    names = list(dict.fromkeys(parameters))
    known = released_parameters(model)
    if names and not known:
        raise PrivlabError("No parameter of the model requires a gradient: unfreeze those that the client trains.")
    for name in names:
        check_name("parameter with a per-image gradient", name, known)
    layers = {name: name.rpartition(".")[::2] for name in names if name not in _EMBEDDING}
    paths = sorted({path for path, _ in layers.values()})
    with torch.set_grad_enabled(create_graph):
        z = model.embed(images, masked_pe, replacement)
    with gradients_enabled(), _tap(model.vit, paths) as taps:
        loss = F.cross_entropy(model.classify(z.requires_grad_()), labels, reduction="sum") / B
        if skipped := [path for path in paths if path not in taps]:
            raise PrivlabError(f"A replaced method of the model skips {first(skipped, 3)}: restore the module's own.")
        g, *δ_layers = torch.autograd.grad(loss, [z, *(taps[path][1] for path in paths)], create_graph=create_graph)
    δ = dict(zip(paths, δ_layers, strict=True))
    fed, gradients = _Fed(images, masked_pe, replacement), {}
    for name in names:
        if name in layers:
            path, kind = layers[name]
            layer = model.vit.get_submodule(path)
            a = taps[path][0] if create_graph else taps[path][0].detach()
            gradients[name] = _rules(layer)[kind](layer, _per_release(a, B), _per_release(δ[path], B))
        else:
            of_images = _EMBEDDING[name](model, fed, g)
            gradients[name] = of_images if B == 1 else _per_release(of_images, B).sum(1)
    return gradients


@contextmanager
def _tap(vit: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Record (input, output) of the named layers during the forward pass within the context."""
    taps: dict[str, tuple[Tensor, Tensor]] = {}

    def record(path: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        taps[path] = (inputs[0], output)

    with ExitStack() as hooks:
        for path in paths:
            hooks.enter_context(vit.get_submodule(path).register_forward_hook(partial(record, path)))
        yield taps


def _per_release(x: Tensor, B: int) -> Tensor:
    """View what is given for each image as r × B × …; as it is where each image is a release of its own."""
    return x if B == 1 else x.unflatten(0, (-1, B))


def _rows(x: Tensor) -> Tensor:
    """View an activation as r × n × d, with the n tokens of a release; a pooled one has a token for each image."""
    return x.flatten(1, -2) if x.ndim > 2 else x.unsqueeze(1)


def _sum(_: nn.Module, a: Tensor, δ: Tensor) -> Tensor:
    return _rows(δ).sum(1)


def _linear_weight(_: nn.Module, a: Tensor, δ: Tensor) -> Tensor:
    return _rows(δ).mT @ _rows(a)


def _norm_weight(layer: nn.Module, a: Tensor, δ: Tensor) -> Tensor:
    assert isinstance(layer, nn.LayerNorm)
    return _rows(δ * F.layer_norm(a, layer.normalized_shape, eps=layer.eps)).sum(1)


def _rules(layer: nn.Module) -> dict[str, Rule]:
    """Return the rules for the parameters of a layer; none for a kind of layer that has no rule."""
    if isinstance(layer, nn.Linear):
        return {"weight": _linear_weight, "bias": _sum}
    if isinstance(layer, nn.LayerNorm):
        return {"weight": _norm_weight, "bias": _sum}
    return {}


def _pos_embed(model: VictimModel, fed: _Fed, g: Tensor) -> Tensor:
    assert model.vit.pos_embed is not None
    rows = g[:, -model.vit.pos_embed.shape[1] :]
    if fed.masked_pe is not None:
        prefix = fed.masked_pe.new_zeros(len(g), rows.shape[1] - fed.masked_pe.shape[1])
        rows = rows.masked_fill(torch.cat([prefix, fed.masked_pe], 1)[..., None], 0)
    return rows.unsqueeze(1)


def _unk_embed(model: VictimModel, fed: _Fed, g: Tensor) -> Tensor:
    if fed.masked_pe is None or fed.replacement == "zero":
        return g.new_zeros(len(g), 1, 1, g.shape[-1])
    return (g[:, -fed.masked_pe.shape[1] :] * fed.masked_pe[..., None]).sum(1)[:, None, None]


def _cls_token(model: VictimModel, fed: _Fed, g: Tensor) -> Tensor:
    return g[:, None, :1]


def _dist_token(model: VictimModel, fed: _Fed, g: Tensor) -> Tensor:
    return g[:, None, 1:2]


def _reg_token(model: VictimModel, fed: _Fed, g: Tensor) -> Tensor:
    assert model.vit.reg_token is not None
    prefix = model.vit.num_prefix_tokens
    return g[:, None, prefix - model.vit.reg_token.shape[1] : prefix]


def _proj_weight(model: VictimModel, fed: _Fed, g: Tensor) -> Tensor:
    X = patchify(model.normalise(fed.images), model.patch)
    return (g[:, -X.shape[1] :].mT @ X).unflatten(2, model.vit.patch_embed.proj.weight.shape[1:])


def _proj_bias(model: VictimModel, fed: _Fed, g: Tensor) -> Tensor:
    return g[:, model.vit.num_prefix_tokens :].sum(1)


_EMBEDDING: dict[str, Callable[[VictimModel, _Fed, Tensor], Tensor]] = {
    "pos_embed": _pos_embed,
    "unk_embed": _unk_embed,
    "cls_token": _cls_token,
    "dist_token": _dist_token,
    "reg_token": _reg_token,
    "patch_embed.proj.weight": _proj_weight,
    "patch_embed.proj.bias": _proj_bias,
}
"""(model, what it is fed, g = ∂ℓ/∂z₀) ↦ the gradient of a parameter of the embedding, per image."""
