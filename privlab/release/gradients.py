"""What clients release: the gradient of the loss of one image, or of the mean loss of a batch, by parameter name."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from timm.models.vision_transformer import Block
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError, first, full_precision
from privlab.release.checked import Images, Labels, images_for, labels_for, model_of
from privlab.release.effects import AnyDefense, effects_of
from privlab.threat import Capability, Feed, GradientDefense, Observation, Stack, defense_declarations
from privlab.victims import (
    AprilBlock,
    Victim,
    VictimModel,
    check_names,
    released_gradients,
    released_parameters,
    why_no_plain_block,
)


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
        images_per_release: B, the images whose mean loss one gradient is of: the first B are the first release.
        public: m × c × h × w images of the adversary's own, as `feed` takes them; None if it has none.

    Raises:
        PrivlabError: as in `released_gradients`; under `torch.inference_mode`; if the defense withholds every
            parameter; if images have another size or type than the model's input, or values that are not finite or
            outside [0, 1]; if the labels are no class indices of the model, or not as many as the images.
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


_MOST_ENTRIES = 2**26  # the most gradient entries that are held in memory at once while a defense acts on them


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
