"""What attacks of a dishonest server share: weights that pass tokens on unchanged, and Adam's first step, inverted."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.attacks.tokens import normalised_tokens
from privlab.base import warn
from privlab.release import observe
from privlab.threat import Capability, Client, Observation
from privlab.victims import VictimModel

STEEP = 1e3
"""A factor of weights and bias that makes a GELU a step at zero, as the published attacks need a ReLU."""

_IMAGES = 14
"""The images of noise over which quantiles are taken."""

_CONTRAST = 0.25
"""The standard deviation of their pixels, about that of photographs."""

_NOTHING = 1e-4
"""The share of the largest sum of biases below which a neuron or a bin has no token."""

_SAME_SLOT = 0.9999
"""The least cosine of a token with its slot, outside the space of all patches. Mixtures of tokens are below it."""


def pass_through(model: VictimModel) -> dict[str, Tensor]:
    """Return zeros for all parameters of a ViT in float64, and ones for the scales of LayerNorm and LayerScale.

    Attention and MLPs then add nothing to the tokens.
    """
    state = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.vit.named_parameters()}
    for name, weight in state.items():
        if name.endswith((".gamma", "norm.weight", "norm1.weight", "norm2.weight")):
            weight += 1
    return state


def layer_of(state: Mapping[str, Tensor], path: str) -> Tensor:
    """Return the matrix of a layer, which LoRA keeps as that of its `base_layer`."""
    return state[f"{path}.weight"] if f"{path}.weight" in state else state[f"{path}.base_layer.weight"]


def last_reads_mean(state: dict[str, Tensor], blocks: int, direction: Float[Tensor, " d"], gain: float) -> None:
    """Let the last attention, which is uniform, add a multiple of the tokens' mean v·u to channel D − 1.

    Args:
        state: the weights, which are changed.
        blocks: L, the number of blocks.
        direction: v.
        gain: the multiple.
    """
    D, last = len(direction), f"blocks.{blocks - 1}.attn"
    layer_of(state, f"{last}.qkv")[2 * D] = direction
    state[f"{last}.proj.weight"][D - 1, 0] = gain


def gradient_of(model: VictimModel, image: Float[Tensor, "1 c h w"], label: int, name: str) -> Tensor:
    """Return the gradient of one parameter for an image of the adversary's own.

    Args:
        model: the model that the clients got.
        image: the image, in [0, 1].
        label: its class index.
        name: timm's name of the parameter.
    """
    return observe(model, image, torch.tensor([label]), [name]).gradients[name][0]


def shrink_head(model: VictimModel, state: dict[str, Tensor], names: Iterable[str], largest: float) -> None:
    """Scale the head so that the gradients of some parameters, which are linear in a small head, have a given size.

    Args:
        model: a copy of the model, which gets the weights.
        state: the weights, of which `head.weight` is changed.
        names: the parameters.
        largest: the largest gradient for white noise, such as a share of Adam's ε.
    """
    with torch.no_grad():
        for name, parameter in model.vit.named_parameters():
            parameter.copy_(state[name])
    noise = torch.rand(1, *model.image_shape, generator=torch.Generator().manual_seed(0)).to(model.mean)
    found = max(float(gradient_of(model, noise, 0, name).abs().max()) for name in names)
    state["head.weight"] *= largest / found


def points_on_sphere(n: int) -> Float[Tensor, "n 3"]:
    """Return n points of the unit sphere, along a spiral that spreads them evenly."""
    i = torch.arange(n, dtype=torch.float64) + 0.5
    height, turn = 1 - 2 * i / n, math.pi * (1 + math.sqrt(5)) * i
    radius = (1 - height.square()).sqrt()
    return torch.stack([radius * turn.cos(), radius * turn.sin(), height], 1)


def nearest_angle(points: Float[Tensor, "n 3"]) -> float:
    """Return the least 1 − cos of the angle of two different points of the unit sphere; 1 for a single point."""
    distances = 1 - points @ points.T  # n × n
    return float(distances.fill_diagonal_(math.inf).min()) if len(points) > 1 else 1.0


def cosine_rows(n: int) -> Float[Tensor, "n n"]:
    """Return the orthonormal matrix of the discrete cosine transform of n values; row 0 is constant."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    rows = torch.cos(math.pi * (2 * i + 1) * k / (2 * n)) * math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return rows


