"""`mjp-unrolling`: the image of a client that trains under MJP for several steps, from the tokens of its first step."""

# Known are θ_0, the client's settings, and what several steps of SGD on one image moved, each with its own mask and
# order (MJP, Ren et al. 2023). Sought is the image.
# 1. `first_mask`: the slots whose position embeddings moved least.
# 2. With E_unk in these slots the first step is one without MJP, on an image whose masked patches are shuffled.
#    `_tokens` finds its tokens at θ_0, and `complete` (of `round-unrolling`) the missing ones, and the patches.
# 3. `place_patches` puts the masked patches where their borders fit.

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

from privlab.attacks.gradients.mjp_subspace import MjpSubspace, subspace
from privlab.attacks.solvers import replacement, slot_rows, token_count
from privlab.attacks.tokens import Mlp, Near, Separated, place_patches, slots_by_law, tokens_of
from privlab.attacks.updates.round_unrolling import RoundUnrolling, bundled, no_tokens
from privlab.base import AtLeast0, AtLeast1, Fraction, draw_for
from privlab.patches import patchify, unpatchify
from privlab.release import Update, each_release, undecayed
from privlab.threat import Capability, Client, Observation, Reconstruction, Stack
from privlab.victims import first_block

_PE, _PATCH_WEIGHT = "pos_embed", "patch_embed.proj.weight"

_PRODUCTS, _FINEST = 1.5, 0.9
"""Products that the gradients of the first block are taken to sum over, in tokens of an image, and the most, relative
to the width, in whose spans the tokens are refined once they are found."""

_MOST_OF_WIDTH = 0.8  # most of the first, relative to the width

_SAME = 0.999  # the least cosine of a slot's token with one that was found for it to be the same

_PHOTOGRAPHS = 28  # photographs, mirror images among them, whose tokens in masked slots are starts


