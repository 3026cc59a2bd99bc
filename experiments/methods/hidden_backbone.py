"""Versions of `transparent-backbone` that hide from the audit of a server's weights, and how much they still read."""

# The channels of tokens are rotated, which LayerNorm commutes with, and no row of a matrix stays empty. What the blocks
# add then depends on the slot, which is known, and a little on its patch. So the server reads by a method of Newton's
# kind: gradients and inputs of the adapters at the last estimate, from a grey image on.

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.attacks.dishonest.layout import layer_of
from privlab.attacks.dishonest.transparent_backbone import ChannelPlan, TransparentBackbone
from privlab.base import full_precision
from privlab.patches import patchify
from privlab.release import as_gradients
from privlab.runs.sent_weights import layer_gradients
from privlab.threat import Client, Observation
from privlab.victims import VictimModel

_READING = ("qkv.base_layer.weight", "lora_A.default.weight", "mlp.fc1.weight", "head.weight")
_WRITING = ("attn.proj.weight", "mlp.fc2.weight")

_SHARP = 4.0
"""The size of the rows of queries and keys, next to 1 / √D for each weight: tokens then attend mostly to themselves."""

_ALIKE = 0.9
"""The cosine of a row of the queries with that of the keys. At 1 they would be parallel rows, which the audit sees."""

_LAST = 0.02
"""The size of what the last attention adds to the class token. Above it LayerNorm takes off what the head reads."""

_LIFTED = 0.3
"""The noise in the last projection by its planted part, of rank one."""

_ATTENTIVE = 10.0
"""The factor of the noise in the last queries and keys where the class token prefers bright patches."""

_WEAK = 0.1
"""Derivatives of less than this share of the largest are left out where A reads a constant, which hardly has one."""

_STEPS = 16
_DIFFERENCE = 1e-4
_SMALLEST = 1e-6
"""The steps of the reading, the difference by which derivatives are taken, and the least singular value, by the first.
"""


@dataclass(frozen=True)
class HiddenBackbone(TransparentBackbone):
    """`transparent-backbone` for LoRA and SGD, with rotated channels, and noise where its matrices are empty.

    Args:
        pixels: the factor of the patch embedding, whose patches are next to nothing in a token at 1, > 0.
        noise: the size of what attention and MLPs add to a token, ≥ 0; None rotates the channels and adds no noise.
        share: s of the mixture θ + s (θ′ − θ) with the honest weights θ.
        attention: how strongly the last attention prefers bright patches: the logit of a patch for each standard
            deviation of pixels by which it is brighter, ≥ 0. Above 0, noise is needed.
    """

    pixels: float = 100.0
    noise: float | None = 0.001
    share: float = 1.0
    attention: float = 0.0

    def choose(self, model: VictimModel, images: int, client: Client | None) -> Mapping[str, Tensor]:
        """Return the weights, as `TransparentBackbone.choose` does.

        Args:
            model: as there, like the other arguments.
            images: the images of a release.
            client: the settings of the client.
        """
        honest = {name: parameter.detach().clone().double() for name, parameter in model.vit.named_parameters()}
        state = {name: tensor.double() for name, tensor in super().choose(model, images, client).items()}
        D = model.vit.embed_dim
        draw = Generator().manual_seed(0)
        R = rotation(D, draw)
        if self.attention:
            _read_constant(state, D)
        embedding = state["patch_embed.proj.weight"]
        embedding.copy_((self.pixels * R @ embedding.flatten(1)).view_as(embedding))
        for name, tensor in state.items():
            if name in ("pos_embed", "cls_token") or name.endswith(_READING):
                tensor.copy_(tensor @ R.mT)
            elif name.endswith(_WRITING):
                tensor.copy_(R @ tensor)
        if self.noise is not None:
            _fill(state, model, R, self.noise, draw)
            if self.attention:
                _prefer_bright(state, model, R, self.attention / self.pixels)
        mixed = {name: honest[name] + self.share * (tensor - honest[name]) for name, tensor in state.items()}
        return {name: tensor.to(model.mean) for name, tensor in mixed.items()}

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the image of each release of SGD."""
        seen = as_gradients(seen)
        model = copy.deepcopy(seen.model).double()
        layers = [name for name, _ in model.vit.named_modules() if name.endswith("lora_B.default")][:-1]
        released = [seen.gradients[f"{name}.weight"].double() for name in layers]
        labels = seen.gradients["head.bias"].argmin(1)  # the only negative gradient is that of the true class
        grey = patchify(model.normalise(model.mean.new_full((1, *model.image_shape), 0.5)), model.patch)
        patches, least = grey.expand(len(labels), -1, -1), _WEAK if self.attention else None
        solve = torch.linalg.pinv(_derivatives(model, grey, layers), rtol=least)
        rows = slice(2 * model.vit.embed_dim if self.attention else 0, None)  # those of values: the others vary more
        for _ in range(_STEPS):
            factors = _factors(model, model.to_images(patches), labels, layers)
            solutions = {}
            for name, gradient in zip(layers, released, strict=True):
                δ, _ = factors[name]  # ∂ℓ/∂B = Σ_t δ_t (A u_t)ᵀ
                solutions[name] = torch.linalg.pinv(δ[..., rows].mT, rtol=_SMALLEST) @ gradient[:, rows]
            # The first A reads a constant, so that it shows by which factor δ_t differs from that of the estimate.
            ratio = (solutions[layers[0]] / factors[layers[0]][1])[..., -1:] if self.attention else 1.0
            missing = [(solutions[name] / ratio - factors[name][1])[:, -grey.shape[1] :] for name in layers]
            moved = patches + torch.einsum("tkr,btr->btk", solve, torch.cat(missing, 2))
            patches = patchify(model.normalise(model.to_images(moved).clamp(0, 1)), model.patch)
        return model.to_images(patches).float()


def rotation(n: int, draw: Generator) -> Float[Tensor, "n n"]:
    """Return a random rotation of n channels that keeps the vector of ones, so that LayerNorm commutes with it."""
    first = torch.eye(n, dtype=torch.float64)
    first[:, 0] = 1
    basis = torch.linalg.qr(first).Q  # its first column is along the ones
    turned = torch.block_diag(
        torch.ones(1, 1, dtype=torch.float64),
        torch.linalg.qr(torch.randn(n - 1, n - 1, generator=draw, dtype=torch.float64)).Q,
    )
    return basis @ turned @ basis.mT


def _fill(state: dict[str, Tensor], model: VictimModel, R: Tensor, noise: float, draw: Generator) -> None:
    """Replace what attention and MLPs compute by noise, except attention to oneself and the last attention's mean.

    Args:
        state: the rotated weights, which are changed.
        model: the model whose weights they are.
        R: the rotation.
        noise: what the blocks add.
        draw: the source of noise.
    """
    D, blocks = model.vit.embed_dim, len(model.vit.blocks)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64) / math.sqrt(shape[-1])

    read = R[:, D - 1] - 1 / D  # where the last channel, of which the last attention takes the mean, went
    written = random(D).sign()
    written -= written.mean()
    for number in range(blocks):
        path, last = f"blocks.{number}", number == blocks - 1
        queries, other, values = random(D, D), random(D, D), torch.linalg.qr(random(D, D)).Q
        keys = _ALIKE * queries + math.sqrt(1 - _ALIKE**2) * other
        both = torch.cat([queries, keys])
        layer_of(state, f"{path}.attn.qkv").copy_(torch.cat([both * (0.05 if last else _SHARP), values]))
        planted = torch.outer(written, values @ read / read.norm()) + _LIFTED * random(D, D)
        state[f"{path}.attn.proj.weight"].copy_(_LAST * planted if last else noise * random(D, D))
        for name, factor in (("fc1", 1.0), ("fc2", noise)):
            weight = state[f"{path}.mlp.{name}.weight"]
            weight.copy_(factor * random(*weight.shape))
    head = state["head.weight"]
    signs = 1 - 2 * (torch.arange(len(head), dtype=torch.float64) % 2)
    head.copy_(torch.outer(signs, written) / math.sqrt(D) + 0.5 * random(*head.shape))


def _read_constant(state: dict[str, Tensor], D: int) -> None:
    """Let the last row of the first A take the last channel, which is √D, and the last A that row's coefficient."""
    matrices = [tensor for name, tensor in state.items() if name.endswith("lora_A.default.weight")]
    first, *_, last = (tensor for tensor in matrices if tensor.any())
    last[-1] = first[-1]
    first[-1] = 0
    first[-1, D - 1], first[-1, 0] = 1, -1


