"""What a client releases: the gradient of each image's loss, by parameter name, for a whole batch at once.

One forward and one backward pass run through the activations only; the gradient of a weight then is a product
of what its layer read and what flowed back into it. No weight gradient is summed over images and none is
computed that nobody asked for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Generator, Tensor, nn

from privlab.errors import unknown_name
from privlab.model import AprilBlock, VictimModel
from privlab.patches import patchify
from privlab.threat import Capability, Defense, FeatureDefense, Feed, GradientDefense, Observation

__all__ = ["full_precision", "granted", "observe", "per_sample_gradients", "released_parameters"]

Rule = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(layer, its input a, the gradient δ of its output) ↦ the gradient of one of its parameters, per image."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute as the tensors are: TF32 and autocast would change the released gradient, and the leak."""
    matmul, conv = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = conv


def released_parameters(model: VictimModel) -> frozenset[str]:
    """Return the names of the parameters whose gradients a client of `model` releases and we can compute."""
    layers = {
        f"{path}.{name}"
        for path, layer in model.vit.named_modules()
        for name, parameter in layer.named_parameters(recurse=False)
        if name in _rules(layer)
    }
    present = {name for name, _ in model.vit.named_parameters()} - model.frozen
    if model.unk_embed is not None:
        present.add("unk_embed")
    return frozenset((layers | set(_EMBEDDING)) & present)


def per_sample_gradients(
    model: VictimModel, feed: Feed, labels: Int[Tensor, " b"], parameters: Iterable[str]
) -> dict[str, Float[Tensor, "b ..."]]:
    """Return ∂ℓ_i/∂θ of each fed image i for each named parameter θ, with ℓ the cross-entropy.

    A linear layer that reads a_n and whose output receives δ_n gives ∂ℓ/∂W = Σ_n δ_n a_nᵀ. The embedding is the
    case a_n = x_n: with g_n = ∂ℓ/∂z_n, ∂ℓ/∂W = Σ_n g_n x_nᵀ, ∂ℓ/∂E_pos[n] = g_n where slot n keeps its PE and 0
    elsewhere, and ∂ℓ/∂E_unk = Σ g_m over the other slots.

    Raises:
        PrivlabError: if a parameter is not there, or belongs to a layer with no such rule.
    """
    names = list(dict.fromkeys(parameters))
    known = released_parameters(model)
    for name in names:
        if name not in known:
            raise unknown_name("parameter with a per-image gradient", name, known)
    layers = {name: name.rpartition(".")[::2] for name in names if name not in _EMBEDDING}
    paths = sorted({path for path, _ in layers.values()})
    with torch.no_grad():
        z = model.embed(feed.images, feed.masked_pe, feed.replacement)
    with torch.enable_grad(), _tapped(model.vit, paths) as taps:
        loss = F.cross_entropy(model.classify(z.requires_grad_()), labels, reduction="sum")
        g, *δ_layers = torch.autograd.grad(loss, [z, *(taps[path][1] for path in paths)])
    δ = dict(zip(paths, δ_layers, strict=True))
    gradients = {}
    for name in names:
        if name in layers:
            path, kind = layers[name]
            layer = model.vit.get_submodule(path)
            gradients[name] = _rules(layer)[kind](layer, taps[path][0].detach(), δ[path])
        else:
            gradients[name] = _EMBEDDING[name](model, feed, g)
    return gradients


def observe(
    model: VictimModel,
    feed: Feed | Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    parameters: Iterable[str],
    defense: Sequence[Defense | FeatureDefense | GradientDefense] = (),
    draws: Sequence[Generator] = (),
) -> Observation:
    """Return what the adversary sees of b clients that take one training step on one image each.

    Args:
        model: the victim's model; it is left as it is.
        feed: what the clients feed it: what a defense makes of the private images, or images in [0, 1] as they are.
        labels: the class indices of the images, known to the client.
        parameters: the names of the gradients that the attacks read.
        defense: the defenses at work, all of them public; those on gradients act here, one after the other.
        draws: the secret generator of each image, for them.
    """
    if isinstance(feed, Tensor):
        feed = Feed.undefended(feed, model.patch)
    on_gradients = [part for part in defense if isinstance(part, GradientDefense)]
    with full_precision():
        if on_gradients:
            gradients = _defended(model, feed, labels, list(parameters), on_gradients, draws)
        else:
            gradients = per_sample_gradients(model, feed, labels, parameters)
    return Observation(model, gradients, granted(model, defense), tuple(defense))


_AT_ONCE = 2**26
"""Entries of all released gradients that are held at once while a defense acts on them."""


