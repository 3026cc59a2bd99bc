"""What clients release, and what the adversary sees of it: gradients of single images or batches, and features.

The gradient is that of the loss of one image, or of the mean loss of a batch, by parameter name. Features are what a
client of split learning sends.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from timm.models.vision_transformer import Block
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError, first, full_precision
from privlab.patches import restore_features
from privlab.release.checked import Images, Labels, images_for, labels_for, model_of
from privlab.release.effects import AnyDefense, effects_of
from privlab.threat import (
    Capability,
    Draws,
    FeatureObservation,
    Feed,
    GradientDefense,
    Observation,
    Sent,
    Stack,
    defense_declarations,
)
from privlab.victims import (
    AprilBlock,
    Victim,
    VictimModel,
    check_names,
    released_gradients,
    released_parameters,
    why_no_plain_block,
)

_MOST_ENTRIES = 2**26  # the most gradient entries that are held in memory at once while a defense acts on them

_MLP = {f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}

FILTERED_PIXELS = 64 * 64
"""The most pixels of an image that grant `filtered_images` and `mixed_images`.

A filter's matrix has as many rows, and 128 MiB then; and there are 516,066 rectangles in as many pixels.
"""


def observe(
    model: VictimModel | Victim,
    feed: Feed | Images,
    labels: Labels,
    parameters: Iterable[str],
    defense: Sequence[AnyDefense] = (),
    draws: Sequence[Generator] = (),
    images_per_release: int = 1,
    public: Images | None = None,
) -> Observation:
    """Return what the adversary sees of clients that take one training step each, on one image or on a batch.

    Args:
        model: the victim, or its model; it is left as it is.
        feed: what the clients feed it: what a defense makes of the private images, or b × c × h × w images as they are,
            in [0, 1] or of type uint8 (0 to 255).
        labels: the class indices of the images, b of them in 0 … classes − 1, known to the client.
        parameters: the names of the gradients that the attacks read.
        defense: the defenses at work, all of them public; those on gradients act here, one after the other.
        draws: the secret generator of each release, for them.
        images_per_release: B, the images of whose mean loss one gradient is made: the first B are the first release.
        public: m × c × h × w images of the adversary's own, as `feed` takes them; None if it has none.

    Raises:
        PrivlabError: as in `released_gradients`; under `torch.inference_mode`; if the defense withholds every
            parameter; if images have another size or type than the model's input, or values that are not finite or
            outside [0, 1]; if the labels are not class indices of the model, or not as many as the images.
    """
    check_names(parameters)
    model = model_of(model)
    if not isinstance(feed, Feed):
        feed = Feed.undefended(images_for(model, feed), model.patch)
    elif feed.images.shape[1:] != model.image_shape:
        images_for(model, feed.images)  # it says what the size should be
    labels = labels_for(model, labels, len(feed.images))
    public = None if public is None else images_for(model, public, "public images")
    grants = gradient_capabilities(model, defense, images_per_release, public=0 if public is None else len(public))
    stack = Stack(tuple(defense))
    with full_precision():
        if stack.on_gradients:
            names = released_names(parameters, defense)
            gradients = _defend(model, feed, labels, names, stack, draws, images_per_release)
        else:
            gradients = released_gradients(model, feed, labels, parameters, images_per_release)
    return Observation(model, gradients, grants, tuple(defense), images_per_release, public=public)


def _defend(
    model: VictimModel,
    feed: Feed,
    labels: Int[Tensor, " b"],
    names: Sequence[str],
    defense: Stack,
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
        left = defense.release(gradients, draws[start // B : start // B + r])
        for name, chunks in kept.items():
            chunks.append(left[name])
    return {name: torch.cat(chunks) for name, chunks in kept.items()}


def gradient_capabilities(
    model: VictimModel,
    defense: Sequence[AnyDefense] = (),
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
    every = released_parameters(model)
    released = set(released_names(every if trained is None else trained, defense)) & every
    granted = {
        Capability.KNOWS_WEIGHTS: True,
        Capability.KNOWS_DEFENSE: True,
        Capability.CLASS_LABELS: True,
        Capability.BATCH_SIZE_ONE: images_per_release == 1,
        Capability.AUXILIARY_IMAGES: public > 0,
        Capability.GRADIENT_DEFENSE: any(isinstance(part, GradientDefense) for part in defense),
        Capability.PERMUTED_VALUES: effects_of(model, defense).values,
        Capability.LEARNABLE_PE_GRADIENT: "pos_embed" in released,
        Capability.PE_OF_EVERY_TOKEN: "pos_embed" in released and model.pe_of_every_token,
        Capability.APRIL_BLOCK: isinstance(model.vit.blocks[0], AprilBlock),
        Capability.PLAIN_BLOCK: released >= _MLP and why_no_plain_block(model) is None,
    }
    return frozenset(capability for capability, holds in granted.items() if holds)


def released_names(names: Iterable[str], defense: Sequence[AnyDefense]) -> list[str]:
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


def send(model: VictimModel, feed: Feed, stack: Stack, draws: Draws, cut_layer: int = 0) -> Sent:
    """Return what the client sends: z_ℓ, the tokens after its ℓ blocks, after the defenses that act on features.

    z_ℓ = B_ℓ(… B₁(F₁(x̃))), with the embedding F₁ and the model's blocks B₁, B₂, …; z₀ = F₁(x̃).

    Args:
        model: the public base, of which the client runs the embedding and the first ℓ blocks.
        feed: x̃, the images after the defenses that act on images, with their masked position embeddings.
        stack: the client's defenses; those on images have acted already and are passed over.
        draws: the client's secret generators: one for each of the b images, one for the batch, one for the model.
        cut_layer: ℓ, the number of blocks that the client holds, in 0 … depth.

    Raises:
        PrivlabError: if a defense acts on gradients, or E_unk is asked for and the model has none.
    """
    with torch.no_grad(), full_precision():
        tokens = model.client_blocks(model.embed(feed.images, feed.masked_pe, feed.replacement), cut_layer)
        return stack.send(tokens, model.vit.num_prefix_tokens, draws)


def observe_features(
    model: VictimModel, sent: Sent, stack: Stack, public: Float[Tensor, "m c h w"], cut_layer: int = 0
) -> FeatureObservation:
    """Return what the server sees of a batch, given the public base and its own images.

    Args:
        model: the public base.
        sent: what the client sent; the server sees its features alone, b × t × d.
        stack: the client's defenses, whose algorithms and parameters are public.
        public: images of the server's own, in [0, 1], as large as the model's input; there may be none (m = 0).
        cut_layer: ℓ, the number of blocks that the client holds, in 0 … depth.

    Raises:
        PrivlabError: if a defense that declares no effects does not run.
    """
    grants = feature_capabilities(model, len(public), stack.parts, cut_layer)
    return FeatureObservation(model, sent.features, stack.parts, public, grants, cut_layer)


def feature_capabilities(
    model: VictimModel, public: int, defense: Sequence[AnyDefense] = (), cut_layer: int = 0
) -> frozenset[Capability]:
    """Return the capabilities of a server of split learning that knows the model and the defense.

    Args:
        model: the public base; its position embeddings and its class token grant capabilities where it has them.
        public: the number of images of the server's own; they grant `auxiliary_images` from one on.
        defense: the client's defenses; unless they mix the rows of several images, `own_rows` is granted.
        cut_layer: ℓ, the number of blocks that the client holds; only without any is `embedded_rows` granted.

    Raises:
        PrivlabError: if a defense that declares no effects does not run.
    """
    done, stack = effects_of(model, defense), Stack(tuple(defense))
    few_pixels = math.prod(model.image_shape[1:]) <= FILTERED_PIXELS
    granted = {
        Capability.KNOWS_WEIGHTS: True,
        Capability.RELEASED_FEATURES: True,
        Capability.KNOWS_DEFENSE: True,
        Capability.QUERIES: True,
        Capability.EMBEDDED_ROWS: cut_layer == 0,
        Capability.AUXILIARY_IMAGES: public > 0,
        Capability.OWN_ROWS: done.rows != "mixed",
        Capability.FILTERED_IMAGES: done.other and stack.changes_images and few_pixels,
        Capability.MIXED_IMAGES: stack.mixes_images and few_pixels,
        Capability.POSITION_EMBEDDINGS: model.vit.pos_embed is not None,
        Capability.CLASS_TOKEN: model.vit.cls_token is not None,
    }
    return frozenset(capability for capability, holds in granted.items() if holds)


def predictions(model: VictimModel, sent: Sent, cut_layer: int = 0) -> Float[Tensor, "b y"]:
    """Return the logits that the client gets: F₂ of what T makes of the sent features, put back in order (Eq. 2 and 5).

    The server's keyed weights make T(Z) P_C of Z P_C (Theorem 4.4), so T is run on the features without P_C.

    Args:
        model: the public base; T is its blocks behind the first ℓ.
        sent: what the client sent, with the orders that it keeps secret.
        cut_layer: ℓ, the number of blocks that the client holds, in 0 … depth.
    """
    with torch.no_grad(), full_precision():
        plain = replace(sent, features=restore_features(sent.features, columns=sent.columns), columns=None)
        return model.head(plain.restore(model.backbone(plain.features, cut_layer)))