def _prefer_bright(state: dict[str, Tensor], model: VictimModel, R: Tensor, strength: float) -> None:
    """Let the class token attend in the last block to bright patches, so that gradients depend on the image.

    Args:
        state: the rotated weights, which are changed.
        model: the model whose weights they are.
        R: the rotation.
        strength: the logit for each standard deviation of pixels, by the factor of the patch embedding.
    """
    block: Any = model.vit.blocks[-1]
    plan, D, heads = ChannelPlan(model), model.vit.embed_dim, block.attn.num_heads
    path = f"blocks.{len(model.vit.blocks) - 1}.attn.qkv"
    bright = R[:, plan.pixels.start] - 1 / D
    unit = plan.gain * math.sqrt(len(plan.transform)) / float(plan.deviations.mean())
    weight = layer_of(state, path)
    weight[: 2 * D] *= _ATTENTIVE
    queries = weight[:D] @ F.layer_norm(state["cls_token"][0, 0], (D,))
    of_head = queries.view(heads, D // heads)
    planted = math.sqrt(D // heads) * of_head / of_head.square().sum(1, keepdim=True)  # its product with q is √d
    weight[D : 2 * D] += torch.outer(planted.flatten(), strength / unit * bright)


def _derivatives(model: VictimModel, grey: Float[Tensor, "1 n k"], layers: list[str]) -> Float[Tensor, "n r k"]:
    """Return the derivatives of what the adapters read of each token by its own patch, at a grey image."""
    step = _DIFFERENCE * torch.eye(grey.shape[2], dtype=torch.float64)[:, None]  # one value of all patches at a time
    sides = []
    for moved in (grey + step, grey - step):
        found = _factors(model, model.to_images(moved), torch.zeros(len(moved), dtype=torch.long), layers)
        sides.append(torch.cat([found[name][1] for name in layers], 2)[:, -grey.shape[1] :])
    return ((sides[0] - sides[1]) / (2 * _DIFFERENCE)).permute(1, 2, 0)


def _factors(
    model: VictimModel, images: Float[Tensor, "b c h w"], labels: Tensor, layers: list[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return δ and the inputs of each layer for each image, of the loss of this image alone."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def visit(name: str, δ: Tensor, inputs: Tensor) -> None:
        if name in layers:
            found[name] = (len(images) * δ, inputs)

    with full_precision():
        layer_gradients(model, images, labels, visit)
    return found
