"""`mjp-full`: the image that MJP hides, exactly: tokens by separation, patches from tokens, places by borders."""

import copy
import warnings
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn

from privlab.attacks.mjp_subspace import MjpSubspace, Subspace, subspace
from privlab.attacks.prior import conjugate_gradients
from privlab.attacks.solve import RTOL, slot_gradients
from privlab.attacks.tokens import Mlp, Separated, normalised, separate
from privlab.draws import draw_for
from privlab.errors import PrivlabError
from privlab.jigsaw import solve_jigsaw
from privlab.model import VictimModel
from privlab.patches import patchify, permute
from privlab.threat import Capability, Observation, PrivlabWarning, Stolen

__all__ = ["MjpFull", "Slots", "patches_of_tokens"]

_FC1, _FC2, _PROJ = ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "blocks.0.attn.proj.weight")

_ALIKE = 0.9
"""Least cosine, beyond what the attention may have added, of a token and the slot that it is put into."""

_STILL = 0.1
"""Share by which a step of Gauss and Newton's must lower the residual to be followed by another one."""


class Slots(NamedTuple):
    """What is known of one image's patches: X = known + C Y, with z = W x + b + pe, and which slots E_unk hides."""

    known: Float[Tensor, "n k"]
    Y: Float[Tensor, "m k"]
    pe: Float[Tensor, "n d"]
    masked: Bool[Tensor, " n"]


