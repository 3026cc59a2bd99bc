"""timm's VisionTransformer as a victim: pixels in [0, 1] at its input, the position embedding chosen per slot."""

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from privlab.base import PrivlabError, full_precision, memory_ended, one_line
from privlab.images.decode import MAX_CHANNELS
from privlab.patches import unpatchify
from privlab.victims.anatomy import (
    PREFIX_TOKENS,
    Vit,
    causes,
    check_plain,
    is_changed,
    layers_run_once,
    plain_interface,
    unwrapped,
)

_SAME = 1e-4
"""Largest deviation of the victim's logits from the model's own, relative to their size: rounding in float32."""

_TELLING = 1e-3
"""Least difference of the logits of two images, relative to their size, by which they say what is between."""


class AprilBlock(nn.Module):
    """A block without pre-norm and without skips: attention acts on the embeddings themselves.

    x ↦ MLP(LN₂(Attention(x))), as the published numbers of APRIL and MJP were made (breaching's model).
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attn, self.ls1, self.drop_path1 = block.attn, block.ls1, block.drop_path1
        self.norm2, self.mlp, self.ls2, self.drop_path2 = block.norm2, block.mlp, block.ls2, block.drop_path2

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Apply attention, then the MLP."""
        x = self.drop_path1(self.ls1(self.attn(x)))
        return self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class VictimModel(nn.Module):
    """A ViT of timm that takes pixels in [0, 1] and may replace the PE of some slots by E_unk.

    The embedding is z₀ = [cls; x¹E; …; xᴺE] + E_pos (MJP, Eq. 3). At the slots that `masked_pe` marks, the rows
    of E_pos are replaced by the shared `unk_embed` (E_unk; Eq. 4, 5), or by zero. Parameters that `vit` does not train
    (`frozen`) have no gradient that a client would release.

    `vit` is timm's `VisionTransformer`, or a copy of another ViT of timm with all that one has (`plain_interface`).
    `silent` names its linear and normalising layers whose gradient is not a sum over the tokens of an image.

    Raises:
        PrivlabError: if the patches are not embedded linearly, or the parts of the model, one after the other, give
            other logits than the model itself.
    """

    mean: Tensor
    std: Tensor
    prompts: int = 0
    """Prompt tokens that a server added behind the class token (`prompted`)."""
    fusion: nn.Module | None
    """What makes one prediction of all images of a batch (`fusing`); None where each image has its own."""

    def __init__(
        self,
        vit: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        unk_embed: Float[Tensor, "1 1 d"] | None = None,
    ) -> None:
        super().__init__()
        self.fusion = None
        vit = unwrapped(vit)
        check_plain(vit)
        _check(vit)
        self.vit = vit = plain_interface(vit)
        self.frozen = frozenset(name for name, parameter in vit.named_parameters() if not parameter.requires_grad)
        self.unk_embed = None if unk_embed is None else nn.Parameter(unk_embed)
        like = vit.patch_embed.proj.weight.detach()
        self.register_buffer("mean", like.new_tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", like.new_tensor(std).view(-1, 1, 1), persistent=False)
        self.silent = self._compare()

    @torch.no_grad()
    def _compare(self) -> frozenset[str]:
        """Check that the parts of the model give its own logits, and return the layers that `layers_run_once` misses.

        A model's `forward`, or a part of it, may have been replaced, and hooks may change what goes through it. Two
        images are classified both ways, first with the model's own weights. Those may leave a part without any effect,
        as a head of zeros does, or the layer scales of 10⁻⁶ with which trainings begin; then, and for other classes
        than `VisionTransformer` and `Block`, weights are drawn for a second comparison, on a copy.
        """
        if self.mean.is_meta:  # only shapes are asked for
            return frozenset()
        draw = torch.Generator().manual_seed(0)
        images = torch.rand(2, *self.image_shape, generator=draw).to(self.mean)
        twin = self if not any(module.training for module in self.vit.modules()) else self._copy().eval()
        parts, whole, _ = twin._both_ways(images)
        if whole.isfinite().all():  # weights that are no numbers say nothing of the parts
            self._check_same(parts, whole)
        telling = bool((whole[0] - whole[1]).abs().max() > _TELLING * whole.abs().max())
        blocks = all(type(block) is Block for block in self.vit.blocks)
        known = blocks and type(self.vit) is VisionTransformer and self.vit.attn_pool is None
        if telling and known:
            return frozenset()
        twin = self._copy().eval()
        for tensor in twin.vit.parameters():
            size = math.sqrt(tensor[0].numel()) if tensor.ndim > 1 else 1.0
            tensor.copy_(torch.randn(tensor.shape, generator=draw) / size)
        parts, drawn, heard = twin._both_ways(images)
        if not (telling and torch.equal(drawn, whole)):  # else `forward` is a function that runs the caller's model
            self._check_same(parts, drawn)
        layers = (path for path, layer in self.vit.named_modules() if isinstance(layer, nn.Linear | nn.LayerNorm))
        return frozenset() if known else frozenset(layers) - heard

    def _copy(self) -> "VictimModel":
        try:
            return copy.deepcopy(self)
        except (RuntimeError, TypeError) as error:
            raise PrivlabError(f"{self._kind()} cannot be copied: {one_line(error)}.") from error

    def _both_ways(self, images: Float[Tensor, "b c h w"]) -> tuple[Tensor, Tensor, set[str]]:
        """Return the logits by the parts of the model and by itself, and the layers of `layers_run_once`."""
        devices = [self.mean.device] if self.mean.is_cuda else []
        try:
            with full_precision(), torch.random.fork_rng(devices=devices):
                with layers_run_once(self.vit, len(images)) as heard:
                    parts = self(images)
                whole = self.vit(self.with_rest(self.normalise(images)))
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            if memory_ended(error) is not None:
                raise
            reason = f"does not run as embedding, blocks, norm and head: {one_line(error)}"
            raise PrivlabError(f"{self._kind()} {reason}.") from error
        if not isinstance(whole, Tensor) or parts.shape != whole.shape:
            found = f"{tuple(whole.shape)}" if isinstance(whole, Tensor) else type(whole).__name__
            raise PrivlabError(
                f"{self._kind()} must give logits, {tuple(parts.shape)} for {len(images)} images. Found {found}"
                f"{causes(self.vit)}."
            )
        return parts, whole, heard

    def with_rest(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c _ _"]:
        """Return images with zeros for the pixels behind the last patches, which a model may ask for and not read."""
        height, width = self.vit.patch_embed.img_size or images.shape[2:]
        return F.pad(images, (0, width - images.shape[3], 0, height - images.shape[2]))

    def _check_same(self, parts: Float[Tensor, "b y"], whole: Float[Tensor, "b y"]) -> None:
        """Check that the logits by the parts of the model are its own, up to rounding in its precision."""
        difference, size = float((parts - whole).abs().max()), float(whole.abs().max())
        if difference <= max(_SAME, 8 * torch.finfo(whole.dtype).eps) * size:
            return
        raise PrivlabError(
            f"{self._kind()} is more than embedding, blocks, norm and head: these alone give other logits, which "
            f"differ by up to {difference:.3g} ({difference / size if size else math.inf:.2g} of their size)"
            f"{causes(self.vit)}. A victim is a ViT whose blocks get every token."
        )

    def _kind(self) -> str:
        return f"{type(self.vit).__name__} of {type(self.vit).__module__}"

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the patterns by which timm groups the layers: embedding, blocks, and the rest (BEiT, MAE)."""
        stem = r"^(?:unk_embed|vit\.(?:cls_token|dist_token|reg_token|pos_embed|patch_embed|norm_pre))"
        return {"stem": stem, "blocks": [(r"^vit\.blocks\.(\d+)", None)]}

    @property
    def patch(self) -> int:
        """Return the side of a patch, in pixels."""
        return self.vit.patch_embed.patch_size[0]

    @property
    def grid(self) -> tuple[int, int]:
        """Return the number of patches in a column and in a row."""
        return self.vit.patch_embed.grid_size

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Return (c, h, w) of the input."""
        height, width = self.grid
        return self.vit.patch_embed.proj.in_channels, height * self.patch, width * self.patch

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self.vit.num_classes

    @property
    def slot_pe(self) -> Float[Tensor, "n d"] | None:
        """Return the PEs of the patches, if there are any."""
        pe = self.vit.pos_embed
        return None if pe is None else pe[0, -self.vit.patch_embed.num_patches :]

    @property
    def pe_of_every_token(self) -> bool:
        """Return whether class and register tokens have position embeddings too."""
        pe = self.vit.pos_embed
        return pe is not None and pe.shape[1] == self.vit.num_prefix_tokens + self.vit.patch_embed.num_patches

    def slots(self, masked: Bool[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
        """Return which PEs belong to masked patches: each patch of a ViT has one."""
        return masked

    def normalised_by(self, mean: Tensor, std: Tensor) -> "VictimModel":
        """Return a model with the same weights, which are not copied, and other means and deviations, c × 1 × 1."""
        other = copy.copy(self)
        other._buffers = {**self._buffers, "mean": mean, "std": std}
        return other

    def normalise(self, images: Float[Tensor, "*b c h w"]) -> Float[Tensor, "*b c h w"]:
        """Return (images − mean) / std."""
        return (images - self.mean) / self.std

    def to_images(self, patches: Float[Tensor, "b n k"]) -> Float[Tensor, "b c h w"]:
        """Turn rows of normalised patches into images, clipped to [0, 1], in the model's precision."""
        images = unpatchify(patches.to(self.mean.dtype), self.image_shape)
        return (images * self.std + self.mean).clamp(0, 1)

    def embed(
        self,
        images: Float[Tensor, "b c h w"],
        masked_pe: Bool[Tensor, "b n"] | None = None,
        replacement: Literal["unknown", "zero"] = "unknown",
    ) -> Float[Tensor, "b t d"]:
        """Return the tokens z₀ that the first block sees, before any dropout (MJP, Eq. 3 to 5).

        z₀ = [cls; x¹E; …; xᴺE] + E_pos. There are t tokens: N patches, and the class and register tokens before them.

        Args:
            images: the images, in [0, 1]; they are normalised here.
            masked_pe: the patch slots whose rows of E_pos are replaced; None for none. A model without PEs ignores it.
            replacement: "unknown" puts E_unk into these rows, "zero" puts zeros.

        Raises:
            PrivlabError: if E_unk is asked for and the model has none.
        """
        vit = self.vit
        patches = vit.patch_embed.proj(self.normalise(images)).flatten(2).mT
        b, n, _ = patches.shape
        own = (getattr(vit, name, None) for name in PREFIX_TOKENS)
        prefix = [p.expand(b, -1, -1) for p in own if p is not None]
        tokens = torch.cat([*prefix, patches], 1)
        if vit.pos_embed is None:
            return tokens
        pe = vit.pos_embed.expand(b, -1, -1)
        if masked_pe is not None:
            slots = torch.where(masked_pe[..., None], self._replacement(replacement), pe[:, -n:])
            pe = torch.cat([pe[:, :-n], slots], 1)
        free = tokens.shape[1] - pe.shape[1]  # prefix tokens that carry no PE (timm's no_embed_class)
        return torch.cat([tokens[:, :free], tokens[:, free:] + pe], 1)

    def _replacement(self, kind: Literal["unknown", "zero"]) -> Tensor:
        if kind == "zero":
            return self.mean.new_zeros(())
        if self.unk_embed is None:
            raise PrivlabError("MJP puts E_unk at the masked slots, and this model has none. Use a `_mjp` victim.")
        return self.unk_embed

    def classify(self, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "_ y"]:
        """Return the logits of embedded tokens, for each image or for the volume whose slices are fused."""
        vit = self.vit
        x = _last(vit, vit.blocks[:-1](self.before_blocks(tokens)))
        if self.fusion is not None:
            return vit.head(self.fusion(vit.forward_head(vit.norm(x), pre_logits=True)))
        return vit.forward_head(vit.norm(x))

    def check_cut_layer(self, cut_layer: int) -> None:
        """Check that a client may hold this many blocks.

        Raises:
            PrivlabError: if it is not in 0 … depth.
        """
        depth = len(self.vit.blocks)
        if not 0 <= cut_layer <= depth:
            raise PrivlabError(f"The cut layer must be in 0 … {depth}, the number of blocks. Found {cut_layer}.")

    def client_blocks(self, tokens: Float[Tensor, "b t d"], cut_layer: int) -> Float[Tensor, "b t d"]:
        """Return z_ℓ of z₀, what a client of split learning sends that holds the embedding and the first ℓ blocks."""
        return tokens if cut_layer == 0 else self.vit.blocks[:cut_layer](self.before_blocks(tokens))

    def backbone(self, tokens: Float[Tensor, "b t d"], cut_layer: int = 0) -> Float[Tensor, "b t d"]:
        """Return T(z_ℓ): what the server of split learning computes with all blocks from ℓ on, every token kept."""
        return self.vit.blocks[cut_layer:](tokens if cut_layer else self.before_blocks(tokens))

    def before_blocks(self, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return what the first block reads of z₀: dropped out, and normalised where the model does so."""
        vit, tokens = self.vit, self.vit.pos_drop(tokens)
        return vit.norm_pre(tokens if vit.patch_drop is None else vit.patch_drop(tokens))

    def head(self, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "b y"]:
        """Return F₂(T(z₀)): the logits that the client computes from the server's outputs."""
        return self.vit.forward_head(self.vit.norm(tokens))

    def features(
        self, images: Float[Tensor, "b c h w"], masked_pe: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b d"]:
        """Return what the classifier reads: F_cls, normalised."""
        return self.vit.forward_head(self.vit.norm(self.backbone(self.embed(images, masked_pe))), pre_logits=True)

    def logits(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b y"]:
        """Return the logits of `features`.

        Raises:
            PrivlabError: if the model has several heads, which read several tokens.
        """
        if hasattr(self.vit, "head_dist"):
            raise PrivlabError(f"{self._kind()} has two heads on two tokens: its logits are of no one feature vector.")
        return self.vit.head(features)

    def forward(
        self,
        images: Float[Tensor, "b c h w"],
        masked_pe: Bool[Tensor, "b n"] | None = None,
        replacement: Literal["unknown", "zero"] = "unknown",
    ) -> Float[Tensor, "_ y"]:
        """Return the logits of images: `classify` of what `embed` makes of them.

        Args:
            images: the images, in [0, 1]; they are normalised here.
            masked_pe: as `embed` takes it.
            replacement: as `embed` takes it.
        """
        return self.classify(self.embed(images, masked_pe, replacement))


def _last(vit: Vit, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b _ d"]:
    """Apply the last block; where the head reads the class token alone, its MLP runs on that token alone.

    The other tokens would be thrown away. Without them, forward and backward pass spare a twentieth of the work of
    twelve blocks.
    """
    block = vit.blocks[-1]
    if type(vit) is not VisionTransformer or type(block) is not Block or vit.global_pool != "token" or vit.attn_pool:
        return block(x)
    if is_changed(block):
        return block(x)
    x = (x + block.drop_path1(block.ls1(block.attn(block.norm1(x)))))[:, :1]
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def april_twin(model: VictimModel) -> VictimModel:
    """Return a copy whose first block has neither pre-norm nor skip.

    Raises:
        PrivlabError: if something stands between the embedding and the attention, or the block is unknown.
    """
    twin = copy.deepcopy(model)
    first, before = twin.vit.blocks[0], twin.vit.norm_pre
    if type(first) is not Block or not isinstance(before, nn.Identity):
        raise PrivlabError(
            "--block april needs timm's plain Block right after the embedding. "
            f"Found {type(first).__name__} after {type(before).__name__}: use --block stock."
        )
    twin.vit.blocks[0] = AprilBlock(first)
    return twin


def check_classifies(model: VictimModel) -> None:
    """Check that a victim has the logits of classes, which the cross-entropy of a label needs.

    Raises:
        PrivlabError: if it has no classifier.
    """
    if model.classes < 1:
        raise PrivlabError(
            f"A victim classifies. Found a model without classifier (num_classes = {model.classes}): --classes N, or "
            "classes=N in Python, gives it an untrained one; --release features needs none."
        )


def _check(vit: nn.Module) -> None:
    embed: Any = vit.patch_embed
    proj = getattr(embed, "proj", None)
    if isinstance(proj, nn.Conv3d):
        raise PrivlabError("A victim takes images. Found a ViT for volumes (Conv3d): take a ViT for their slices.")
    plain = type(embed) is PatchEmbed and isinstance(embed.norm, nn.Identity) and embed.grid_size is not None
    if not plain or not isinstance(proj, nn.Conv2d) or len({*proj.kernel_size, *proj.stride}) > 1:
        found = f"{type(embed).__name__} with {str(proj).splitlines()[0]}"
        raise PrivlabError(
            "A victim embeds square patches that do not overlap linearly, and has an input size. "
            f"Found {found} and grid {getattr(embed, 'grid_size', None)}."
        )
    if not 1 <= proj.in_channels <= MAX_CHANNELS:
        raise PrivlabError(
            f"A victim takes images of 1 to {MAX_CHANNELS} channels. Found a model with {proj.in_channels}."
        )
