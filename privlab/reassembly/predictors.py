"""Position predictors: networks that tell from the patches of an image which slot each of them belongs to.

A predictor is kept in one safetensors file, `predictor.safetensors`, which holds its tensors and, under `privlab` in
the metadata, the sizes to build it from, as JSON. Reading it needs neither timm's registry nor training code.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from privlab.base import PrivlabError, one_line, parse_json, unknown_name
from privlab.patches import patchify
from privlab.victims import VictimModel, shipped_file

LEFT_BEHIND = ("model.vit.head.", "model.vit.pos_embed", "model.unk_embed")
"""The parts of a model that no predictor reads."""


class PositionPredictor(nn.Module):
    """A ViT's patch embedding, class token, blocks and norm, with a part on top that names a slot for each patch.

    Raises:
        PrivlabError: if the model is not a plain ViT with one class token.
    """

    name: ClassVar[str]

    def __init__(self, model: VictimModel) -> None:
        super().__init__()
        self.model = model
        with torch.device("meta"):
            plain = _plain(_sizes(model))
        if _shapes(model) != _shapes(plain):
            raise PrivlabError(
                "A position predictor is made of a plain ViT with one class token. Found "
                f"{type(model.vit).__name__} with parts of its own, such as register tokens, layer scale or pooling."
            )

    @property
    def slots(self) -> int:
        """Return N, the number of slots."""
        h, w = self.model.grid
        return h * w

    def check(self, grid: tuple[int, int], patch: int) -> None:
        """Refuse patches that the predictor was not made for.

        Raises:
            PrivlabError: if the grid or the side of a patch is not the predictor's.
        """
        if (grid, patch) != (self.model.grid, self.model.patch):
            (h, w), p = self.model.grid, self.model.patch
            raise PrivlabError(
                f"This {self.name} predictor is for {h} × {w} patches of {p} × {p} pixels. "
                f"Found {grid[0]} × {grid[1]} of {patch} × {patch}."
            )

    def decoder(self) -> dict[str, int]:
        """Return the sizes of the part on top of the ViT; empty if they follow from the ViT."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a predictor's file holds, by name."""
        named = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        return {name: tensor for name, tensor in named.items() if not name.startswith(LEFT_BEHIND)}

    def embed(self, patches: Float[Tensor, "b m c p p"]) -> Float[Tensor, "b m d"]:
        """Return x E + b of patches x in [0, 1], in any order, after the victim's normalisation."""
        proj = self.model.vit.patch_embed.proj
        return F.linear(self.model.normalise(patches).flatten(2), proj.weight.flatten(1), proj.bias)

    @abstractmethod
    def scores(self, patches: Float[Tensor, "b n c p p"], known: Bool[Tensor, "b n"]) -> Float[Tensor, "b n s"]:
        """Return log p(slot s | patch i) of patches, some of which are `known` to be in their own slot."""


class Mp3Network(PositionPredictor):
    """MP3: no position embeddings, and a linear head D → N; it is trained with a share of the patches as context.

    Source: Zhai et al., ICML 2022, Section 3.2 and Algorithm 1, which leaves out the class token: here it is context.
    """

    name = "mp3"

    def __init__(self, model: VictimModel) -> None:
        super().__init__(model)
        self.head = nn.Linear(model.vit.embed_dim, self.slots)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, patches: Float[Tensor, "b n c p p"]) -> Float[Tensor, "b n s"]:
        """Return the logits of the slots for each patch, in any order, with all patches as context."""
        vit, x = self.model.vit, self.embed(patches)
        x = vit.blocks(torch.cat([class_token(vit, len(x)), x], 1))
        return self.head(vit.norm(x[:, 1:]))

    def scores(self, patches: Float[Tensor, "b n c p p"], known: Bool[Tensor, "b n"]) -> Float[Tensor, "b n s"]:
        """Return log p with all patches as context; `known` has no effect."""
        return self(patches).log_softmax(2)