@dataclass(frozen=True)
class MjpFull:
    """Recover the image behind MJP's shuffled patches and unknown position embeddings from one gradient.

    1. `mjp-subspace`: the span Y of the masked patches, and the others but for their component in Y.
    2. Token separation: all inputs u of the first block's MLP, from ∂W_fc1 and ∂W_fc2; no shuffle hides them.
    3. A token is z + a, up to scale and mean: z = W x + b + e with x = known + Yᵀ c, and attention adds
       a = W_proj o + b_proj with o in the row space of ∂W_proj. Without the directions of W Yᵀ, W_proj Oᵀ and 1,
       a token is parallel to its slot's W known + b + e + b_proj: that assigns it, and c follows linearly. Masked slots
       are alike, so their tokens are taken in any order.
    4. Gauss and Newton's method on c, with the block's own attention, removes what the spans had of rounding.
    5. Masked patches are put where their borders fit. Their order in the shuffled image is not in the gradient.

    Slots whose token was not found keep what `mjp-subspace` makes of them. Without a mask this is `patch-gradient`.

    Args:
        starts: of the search for tokens, in each round.
        rounds: of the search, at most.
        steps: of Levenberg and Marquardt's method in each search.
        tolerance: the relative residual below which a solution may be a token.
        sure: the one below which it is beyond doubt.
        sharpen: steps of Gauss and Newton's method, at most.
        inner: steps of conjugate gradients in each of them.
        seed: of the starts.
        rtol: the ridge of `ridge_inverse`.

    Source: ours; what is masked is that of MJP (Ren et al. 2023), Algorithm 2 and Equation 4.
    """

    name: ClassVar[str] = "mjp-full"
    paper: ClassVar[str] = "ours, against MJP (Ren et al. 2023), Algorithm 2"
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.LEARNABLE_PE_GRADIENT, Capability.BATCH_SIZE_ONE, Capability.KNOWS_WEIGHTS, Capability.PLAIN_BLOCK}
    )
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed", "patch_embed.proj.weight", _FC1, _FC2, _PROJ)

    starts: int = 24
    rounds: int = 60
    steps: int = 40
    tolerance: float = 0.02
    sure: float = 0.001
    sharpen: int = 6
    inner: int = 60
    seed: int = 0
    rtol: float = RTOL

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            PrivlabError: if a number is out of range.
        """
        counts = (self.starts, self.rounds, self.steps, self.inner)
        if min(counts) < 1 or self.sharpen < 0 or not 0 < self.sure <= self.tolerance < 1:
            raise PrivlabError(
                "mjp-full takes starts, rounds, steps and inner ≥ 1, sharpen ≥ 0 and 0 < sure ≤ tolerance < 1. "
                f"Found {', '.join(map(str, counts))}, {self.sharpen}, {self.sure:g} and {self.tolerance:g}."
            )

    def __call__(self, seen: Observation) -> Stolen:
        """Reconstruct the private images, and say how many tokens were found."""
        model = seen.model
        A = slot_gradients(seen)
        found = subspace(A, seen.gradients["patch_embed.proj.weight"].flatten(2), self.rtol)
        if not found.masked.any():
            return Stolen(model.to_images(found.known))
        X = MjpSubspace().completed(found, model).double()
        block = _first_block(model)
        tokens = [self._tokens(block, seen, i, model.vit.num_prefix_tokens + A.shape[1]) for i in range(len(A))]
        X = torch.stack([self._patches(model, block, seen, found, X[i], i, tokens[i]) for i in range(len(A))])
        images = model.to_images(X)
        order = torch.stack([_placed(model, images[i], found.masked[i]) for i in range(len(A))])
        counts = torch.tensor([len(each.u) for each in tokens], device=A.device)
        sure = torch.tensor([int((each.residual < self.sure).sum()) for each in tokens], device=A.device)
        return Stolen(permute(images, order, model.patch), loose=found.masked, tokens=counts, tokens_sure=sure)

    def _tokens(self, block: Block, seen: Observation, i: int, count: int) -> Separated:
        """Find the tokens of image i; as many as the model has, if they are fewer than its width."""
        G1, G2 = (seen.gradients[name][i] for name in (_FC1, _FC2))
        if count >= G1.shape[1]:
            warnings.warn(
                f"{self.name}: {count} tokens, but gradients of width {G1.shape[1]} tell at most {G1.shape[1] - 1} "
                "apart. Nothing is gained over mjp-subspace: a low score here is no evidence of privacy.",
                PrivlabWarning,
                stacklevel=4,
            )
            return Separated(G1.new_zeros(0, G1.shape[1]).double(), G1.new_zeros(0).double(), count)
        return separate(
            Mlp.of(block),
            G1,
            G2,
            count,
            draw_for(self.seed, self.name, "starts"),
            starts=self.starts,
            rounds=self.rounds,
            steps=self.steps,
            tolerance=self.tolerance,
        )

    def _patches(
        self,
        model: VictimModel,
        block: Block,
        seen: Observation,
        found: Subspace,
        X: Float[Tensor, "n k"],
        i: int,
        tokens: Separated,
    ) -> Float[Tensor, "n k"]:
        """Return the patches of image i, those that no token was found for as they are in X."""
        masked, Y = found.masked[i], found.Y[i, : int(found.masked[i].sum())]
        known = found.known[i].masked_fill(masked[:, None], 0)
        assert model.vit.pos_embed is not None  # its gradient was released
        pe = model.vit.pos_embed.detach()[0, -len(X) :].double()
        pe = torch.where(masked[:, None], _replacement(seen).double(), pe)
        slots = Slots(known - (known @ Y.mT) @ Y, Y, pe, masked)
        if not len(tokens.u):
            return X
        return patches_of_tokens(
            model, block, slots, tokens.u, seen.gradients[_PROJ][i].double(), X, self.sharpen, self.inner
        )


@torch.no_grad()
def patches_of_tokens(
    model: VictimModel,
    block: Block,
    slots: Slots,
    u: Float[Tensor, "f d"],
    G_proj: Float[Tensor, "d d"],
    X: Float[Tensor, "n k"],
    sharpen: int,
    inner: int,
) -> Float[Tensor, "n k"]:
    """Return the patches whose tokens are among u, and those of X elsewhere; steps 3 and 4 of `MjpFull`.

    Args:
        model: the victim.
        block: its first one, in float64.
        slots: what is known of the patches.
        u: tokens, in no order; the class token among them.
        G_proj: ∂ℓ/∂W_proj, whose row space holds what attention's projection read.
        X: patches to start from.
        sharpen: steps of Gauss and Newton's method.
        inner: of conjugate gradients.
    """
    proj = model.vit.patch_embed.proj
    W = proj.weight.detach().flatten(1).double()
    b = 0 if proj.bias is None else proj.bias.detach().double()
    t = normalised(Mlp.of(block), u)
    t = nn.functional.normalize(t - t.mean(1, keepdim=True), dim=1)
    W_p, b_p = _projection(block)
    prefix = _prefix(model).double()
    read = torch.linalg.svd(G_proj, full_matrices=False).Vh[: len(prefix) + len(X)]
    free = torch.cat([W_p @ read.mT, torch.ones_like(W_p[:, :1])], 1)
    base = slots.known @ W.mT + b + slots.pe + b_p
    own, at = _assigned(t, prefix + b_p, torch.linalg.qr(free).Q)
    left = torch.ones(len(t), dtype=torch.bool, device=t.device)
    left[own] = False
    basis = torch.cat([W @ slots.Y.mT, free], 1)
    if basis.shape[1] >= len(W) - 1:  # nothing is left to tell slots apart by
        return X
    Q, R = torch.linalg.qr(basis)
    js, ns = _slots_of(t, left, base, Q, slots.masked)
    c = _coordinates(t[js], base[ns], Q, R)[:, : len(slots.Y)]
    C = (X - slots.known) @ slots.Y.mT
    places = torch.cat([at, len(prefix) + ns])
    solved = C.index_put((ns,), c)
    C = _sharpened(prefix, block, slots, W, b, u[torch.cat([own, js])], places, (solved, C), sharpen, inner)
    kept = torch.ones(len(X), dtype=torch.bool, device=X.device)
    kept[ns] = False
    return torch.where(kept[:, None], X, slots.known + C @ slots.Y)


def _projection(block: Block) -> tuple[Float[Tensor, "d d"], Float[Tensor, " d"]]:
    """Return the matrix and the bias of attention's projection, with the block's layer scale in them."""
    assert isinstance(block.attn, Attention)
    assert isinstance(block.attn.proj, nn.Linear)
    W, b = block.attn.proj.weight.detach(), block.attn.proj.bias
    scale = torch.as_tensor(block.ls1(torch.ones_like(W[:, 0])))
    return scale[:, None] * W, scale * (torch.zeros_like(W[:, 0]) if b is None else b.detach())


def _off(v: Float[Tensor, "f d"], Q: Float[Tensor, "d r"]) -> Float[Tensor, "f d"]:
    """Return v without its component in the orthonormal columns of Q."""
    return v - (v @ Q) @ Q.mT


def _cosine(t: Float[Tensor, "f d"], base: Float[Tensor, "s d"], Q: Float[Tensor, "d r"]) -> Float[Tensor, "f s"]:
    """Return the cosine of each token and each slot's known part, beyond Q."""
    t, base = (nn.functional.normalize(_off(v, Q), dim=1) for v in (t, base))
    return t @ base.mT