def patch_transform(channels: int, patch: int) -> Float[Tensor, "k k"]:
    """Return an orthonormal transform of a patch, its rows from large to small variance in photographs.

    Row 0 is the mean. Variance falls with the square of the frequency, and colour has about a tenth of that of grey.
    """
    rows, colours = cosine_rows(patch), cosine_rows(channels)
    whole = torch.kron(colours, torch.kron(rows, rows))
    u = torch.arange(patch, dtype=torch.float64)
    frequency = 1 + (u[:, None] ** 2 + u**2).flatten()
    colour = torch.tensor([1.0] + [8.0 + i for i in range(channels - 1)], dtype=torch.float64)
    return whole[(colour[:, None] * frequency).flatten().argsort(stable=True)]


@torch.no_grad()
def mlp_inputs(model: VictimModel, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b t d"]:
    """Return what the MLP of the first block reads."""
    block: Any = model.vit.blocks[0]
    z = model.before_blocks(model.embed(images))
    return block.norm2(z + block.attn(block.norm1(z)))


def noise_images(count: int, shape: Sequence[int]) -> Float[Tensor, "b c h w"]:
    """Return images of noise whose amplitudes fall with the frequency f as 1 / f, as those of photographs do.

    Args:
        count: b, the number of images.
        shape: c, h and w.
    """
    c, h, w = shape
    noise = torch.randn(count, c, h, w, generator=Generator().manual_seed(0))
    f = torch.hypot(torch.fft.fftfreq(h)[:, None], torch.fft.rfftfreq(w))  # h × (w/2 + 1), in cycles per pixel
    images = torch.fft.irfft2(torch.fft.rfft2(noise) / (f + 1 / h), s=(h, w))
    return (0.5 + _CONTRAST * (images - images.mean()) / images.std()).clamp(0, 1)


class OneLayerAttack(ABC):
    """An attack by one changed layer, the first MLP: tokens are quotients of its gradients, and each shows its slot."""

    named_only: ClassVar[bool] = True
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {
            *(Capability.KNOWS_WEIGHTS, Capability.CHOOSES_WEIGHTS, Capability.PLAIN_BLOCK),
            *(Capability.LEARNABLE_PE_GRADIENT, Capability.BATCH_SIZE_ONE),
        }
    )
    parameters: ClassVar[tuple[str, ...]] = ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc1.bias")

    @staticmethod
    @abstractmethod
    def manipulate(model: VictimModel, images: Float[Tensor, "b c h w"]) -> None:
        """Change the first MLP of a model, by quantiles over images."""

    @staticmethod
    def sums(W: Float[Tensor, "m d"], b: Float[Tensor, " m"]) -> tuple[Float[Tensor, "m d"], Float[Tensor, " m"]]:
        """Return the sums over the tokens of each neuron: the gradients of the layer's weights and biases."""
        return W, b

    @torch.no_grad()
    def choose(self, model: VictimModel, images: int, client: Client | None) -> Mapping[str, Tensor]:
        """Return the first block's weights after a change of its MLP, behind an attention that adds nothing.

        The MLP then reads the tokens that the attention reads: its LayerNorm becomes that of the attention. Quantiles
        are taken over images of noise, since photographs may be among those under attack.

        Args:
            model: a copy of the honest model, which is changed.
            images: the images of a release; it does not matter.
            client: the settings of the client; they do not matter.
        """
        block: Any = model.vit.blocks[0]
        block.attn.proj.weight.zero_()
        block.attn.proj.bias.zero_()
        block.norm2.load_state_dict(block.norm1.state_dict())
        self.manipulate(model, noise_images(_IMAGES, model.image_shape).to(model.mean))
        return {f"blocks.0.{name}": weight.detach() for name, weight in block.named_parameters()}

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition on the width with its numbers if it does not hold."""
        K, D = seen.model.vit.patch_embed.proj.weight[0].numel(), seen.model.vit.embed_dim
        return None if D > K + 1 else f"D = {D} <= K + 1 = {K + 1}"

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the image of each release."""
        images: list[Tensor] = []
        for W, b in zip(*(seen.gradients[name].double() for name in self.parameters), strict=True):
            rows, biases = self.sums(W, b)
            filled = biases.abs() > _NOTHING * biases.abs().max()
            images.append(image_of_tokens(seen.model, rows[filled] / biases[filled, None]))
        return torch.cat(images)