class DropPosNetwork(PositionPredictor):
    """DropPos: fixed 2-D sin-cos PEs, a learnable mask token in place of dropped ones, and a decoder without PEs.

    Args:
        model: the encoder; its own PEs are not read.
        width: the decoder's width, a multiple of `heads`.
        depth: the decoder's number of blocks.
        heads: the decoder's attention heads.

    Raises:
        PrivlabError: if the encoder's width is not a multiple of 4, or the decoder's is not one of its heads.

    Source: Wang et al., NeurIPS 2023, Sections 3.1 and 3.2, Eq. 3; p₀, the PE of the class token, is zero as in MAE.
    """

    name = "droppos"
    pe: Float[Tensor, "n d"]

    def __init__(self, model: VictimModel, width: int = 512, depth: int = 2, heads: int = 16) -> None:
        super().__init__(model)
        wide = model.vit.embed_dim
        if wide % 4 or width < 1 or depth < 0 or heads < 1 or width % heads:
            raise PrivlabError(
                "DropPos needs a ViT whose width is a multiple of 4, and a decoder whose width is one of its heads. "
                f"Found {wide}, and a decoder of {depth} blocks, width {width} and {heads} heads."
            )
        self._decoder = {"width": width, "depth": depth, "heads": heads}
        self.mask = nn.Parameter(torch.empty(1, 1, wide))
        nn.init.normal_(self.mask, std=0.02)
        self.register_buffer("pe", sincos(model.grid, wide), persistent=False)
        self.lead = nn.Linear(wide, width)
        self.blocks = nn.Sequential(*(Block(width, heads, qkv_bias=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, self.slots)
        for part in (self.lead, *self.blocks.modules(), self.head):
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                nn.init.zeros_(part.bias)

    def decoder(self) -> dict[str, int]:
        """Return the sizes of the decoder."""
        return dict(self._decoder)

    def encode(
        self, patches: Float[Tensor, "b m c p p"], places: Int[Tensor, "b m"], known: Bool[Tensor, "b m"]
    ) -> Float[Tensor, "b t d"]:
        """Return the encoder's output, t = 1 + m rows with the class token first.

        Args:
            patches: patches in [0, 1], m ≤ N of each image, in any order.
            places: the slot of each patch; read only if the patch is known.
            known: marks the patches that carry their PE; the others carry the mask token.
        """
        vit = self.model.vit
        x = self.embed(patches) + torch.where(known[..., None], self.pe[places], self.mask)
        return vit.norm(vit.blocks(torch.cat([class_token(vit, len(x)), x], 1)))

    def forward(
        self, patches: Float[Tensor, "b m c p p"], places: Int[Tensor, "b m"], known: Bool[Tensor, "b m"]
    ) -> Float[Tensor, "b m s"]:
        """Return the logits of the slots for each patch.

        Args:
            patches: patches in [0, 1], m ≤ N of each image, in any order.
            places: the slot of each patch; read only if the patch is known.
            known: marks the patches that carry their PE; the others carry the mask token.
        """
        x = self.blocks(self.lead(self.encode(patches, places, known)))
        return self.head(self.norm(x[:, 1:]))

    def scores(self, patches: Float[Tensor, "b n c p p"], known: Bool[Tensor, "b n"]) -> Float[Tensor, "b n s"]:
        """Return log p if the known patches carry their PEs."""
        places = torch.arange(known.shape[1], device=known.device).expand(len(known), -1)
        return self(patches, places, known).log_softmax(2)


PREDICTORS: dict[str, type[PositionPredictor]] = {kind.name: kind for kind in (Mp3Network, DropPosNetwork)}
"""The kinds of predictors by name."""


def sincos(grid: tuple[int, int], width: int) -> Float[Tensor, "n d"]:
    """Return the fixed 2-D sin-cos position embeddings of MAE, channels in timm's order."""
    return build_sincos2d_pos_embed(list(grid), width)


def tiles(images: Float[Tensor, "b c h w"], patch: int) -> Float[Tensor, "b n c p p"]:
    """Cut images into patches, row by row."""
    return patchify(images, patch).unflatten(2, (images.shape[1], patch, patch))


def save_predictor(predictor: PositionPredictor, path: Path, *, half: bool = False) -> None:
    """Write a predictor to a file that `load_predictor` reads.

    Args:
        predictor: the predictor; parts of its model that it never reads are left out.
        path: the safetensors file to be written.
        half: whether tensors are stored in half precision.
    """
    model, facts = predictor.model, {"predictor": predictor.name, "decoder": predictor.decoder()}
    facts |= _sizes(model) | {"mean": model.mean.flatten().tolist(), "std": model.std.flatten().tolist()}
    tensors = {name: tensor.half() if half else tensor for name, tensor in predictor.tensors().items()}
    save_file(tensors, path, {"format": "pt", "privlab": json.dumps(facts)})


def predictor_file(name: str) -> Path:
    """Return the file of a predictor, by its name in the zoo or by its path."""
    return shipped_file(name) or Path(name)


def load_predictor(path: Path, device: torch.device | str = "cpu") -> PositionPredictor:
    """Return the predictor of a file, in single precision and evaluation mode; an unchanged file is read once.

    Args:
        path: the file.
        device: where the predictor is; all who ask for it there share it, so it must not be moved.

    Raises:
        PrivlabError: if the file is missing or damaged, or holds no position predictor.
    """
    if not path.is_file():
        raise PrivlabError(f"No position predictor at '{path}'. `privlab train mp3|droppos` makes one.")
    stamp = path.stat()
    return _load(path, torch.device(device), stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=4)
def _load(path: Path, device: torch.device, *stamp: int) -> PositionPredictor:
    try:
        with safe_open(path, "pt") as file:
            facts = parse_json((file.metadata() or {})["privlab"], "the description")
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        if facts["predictor"] not in PREDICTORS:
            raise unknown_name("position predictor", str(facts["predictor"]), PREDICTORS)
        with torch.device("meta"):  # no random draws, and false sizes take no memory
            made = PREDICTORS[facts["predictor"]](_plain(facts), **facts["decoder"])
        if _shapes(made) != {name: tuple(tensor.shape) for name, tensor in state.items()}:
            raise PrivlabError("its tensors are not those of the network that it describes")
        return _fill(facts, state).to(device)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise PrivlabError(
            f"'{path}' is not a position predictor, such as `privlab train mp3` makes: {one_line(error)}."
        ) from error


def _fill(facts: Mapping[str, Any], state: Mapping[str, Tensor]) -> PositionPredictor:
    with torch.random.fork_rng(devices=[]):
        made = PREDICTORS[facts["predictor"]](_plain(facts), **facts["decoder"])
    made.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=False)
    return made.eval().requires_grad_(False)


def _sizes(model: VictimModel) -> dict[str, Any]:
    """Return the sizes that the plain ViT of a predictor is built from."""
    vit, (channels, height, width) = model.vit, model.image_shape
    block: Any = vit.blocks[0]
    return {
        "img_size": [height, width],
        "patch_size": model.patch,
        "in_chans": channels,
        "embed_dim": vit.embed_dim,
        "depth": len(vit.blocks),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": block.mlp.fc1.out_features / vit.embed_dim,
    }


def _plain(sizes: Mapping[str, Any]) -> VictimModel:
    names = ("patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio")
    options: dict[str, Any] = {name: sizes[name] for name in names}
    vit = VisionTransformer(**options, img_size=tuple(sizes["img_size"]), num_classes=1, pos_embed="none")
    return VictimModel(vit, sizes.get("mean", (0.0,) * 3), sizes.get("std", (1.0,) * 3))


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a predictor reads, by their names in it."""
    prefix = "" if isinstance(module, PositionPredictor) else "model."
    named = {prefix + name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    return {name: shape for name, shape in named.items() if not name.startswith(LEFT_BEHIND)}


def class_token(vit: VisionTransformer, b: int) -> Float[Tensor, "b 1 d"]:
    """Return the class token of a ViT for b images."""
    assert vit.cls_token is not None
    return vit.cls_token.expand(b, -1, -1)
