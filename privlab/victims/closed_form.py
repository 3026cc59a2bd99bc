"""The gradients of a victim's parameters by closed forms, for each release.

One forward and one backward pass run through the activations only; the gradient of a weight then is a product
of what its layer read and what flowed back into it, over the tokens of one release. No weight gradient is summed
over releases and none is computed that nobody asked for.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from privlab.base import PrivlabError, check_name, first, gradients_enabled
from privlab.patches import patchify
from privlab.victims.anatomy import PREFIX_TOKENS
from privlab.victims.feed import Feed
from privlab.victims.model import VictimModel, check_classifies

_EMBEDDING = (*PREFIX_TOKENS, "pos_embed", "unk_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")
"""The parameters of the embedding, which `_of_embedding` knows."""

_CROSS_ENTROPY = partial(F.cross_entropy, reduction="sum")


def released_parameters(model: VictimModel) -> frozenset[str]:
    """Return the names of the parameters whose gradients a client of `model` releases and we can compute."""
    layers = {
        f"{path}.{name}"
        for path, layer in model.vit.named_modules()
        if isinstance(layer, nn.Linear | nn.LayerNorm) and path not in model.silent
        for name in ("weight", "bias")
        if getattr(layer, name) is not None
    }
    held = {name.removeprefix("vit.") for name, _ in model.named_parameters()}
    return frozenset((layers | ({*_EMBEDDING} & held)) - model.frozen)


def check_names(parameters: Iterable[str] | None) -> None:
    """Check that names of parameters are not one string, which would be read letter by letter.

    Raises:
        PrivlabError: if they are.
    """
    if isinstance(parameters, str):
        raise PrivlabError(f"parameters must be a list of names. Found '{parameters}': give ['{parameters}'].")


def released_gradients(
    model: VictimModel,
    feed: Feed,
    labels: Int[Tensor, " n"] | Float[Tensor, "n y"],
    parameters: Iterable[str],
    images_per_release: int = 1,
    *,
    create_graph: bool = False,
    loss: Callable[[Tensor, Tensor], Tensor] = _CROSS_ENTROPY,
) -> dict[str, Float[Tensor, "r ..."]]:
    """Return ∂ℓ/∂θ of each release for each named parameter θ, with ℓ the mean loss of its B images.

    The n = r·B fed images are those of the releases in their order. A linear layer that reads a_n and whose output
    receives δ_n gives ∂ℓ/∂W = Σ_n δ_n a_nᵀ, over the tokens of all B images. The embedding is the case a_n = x_n: with
    g_n = ∂ℓ/∂z_n, ∂ℓ/∂W = Σ_n g_n x_nᵀ, ∂ℓ/∂E_pos[n] = g_n where slot n keeps its PE and 0 elsewhere, and ∂ℓ/∂E_unk = Σ
    g_m over the other slots; of B images these add up.

    Args:
        model: the clients' model; it is left as it is.
        feed: the n images in [0, 1] as the clients feed them, with their masked position embeddings.
        labels: the class index of each image, or its targets: a probability of each class.
        parameters: names out of `released_parameters(model)`; a name that comes twice counts once.
        images_per_release: B, at least 1: the first B images are those of the first release.
        create_graph: whether the result can be differentiated by the images; the model's attention must not be fused
            then.
        loss: of logits and `labels`, the sum over the n images.

    Raises:
        PrivlabError: if a parameter is not there, or belongs to a layer with no such rule, or B does not divide n; if
            the model has no classifier, or no parameter that requires a gradient; if a replaced method skips a layer.
    """
    check_names(parameters)
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
        z = model.embed(feed.images, feed.masked_pe, feed.replacement)
    with gradients_enabled(), _tap(model.vit, paths) as taps:
        mean = loss(model.classify(z.requires_grad_()), labels) / B
        if skipped := [path for path in paths if path not in taps]:
            raise PrivlabError(f"A replaced method of the model skips {first(skipped, 3)}: restore the module's own.")
        g, *δ_layers = torch.autograd.grad(mean, [z, *(taps[path][1] for path in paths)], create_graph=create_graph)
    δ = dict(zip(paths, δ_layers, strict=True))
    gradients = {}
    for name in names:
        if name in layers:
            path, kind = layers[name]
            layer = model.vit.get_submodule(path)
            a = taps[path][0] if create_graph else taps[path][0].detach()
            gradients[name] = _of_layer(layer, kind, _per_release(a, B), _per_release(δ[path], B))
        else:
            of_images = _of_embedding(name, model, feed, g)
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
    """View what is given for each image as r × B × …; as it is where each image is a separate release."""
    return x if B == 1 else x.unflatten(0, (-1, B))


def _rows(x: Tensor) -> Tensor:
    """View an activation as r × n × d, with the n tokens of a release; a pooled one has a token for each image."""
    return x.flatten(1, -2) if x.ndim > 2 else x.unsqueeze(1)


def _of_layer(layer: nn.Module, kind: str, a: Tensor, δ: Tensor) -> Tensor:
    """Return the gradient of a layer's weight or bias per release, by its input a and the gradient δ of its output."""
    if kind == "bias":
        return _rows(δ).sum(1)
    if isinstance(layer, nn.LayerNorm):
        return _rows(δ * F.layer_norm(a, layer.normalized_shape, eps=layer.eps)).sum(1)
    return _rows(δ).mT @ _rows(a)


def _of_embedding(name: str, model: VictimModel, feed: Feed, g: Tensor) -> Tensor:
    """Return the gradient of a parameter of the embedding per image, by g = ∂ℓ/∂z₀."""
    vit, masked = model.vit, feed.masked_pe
    match name:
        case "pos_embed":
            rows = g[:, -vit.get_parameter("pos_embed").shape[1] :]
            if masked is not None:
                before = masked.new_zeros(len(g), rows.shape[1] - masked.shape[1])
                rows = rows.masked_fill(torch.cat([before, masked], 1)[..., None], 0)
            return rows.unsqueeze(1)
        case "unk_embed":
            if masked is None or feed.replacement == "zero":
                return g.new_zeros(len(g), 1, 1, g.shape[-1])
            return (g[:, -masked.shape[1] :] * masked[..., None]).sum(1)[:, None, None]
        case "cls_token":
            return g[:, None, :1]
        case "dist_token":
            return g[:, None, 1:2]
        case "reg_token":
            return g[:, None, vit.num_prefix_tokens - vit.get_parameter("reg_token").shape[1] : vit.num_prefix_tokens]
        case "patch_embed.proj.weight":
            X = patchify(model.normalise(feed.images), model.patch)
            return (g[:, -X.shape[1] :].mT @ X).unflatten(2, vit.patch_embed.proj.weight.shape[1:])
        case _:  # patch_embed.proj.bias
            return g[:, vit.num_prefix_tokens :].sum(1)
