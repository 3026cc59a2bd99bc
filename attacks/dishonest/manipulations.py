"""Manipulations of one layer that are simple or hide, and what a server reads from the gradient of weights it chose."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.attacks.dishonest.imprint_bins import bins
from privlab.attacks.dishonest.layout import STEEP, mlp_inputs
from privlab.attacks.dishonest.trap_weights import traps
from privlab.base import PrivlabError
from privlab.victims import VictimModel

_NOTHING = 1e-9
"""The share of the largest gradient of a bias below which a row is lost in rounding."""

Manipulation: TypeAlias = Callable[[VictimModel, Float[Tensor, "b c h w"]], None]
"""Changes a model, by quantiles over public images where it has thresholds."""


@torch.no_grad()
def pairs(model: VictimModel, images: Float[Tensor, "b c h w"], noise: float = 0.0, steep: float = 1.0) -> None:
    """Let each two neurons of the first MLP be a bin of a hundredth, by a projection that no others have.

    Args:
        model: the model, which is changed.
        images: public images, by whose quantiles the bins are made.
        noise: the size of the difference of the two directions, by that of the direction; it hides that they are equal.
        steep: the factor of weights and bias, > 0.
    """
    mlp: Any = model.vit.blocks[0].mlp
    draw = Generator().manual_seed(1)
    directions = torch.randn(len(mlp.fc1.bias) // 2, mlp.fc1.weight.shape[1], generator=draw).to(mlp.fc1.weight)
    levels = mlp_inputs(model, images)[:, 1:].flatten(0, 1) @ directions.mT
    at = (torch.rand(len(directions), generator=draw) * 0.98).to(levels)
    edges = [torch.stack([each.quantile(q) for each, q in zip(levels.T, at + d, strict=True)]) for d in (0, 0.01)]
    others = directions + noise * torch.randn(directions.shape, generator=draw).to(directions)
    mlp.fc1.weight.copy_(steep * torch.stack([directions, others], 1).flatten(0, 1))
    mlp.fc1.bias.copy_(-steep * torch.stack(edges, 1).flatten())
    mlp.fc2.weight.copy_(mlp.fc2.weight[:, ::2].repeat_interleave(2, 1) / steep)


@torch.no_grad()
def places(model: VictimModel, images: Float[Tensor, "b c h w"]) -> None:
    """Let the position embedding give each token a channel, by which one neuron reads it alone."""
    vit, N = model.vit, min(model.vit.patch_embed.num_patches, model.vit.embed_dim)
    assert vit.pos_embed is not None
    vit.pos_embed[:, -N:] = 100 * torch.eye(N, vit.embed_dim)
    block: Any = vit.blocks[0]
    mlp = block.mlp
    mlp.fc1.weight[:N] = STEEP * torch.eye(N, vit.embed_dim)
    mlp.fc1.bias[:N] = -STEEP
    block.attn.proj.weight.zero_()


@torch.no_grad()
def faint(model: VictimModel, images: Float[Tensor, "b c h w"]) -> None:
    """Shrink the classifier, so that Adam's ε shows the size of a gradient."""
    model.vit.get_parameter("head.weight").mul_(1e-8)


MANIPULATIONS: Mapping[str, Manipulation] = {each.__name__: each for each in (bins, traps, places, faint)}
"""Simple manipulations by name; those of attacks that come with privlab are found in the registry."""


def mixed(manipulation: Manipulation, strength: float) -> Manipulation:
    """Return a manipulation that moves the weights only a part of the way: θ + s (θ′ − θ)."""

    @torch.no_grad()
    def mix(model: VictimModel, images: Float[Tensor, "b c h w"]) -> None:
        twin = copy.deepcopy(model)
        manipulation(twin, images)
        for name, parameter in model.vit.named_parameters():
            parameter.lerp_(twin.vit.get_parameter(name), strength)

    return mix


_HIDDEN: Mapping[str, Callable[[str, float], Manipulation]] = {
    "mixed": lambda name, x: mixed(MANIPULATIONS[name], x),
    "neurons": lambda name, x: partial(bins, neurons=round(x)),
    "steep": lambda name, x: partial(bins, steep=x),
    "noise": lambda name, x: partial(pairs, noise=x, steep=STEEP if name == "steep-pairs" else 1.0),
}
"""The ways to hide, by the word between the name of a manipulation and its number."""


def manipulation_of(name: str) -> Manipulation:
    """Return a manipulation by its name, as "bins", or by name, way to hide and number, as "bins mixed 0.03".

    Raises:
        PrivlabError: if there is no such manipulation.
    """
    match name.split():
        case [head] if head in MANIPULATIONS:
            return MANIPULATIONS[head]
        case [head, way, x] if way in _HIDDEN and (head in MANIPULATIONS or head.endswith("pairs")):
            return _HIDDEN[way](head, float(x))
        case _:
            raise PrivlabError(f"No manipulation is called '{name}'. Name one of {', '.join(MANIPULATIONS)}.")


def reading_errors(gradient: Float[Tensor, "o i"], inputs: Float[Tensor, "n i"]) -> Float[Tensor, " n"]:
    """Return how far the best row of a layer's gradient, or difference of adjacent rows, is from each token.

    The distance of x from the line of a row, by ‖x‖, is sin ∠(x, row). The server knows the rows, and not the tokens:
    that the best row of each is taken is a bound on what it reads by rows.

    Args:
        gradient: ∂ℓ/∂W, of all images together.
        inputs: the tokens x that the layer read.
    """
    rows = torch.cat([gradient, gradient.diff(dim=0)]).double()
    cosines = (F.normalize(inputs.double()) @ F.normalize(rows).mT).abs().amax(1)
    return (1 - cosines.square()).clamp(min=0).sqrt()


def quotient_errors(
    gradients: tuple[Float[Tensor, "o i"], Float[Tensor, " o"]],
    inputs: Float[Tensor, "b t i"],
    known: Float[Tensor, "t i"],
) -> Float[Tensor, "b t"]:
    """Return how far the best quotient of a layer's gradients is from each token, by how little the server knew of it.

    A server divides a row of ∂ℓ/∂W by that of ∂ℓ/∂b, or the difference of two adjacent rows by that of the biases. The
    distance to x is measured by ‖x − μ_n‖, where μ_n is the token that slot n has on average: where position embeddings
    outweigh the patches, a row that has the direction of a token says nothing of its patch.

    Args:
        gradients: ∂ℓ/∂W and ∂ℓ/∂b, of all b images together.
        inputs: the tokens x that the layer read.
        known: μ, over images of the server's own.
    """
    rows, biases = (torch.cat([each, each.diff(dim=0)]).double() for each in gradients)
    used = biases.abs() > _NOTHING * biases.abs().max()
    x, far = inputs.double(), (inputs - known).double().norm(dim=2)
    if not bool(used.any()):
        return torch.full_like(far, torch.inf)
    return torch.cdist(x.flatten(0, 1), rows[used] / biases[used, None]).amin(1).view_as(far) / far