def _assigned(
    t: Float[Tensor, "f d"], base: Float[Tensor, "s d"], Q: Float[Tensor, "d r"]
) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return which tokens belong to which slots: the assignment of greatest cosine beyond Q."""
    cosine = _cosine(t, base, Q).nan_to_num(-1)
    rows, columns = (torch.as_tensor(index, device=t.device) for index in linear_sum_assignment(-cosine.cpu()))
    near = cosine[rows, columns] > _ALIKE
    return rows[near], columns[near]


def _slots_of(
    t: Float[Tensor, "f d"],
    left: Bool[Tensor, " f"],
    base: Float[Tensor, "n d"],
    Q: Float[Tensor, "d r"],
    masked: Bool[Tensor, " n"],
) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return tokens and their slots: unmasked ones by position embedding, masked ones in any order."""
    tokens, (open_, hidden) = left.nonzero()[:, 0], ((~masked).nonzero()[:, 0], masked.nonzero()[:, 0])
    js, ns = _assigned(t[tokens], base[open_], Q)
    rest = torch.ones(len(tokens), dtype=torch.bool, device=t.device)
    rest[js] = False
    rest = rest.nonzero()[:, 0]
    cosine = _cosine(t[tokens[rest]], base[hidden[:1]], Q)[:, 0]  # the same for all masked slots
    rest = rest[cosine.argsort(descending=True)][: len(hidden)]
    return torch.cat([tokens[js], tokens[rest]]), torch.cat([open_[ns], hidden[: len(rest)]])


