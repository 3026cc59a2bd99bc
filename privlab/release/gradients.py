"""What clients release: the gradient of the loss of one image, or of the mean loss of a batch, by parameter name.

One forward and one backward pass run through the activations only; the gradient of a weight then is a product
of what its layer read and what flowed back into it, over the tokens of one release. No weight gradient is summed
over releases and none is computed that nobody asked for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.models.vision_transformer import Block
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError, check_name, first, full_precision
from privlab.patches import patchify
from privlab.release.effects import effects_of
from privlab.threat import (
    Capability,
    Defense,
    FeatureDefense,
    Feed,
    GradientDefense,
    Observation,
    defense_declarations,
)
from privlab.victims import AprilBlock, VictimModel, check_classifies, why_no_plain_block

__all__ = ["gradient_capabilities", "observe", "per_sample_gradients", "released_gradients", "released_parameters"]
__all__ += ["released_names"]

Rule = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(layer, its input a, the gradient δ of its output) ↦ the gradient of one of its parameters, per release."""


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


def per_sample_gradients(
    model: VictimModel, feed: Feed, labels: Int[Tensor, " b"], parameters: Iterable[str]
) -> dict[str, Float[Tensor, "b ..."]]:
    """Return ∂ℓ_i/∂θ of each fed image i for each named parameter θ, with ℓ the cross-entropy.

    Args:
        model: the client's model; it is left as it is.
        feed: the b images in [0, 1] as the client feeds them, with their masked position embeddings.
        labels: the class index of each image.
        parameters: names out of `released_parameters(model)`.

    Raises:
        PrivlabError: as in `released_gradients`.
    """
    return released_gradients(model, feed, labels, parameters)


def released_gradients(
    model: VictimModel,
    feed: Feed,
    labels: Int[Tensor, " n"],
    parameters: Iterable[str],
    images_per_release: int = 1,
    *,
    create_graph: bool = False,
) -> dict[str, Float[Tensor, "r ..."]]:
    """Return ∂ℓ/∂θ of each release for each named parameter θ, with ℓ the mean cross-entropy of its B images.

    The n = r·B fed images are those of the releases in their order. A linear layer that reads a_n and whose output
    receives δ_n gives ∂ℓ/∂W = Σ_n δ_n a_nᵀ, over the tokens of all B images. The embedding is the case a_n = x_n: with
    g_n = ∂ℓ/∂z_n, ∂ℓ/∂W = Σ_n g_n x_nᵀ, ∂ℓ/∂E_pos[n] = g_n where slot n keeps its PE and 0 elsewhere, and ∂ℓ/∂E_unk = Σ
    g_m over the other slots; of B images these add up.

    Args:
        model: the clients' model; it is left as it is.
        feed: the n images in [0, 1] as the clients feed them, with their masked position embeddings.
        labels: the class index of each image.
        parameters: names out of `released_parameters(model)`; a name that comes twice counts once.
        images_per_release: B, at least 1: the first B images are those of the first release.
        create_graph: whether the result can be differentiated by the images; the model's attention must not be fused
            then.

    Raises:
        PrivlabError: if a parameter is not there, or belongs to a layer with no such rule, or B does not divide n; if
            the model has no classifier.
    """
    B = images_per_release
    if B < 1 or len(labels) % B:
        raise PrivlabError(f"images_per_release must be a divisor of the {len(labels)} images. Found {B}.")
    check_classifies(model)
    names = list(dict.fromkeys(parameters))
    known = released_parameters(model)
    for name in names:
        check_name("parameter with a per-image gradient", name, known)
    layers = {name: name.rpartition(".")[::2] for name in names if name not in _EMBEDDING}
    paths = sorted({path for path, _ in layers.values()})
    with torch.set_grad_enabled(create_graph):
        z = model.embed(feed.images, feed.masked_pe, feed.replacement)
    with torch.enable_grad(), _tap(model.vit, paths) as taps:
        loss = F.cross_entropy(model.classify(z.requires_grad_()), labels, reduction="sum") / B
        g, *δ_layers = torch.autograd.grad(loss, [z, *(taps[path][1] for path in paths)], create_graph=create_graph)
    δ = dict(zip(paths, δ_layers, strict=True))
    gradients = {}
    for name in names:
        if name in layers:
            path, kind = layers[name]
            layer = model.vit.get_submodule(path)
            a = taps[path][0] if create_graph else taps[path][0].detach()
            gradients[name] = _rules(layer)[kind](layer, _per_release(a, B), _per_release(δ[path], B))
        else:
            of_images = _EMBEDDING[name](model, feed, g)
            gradients[name] = of_images if B == 1 else _per_release(of_images, B).sum(1)
    return gradients


