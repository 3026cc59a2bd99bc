"""Which tokens of one gradient belong to the same image: attention determines it by linear equations.

Known are the patches of a release of B images, their slots, and the output o of attention for each token; which patch
belongs to which image is sought. Attention mixes the tokens of one image only, so o_i is a weighted mean of the values
of that image: linear equations for the membership of all patches in the image of token i.

1. `_memberships` solves these equations for every token.
2. `_group_patches` turns the shares into B groups, in which no slot occurs twice.
3. Class and register tokens join the group whose patches have the largest share in their image (`by_image`).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from privlab.attacks.rows import known_tokens
from privlab.attacks.tokens.slots import Linear, Slots, projection
from privlab.base import linear_sum_assignment
from privlab.victims import PreNormBlock, VictimModel

_RIDGE = 1e-5
"""Weight, relative to the equations', that draws a share to 1/B; it decides for tokens that receive no attention."""

_ROUNDS = 20  # the most rounds of the vote, which is stable after two or three


@torch.no_grad()
def by_image(model: VictimModel, block: PreNormBlock, slots: Slots, linear: Linear, images: int) -> list[Linear]:
    """Return the tokens of each image among those of a release; equal slots are numbered in any order.

    Args:
        model: the victim, whose patch embedding and prefix tokens are read.
        block: its first block, in float64.
        slots: the known part and the span of the patches, and their position embeddings; the same for all images.
        linear: the tokens of the release and their slots, as `slots_of_tokens` returns them.
        images: number of images B of the release.
    """
    p = model.vit.num_prefix_tokens
    linear = linear.take((linear.slot < p).int().argsort(stable=True))  # patches first
    # The f patches and their slots are known, and thus z = W x + b + e; only their images are not.
    f, prefix, (W, b) = int((linear.slot >= p).sum()), known_tokens(model)[0], projection(model)
    ns, first = linear.slot[:f] - p, linear.slot[f:]
    z = (slots.known[ns] + linear.c[:f] @ slots.Y) @ W.mT + b + slots.pe[ns]
    # share[i, l] is near one if token i, of class and register tokens too, and patch l share an image, else near zero.
    share = _memberships(block, prefix, z, torch.cat([z, prefix[first]]), linear.mixed, images)
    alike = slots.alike[ns]
    # Equal slots count as one slot, −1, that holds several patches of each image.
    group = _group_patches(share[:f], ns.masked_fill(alike, -1), images, alike=int(slots.alike.sum()))
    # Each class or register token joins the group whose patches have the largest mean share in its image.
    members = one_hot(group, images).to(z)
    of_first = _by_slot(share[f:] @ members / members.sum(0).clamp_min(1), first, 0)
    group, places = torch.cat([group, of_first]), slots.alike.nonzero()[:, 0] + p
    parts = [linear.take((group == i).nonzero()[:, 0]) for i in range(images)]
    # The patches in equal slots have no order: each image numbers these slots in turn.
    for part in parts:
        loose = (part.slot >= p) & slots.alike[(part.slot - p).clamp_min(0)]
        part.slot[loose] = places[: int(loose.sum())]
    return parts


