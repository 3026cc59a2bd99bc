"""What attacks of a dishonest server share: weights that pass tokens on unchanged, and Adam's first step, inverted."""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import warn
from privlab.threat import Client, Observation
from privlab.victims import VictimModel


def pass_through(model: VictimModel) -> dict[str, Tensor]:
    """Return zeros for all parameters of a ViT in float64, and ones for the scales of LayerNorm and LayerScale.

    Attention and MLPs then add nothing to the tokens.
    """
    state = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.vit.named_parameters()}
    for name, weight in state.items():
        if name.endswith((".gamma", "norm.weight", "norm1.weight", "norm2.weight")):
            weight += 1
    return state


def cosine_rows(n: int) -> Float[Tensor, "n n"]:
    """Return the orthonormal matrix of the discrete cosine transform of n values; row 0 is constant."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    rows = torch.cos(math.pi * (2 * i + 1) * k / (2 * n)) * math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return rows


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
