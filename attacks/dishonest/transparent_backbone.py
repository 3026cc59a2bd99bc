"""`transparent-backbone`: one image from LoRA or adapters alone, behind frozen weights that the server chooses."""

# `ChannelPlan` lays out the channels of a token, and says which coefficients of a patch each block's adapter reads.
# `choose` writes it into the weights. Then:
# 1. `_token_gradients` computes G, the gradients of the tokens, which do not depend on the image.
# 2. `_known` solves Gᵀ Y = ∂ℓ/∂B for r coefficients of all tokens, block by block.
# 3. The coefficients that no adapter read follow from a prior of smooth images.

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.dishonest.layout import (
    adam_inverted,
    cosine_rows,
    gradient_of,
    has_class_token,
    last_reads_mean,
    layer_of,
    more_than_a_step,
    nearest_angle,
    pass_through,
    patch_transform,
    points_on_sphere,
    shrink_head,
)
from privlab.attacks.solvers import Smoothness, photograph_gradients
from privlab.base import PrivlabError
from privlab.release import as_gradients
from privlab.threat import Capability, Client, Observation
from privlab.victims import VictimModel, why_no_plain_block

_RESERVED = 5
"""Channels that hold neither pixels nor the code of a slot: a zero, the point of the slot, and what is averaged."""

_FAINT = 1e-2
"""The largest value of a pixel channel. Codes are near 1, so that the deviation of a token hardly depends on pixels."""

_LIFT = 8.0
"""The bias that lifts an activation of at most 1 to where GELU is the identity."""

_ADDED = 1e-8
"""What a MLP adds to the pixel channels, at most; adapters enlarge it to 1."""

_OWN = 40.0
"""The least difference of logits by which a token attends to itself alone."""

_SHARE = 0.1
"""The largest gradient of what is read in units of Adam's ε, for white noise."""

_STEPS = 100
"""The steps of conjugate gradients for coefficients that were not read."""


@dataclass(frozen=True, eq=False)
class ChannelPlan:
    """The layout of channels for a model with LoRA's or bottleneck adapters, from its architecture alone."""

    model: VictimModel

    @cached_property
    def read(self) -> list[str]:
        """Return the parameters that are read, one for each block but the last, which sees the class token alone."""
        kinds = r"blocks\.\d+\.(attn\.qkv\.lora_B\.default|mlp\.adapter\.up)\.weight"
        names = [name for name, _ in self.model.vit.named_parameters() if re.fullmatch(kinds, name)]
        return names[:-1]

    @property
    def rank(self) -> int:
        """Return r."""
        return self.model.vit.get_parameter(self.read[0]).shape[1]

    @cached_property
    def transform(self) -> Float[Tensor, "k k"]:
        """Return the whole transform of a patch."""
        return patch_transform(self.model.image_shape[0], self.model.patch)

    @property
    def count(self) -> int:
        """Return C, the number of coefficients that are read of a patch: r from each block, K at most."""
        return min(self.rank * len(self.read), len(self.transform))

    @property
    def largest(self) -> float:
        """Return R, a bound of the coefficients: K normalised pixels are at most so large."""
        darkest, brightest = (0 - self.model.mean) / self.model.std, (1 - self.model.mean) / self.model.std
        return math.sqrt(len(self.transform)) * float(torch.maximum(-darkest, brightest).max())

    @property
    def gain(self) -> float:
        """Return τ, the factor of coefficients in a token."""
        return _FAINT / self.largest

    @property
    def pixels(self) -> slice:
        """Return the channels of the coefficients."""
        return slice(_RESERVED - 1, _RESERVED - 1 + self.count)

    @property
    def codes(self) -> slice:
        """Return the channels of the codes."""
        return slice(self.pixels.stop, self.model.vit.embed_dim - 1)

    @cached_property
    def rows(self) -> Float[Tensor, "e d"]:
        """Return orthonormal codes with the mean 0, in the channels of codes."""
        return cosine_rows(self.codes.stop - self.codes.start)[1:]

    @cached_property
    def places(self) -> Float[Tensor, "n d"]:
        """Return the position embeddings: a point of the sphere, a code of norm √D, and √D in the last channel."""
        N, D = self.model.vit.patch_embed.num_patches, self.model.vit.embed_dim
        places = torch.zeros(N, D, dtype=torch.float64)
        places[:, 1:4] = points_on_sphere(N)
        places[:, self.codes] = self.rows[:N] * math.sqrt(D)
        places[:, D - 1] = math.sqrt(D)
        return places

    @cached_property
    def deviations(self) -> Float[Tensor, " n"]:
        """Return the standard deviations σ by which LayerNorm divides the tokens, without their faint pixels."""
        block: Any = self.model.vit.blocks[0]
        return (self.places.var(1, correction=0) + block.norm1.eps).sqrt()

    def block(self, number: int) -> range:
        """Return the channels of the coefficients that a block reads, r at most."""
        start = self.pixels.start + number * self.rank
        return range(start, min(start + self.rank, self.pixels.stop))