@torch.no_grad()
def _memberships(
    block: PreNormBlock,
    prefix: Float[Tensor, "p d"],
    z: Float[Tensor, "f d"],
    asking: Float[Tensor, "a d"],
    mixed: Float[Tensor, "a d"],
    images: int,
) -> Float[Tensor, "a f"]:
    """Return the share that each patch has in the image of each asking token: one if it belongs to it, else zero.

    Attention gives token i, in each head, o_i = Σ_l w_il v_l / Σ_l w_il over its own image, w_il = exp(q_i · k_l). So
    Σ_l m_l w_il (v_l − o_i) = 0 over all images, where m_l marks the tokens of the image of i: D equations, linear in
    m, in which class and register tokens, the same in all images, have m = 1.
    """
    attn, p, f = block.attn, len(prefix), len(z)
    # The asking tokens have queries; the prefix and all patches have keys and values, h × (p + f) × d/h each.
    q, k, v = heads(block, torch.cat([prefix, z, asking]))
    k, v = k[:, : p + f], v[:, : p + f]
    # softmax divides each row by its sum over all images, a factor of each equation that changes no solution.
    weight = (q[:, p + f :] @ k.mT * attn.scale).softmax(-1)
    o = mixed.view(len(asking), attn.num_heads, attn.head_dim).transpose(0, 1)
    shares, eye = z.new_zeros(len(asking), f), torch.eye(f).to(z)
    for i in range(len(asking)):
        # E (D × (p + f)) holds the columns w_il (v_l − o_i), the heads one below another: E m = 0.
        E = (weight[:, i, :, None] * (v - o[:, i, None])).mT.flatten(0, 1)
        λ = _RIDGE * E.norm() / f**0.5
        # Tokens of the prefix have m = 1 and move to the right side. The ridge draws all others to 1/B.
        left = torch.cat([E[:, p:], λ * eye])
        right = torch.cat([-E[:, :p].sum(1), λ.expand(f) / images])
        # A patch belongs to its own image: its share is one, and moves to the right side too.
        own = torch.arange(f, device=z.device) == i
        right = right - left[:, own].sum(1)
        shares[i, ~own] = torch.linalg.lstsq(left[:, ~own], right[:, None]).solution[:, 0]
        shares[i, own] = 1
    return shares


def _group_patches(
    share: Float[Tensor, "f f"], slot: Int[Tensor, " f"], images: int, *, alike: int = 0
) -> Int[Tensor, " f"]:
    """Return the image, 0 to B − 1, of each patch, such that no image has two patches in one slot.

    The vote of two patches is the sum of their shares in each other's image, less 1/B each. The patch with the largest
    votes represents the first image, and for each further image the patch with the least vote for the earlier ones. All
    patches are assigned slot by slot, and then again by the votes of each group, until that changes nothing.
    """
    # The vote of two patches is what each says of the other, less chance; a patch does not vote on itself.
    vote = share.clamp(0, 1) - 1 / images
    vote = vote + vote.mT - 2 * vote.diagonal().diag()
    # Each further representative is the patch whose largest vote for an earlier one is the least.
    stand = [int(vote.abs().sum(1).argmax())] if len(vote) else []
    while 0 < len(stand) < min(images, len(vote)):
        fits = vote[:, stand].amax(1)
        fits[stand] = torch.inf
        stand.append(int(fits.argmin()))
    # Patches first join the best representative, then the group with the largest sum of votes, until that is stable.
    group = _by_slot(vote[:, stand], slot, alike)
    for _ in range(_ROUNDS):
        new = _by_slot(vote @ one_hot(group, images).to(vote), slot, alike)
        if torch.equal(new, group):
            break
        group = new
    return group


def heads(block: PreNormBlock, z: Float[Tensor, "t d"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of tokens, head by head: each is h × t × d/h."""
    # timm's qkv layer returns queries, keys and values one after the other, and each of them head by head.
    attn = block.attn
    q, k, v = attn.qkv(block.norm1(z)).view(len(z), 3, attn.num_heads, attn.head_dim).permute(1, 2, 0, 3)
    return attn.q_norm(q), attn.k_norm(k), v


def _by_slot(score: Float[Tensor, "f b"], slot: Int[Tensor, " f"], alike: int) -> Int[Tensor, " f"]:
    """Return the image of each patch: within each slot, the assignment of greatest score."""
    group = torch.zeros_like(slot)
    for place in slot.unique():
        # An image takes one patch of a slot, and `alike` of the equal slots: its column is repeated for each of them.
        own, room = (slot == place).nonzero()[:, 0], alike if place < 0 else 1
        rows, columns = linear_sum_assignment(-score[own].repeat_interleave(room, 1).cpu())
        group[own[rows]] = torch.as_tensor(columns // room, device=slot.device)
    return group