def _coordinates(
    t: Float[Tensor, "p d"], base: Float[Tensor, "p d"], Q: Float[Tensor, "d r"], R: Float[Tensor, "r r"]
) -> Float[Tensor, "p r"]:
    """Return the coordinates x for which base + Q R x = s t for some scale s."""
    t_off, base_off = _off(t, Q), _off(base, Q)
    s = (t_off * base_off).sum(1, keepdim=True) / t_off.square().sum(1, keepdim=True)
    return torch.linalg.solve_triangular(R, Q.mT @ (s * t - base).mT, upper=True).mT


def _sharpened(
    prefix: Float[Tensor, "p d"],
    block: Block,
    slots: Slots,
    W: Float[Tensor, "d k"],
    b: Tensor | int,
    target: Float[Tensor, "f d"],
    places: Int[Tensor, " f"],
    guesses: tuple[Float[Tensor, "n m"], ...],
    steps: int,
    inner: int,
) -> Float[Tensor, "n m"]:
    """Minimise |u(C)[places] − target|² by Gauss and Newton's method from the best guess; W Yᵀ is made orthonormal."""
    R = torch.linalg.qr(W @ slots.Y.mT).R
    scale = target.norm(dim=1).mean()

    def residual(B: Tensor) -> Tensor:
        x = slots.known + torch.linalg.solve_triangular(R, B.mT, upper=True).mT @ slots.Y
        z = torch.cat([prefix, x @ W.mT + b + slots.pe])[None]
        return (block.norm2(z + block.ls1(block.attn(block.norm1(z))))[0, places] - target) / scale

    B = min((C @ R.mT for C in guesses), key=lambda B: float(residual(B).square().sum()))
    for _ in range(steps):
        with torch.enable_grad():
            B.requires_grad_()
            r = residual(B)
            weight = torch.zeros_like(r, requires_grad=True)
            (pulled,) = torch.autograd.grad(r, B, weight, create_graph=True)  # Jᵀ weight: its derivative by weight is J

        def product(p: Tensor, r: Tensor = r, pulled: Tensor = pulled, by: Tensor = weight, B: Tensor = B) -> Tensor:
            (pushed,) = torch.autograd.grad(pulled, by, p[0], retain_graph=True)
            return torch.autograd.grad(r, B, pushed, retain_graph=True)[0][None]

        (slope,) = torch.autograd.grad(r, B, r.detach(), retain_graph=True)
        new = B.detach() + conjugate_gradients(product, -slope[None], inner)[0]
        if not residual(new).square().sum() < (1 - _STILL) * r.square().sum():
            break
        B = new
    B = B.detach()
    return torch.linalg.solve_triangular(R, B.mT, upper=True).mT


def _placed(model: VictimModel, image: Float[Tensor, "c h w"], masked: Bool[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return the order that puts the masked patches where their borders fit."""
    patches = patchify(image[None], model.patch)[0].unflatten(1, (image.shape[0], model.patch, model.patch))
    return solve_jigsaw(patches, model.grid, ~masked).to(image.device)


def _prefix(model: VictimModel) -> Float[Tensor, "p d"]:
    """Return the embedded class and register tokens, which are the same for every image."""
    blank = model.mean.new_zeros(1, *model.image_shape)
    return model.embed(blank)[0, : -model.grid[0] * model.grid[1]].detach()


def _replacement(seen: Observation) -> Float[Tensor, "1 d"]:
    """Return what stands in for the position embedding of masked slots: E_unk, or nothing, as the defense says."""
    unknown = seen.model.unk_embed
    if unknown is None or any(getattr(part, "masked_pe", None) == "none" for part in seen.defense):
        return seen.model.mean.new_zeros(1, seen.model.vit.embed_dim)
    return unknown.detach()[0]


def _first_block(model: VictimModel) -> Block:
    """Return a copy of the first block in float64, whose attention has derivatives of both kinds."""
    block = copy.deepcopy(model.vit.blocks[0]).double().requires_grad_(False)
    assert isinstance(block, Block)
    assert isinstance(block.attn, Attention)
    block.attn.fused_attn = False  # pyright: ignore[reportAttributeAccessIssue]  # timm declares it final
    return block