@dataclass(frozen=True)
class MjpUnrolling(RoundUnrolling):
    """Recover the image of a client that trains under MJP for several steps, from the tokens of its first step.

    Idea: Each step draws another mask, but the first step moves the weights most, and the server knows the weights it
    was made at. The slots whose position embeddings moved least are its mask, and with the unknown embedding in them it
    is a step without a defense on a shuffled image. The attack separates the tokens of that step, turns them into
    patches, and places the masked ones where their borders fit.

    Steps: mask of the first step → its tokens and patches → masked patches by borders

    Algorithm: The update is Σ_t a_t g(θ_t; x̃_t), where x̃_t has the mask and the order of step t.

    1. A slot that the first step masked got its gradient from later steps alone, which are small: it is among those
       whose rows of Δe have the least norm. How many there are, the defense says under draws of the adversary's own.
    2. At θ_0 the first step feeds z = W x + b + e, with E_unk for e in masked slots. Its tokens u and h lie nearly in
       the row spaces of ∂W_fc1 and ∂W_fc2: later steps add directions, so that 1.5 times as many products are taken as
       there are tokens. The search starts from the image of `mjp-subspace`, and from photographs.
    3. D equations of a token, s t = W x + b + e + a + a constant, with a what attention adds, leave x no freedom for
       K + 2 ≤ D; for K > D it lies in the row spaces of ∂W and ∂W_qkv too. All this is that of `round-unrolling`.
    4. The masked patches, all of which fed E_unk, have no order in the first step: borders show their places. Slots
       without a token keep their patches of the first image, of which the masked ones are placed last.

    Without a mask there is nothing to separate, and the image solves Aᵀ X = G.

    Exact if: the first step dominates the update, every token is found, and the borders show all places.

    Fails if: the model is sure of the image from the start, so that the first step is no larger than the others: then
    the mask is not seen, and the tokens are not in few directions. It needs 1.2 (N + p) < D.

    Cost: 4 to 12 s of processor time where most tokens are found, 30 s where not (32 pixels, D = 128).

    Example: privlab attack --model cifar_vit_mjp27 --attack mjp-unrolling --setting c --client sgd --set client.lr=0.1
    --set client.momentum=0.9 --set client.steps=5

    Studies: updates

    Source: ours, against MJP (Ren et al. 2023), Algorithm 2 and Equation 4, in each of several steps. [@ren2023mjp]
    """

    name: ClassVar[str] = "mjp-unrolling"
    paper: ClassVar[str] = "ours, against MJP (Ren et al. 2023) in each step: token separation at the first step"
    order: ClassVar[int] = 135
    short: ClassVar[Mapping[str, Any]] = {"starts": 2, "rounds": 2, "passes": 0, "sharpen": 1, "inner": 1}
    effort: ClassVar[str] = "full"
    knows: ClassVar[frozenset[str]] = frozenset({"mjp"})
    places: ClassVar[bool] = True  # its loose patches are put in order: there is nothing left to re-assemble
    requires: ClassVar[frozenset[Capability]] = RoundUnrolling.requires | {
        Capability.BATCH_SIZE_ONE,
        Capability.KNOWS_DEFENSE,
    }
    stands_in_for: ClassVar[tuple[str, ...]] = ()
    at_full: ClassVar[Mapping[str, int]] = {"starts": 192, "rounds": 120}

    starts: AtLeast1 = 48
    tolerance: Fraction = 0.01
    passes: AtLeast0 = 1

    @staticmethod
    def refuses(client: Client) -> str | None:
        """Return why an update is not read: it is a gradient, or of several images, or its steps cannot be read."""
        if client.images > 1:
            return f"reads clients of one image, and here each has client.images={client.images}"
        if client.total_steps == 1:
            return "reads several steps, and here the client took one, which is a gradient"
        return RoundUnrolling.refuses(client)

    def beyond(self, seen: Observation) -> str | None:
        """Return 1.2 (N + p) ≥ D with its numbers where it holds: later steps then fill the span of the tokens."""
        vit, count = seen.model.vit, token_count(seen.model)
        if 1.2 * count < vit.embed_dim:
            return None
        return f"1.2·(N + {vit.num_prefix_tokens}) = {1.2 * count:.0f} ≥ D = {vit.embed_dim}"

    def __call__(self, seen: Observation) -> Reconstruction:
        """Reconstruct the image of each client, and count the tokens that were found.

        Raises:
            PrivlabError: if this attack does not read such an update, or attention reads places.
        """
        client = self.client_of(seen, "the update of several steps of SGD on one image")
        usual = bundled(seen, draw_for(self.seed, self.name, "photographs"))
        found = [self._image(seen, client, update, usual) for update in each_release(seen)]
        images, masks, tokens = zip(*found, strict=True)
        images = torch.stack(images).to(seen.model.mean)
        return Reconstruction(images, loose=torch.stack(masks), **self.counts(tokens))

    def _image(
        self, seen: Observation, client: Client, update: Update, usual: Float[Tensor, "i c h w"]
    ) -> tuple[Float[Tensor, "c h w"], Bool[Tensor, " n"], Separated]:
        """Return the image of one client, the mask of its first step, and its tokens."""
        model, moved = seen.model, undecayed(seen.model, update, client)
        A, G = slot_rows(model, moved[_PE]), moved[_PATCH_WEIGHT].flatten(1)
        masked = first_mask(seen, A)
        if not masked.any():
            return self.alone(model, client, moved, update)[-1], masked, no_tokens(G)
        # Step 1 of the client is that of this model, without MJP, on the shuffled image.
        first = copy.deepcopy(model)
        assert first.vit.pos_embed is not None
        with torch.no_grad():
            slot_rows(first, first.vit.pos_embed)[masked] = replacement(seen)
        now = replace(seen, model=first, gradients={name: u[None] for name, u in moved.items()})
        # The other patches, but for their part in the span of the masked ones, and a prior's completion of it.
        span = subspace(A.masked_fill(masked[:, None], 0)[None], G[None])
        near = model.to_images(MjpSubspace().complete(span, seen))
        embedded, block = first.embed(usual).double(), first_block(first)
        # The search starts from the tokens of that image, and then from those of photographs in the masked slots.
        of_near, of_usual = tokens_of(block, first.embed(near).double())[0], tokens_of(block, embedded)
        p, d = len(of_near) - len(masked), of_near.shape[1]
        shown = torch.cat([torch.ones_like(masked[:1]).expand(p), ~masked])
        usual_masked = of_usual[:_PHOTOGRAPHS, ~shown].flatten(0, 1)
        count = max(len(of_near), min(int(_PRODUCTS * len(of_near)), int(_MOST_OF_WIDTH * d)))
        guessed = [Near.alone(of_near[shown])]
        tokens = self.tokens(block, now, [0], count, guessed, usual_masked, most=len(of_near))[0]
        if not len(tokens.u):
            return near[0], masked, tokens._replace(wanted=len(of_near))
        # All masked slots have the same embedding, so that any order of their tokens will do.
        placed = slots_by_law(Mlp.of(block), tokens.u, of_usual)
        finest = int(_FINEST * d)
        images, tokens = self.complete(now, 1, count, placed, embedded, [finest] if finest > count else [])
        # A patch was found if the token of its slot is one of those found. Other slots keep their patches of `near`.
        made = tokens_of(block, first.embed(images[-1][None]).double())[0, p:]
        found = (normalize(made) @ normalize(tokens.u).mT).amax(1) > _SAME
        X, guess = (patchify(each, model.patch)[0] for each in (images[-1][None], near.to(images[-1])))
        X = torch.where(found[:, None], X, guess)
        # Masked patches without a token are placed last.
        order = place_patches(model, unpatchify(X[None], model.image_shape)[0], masked, ~found & masked)
        return unpatchify(X[order][None], model.image_shape)[0], masked, tokens


def first_mask(seen: Observation, A: Float[Tensor, "n d"]) -> Bool[Tensor, " n"]:
    """Return the slots that the first step masked: those whose position embeddings moved least, as many as it masks.

    Args:
        seen: the observation, whose defense is public.
        A: what gradients moved of the position embeddings of the patch slots.
    """
    # The defense says under draws of the adversary's own how many slots it masks; grey images serve as well as others.
    model, images = seen.model, Stack(tuple(seen.defense)).on_images
    grey = torch.full((1, *model.image_shape), 0.5).to(model.mean)
    feed = Stack(tuple(images)).feed(grey, model.patch, [torch.Generator().manual_seed(0)], 1)
    count = 0 if feed.masked_pe is None else int(feed.masked_pe.sum())
    return torch.zeros(len(A), dtype=torch.bool, device=A.device).index_fill(0, A.norm(dim=1).argsort()[:count], True)