def image_of_tokens(model: VictimModel, tokens: Float[Tensor, "t d"]) -> Float[Tensor, "1 c h w"]:
    """Return an image of what LayerNorm makes of its embedded patches: a token's slot, and then its patch.

    A slot without a token gets the mean of the patches that are found.

    Args:
        model: the model that the clients got.
        tokens: candidates u in any order; those that are no slot's are left out.
    """
    # σ u = F x + β σ + g_n. Outside the columns of F, with the orthonormal rows Q: σ Q (u − β) = Q g_n.
    both, g, _ = normalised_tokens(model)
    F, β = both[:, :-1], both[:, -1]
    Q = torch.linalg.svd(F).U[:, F.shape[1] :].mT
    a, c = (tokens - β) @ Q.mT, g @ Q.mT  # t × (D − K) and N × (D − K)
    # The slot n of the largest cosine of a and c_n; each slot takes the token that fits best.
    cosines = torch.nn.functional.normalize(a) @ torch.nn.functional.normalize(c).mT
    best, token = cosines.max(0)
    u, σ = tokens[token] - β, (a[token] * c).sum(1) / a[token].square().sum(1)
    patches = (σ[:, None] * u - g) @ torch.linalg.pinv(F).mT
    found = best > _SAME_SLOT
    patches[~found] = patches[found].mean(0) if found.any() else 0.0
    return model.to_images(patches[None])


def has_class_token(model: VictimModel) -> bool:
    """Return whether one head reads the class token, and position embeddings are learned."""
    vit = model.vit
    one_head = vit.global_pool == "token" and not hasattr(vit, "head_dist")
    return one_head and vit.cls_token is not None and vit.pos_embed is not None


def more_than_a_step(client: Client) -> str | None:
    """Return why the update of a client of Adam does not show a gradient; None if it does."""
    return None if client.total_steps == 1 else f"reads one step of Adam, and here are {client.total_steps}"


def adam_inverted(seen: Observation, names: Iterable[str]) -> dict[str, Float[Tensor, "r ..."]]:
    """Return the gradients behind the first step of Adam, in float64; of another release, what was released.

    Adam moves a weight by −η g / (|g| + ε), and AdamW by −η λ θ as well. So g = ε r / (1 − |r|) for r, the distance in
    units of η. Of a decay that is coupled with the gradient, as Adam's is, the gradient is that with the decay: weights
    of 0 have none.

    Args:
        seen: the release, whose parameters moved by one step.
        names: the parameters whose gradients are returned.

    Warns:
        PrivlabWarning: if a gradient is so large that Adam's step does not show its size.
    """
    released = {name: seen.gradients[name].double() for name in names}
    client = seen.client
    if client is None or client.optimiser == "sgd":
        return released
    found: dict[str, Tensor] = {}
    for name, moved in released.items():
        r = moved / client.rates[0]
        if client.optimiser == "adamw":
            r = r - client.weight_decay * seen.model.vit.get_parameter(name).double()
        if float(r.abs().max()) >= 1:
            warn(f"The gradient of {name} is not small next to ε, and Adam's step does not show its size.")
        found[name] = client.eps * r / (1 - r.abs()).clamp(min=torch.finfo(r.dtype).eps)
    return found
