"""What a client of split learning sends, and what its server sees of it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import full_precision
from privlab.patches import restore_features
from privlab.release.effects import effects_of
from privlab.threat import (
    Capability,
    Defense,
    Draws,
    FeatureDefense,
    FeatureObservation,
    Feed,
    GradientDefense,
    Sent,
    Stack,
)
from privlab.victims import VictimModel

__all__ = ["feature_capabilities", "observe_features", "predictions", "send"]

FILTERED_PIXELS = 64 * 64
"""The most pixels of an image that grant `filtered_images` and `mixed_images`.

A filter's matrix has as many rows, and 128 MiB then; and there are 516,066 rectangles in as many pixels.
"""


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
    """Return what the server sees of a batch, given the public base and images of its own.

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
    model: VictimModel,
    public: int,
    defense: Sequence[Defense | FeatureDefense | GradientDefense] = (),
    cut_layer: int = 0,
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
    grants = {
        Capability.KNOWS_WEIGHTS,
        Capability.RELEASED_FEATURES,
        Capability.KNOWS_DEFENSE,
        Capability.QUERIES,
    }
    if cut_layer == 0:
        grants.add(Capability.EMBEDDED_ROWS)
    if public:
        grants.add(Capability.AUXILIARY_IMAGES)
    done = effects_of(model, defense)
    if done.rows != "mixed":
        grants.add(Capability.OWN_ROWS)
    (h, w), stack = model.image_shape[1:], Stack(tuple(defense))
    if done.other and stack.changes_images and h * w <= FILTERED_PIXELS:
        grants.add(Capability.FILTERED_IMAGES)
    if stack.mixes_images and h * w <= FILTERED_PIXELS:
        grants.add(Capability.MIXED_IMAGES)
    if model.vit.pos_embed is not None:
        grants.add(Capability.POSITION_EMBEDDINGS)
    if model.vit.cls_token is not None:
        grants.add(Capability.CLASS_TOKEN)
    return frozenset(grants)


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
