"""What a server adds to a victim: LoRA's or bottleneck adapters, prompt tokens, or a layer that fuses slices."""

import copy

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.models.eva import EvaBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError
from privlab.victims.model import VictimModel

_SEED = 0
"""The seed from which the server draws what it adds. It is public, as what is drawn is."""

_STD = 1e-2
"""Standard deviation of the first weights of a bottleneck adapter, cut off at two of them (Houlsby et al. 2019)."""


class Bottleneck(nn.Module):
    """h ↦ h + U GELU(V h + v) + u, with V of r × D and U of D × r."""

    def __init__(self, width: int, rank: int, draw: Generator, like: Tensor) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank), nn.Linear(rank, width)
        for layer in (self.down, self.up):
            nn.init.trunc_normal_(layer.weight, std=_STD, a=-2 * _STD, b=2 * _STD, generator=draw)
            nn.init.zeros_(layer.bias)
        self.to(like)

    def forward(self, h: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Return what the adapter makes of each token."""
        return h + self.up(F.gelu(self.down(h)))


class SliceFusion(nn.Module):
    """Make one feature vector of those of the slices of a volume: by a transformer layer, or their mean.

    The layer is that of MediSwarm's MST: the features and behind them a class token go through pre-norm attention with
    rotary places and an MLP as wide as the features, and the class token is normalised and read. Biases and the width
    of its heads are timm's.
    """

    def __init__(self, width: int, fusion: str) -> None:
        super().__init__()
        self.layer: nn.Module | None = None
        if fusion == "attention":
            self.heads = next(heads for heads in (12, 8, 1) if width % (2 * heads) == 0)  # places turn pairs of entries
            self.layer = EvaBlock(width, self.heads, mlp_ratio=1.0, num_prefix_tokens=0)
            self.cls_token, self.norm = nn.Parameter(torch.randn(1, width)), nn.LayerNorm(width)

    def forward(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "1 d"]:
        """Return the features of the volume."""
        if self.layer is None:
            return features.mean(0, keepdim=True)
        tokens = torch.cat([features, self.cls_token])[None]
        _, count, width = tokens.shape
        half = width // self.heads // 2
        rates = 10_000.0 ** -(torch.arange(half).to(tokens) / half)
        angles = (torch.arange(count).to(tokens)[:, None] * rates).repeat_interleave(2, 1)
        return self.norm(self.layer(tokens, rope=torch.cat([angles.sin(), angles.cos()], 1)))[:, -1]


def fusing(model: VictimModel, fusion: str) -> VictimModel:
    """Return a copy whose logits are those of a volume of all images of a batch, b × y for b = 1.

    Args:
        model: a model with one head.
        fusion: "mean" or "attention", whose layer the server draws from a public seed; "none" returns the model itself.

    Raises:
        PrivlabError: if the model has several heads, which read several tokens.
    """
    if fusion == "none":
        return model
    if hasattr(model.vit, "head_dist"):
        raise PrivlabError("client.fusion needs a model with one head. This one has two, as distilled models have.")
    twin = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):  # timm draws on the CPU
        torch.manual_seed(_SEED)
        twin.fusion = SliceFusion(model.vit.num_features, fusion).to(model.mean)
    return twin


def adapted(model: VictimModel, rank: int) -> VictimModel:
    """Return a copy whose attention computes W u + b + B A u in each block's qkv, with A drawn by peft and B = 0.

    It gives the same logits. The base is `….qkv.base_layer`; A is `….qkv.lora_A.default.weight`, r × D, and B is
    `….qkv.lora_B.default.weight`, 3 D × r. A model that has adapters is returned as it is. The rank is r ≥ 1.

    Raises:
        PrivlabError: if peft is not installed, or no layer of the model is named qkv.

    Source: LoRA (Hu et al., ICLR 2022), Equation 3 with α = r; peft's `LoraConfig(target_modules=["qkv"])`.
    """
    if any(".lora_A." in name for name, _ in model.vit.named_parameters()):
        return model
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise PrivlabError("client.trains=lora needs peft: pip install 'privlab[peft]'.") from error
    twin = copy.deepcopy(model)
    if not any(path.endswith(".qkv") for path, _ in twin.vit.named_modules()):
        raise PrivlabError("client.trains=lora adapts the layers named qkv. This model has none.")
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        torch.manual_seed(_SEED)
        inject_adapter_in_model(LoraConfig(target_modules=["qkv"], r=rank, lora_alpha=rank), twin.vit)
    return twin.requires_grad_(False)


def bottlenecked(model: VictimModel, rank: int) -> VictimModel:
    """Return a copy whose blocks put an adapter behind the MLP: h + U GELU(V h + v) + u for h = MLP(LN₂(z)).

    The parameters are `….mlp.adapter.down.weight` and `.bias`, V and v, and `….mlp.adapter.up.weight` and `.bias`, U
    and u. V and U are drawn from a public seed, of small numbers, and v = u = 0, so that logits are nearly the same. A
    model that has adapters is returned as it is. The rank is r ≥ 1, the width of the bottleneck.

    Raises:
        PrivlabError: if a block of the model has no layer named mlp.

    Source: Houlsby et al. (ICML 2019), Figure 2; behind the MLP alone as in Pfeiffer et al. (EACL 2021).
    """
    if any(".mlp.adapter." in name for name, _ in model.vit.named_parameters()):
        return model
    twin, draw = copy.deepcopy(model), Generator().manual_seed(_SEED)
    for number, block in enumerate(twin.vit.blocks):
        mlp = getattr(block, "mlp", None)
        if not isinstance(mlp, nn.Module):
            raise PrivlabError(
                f"client.trains=adapters puts an adapter behind the layer named mlp of each block. Block {number} has "
                f"none ({type(block).__name__})."
            )
        mlp.add_module("adapter", Bottleneck(twin.vit.embed_dim, rank, draw, twin.mean.cpu()).to(twin.mean.device))
        mlp.register_forward_hook(_through_adapter)  # a function of this module, so that a copy calls its own adapter
    return twin.requires_grad_(False)


def _through_adapter(mlp: nn.Module, _: tuple[Tensor, ...], h: Tensor) -> Tensor:
    return mlp.get_submodule("adapter")(h)


def prompted(model: VictimModel, count: int) -> VictimModel:
    """Return a copy that reads learned prompt tokens behind the class token, drawn from a public seed.

    They are timm's register tokens, `reg_token` (1 × count × D), without position embeddings, uniform in ±v with v² = 6
    / (3 P² + D). They enter the first block alone. A model that has prompts is returned as it is.

    Raises:
        PrivlabError: if the model has another kind than timm's `VisionTransformer`, or has register tokens.

    Source: Visual Prompt Tuning (Jia et al., ECCV 2022), section 3.2, VPT-shallow; the first values as in its code.
    """
    if model.prompts:
        return model
    if type(model.vit) is not VisionTransformer or model.vit.reg_token is not None:
        found = "register tokens" if type(model.vit) is VisionTransformer else type(model.vit).__name__
        raise PrivlabError(
            f"client.trains=prompts needs timm's VisionTransformer without register tokens. Found {found}."
        )
    twin = copy.deepcopy(model)
    vit, like = twin.vit, twin.vit.patch_embed.proj.weight
    bound = (6 / (3 * model.patch**2 + vit.embed_dim)) ** 0.5
    tokens = torch.rand(1, count, vit.embed_dim, generator=Generator().manual_seed(_SEED)) * 2 * bound - bound
    vit.reg_token = nn.Parameter(tokens.to(like))
    if vit.pos_embed is not None and model.pe_of_every_token:
        first = vit.num_prefix_tokens
        rows = vit.pos_embed.detach()
        vit.pos_embed = nn.Parameter(torch.cat([rows[:, :first], torch.zeros_like(vit.reg_token), rows[:, first:]], 1))
    vit.num_prefix_tokens += count
    vit.num_reg_tokens = twin.prompts = count
    return twin.requires_grad_(False)