def observe(
    model: VictimModel,
    feed: Feed | Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    parameters: Iterable[str],
    defense: Sequence[Defense | FeatureDefense | GradientDefense] = (),
    draws: Sequence[Generator] = (),
    images_per_release: int = 1,
    public: Float[Tensor, "m c h w"] | None = None,
) -> Observation:
    """Return what the adversary sees of clients that take one training step each, on one image or on a batch.

    Args:
        model: the victim's model; it is left as it is.
        feed: what the clients feed it: what a defense makes of the private images, or images in [0, 1] as they are.
        labels: the class indices of the images, known to the client.
        parameters: the names of the gradients that the attacks read.
        defense: the defenses at work, all of them public; those on gradients act here, one after the other.
        draws: the secret generator of each release, for them.
        images_per_release: B, the images whose mean loss one gradient is of: the first B are the first release.
        public: images of the adversary's own, in [0, 1], as large as the model's input; None if it has none.

    Raises:
        PrivlabError: as in `released_gradients`, or if the defense withholds every parameter.
    """
    if isinstance(feed, Tensor):
        feed = Feed.undefended(feed, model.patch)
    grants = gradient_capabilities(model, defense, images_per_release, public=0 if public is None else len(public))
    on_gradients = [part for part in defense if isinstance(part, GradientDefense)]
    with full_precision():
        if on_gradients:
            names = released_names(parameters, defense)
            gradients = _defend(model, feed, labels, names, on_gradients, draws, images_per_release)
        else:
            gradients = released_gradients(model, feed, labels, parameters, images_per_release)
    return Observation(model, gradients, grants, tuple(defense), images_per_release, public=public)


_MOST_ENTRIES = 2**26
"""The most gradient entries that are held in memory at once while a defense acts on them."""