def _unadapted(model: VictimModel) -> str | None:
    """Return why the weights cannot be chosen for a model, or None."""
    plan, vit = ChannelPlan(model), model.vit
    if (why := why_no_plain_block(model)) is not None:
        return why
    if not has_class_token(model):
        return "it needs a class token that one head reads, and position embeddings"
    if not plan.read:
        return "it reads LoRA's or bottleneck adapters of two blocks or more, as client.trains=lora or adapters gives"
    N, room = vit.patch_embed.num_patches, plan.codes.stop - plan.codes.start - 1
    if room < N:
        return f"it needs N = {N} channels for the codes of the slots, and D - C - {_RESERVED + 1} = {room} are left"
    return None


@dataclass(frozen=True)
class TransparentBackbone:
    """Choose frozen weights that pass tokens on, a code for each slot, and adapters that read r values of a patch.

    Idea: A client that trains only adapters shows r numbers of each token that passes one. The server freezes weights
    that pass the tokens on unchanged, gives each slot a code by which its numbers can be separated, and lets each block
    read other numbers. The patches come back exactly if there are enough blocks, and else with their low frequencies.

    Steps: known gradients G of the tokens → solve Gᵀ Y = ∂ℓ/∂B in each block → other coefficients by a prior

    Algorithm: LoRA computes W u + B A u, so that ∂ℓ/∂B = Σ_t δ_t (A u_t)ᵀ where B = 0. An adapter computes h + U a
    with a = GELU(V h + v), and ∂ℓ/∂U = Σ_t g_t a_tᵀ. Both have r numbers of token t, A u_t or a_t, times its gradient.

    1. A token is z_t = (0, s_t, τ T x_t, √D c_t, √D): a point s_t of a sphere, the first C rows T of an orthonormal
       cosine transform of its patch x_t, and a code c_t, orthogonal to all others and of mean 0. Small τ make
       LayerNorm's deviation nearly independent of the patch.
    2. W_v = 0 and B = 0, so that attention adds nothing. Queries and keys are s_t times a large factor: a token attends
       to itself alone, and δ_t = P g_t for the gradient g_t of the token, with the rows of P along the codes.
    3. The last attention takes the mean of v·u_t, the last channel, and the head reads it. LayerNorm's derivative adds
       −u_t (v·u_t) / D to the gradient of a token, so that g_t has the part c / σ_t² along its code, and none along
       others: G is diagonal, and depends on the label alone.
    4. A of block l reads the coefficients r l … r (l + 1) − 1. So Gᵀ Y = ∂ℓ/∂B gives them for all tokens.
    5. An MLP before an adapter repeats its r coefficients, lifted to where GELU is the identity.
    6. For C < K the other coefficients are those of the smoothest image, with the colour covariance of photographs.

    The bound: an adapted layer gives r numbers of a token, and L − 1 layers see the patches. So C = r (L − 1) of K
    values are read, for N ≤ D − C − 6. The 3 D rows of ∂B are combinations of N vectors: more rows do not help.

    Exact if: r (L − 1) ≥ K and N ≤ D − K − 6, for one image and one step of SGD, Adam or AdamW.

    Fails if: several images are trained on together, whose mean it then returns at best, or there are further steps. It
    needs a class token, position embeddings and LayerNorm before attention and MLP.

    Studies: dishonest_server

    Example: privlab attack --model cifar_vit --attack transparent-backbone --client sgd --set client.trains=lora
    --set client.rank=16 --limit 2

    Source: a transparent ViT, as in PEFTLeak, for up-projections and LoRA. [@sami2025peftleak; @hu2022lora]
    """

    name: ClassVar[str] = "transparent-backbone"
    paper: ClassVar[str] = "ours, with the transparent ViT of PEFTLeak (Sami et al., CVPR 2025)"
    named_only: ClassVar[bool] = True
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {
            *(Capability.KNOWS_WEIGHTS, Capability.CHOOSES_WEIGHTS, Capability.CLIENT_UPDATE),
            *(Capability.CLASS_LABELS, Capability.BATCH_SIZE_ONE),
        }
    )
    parameters: ClassVar[tuple[str, ...]] = ("*",)
    updates_of: ClassVar[tuple[str, ...]] = ("sgd", "adam", "adamw")

    @staticmethod
    def refuses(client: Client) -> str | None:
        """Return why the update is not read: other parameters are trained, or in further steps."""
        if client.trains not in ("lora", "adapters"):
            return f"reads LoRA's or bottleneck adapters, and here client.trains={client.trains}"
        if client.optimiser == "sgd" and client.gradient_factor is None:
            return f"reads the update of one step, and here there are {client.total_steps} steps of SGD, or clipping"
        return None if client.optimiser == "sgd" else more_than_a_step(client)

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition r (L − 1) ≥ K with its numbers if it does not hold."""
        plan = ChannelPlan(seen.model)
        read, K = plan.rank * len(plan.read), len(plan.transform)
        return None if read >= K else f"r (L - 1) = {read} < K = {K}"

    def choose(self, model: VictimModel, images: int, client: Client | None) -> Mapping[str, Tensor]:
        """Return the weights, from the architecture, the normalisation of the pixels and Adam's ε.

        Args:
            model: a copy of the honest model with the adapters of the client.
            images: the images of a release; it does not matter.
            client: the settings of the client, of which the optimiser and ε are read.

        Raises:
            PrivlabError: if the model has no adapters, or no place for the codes.
        """
        if (why := _unadapted(model)) is not None:
            raise PrivlabError(f"Attack '{self.name}' cannot choose weights for this model: {why}.")
        plan, state, vit = ChannelPlan(model), pass_through(model), model.vit
        N, D = vit.patch_embed.num_patches, vit.embed_dim
        # 1. Tokens. The class token is constant in the channels of codes, and so is its own gradient there: both are
        # orthogonal to all codes. It has no point on the sphere, so that no patch attends to it.
        state["patch_embed.proj.weight"].flatten(1)[plan.pixels] = plan.gain * plan.transform[: plan.count]
        state["pos_embed"][0, -N:] = plan.places
        for name in {"cls_token", "reg_token"} & state.keys():
            state[name][..., plan.codes] = 1
        # 2., 4., 5. All blocks but the last.
        for number, name in enumerate(plan.read):
            write = _write_lora if ".lora_B." in name else _write_adapter
            write(state, plan, number)
        # 3. The last attention, and a head whose rows have the mean 0.
        last_reads_mean(state, len(vit.blocks), torch.eye(D, dtype=torch.float64)[D - 1], gain=1e-3)
        state["head.weight"][::2, D - 1], state["head.weight"][::2, 0] = 1, -1
        state["head.weight"][1::2, D - 1], state["head.weight"][1::2, 0] = -1, 1
        if client is not None and client.optimiser != "sgd":
            shrink_head(model, state, plan.read, _SHARE * client.eps)
        return {name: tensor.to(model.mean) for name, tensor in state.items()}

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the image of each release."""
        model, plan = seen.model, ChannelPlan(seen.model)
        known = _known(seen, plan)
        patches = known @ plan.transform[: plan.count].to(known)
        if plan.count < len(plan.transform):
            prior = Smoothness(model.image_shape, photograph_gradients(model, seen.photographs))
            lost = plan.transform[plan.count :].expand(len(known), -1, -1).to(known)
            every = torch.ones(known.shape[:2], dtype=torch.bool, device=known.device)
            patches = prior.fill(patches, lost, free=every, inside=every, steps=_STEPS)
        return model.to_images(patches)


