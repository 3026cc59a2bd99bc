"""`shrunk-loss`: one image from the first step of Adam, which shows the size of gradients that are near its ε."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.dishonest.layout import (
    adam_inverted,
    cosine_rows,
    gradient_of,
    has_class_token,
    last_reads_mean,
    more_than_a_step,
    pass_through,
    shrink_head,
)
from privlab.base import PrivlabError
from privlab.threat import Capability, Client, Observation
from privlab.victims import VictimModel

_SHARE = 0.1
"""The largest gradient of a patch embedding in units of Adam's ε, for white noise: Adam moves it by a tenth of η."""


@dataclass(frozen=True)
class ShrunkLoss:
    """Choose weights whose gradients are below Adam's ε, and a patch embedding of zeros, and solve for the patches.

    Idea: Adam divides a gradient by its size plus ε, so that it shows signs alone, unless gradients are as small as ε.
    The server makes them so small by a tiny head. It also sets the patch embedding to 0, so that no rounding is left in
    its update, and the gradients of all tokens are known beforehand.

    Steps: undo Adam: g = ε r / (1 − |r|) → known gradients A of the tokens → solve Aᵀ X = ∂ℓ/∂W

    Algorithm: The first step of Adam moves a weight by Δ = −η g / (|g| + ε), whence g = ε r / (1 − |r|) for r = −Δ / η.
    The weights that are read are 0, so that Δ is released to all digits, and weight decay does not act on them.

    With W = 0 the tokens are the position embeddings e_n, rows of an orthogonal cosine transform without its mean.
    They pass unchanged to the last block, whose uniform attention reads v·u_n. So g_n = ∂ℓ/∂z_n is known up to the
    label, and the head's update shows the label. As in `patch-gradient`, ∂ℓ/∂W = Aᵀ X with the rows g_n of A. Here
    A = c (1 1ᵀ − I) E for the matrix E of all e_n, which has rank N.

    Exact if: N < D, for one image and one step of Adam, AdamW or SGD, or its gradient.

    Fails if: N ≥ D, the client takes further steps, or a defense changes the release. It needs a class token and
    position embeddings.

    Studies: dishonest_server

    Example: privlab attack --model vit_s --weights random --img-size 64 --attack shrunk-loss --client adamw
    --limit 1

    Source: the first step of Adam, inverted. [@kingma2015adam]
    """

    name: ClassVar[str] = "shrunk-loss"
    paper: ClassVar[str] = "Adam's update (Kingma and Ba 2015), inverted where gradients are as small as ε"
    named_only: ClassVar[bool] = True
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {
            *(Capability.KNOWS_WEIGHTS, Capability.CHOOSES_WEIGHTS, Capability.PLAIN_BLOCK, Capability.CLASS_LABELS),
            *(Capability.LEARNABLE_PE_GRADIENT, Capability.BATCH_SIZE_ONE),
        }
    )
    parameters: ClassVar[tuple[str, ...]] = ("patch_embed.proj.weight", "head.bias")
    updates_of: ClassVar[tuple[str, ...]] = ("adam", "adamw")

    @staticmethod
    def refuses(client: Client) -> str | None:
        """Return why a client of Adam does not release a gradient."""
        return more_than_a_step(client)

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition N < D with its numbers if it does not hold."""
        N, D = seen.model.vit.patch_embed.num_patches, seen.model.vit.embed_dim
        return None if N < D else f"N = {N} >= D = {D}"

    def choose(self, model: VictimModel, images: int, client: Client | None) -> dict[str, Tensor]:
        """Return the weights, from the architecture and Adam's ε.

        Args:
            model: a copy of the honest model.
            images: the images of a release; it does not matter.
            client: the settings of the client, of which ε is read; None where gradients are released.

        Raises:
            PrivlabError: if the architecture has no class token or no position embeddings.
        """
        vit = model.vit
        if not has_class_token(model):
            raise PrivlabError(
                f"Attack '{self.name}' needs a class token that one head reads, and position embeddings. "
                "The model has another shape."
            )
        state = pass_through(model)
        N, D = vit.patch_embed.num_patches, vit.embed_dim
        rows = cosine_rows(D)[1:]
        places = rows[torch.arange(N) % (D - 1)] * D**0.5  # of mean 0 and variance 1, so that LayerNorm keeps them
        state["pos_embed"][0, -N:] = places
        state["cls_token"][..., 0], state["cls_token"][..., 1] = 1, -1
        last_reads_mean(state, len(vit.blocks), places.sum(0) / D, gain=1e-3)
        state["head.weight"][::2, D - 1] = 1
        state["head.weight"][1::2, D - 1] = -1
        if client is not None and client.optimiser != "sgd":
            shrink_head(model, state, self.parameters[:1], _SHARE * client.eps)
        return {name: tensor.to(model.mean) for name, tensor in state.items()}

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the image of each release."""
        model = seen.model
        labels = seen.gradients["head.bias"].argmin(1).tolist()  # the only logit whose gradient is negative
        released = adam_inverted(seen, self.parameters[:1])[self.parameters[0]]
        grey = model.mean.new_full((1, *model.image_shape), 0.5)
        N, found = model.vit.patch_embed.num_patches, []
        for G, label in zip(released.flatten(2), labels, strict=True):
            # A does not depend on the image, since W = 0: any image of this label has the same.
            A = gradient_of(model, grey, label, "pos_embed")[0, -N:].double()
            found.append(torch.linalg.lstsq(A.mT, G).solution)
        return model.to_images(torch.stack(found))