def _defend(
    model: VictimModel,
    feed: Feed,
    labels: Int[Tensor, " b"],
    names: Sequence[str],
    defense: Sequence[GradientDefense],
    draws: Sequence[Generator],
    images_per_release: int,
) -> dict[str, Float[Tensor, "r ..."]]:
    """Return the named gradients of releases that are defended as a whole, computed for a few of them at a time."""
    released = released_parameters(model) | set(names)
    size = sum(parameter.numel() for parameter in model.vit.parameters())
    r, B = max(1, _MOST_ENTRIES // max(1, size)), images_per_release
    kept: dict[str, list[Tensor]] = {name: [] for name in names}
    for start in range(0, len(labels), max(r * B, 1)):
        rows = slice(start, start + r * B)
        gradients = released_gradients(model, feed.take(rows), labels[rows], sorted(released), B)
        for part in defense:
            gradients = part.release(gradients, draws[start // B : start // B + r])
        for name, chunks in kept.items():
            chunks.append(gradients[name])
    return {name: torch.cat(chunks) for name, chunks in kept.items()}


def gradient_capabilities(
    model: VictimModel,
    defense: Sequence[Defense | FeatureDefense | GradientDefense] = (),
    images_per_release: int = 1,
    *,
    trained: frozenset[str] | None = None,
    public: int = 0,
) -> frozenset[Capability]:
    """Return the capabilities that released gradients of a model grant under a defense.

    The weights and the defense are known in any case.

    Args:
        model: the clients' model; its position embeddings, its first block and its trained parameters decide on the
            rest.
        defense: the clients' defenses; one on gradients grants `gradient_defense`.
        images_per_release: B; `batch_size_one` is granted for B = 1 alone.
        trained: the parameters that the clients train and release; None for all that the model does not freeze.
        public: the number of images of the adversary's own; they grant `auxiliary_images` from one on.

    Raises:
        PrivlabError: if the defense withholds every parameter.
    """
    grants = {Capability.KNOWS_WEIGHTS, Capability.KNOWS_DEFENSE, Capability.CLASS_LABELS}
    if images_per_release == 1:
        grants.add(Capability.BATCH_SIZE_ONE)
    if public:
        grants.add(Capability.AUXILIARY_IMAGES)
    if any(isinstance(part, GradientDefense) for part in defense):
        grants.add(Capability.GRADIENT_DEFENSE)
    if effects_of(model, defense).values:
        grants.add(Capability.PERMUTED_VALUES)
    every = released_parameters(model)
    released = set(released_names(every if trained is None else trained, defense)) & every
    if "pos_embed" in released:
        grants.add(Capability.LEARNABLE_PE_GRADIENT)
        if model.pe_of_every_token:
            grants.add(Capability.PE_OF_EVERY_TOKEN)
    if isinstance(model.vit.blocks[0], AprilBlock):
        grants.add(Capability.APRIL_BLOCK)
    if why_no_plain_block(model) is None and released >= _MLP:
        grants.add(Capability.PLAIN_BLOCK)
    return frozenset(grants)


def released_names(names: Iterable[str], defense: Sequence[Defense | FeatureDefense | GradientDefense]) -> list[str]:
    """Return those of the names of parameters that no defense withholds.

    Raises:
        PrivlabError: if there are names, and the defenses withhold all of them.
    """
    left = list(names)
    for part in defense:
        withheld = defense_declarations(part).withholds(left)
        if withheld and len(withheld) == len(left):
            raise PrivlabError(
                f"Defense '{part.name}' removes everything: it withholds {first(sorted(withheld), 3)}. There is "
                "nothing to attack."
            )
        left = [name for name in left if name not in withheld]
    return left


_MLP = {f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}


def obstacles(model: VictimModel) -> dict[Capability, str]:
    """Return why a model lacks a capability that its kind has, where the capability's own text does not tell."""
    found: dict[Capability, str] = {}
    if isinstance(model.vit.blocks[0], AprilBlock):
        return found
    if (why := why_no_plain_block(model)) is not None:
        found[Capability.PLAIN_BLOCK] = why
        if type(model.vit.blocks[0]) is not Block or not isinstance(model.vit.norm_pre, nn.Identity):
            found[Capability.APRIL_BLOCK] = why
    if model.vit.pos_embed is None:
        found[Capability.LEARNABLE_PE_GRADIENT] = "this model adds no position embedding to its tokens"
    return found


@contextmanager
def _tap(vit: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
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


def _dist_token(model: VictimModel, feed: Feed, g: Tensor) -> Tensor:
    return g[:, None, 1:2]


def _reg_token(model: VictimModel, feed: Feed, g: Tensor) -> Tensor:
    assert model.vit.reg_token is not None
    prefix = model.vit.num_prefix_tokens
    return g[:, None, prefix - model.vit.reg_token.shape[1] : prefix]


def _proj_weight(model: VictimModel, feed: Feed, g: Tensor) -> Tensor:
    X = patchify(model.normalise(feed.images), model.patch)
    return (g[:, -X.shape[1] :].mT @ X).unflatten(2, model.vit.patch_embed.proj.weight.shape[1:])


def _proj_bias(model: VictimModel, feed: Feed, g: Tensor) -> Tensor:
    return g[:, model.vit.num_prefix_tokens :].sum(1)


_EMBEDDING: dict[str, Callable[[VictimModel, Feed, Tensor], Tensor]] = {
    "pos_embed": _pos_embed,
    "unk_embed": _unk_embed,
    "cls_token": _cls_token,
    "dist_token": _dist_token,
    "reg_token": _reg_token,
    "patch_embed.proj.weight": _proj_weight,
    "patch_embed.proj.bias": _proj_bias,
}
"""(model, feed, g = ∂ℓ/∂z₀) ↦ the gradient of a parameter of the embedding, per image."""
