"""What is claimed of a defense's privacy, beside what its class declares: ε, and the bits of its key."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from privlab.base import PrivlabError
from privlab.defenses import DEFENSES
from privlab.threat import Draws, Stack, acts_on, defense_declarations
from privlab.victims import VictimModel

__all__ = ["check_bits", "check_epsilon", "derived_bits", "draws_nothing"]

_ROUNDING = 0.005
"""How far ε may be from the derived one, relatively, and how many bits more a card may state: it has a few digits."""


def check_bits(where: str, claimed: float, found: float | None, name: str) -> None:
    """Compare the secret bits that are claimed of a defense with those that were derived.

    Args:
        where: whose claim it is, which begins the message.
        claimed: the bits.
        found: log₂ of the number of keys; None if it is not known, and the claim is let pass.
        name: the defense's.

    Raises:
        PrivlabError: if more are claimed, by more than a rounding.
    """
    if not 0 <= claimed < math.inf:
        raise PrivlabError(f"{where}: secret_bits must be finite and at least 0. Found {claimed:g}.")
    if found is not None and claimed > found + max(0.05, _ROUNDING * found):
        raise PrivlabError(
            f"{where}: secret_bits says {claimed:g}, and '{name}' draws from keys of {found:.1f} bits. State at most "
            "that."
        )


def derived_bits(parts: Sequence[Any], model: VictimModel, together: int) -> float | None:
    """Return log₂ of the number of keys of the parts, at most; None if one of another package does not declare it.

    A defense of this package that declares no key has none: fresh noise and random masks are no secret that lasts.

    Args:
        parts: the defenses.
        model: the victim's.
        together: how many images are released together.
    """
    bits = 0.0
    for part in parts:
        declared = defense_declarations(part).secret_bits
        if declared is None and part.name not in DEFENSES:
            return None
        bits += 0.0 if declared is None else declared(model, together)
    return bits


def check_epsilon(where: str, epsilon: float, parts: Sequence[Any], model: VictimModel | None) -> None:
    """Compare the ε that is claimed of a defense with what its parts declare; what none declares is let pass.

    The ε of a stack is the least of its parts: the others act before that part, or on its release.

    Args:
        where: whose claim it is, which begins the message.
        epsilon: ε.
        parts: the defenses; none for keys, which add no noise.
        model: the victim's, on whose shapes the parts are tried; None for keys.

    Raises:
        PrivlabError: if ε is another one, or nothing is drawn.
    """
    if not 0 < epsilon < math.inf:
        raise PrivlabError(f'{where}: epsilon must be finite and above 0, or "none". Found {epsilon:g}.')
    if model is None:
        raise PrivlabError(f'{where}: epsilon says {epsilon:g}, and a key adds no noise. State "none".')
    guarantees = [declared() for part in parts if (declared := defense_declarations(part).guarantee) is not None]
    if guarantees:
        found = min(guarantees, key=lambda each: each.epsilon)
        if not math.isclose(epsilon, found.epsilon, rel_tol=_ROUNDING):
            raise PrivlabError(
                f"{where}: epsilon says {epsilon:g}, and {found.by} gives {found.epsilon:.4g} at delta = "
                f"{found.delta:g} (replace-one)."
            )
    elif all(draws_nothing(part, model) for part in parts):
        raise PrivlabError(
            f"{where}: epsilon says {epsilon:g}, and '{'+'.join(part.name for part in parts)}' releases the same "
            'whatever it draws, so that no finite epsilon holds. State "none".'
        )


def draws_nothing(part: Any, model: VictimModel) -> bool:  # noqa: ANN401
    """Return whether a defense releases the same of the same for two different draws.

    Args:
        part: the defense.
        model: the victim's, whose shapes it meets.
    """
    return torch.equal(*(_release(part, model, seed) for seed in (1, 2)))


def _release(part: Any, model: VictimModel, seed: int) -> Tensor:  # noqa: ANN401
    same = Generator().manual_seed(0)
    draws = Draws(*([Generator().manual_seed(10 * seed + i) for i in range(2)], *map(_seeded, (seed, seed))))
    if acts_on(type(part)) == "gradients":
        gradients = {name: torch.randn(2, *W.shape, generator=same) for name, W in [*model.vit.named_parameters()]}
        return torch.cat([each.flatten() for each in part.release(gradients, draws.images).values()])
    if acts_on(type(part)) == "features":
        tokens = model.vit.patch_embed.num_patches + model.vit.num_prefix_tokens
        features = torch.randn(2, tokens, model.vit.embed_dim, generator=same)
        return Stack((part,)).send(features, model.vit.num_prefix_tokens, draws).features
    images = torch.rand(2, *model.image_shape, generator=same)
    return Stack((part,)).feed(images, model.patch, draws.images, key=draws.model).images


def _seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)
