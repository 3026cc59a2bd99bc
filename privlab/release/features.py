"""What a client of split learning sends, and what its server sees of it."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import full_precision
from privlab.patches import restore_features
from privlab.release.effects import AnyDefense, effects_of
from privlab.threat import Capability, Draws, FeatureObservation, Feed, Sent, Stack
from privlab.victims import VictimModel

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
