"""`mjp-full`: the image that MJP hides: tokens by separation, patches from tokens, places by borders."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.gradients.mjp_subspace import MjpSubspace, Subspace, subspace
from privlab.attacks.solvers import (
    RTOL,
    Smoothness,
    photograph_gradients,
    replacement,
    slot_gradients,
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
    patches_of_tokens,
    place_patches,
)
from privlab.base import one_per_core
from privlab.threat import Capability, Observation, Reconstruction
from privlab.victims import PreNormBlock, VictimModel, first_block

__all__ = ["MjpFull"]

_STEPS = 120
"""Steps of conjugate gradients for the patches whose token was not found."""


@dataclass(frozen=True)
class MjpFull(TokenSearch):
    """Recover the image behind MJP's shuffled patches and unknown position embeddings from one gradient.

    1. `mjp-subspace`: the span Y of the masked patches, and the other patches without their component in Y.
    2. Token separation: all inputs u of the first block's MLP, from ∂W_fc1 and ∂W_fc2; no shuffle hides them.
    3. A token is z + a, up to scale and mean: z = W x + b + e with x = known + Yᵀ c, and attention adds
       a = W_proj o + b_proj with o in the row space of ∂W_proj. Without the directions of W Yᵀ, W_proj Oᵀ and 1,
       a token is parallel to its slot's W known + b + e + b_proj: that assigns it, and c follows linearly; ∂W_qkv adds
       further equations (`patches_of_tokens`). Masked slots are alike, so their tokens are taken in any order.
    4. The Gauss-Newton method on c, with the block's own attention, removes the rounding errors of the spans.
    5. Masked patches are put where their borders fit. Their order in the shuffled image is not in the gradient.

    Masked patches whose token was not found are placed last, in the remaining slots, and become the smoothest patches
    within Y there. Other patches without a token are completed again by the prior of `mjp-subspace`, given those that
    were found. Without a mask this is `patch-gradient`.

    Args:
        starts: random starts of the search for tokens in each round.
        rounds: the most rounds of the search.
        steps: steps of the Levenberg-Marquardt method in each search.
        tolerance: the relative residual below which a solution may be a token.
        sure: the relative residual below which a solution certainly is one.
        sharpen: the most steps of the Gauss-Newton method.
        inner: steps of conjugate gradients in each of them.
        seed: seed of the starts.
        rtol: the ridge of `ridge_inverse`.

    Source: ours; what is masked is that of MJP (Ren et al. 2023), Algorithm 2 and Equation 4.
    """

    name: ClassVar[str] = "mjp-full"
    paper: ClassVar[str] = "ours, against MJP (Ren et al. 2023), Algorithm 2"
    knows: ClassVar[frozenset[str]] = frozenset({"mjp"})
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.LEARNABLE_PE_GRADIENT, Capability.BATCH_SIZE_ONE, Capability.KNOWS_WEIGHTS, Capability.PLAIN_BLOCK}
    )
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed", "patch_embed.proj.weight", FC1, FC2, QKV, PROJ)
    places: ClassVar[bool] = True  # its loose patches are put in order: there is nothing left to re-assemble

    rtol: float = RTOL

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition N + |masked| + 1 < D, or N < D without a mask, with its numbers if it does not hold."""
        A = slot_gradients(seen)
        (_, n, d), masked = A.shape, int(zero_rows(A).sum(1).max())
        if masked and n + masked + 1 >= d:
            return f"N + |masked| + 1 = {n + masked + 1} ≥ D = {d}"
        return too_many(seen)

    def __call__(self, seen: Observation) -> Reconstruction:
        """Reconstruct the private images, and return how many tokens were found."""
        model = seen.model
        A = slot_gradients(seen)
        found = subspace(A, seen.gradients["patch_embed.proj.weight"].flatten(2), self.rtol)
        if not found.masked.any():
            return Reconstruction(model.to_images(found.known))
        X = MjpSubspace().complete(found, seen).double()
        block = first_block(model)
        parts = one_per_core(lambda i, X=X: self._image(model, block, seen, found, X[i], i), len(A), A.device)
        tokens, solved = zip(*parts, strict=True)
        X, told = (torch.stack(part) for part in zip(*solved, strict=True))
        if (open_ := ~told & ~found.masked).any():  # their neighbours now tell more than mjp-subspace knew
            dtype, inside = model.mean.dtype, ~found.masked
            filled = MjpSubspace().likeliest(X.to(dtype), found.Y.to(dtype), seen, free=open_, inside=inside)
            X = torch.where(open_[..., None], filled.double(), X)
        lost = ~told & found.masked
        images = model.to_images(X)
        order = torch.stack([place_patches(model, *each) for each in zip(images, found.masked, lost, strict=True)])
        X, lost = X.gather(1, order[..., None].expand_as(X)), lost.gather(1, order)
        if lost.any():
            smooth = Smoothness(model.image_shape, photograph_gradients(model, seen.photographs))
            X = smooth.fill(X, found.Y, free=lost, inside=torch.ones_like(lost), steps=_STEPS)
        return Reconstruction(model.to_images(X), loose=found.masked, **self.counts(tokens))

    def _image(
        self,
        model: VictimModel,
        block: PreNormBlock,
        seen: Observation,
        found: Subspace,
        X: Float[Tensor, "n k"],
        i: int,
    ) -> tuple[Separated, Solved]:
        """Return the tokens of image i, and its patches; a patch whose token was not found is taken from X."""
        masked, Y = found.masked[i], found.Y[i, : int(found.masked[i].sum())]
        assert model.vit.pos_embed is not None  # its gradient was released
        pe = model.vit.pos_embed.detach()[0, -len(X) :].double()
        pe = torch.where(masked[:, None], replacement(seen).double(), pe)
        slots = Slots(found.known[i], Y, pe, masked)
        count = model.vit.num_prefix_tokens + len(X)
        reads = Reads.of(seen, i, block, count)
        tokens = self.tokens(block, seen, i, count, guesses(model, block, slots, reads, X))
        if not len(tokens.u):
            return tokens, Solved(X, torch.zeros_like(masked))
        return tokens, patches_of_tokens(model, block, slots, tokens.u, reads, X, self.sharpen, self.inner)
