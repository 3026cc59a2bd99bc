"""`token-separation`: the image without any gradient of position embeddings, from what the first MLP reads.

Known are gradients of the first block, of one image or summed over several; position embeddings need none. Sought are
all patches. The class docstring numbers the steps, which are `TokenSearch.tokens` (1), `slots_of_tokens` and
`sharpen_patches` (2), `embeddings_of_tokens` and `_invert` (3), `by_image` (4), and `place_patches` (5).
`complete_image` fills what is left open.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from privlab.attacks.rows import known_tokens, least_cost
from privlab.attacks.solvers import (
    hides_places,
    masked_slots,
    photograph_gradients,
    replacement,
    ridge_inverse,
    shares_mask,
    token_count,
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
    by_image,
    complete_image,
    embeddings_of_tokens,
    mirrored,
    patch_prior,
    place_patches,
    projection,
    row_space,
    sharpen_patches,
    slots_of_tokens,
    tokens_of,
)
from privlab.base import PrivlabError, warn
from privlab.threat import Capability, Observation, Reconstruction, Stack
from privlab.victims import PreNormBlock, VictimModel, first_block

_PATCH_WEIGHT = "patch_embed.proj.weight"

_RIDGE = 1e-4
"""Is added to the variances of embedded patches, relative to their mean, because the prior is only approximate."""


@dataclass(frozen=True)
class TokenSeparation(TokenSearch):
    """Recover images where no position embedding has a gradient, or one that sums over several images.

    Idea: The gradients of the first block's MLP are sums over all tokens of all images. A search finds the vectors that
    are true tokens, because only those agree with both matrices of the MLP. Patches follow from the tokens by linear
    equations, without any gradient of a position embedding.

    Steps: separate the MLP's tokens → patches from tokens → sort into images and slots

    Algorithm:

    1. Token separation: all inputs u of the first block's MLP, from ∂W_fc1 and ∂W_fc2, as in `mjp-full`. For several
       images in one gradient half of the starts are tokens of photographs; if that search leaves some out, it is made
       again without, and the one that finds more counts.
    2. Patches from tokens (`slots_of_tokens`), if ∂W = Σ_n g_n x_nᵀ is released: x = Yᵀ c with Y its row space. A token
       is W x + b + e plus what attention adds, and attention reads W x + b + e: both are linear in c.
    3. If the patch embedding is frozen too, the same with x = c for D > K (K + 2 N + 6 < 2 D). For D ≤ K the token
       alone gives W x + b + e, except for a constant (`embeddings_of_tokens`; 2 N + 5 < D). K − D + 1 directions of
       each patch are then in no gradient: the image prior of `mjp-subspace` completes them.
    4. For B images in one gradient (B N for N above) attention shows which patches belong together (`grouping`).
    5. Known position embeddings separate the slots. Without them patches have no order, and are put where their
       borders fit. The same holds under MJP for masked slots, if ∂ℓ/∂E_pos shows which these are: for one image, or for
       all that share a mask.

    A gradient of the embedding whose error is stated to be as large as itself, as where a defense encrypts it, is taken
    for one that is not released.

    Patches whose token was not found are the smoothest ones, or, without position embeddings, grey.

    Exact if: 2 N + 1 < D without position embeddings, up to the order of the patches; N + 1 < D and 3 N + 6 < 2 D with
    known ones; 2 N + 5 < D if the patch embedding is frozen too and D ≤ K, except for K − D + 1 directions of each
    patch. This holds for the tokens that are found; for B images, B N replaces N.

    Fails if: tokens are nearly equal: some are missed then, above all with random weights and several images.

    Cost: 1 to 4 s of processor time an image (ViT-Ti, 96 to 160 pixels).

    Studies: tokens, table5

    Source: ours; the sums are the chain rule at the first block.
    """

    name: ClassVar[str] = "token-separation"
    paper: ClassVar[str] = "ours: the chain rule at the first block's MLP"
    order: ClassVar[int] = 100
    short: ClassVar[Mapping[str, Any]] = {"starts": 2, "rounds": 2, "steps": 3}
    knows: ClassVar[frozenset[str]] = frozenset({"encrypted-embedding"})
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.KNOWS_WEIGHTS, Capability.PLAIN_BLOCK})
    parameters: ClassVar[tuple[str, ...]] = (FC1, FC2, QKV, PROJ)
    if_released: ClassVar[tuple[str, ...]] = (_PATCH_WEIGHT, "pos_embed")
    stands_in_for: ClassVar[tuple[str, ...]] = ("mjp-full",)
    places: ClassVar[bool] = True  # as of mjp-full

    def beyond(self, seen: Observation) -> str | None:
        """Return the conditions on B images, N patches, p prefix tokens, K and D that do not hold, with their numbers.

        Tokens can be separated for B (N + p) < D. The unknowns of a token are then the m coordinates of its patch, m =
        B N or, if the patch embedding is frozen, K, and the B (N + p) of what attention mixed. Its equations are D of
        its own and, if position embeddings distinguish slots, D − B (N + p) of what attention read.
        """
        seen = _without_lost(seen)
        model, B = seen.model, seen.images_per_release
        p, n = model.vit.num_prefix_tokens, model.vit.patch_embed.num_patches
        d, k = model.vit.embed_dim, model.vit.patch_embed.proj.weight[0].numel()
        all_, frozen = B * (n + p), _PATCH_WEIGHT not in seen.gradients
        m, named = (k, "K") if frozen else (B * n, "B·N")
        T = f"B·(N + {p})"
        # z takes T + 2 dimensions, with γ₁ and β₁, and a T + 1, with b_proj: one of the D must be left over.
        if frozen and d <= k:
            asked, said = (2 * all_ + 3, d), (f"2·{T} + 3", "D")
        # Equal slots: ∂W_qkv adds only one equation to the D of a token, for m + T + 1 unknowns and the scale.
        elif model.vit.pos_embed is None:
            asked, said = (m + all_, d), (f"{named} + {T}", "D")
        else:
            # Different slots: ∂W_qkv adds D − T − 2 equations to the D, and one must be left over.
            asked, said = (m + 2 * all_ + 4, 2 * d), (f"{named} + 2·{T} + 4", "2·D")
        told = [(asked, said), ((all_, d), (T, "D"))]
        found = [f"{a} = {x} ≥ {b} = {y}" for (x, y), (a, b) in told if x >= y]
        return " and ".join(found) or None

    def __call__(self, seen: Observation) -> Reconstruction:
        """Reconstruct the private images, and return how many tokens were found.

        Raises:
            PrivlabError: if the patch embedding is frozen and D ≤ K, or attention depends on places, for several images
            in one gradient; for one image, if both hold.

        Warns:
            PrivlabWarning: if slots are masked, and the gradient does not tell which.
        """
        seen = _without_lost(seen)
        model, block, B = seen.model, first_block(seen.model), seen.images_per_release
        hidden = self._hidden(seen)
        count = token_count(model)
        if B > 1 and _is_underdetermined(seen):
            raise PrivlabError(
                f"{self.name}: {B} images in one gradient, and a frozen patch embedding that leaves some of a patch "
                "open. Only one image in each can be found then."
            )
        if block.reads_places and (B > 1 or _is_underdetermined(seen)):
            what = f"{B} images in one gradient" if B > 1 else "a frozen patch embedding that leaves some of it open"
            raise PrivlabError(
                f"{self.name}: attention depends on places here ({type(block.attn).__name__}), and its weights are "
                f"needed before these are known. Found {what}: give one image, with the gradient of its embedding."
            )
        # For several images, half of the starts are tokens of the bundled photographs, in their mirror images too.
        several = B > 1 and B * count < model.vit.embed_dim  # of more tokens none is searched for
        several = several and seen.photographs != ()
        usual = tokens_of(block, model.embed(mirrored(seen))).flatten(0, 1) if several else None
        found: list[Separated] = []
        solved: list[Solved] = []
        for i in range(len(seen.gradients[FC1])):
            # Step 1: the tokens of one release, of all its images.
            own = self.tokens(block, seen, [i], B * count, usual=usual)[0]
            if usual is not None and len(own.u) < own.wanted:  # one search or the other gets stuck
                own = max(own, *self.tokens(block, seen, [i], B * count), key=lambda each: len(each.u))
            # Steps 2 to 4: patches from tokens, and for several images which patches belong together.
            slots = _slots(seen, i, hidden[i])
            if B == 1:
                parts = [(own, self._patches(seen, block, i, own.u, slots))]
            else:
                parts = self._images(seen, block, i, own, slots)
            found += [tokens for tokens, _ in parts]
            solved += [patches for _, patches in parts]
        X, known = (torch.stack(part) for part in zip(*solved, strict=True))
        counts = self.counts(found)
        loose = hidden.repeat_interleave(B, 0)
        # If every slot has a position embedding that is known, the patches are in place, and only gaps are filled.
        if not loose.any():
            return Reconstruction(model.to_images(self._complete(seen, X, known)), **counts)
        # Step 5: loose patches move to where their borders fit. Gaps are filled afterwards, when neighbours are known.
        lost = [None] * len(X) if model.vit.pos_embed is None else ~known
        each = zip(model.to_images(X), loose, lost, strict=True)
        order = torch.stack([place_patches(model, *image) for image in each])
        X, known = X.gather(1, order[..., None].expand_as(X)), known.gather(1, order)
        return Reconstruction(model.to_images(self._complete(seen, X, known)), loose=loose, **counts)

    def _complete(self, seen: Observation, X: Float[Tensor, "b n k"], known: Bool[Tensor, "b n"]) -> Tensor:
        """Return X with its unknown parts as smooth as possible."""
        return complete_image(seen.model, X, known, seen.photographs, frozen=_is_underdetermined(seen))

    def _hidden(self, seen: Observation) -> Bool[Tensor, "r n"]:
        """Return the slots that nothing distinguishes: all without position embeddings, under MJP the masked ones.

        Warns:
            PrivlabWarning: if some are masked, and the gradient does not tell which.
        """
        r, bare = len(seen.gradients[FC1]), seen.model.vit.pos_embed is None
        none = torch.full((r, seen.model.vit.patch_embed.num_patches), bare, device=seen.model.mean.device)
        # All slots are equal without position embeddings; with them, none is unless MJP is at work.
        if bare or not hides_places(seen):
            return none
        if "pos_embed" in seen.gradients and shares_mask(seen):
            return masked_slots(seen)
        warn(
            f"{self.name}: MJP is at work, and the gradient does not tell in which slots. Every slot is taken to keep "
            "its position embedding: a low score here is no evidence of privacy.",
        )
        return none

    def _patches(self, seen: Observation, block: PreNormBlock, i: int, u: Float[Tensor, "f d"], slots: Slots) -> Solved:
        """Return the patches of image i, and which of them have a token."""
        model = seen.model
        # Patches without a token are grey: zeros in normalised pixels.
        grey, none = slots.known, torch.zeros_like(slots.alike)
        if not len(u):
            return Solved(grey, none)
        reads = Reads.of(seen, i, block, model.vit.num_prefix_tokens + len(grey))
        # Frozen with D ≤ K: tokens yield embeddings, and the prior yields the likeliest patches and their slots.
        if _is_underdetermined(seen):
            z = embeddings_of_tokens(u, reads, self.sharpen, self.inner)
            ns, x = _invert(model, z, slots.pe, photograph_gradients(model, seen.photographs))
            return Solved(grey.index_put((ns,), x), none.index_fill(0, ns, value=True))
        # Otherwise slots and coordinates c follow linearly, and the Gauss-Newton method sharpens c.
        linear = slots_of_tokens(slots, u, reads)
        return sharpen_patches(model, block, [slots], [u], [linear], [grey], self.sharpen, self.inner)[0]

    def _images(
        self, seen: Observation, block: PreNormBlock, i: int, tokens: Separated, slots: Slots
    ) -> list[tuple[Separated, Solved]]:
        """Return for each image of release i its tokens and its patches."""
        model, B = seen.model, seen.images_per_release
        reads = Reads.of(seen, i, block, B * (model.vit.num_prefix_tokens + len(slots.pe)))
        # Every slot takes up to B tokens; attention then shows which of them belong to the same image.
        linear = slots_of_tokens(slots, tokens.u, reads, B)
        own = by_image(model, block, slots, linear, B)
        each = [Separated(tokens.u[of.token], tokens.residual[of.token], tokens.wanted // B) for of in own]
        grey = [slots.known] * B
        # Each image is sharpened separately, because attention does not cross images.
        patches = sharpen_patches(model, block, [slots] * B, [tokens.u] * B, own, grey, self.sharpen, self.inner)
        return list(zip(each, patches, strict=True))


def _without_lost(seen: Observation) -> Observation:
    """Return the observation without those gradients of the embedding whose stated errors are as large as they are."""
    # A gradient whose mean square is no larger than the variance of its error is taken for noise alone.
    read = {name: seen.gradients[name] for name in TokenSeparation.if_released if name in seen.gradients}
    error = Stack(tuple(seen.defense)).variance(read)
    lost = {name for name, g in read.items() if bool(error[name].mean() >= g.square().mean())}
    return replace(seen, gradients={name: g for name, g in seen.gradients.items() if name not in lost})


def _slots(seen: Observation, i: int, hidden: Bool[Tensor, " n"]) -> Slots:
    """Return what is known of the patches of release i: their span, and their position embeddings or `replacement`."""
    # E_unk or zero, as MJP has it, replaces the position embeddings of hidden slots.
    pe = known_tokens(seen.model)[1]
    if seen.model.vit.pos_embed is not None:
        pe = torch.where(hidden[:, None], replacement(seen).to(pe), pe)
    W, _ = projection(seen.model)
    # ∂W = Σ_n g_n x_nᵀ has the patches for its row space; without it every direction of a patch is open. No part is
    # known beforehand: X = C Y.
    Y = torch.eye(W.shape[1]).to(W)
    if _PATCH_WEIGHT in seen.gradients:
        Y = row_space(seen.gradients[_PATCH_WEIGHT][i].flatten(1), seen.images_per_release * len(pe))
    return Slots(W.new_zeros(len(pe), W.shape[1]), Y, pe, hidden)


def _is_underdetermined(seen: Observation) -> bool:
    """Return whether an embedded patch does not determine the patch, and no gradient says more of it."""
    W, _ = projection(seen.model)
    return _PATCH_WEIGHT not in seen.gradients and len(W) <= W.shape[1]


def _invert(
    model: VictimModel, z: Float[Tensor, "p d"], pe: Float[Tensor, "n d"], Γ: Float[Tensor, "c c"]
) -> tuple[Int[Tensor, " p"], Float[Tensor, "p k"]]:
    """Return the slots of embedded patches that are known up to a constant, and the likeliest patches in them.

    Under the prior of `Smoothness` patches are x ~ N(0, S), so z − b − e_s is N(0, W S Wᵀ) in its own slot.
    """
    W, b = projection(model)
    L = patch_prior(model, Γ)
    # With x = L g, g ~ N(0, I), z − b − e_s less its mean is V g, and normal with the covariance V Vᵀ (D × D). Nothing
    # shows the mean of z, so all means are removed.
    V = (W - W.mean(0)) @ L
    law = V @ V.mT
    law = law + _RIDGE * law.diagonal().mean() * torch.eye(len(law)).to(law)
    # Whitened, the squared distance of z − b and e_s is the cost of slot s; the least sum is the likeliest order.
    whiten = torch.linalg.inv(torch.linalg.cholesky(law)).mT
    rows = torch.cat([z - b, pe])
    z, pe = (rows - rows.mean(1, keepdim=True)).split([len(z), len(pe)])
    ns = least_cost(torch.cdist(z @ whiten, pe @ whiten).square())[1]
    # The likeliest patch is the shortest g with V g = z − b − e_s, times L.
    return ns, (z - pe[ns]) @ (L @ ridge_inverse(V)).mT
