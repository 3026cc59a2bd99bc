"""`mjp-full`: the image that MJP hides: tokens by separation, patches from tokens, places by borders.

Known are all gradients of one image under MJP (Ren et al., Algorithm 2 and Eq. 4): the patches of masked slots are
shuffled, and E_unk replaces their position embeddings. Sought is the image. The class docstring numbers the steps:
`subspace` (1), `TokenSearch.tokens` (2), `slots_of_tokens` (3), `sharpen_patches` (4) and `place_patches` (5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.gradients.mjp_subspace import MjpSubspace, Subspace, subspace
from privlab.attacks.solvers import (
    ONE_IMAGE,
    RTOL,
    Smoothness,
    photograph_gradients,
    replacement,
    slot_gradients,
    token_count,
    too_many,
    zero_rows,
)
from privlab.attacks.tokens import (
    FC1,
    FC2,
    PROJ,
    QKV,
    Reads,
    Separated,
    Slots,
    Solved,
    TokenSearch,
    guesses,
    place_patches,
    sharpen_patches,
    slots_of_tokens,
)
from privlab.base import one_per_core
from privlab.threat import Capability, Observation, Reconstruction
from privlab.victims import PreNormBlock, VictimModel, first_block

_STEPS = 120  # steps of conjugate gradients for the patches whose token was not found

_ON_CPU, _ON_GPU = 1, 32
"""The most images that are searched at once. A CPU is not faster for several, so it searches one on each core."""


@dataclass(frozen=True)
class MjpFull(TokenSearch):
    """Recover the image behind MJP's shuffled patches and unknown position embeddings from one gradient.

    Idea: The first block's MLP sees every token, masked or not, and its gradients are sums over them. The attack
    splits these sums into single tokens, including those that MJP hides. Linear equations turn tokens into patches, and
    the masked patches are placed where their borders fit.

    Steps: start from mjp-subspace → separate the MLP's tokens → patches from tokens, by borders

    Algorithm:

    1. `mjp-subspace`: the span Y of the masked patches, and the other patches without their component in Y.
    2. Token separation: all inputs u of the first block's MLP, from ∂W_fc1 and ∂W_fc2; no shuffle hides them.
    3. A token is z + a, up to scale and mean: z = W x + b + e with x = known + Yᵀ c, and attention adds
       a = W_proj o + b_proj with o in the row space of ∂W_proj. Without the directions of W Yᵀ, W_proj Oᵀ and 1,
       a token is parallel to its slot's W known + b + e + b_proj: that assigns it, and c follows linearly; ∂W_qkv adds
       further equations (`slots_of_tokens`). Masked slots look the same, so their tokens are taken in any order.
    4. The Gauss-Newton method on c, with the block's own attention, removes the rounding errors of the spans.
    5. Masked patches are put where their borders fit. Their order in the shuffled image is not in the gradient.

    Masked patches whose token was not found are placed last, in the remaining slots, and become the smoothest patches
    within Y there. Other patches without a token are completed again by the prior of `mjp-subspace`, given those that
    were found. Without a mask this is `patch-gradient`.

    Exact if: N + |masked| + 1 < D: every patch whose token is found, up to the order of the masked patches.

    Fails if: N ≥ D: no token is found then. Flat patches have nearly equal tokens, and some are missed.

    Cost: 2.7 s of processor time an image (trained ViT-Ti, 160 pixels), 12 to 18 s (random DeiT-S, 224 pixels).

    Studies: mjp, table5

    Example: privlab attack --model cifar_vit_mjp27 --attack mjp-full --setting c

    Args:
        rtol: the ridge of `ridge_inverse`.

    Source: ours; what is masked is that of MJP (Ren et al. 2023), Algorithm 2 and Equation 4. [@ren2023mjp]
    """

    name: ClassVar[str] = "mjp-full"
    paper: ClassVar[str] = "ours, against MJP (Ren et al. 2023), Algorithm 2"
    order: ClassVar[int] = 90
    short: ClassVar[Mapping[str, Any]] = {"starts": 2, "rounds": 2, "steps": 3, "sharpen": 1, "inner": 1}
    knows: ClassVar[frozenset[str]] = frozenset({"mjp"})
    requires: ClassVar[frozenset[Capability]] = ONE_IMAGE | {Capability.KNOWS_WEIGHTS, Capability.PLAIN_BLOCK}
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed", "patch_embed.proj.weight", FC1, FC2, QKV, PROJ)
    places: ClassVar[bool] = True  # its loose patches are put in order: there is nothing left to re-assemble

    rtol: float = RTOL

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition N + |masked| + 1 < D, or N < D without a mask, with its numbers if it does not hold."""
        A = slot_gradients(seen)
        (_, n, d), masked = A.shape, int(zero_rows(A).sum(1).max())
        # The directions of Y and of what attention adds must leave some of the D equations of a token over.
        if masked and n + masked + 1 >= d:
            return f"N + |masked| + 1 = {n + masked + 1} ≥ D = {d}"
        return too_many(seen)

    def __call__(self, seen: Observation) -> Reconstruction:
        """Reconstruct the private images, and return how many tokens were found."""
        model = seen.model
        A = slot_gradients(seen)
        # Step 1: Y and the unmasked patches beyond Y; without a mask these are complete.
        found = subspace(A, seen.gradients["patch_embed.proj.weight"].flatten(2), self.rtol)
        if not found.masked.any():
            return Reconstruction(model.to_images(found.known))
        # The prior's completion is only a guess of all patches: the search for tokens starts from it.
        X = MjpSubspace().complete(found, seen).double()
        block = first_block(model)
        # Steps 2 to 4, for several images at once on a GPU, and one on each core of a CPU.
        together = torch.arange(len(A)).split(_ON_CPU if A.device.type == "cpu" else _ON_GPU)
        parts = one_per_core(
            lambda i, X=X: self._images(model, block, seen, found, X, together[i].tolist()), len(together), A.device
        )
        tokens, solved = zip(*(image for part in parts for image in part), strict=True)
        X, told = (torch.stack(part) for part in zip(*solved, strict=True))
        # The prior chooses the components in Y of unmasked patches without a token again, given all others.
        if (open_ := ~told & ~found.masked).any():  # their neighbours now tell more than mjp-subspace knew
            dtype, inside = model.mean.dtype, ~found.masked
            filled = MjpSubspace().likeliest(X.to(dtype), found.Y.to(dtype), seen, free=open_, inside=inside)
            X = torch.where(open_[..., None], filled.double(), X)
        # Step 5: the masked patches move to where their borders fit; those without a token take the places left.
        lost = ~told & found.masked
        images = model.to_images(X)
        order = torch.stack([place_patches(model, *each) for each in zip(images, found.masked, lost, strict=True)])
        X, lost = X.gather(1, order[..., None].expand_as(X)), lost.gather(1, order)
        if lost.any():
            # Masked patches without a token become the smoothest ones within Y at the places that they got.
            smooth = Smoothness(model.image_shape, photograph_gradients(model, seen.photographs))
            X = smooth.fill(X, found.Y, free=lost, inside=torch.ones_like(lost), steps=_STEPS)
        return Reconstruction(model.to_images(X), loose=found.masked, **self.counts(tokens))

    def _images(
        self,
        model: VictimModel,
        block: PreNormBlock,
        seen: Observation,
        found: Subspace,
        X: Float[Tensor, "b n k"],
        images: Sequence[int],
    ) -> list[tuple[Separated, Solved]]:
        """Return for some images the tokens and the patches; a patch whose token was not found is taken from X."""
        assert model.vit.pos_embed is not None  # its gradient was released
        # In masked slots E_unk replaces the position embedding, so that these slots look equal (`Slots.alike`).
        pe, e_unk = model.vit.pos_embed.detach()[0, -X.shape[1] :].double(), replacement(seen).double()
        count = token_count(model)
        # For each image X = known + C Y, with as many rows of Y as there are masked patches.
        slots = [
            Slots(found.known[i], found.Y[i, : int(masked.sum())], torch.where(masked[:, None], e_unk, pe), masked)
            for i, masked in zip(images, found.masked[images], strict=True)
        ]
        # Row spaces of ∂W_qkv and ∂W_proj: what attention read and added.
        reads = [Reads.of(seen, i, block, count) for i in images]
        # Step 2: the tokens of X are guesses for unmasked slots; all tokens are then searched together.
        near = [guesses(*each) for each in zip(slots, reads, X[images], strict=True)]
        tokens = self.tokens(block, seen, images, count, near)
        u = [of.u for of in tokens]
        # Step 3: each token gets a slot and the coordinates c of its patch, by linear equations.
        linear = [slots_of_tokens(*each) for each in zip(slots, u, reads, strict=True)]
        # Step 4: the Gauss-Newton method on all c of an image, with the block's own attention.
        solved = sharpen_patches(model, block, slots, u, linear, list(X[images]), self.sharpen, self.inner)
        return list(zip(tokens, solved, strict=True))