def _write_lora(state: dict[str, Tensor], plan: ChannelPlan, number: int) -> None:
    """Let a block attend to each token itself, A read its coefficients, and the projection map values to codes."""
    attention: Any = plan.model.vit.blocks[number]
    D, heads = plan.model.vit.embed_dim, attention.attn.num_heads
    path = f"blocks.{number}.attn"
    # The logit of tokens s and t is f² u_s·u_t / √(D / heads) in the three channels of the sphere, with u = s / σ.
    logits = _OWN / nearest_angle(points_on_sphere(len(plan.places))) * float(plan.deviations.max()) ** 2
    factor = math.sqrt(logits * math.sqrt(D // heads))
    for head in range(heads):
        for axis in range(3):
            for start in (0, D):  # queries and keys
                row = layer_of(state, f"{path}.qkv")[start + head * (D // heads) + axis]
                row[1 + axis], row[0] = factor, -factor  # channel 0 is 0: the mean that LayerNorm takes off cancels
    A = state[f"{path}.qkv.lora_A.default.weight"]
    for i, channel in enumerate(plan.block(number)):
        A[i, channel], A[i, 0] = 1, -1
    state[f"{path}.proj.weight"][plan.codes, : len(plan.rows)] = plan.rows.mT


def _write_adapter(state: dict[str, Tensor], plan: ChannelPlan, number: int) -> None:
    """Let the MLP of a block repeat its coefficients, and the adapter's down-projection read them."""
    path = f"blocks.{number}.mlp"
    enlarged = float(plan.deviations.max()) / _FAINT  # pre-activations in [−1, 1]
    for i, channel in enumerate(plan.block(number)):
        state[f"{path}.fc1.weight"][i, channel], state[f"{path}.fc1.weight"][i, 0] = enlarged, -enlarged
        state[f"{path}.fc1.bias"][i] = _LIFT
        state[f"{path}.fc2.weight"][channel, i] = _ADDED
        state[f"{path}.fc2.bias"][channel] = -_ADDED * _LIFT
        state[f"{path}.adapter.down.weight"][i, channel] = 1 / _ADDED
        state[f"{path}.adapter.down.bias"][i] = _LIFT


def _token_gradients(plan: ChannelPlan, label: int) -> Float[Tensor, "n n"]:
    """Return G, the gradients of the tokens along the codes, by those of position embeddings for a grey image."""
    model = plan.model
    grey = model.mean.new_full((1, *model.image_shape), 0.5)
    places = gradient_of(model, grey, label, "pos_embed")[0, -len(plan.places) :, plan.codes].double()
    return places @ plan.rows[: len(plan.places)].to(places).mT


def _known(seen: Observation, plan: ChannelPlan) -> Float[Tensor, "b n c"]:
    """Return the coefficients that the adapters read of each patch: Gᵀ Y = ∂ℓ/∂B, whose rows are along the codes."""
    if seen.client is not None and seen.client.optimiser == "sgd":
        seen = as_gradients(seen)
    released, known = adam_inverted(seen, plan.read), []
    for image, bias in enumerate(seen.gradients["head.bias"]):
        G = _token_gradients(plan, int(bias.argmin()))  # the gradient of the true class is the only negative one
        parts = [_of_block(G, released[name][image], plan, number) for number, name in enumerate(plan.read)]
        known.append(torch.cat(parts, 1))
    return torch.stack(known)


def _of_block(
    G: Float[Tensor, "n n"], released: Float[Tensor, "_ r"], plan: ChannelPlan, number: int
) -> Float[Tensor, "n c"]:
    """Return the coefficients that one block reads.

    Args:
        G: the gradients of the tokens along the codes.
        released: the gradient of B or U.
        plan: the layout of channels.
        number: the block.
    """
    N, D = len(G), plan.model.vit.embed_dim
    deviations = plan.deviations.to(G)[:, None]
    lora = ".lora_B." in plan.read[number]
    # LoRA's rows of values, the last third, are along the codes already.
    sides = released[2 * D : 2 * D + N] if lora else plan.rows[:N].to(G) @ released[plan.codes]
    Y = torch.linalg.solve(G.mT, sides)[:, : len(plan.block(number))]
    if lora:
        return Y * deviations / plan.gain  # A u = τ T x / σ
    return (Y - _LIFT) * deviations / deviations.max() * plan.largest  # a = T x / R · σ_max / σ + 8