def _defended(
    model: VictimModel,
    feed: Feed,
    labels: Int[Tensor, " b"],
    names: Sequence[str],
    defense: Sequence[GradientDefense],
    draws: Sequence[Generator],
) -> dict[str, Float[Tensor, "b ..."]]:
    """Return the named gradients of a release that is defended as a whole, computed for a few images at a time."""
    released = released_parameters(model) | set(names)
    size = sum(parameter.numel() for parameter in model.vit.parameters())
    b = max(1, _AT_ONCE // max(1, size))
    kept: dict[str, list[Tensor]] = {name: [] for name in names}
    for start in range(0, len(labels), b):
        rows = slice(start, start + b)
        gradients = per_sample_gradients(model, feed.take(rows), labels[rows], sorted(released))
        for part in defense:
            gradients = part.release(gradients, draws[rows])
        for name, chunks in kept.items():
            chunks.append(gradients[name])
    return {name: torch.cat(chunks) for name, chunks in kept.items()}


def granted(
    model: VictimModel, defense: Sequence[Defense | FeatureDefense | GradientDefense] = ()
) -> frozenset[Capability]:
    """Return the capabilities that one released gradient per image of `model` grants, under a defense."""
    grants = {Capability.KNOWS_WEIGHTS, Capability.BATCH_SIZE_ONE, Capability.KNOWS_DEFENSE}
    if any(isinstance(part, GradientDefense) for part in defense):
        grants.add(Capability.GRADIENT_DEFENSE)
    if "pos_embed" in released_parameters(model):
        grants.add(Capability.LEARNABLE_PE_GRADIENT)
        if not model.vit.no_embed_class:
            grants.add(Capability.PE_OF_EVERY_TOKEN)
    if isinstance(model.vit.blocks[0], AprilBlock):
        grants.add(Capability.APRIL_BLOCK)
    if _plain(model) and released_parameters(model) >= _MLP:
        grants.add(Capability.PLAIN_BLOCK)
    return frozenset(grants)


_MLP = {f"blocks.0.{name}.weight" for name in ("attn.proj", "mlp.fc1", "mlp.fc2")}


def _plain(model: VictimModel) -> bool:
    """Return whether the embedded tokens enter a block of timm's plain kind as they are."""
    first = model.vit.blocks[0]
    if type(first) is not Block or type(first.mlp) is not Mlp or not isinstance(first.norm2, nn.LayerNorm):
        return False
    return isinstance(model.vit.norm_pre, nn.Identity) and isinstance(first.mlp.norm, nn.Identity)


@contextmanager
def _tapped(vit: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Record (input, output) of the named layers during the forward pass within the context."""
    taps: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def record(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            taps[path] = (inputs[0], output)

        return record

    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(vit.get_submodule(path).register_forward_hook(hook(path)))
        yield taps


def _rows(x: Tensor) -> Tensor:
    """View an activation as b × n × d; a pooled one has n = 1."""
    return x.flatten(1, -2) if x.ndim > 2 else x.unsqueeze(1)


def _summed(_: nn.Module, a: Tensor, δ: Tensor) -> Tensor:
    return _rows(δ).sum(1)


def _linear_weight(_: nn.Module, a: Tensor, δ: Tensor) -> Tensor:
    return _rows(δ).mT @ _rows(a)


def _norm_weight(layer: nn.Module, a: Tensor, δ: Tensor) -> Tensor:
    assert isinstance(layer, nn.LayerNorm)
    return _rows(δ * F.layer_norm(a, layer.normalized_shape, eps=layer.eps)).sum(1)


def _rules(layer: nn.Module) -> dict[str, Rule]:
    """Return the rules for the parameters of a layer; none for a kind of layer that has no rule."""
    if isinstance(layer, nn.Linear):
        return {"weight": _linear_weight, "bias": _summed}
    if isinstance(layer, nn.LayerNorm):
        return {"weight": _norm_weight, "bias": _summed}
    return {}


def _pos_embed(model: VictimModel, feed: Feed, g: Tensor) -> Tensor:
    assert model.vit.pos_embed is not None
    rows = g[:, -model.vit.pos_embed.shape[1] :]
    if feed.masked_pe is not None:
        prefix = feed.masked_pe.new_zeros(len(g), rows.shape[1] - feed.masked_pe.shape[1])
        rows = rows.masked_fill(torch.cat([prefix, feed.masked_pe], 1)[..., None], 0)
    return rows.unsqueeze(1)


def _unk_embed(model: VictimModel, feed: Feed, g: Tensor) -> Tensor:
    if feed.masked_pe is None or feed.replacement == "zero":
        return g.new_zeros(len(g), 1, 1, g.shape[-1])
    return (g[:, -feed.masked_pe.shape[1] :] * feed.masked_pe[..., None]).sum(1)[:, None, None]


def _cls_token(model: VictimModel, feed: Feed, g: Tensor) -> Tensor:
    return g[:, None, :1]


def _reg_token(model: VictimModel, feed: Feed, g: Tensor) -> Tensor:
    prefix = model.vit.num_prefix_tokens
    return g[:, None, prefix - model.vit.num_reg_tokens : prefix]


def _proj_weight(model: VictimModel, feed: Feed, g: Tensor) -> Tensor:
    X = patchify(model.normalise(feed.images), model.patch)
    return (g[:, -X.shape[1] :].mT @ X).unflatten(2, model.vit.patch_embed.proj.weight.shape[1:])


def _proj_bias(model: VictimModel, feed: Feed, g: Tensor) -> Tensor:
    return g[:, model.vit.num_prefix_tokens :].sum(1)


_EMBEDDING: dict[str, Callable[[VictimModel, Feed, Tensor], Tensor]] = {
    "pos_embed": _pos_embed,
    "unk_embed": _unk_embed,
    "cls_token": _cls_token,
    "reg_token": _reg_token,
    "patch_embed.proj.weight": _proj_weight,
    "patch_embed.proj.bias": _proj_bias,
}
"""(model, feed, g = ∂ℓ/∂z₀) ↦ the gradient of a parameter of the embedding, per image."""
