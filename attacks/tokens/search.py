"""The search for tokens that attacks on the first block share: its options, and what it found."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.tokens.equations import Separated, separate
from privlab.attacks.tokens.spans import Mlp, Near
from privlab.base import PrivlabError, PrivlabWarning, draw_for
from privlab.threat import Observation
from privlab.victims import PreNormBlock

__all__ = ["FC1", "FC2", "TokenSearch"]

FC1, FC2 = "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight"


@dataclass(frozen=True)
class TokenSearch:
    """The options of an attack that searches for tokens, and the search.

    Raises:
        PrivlabError: if a number is out of range.
    """

    name: ClassVar[str]
    search: ClassVar[bool] = True
    at_full: ClassVar[Mapping[str, int]] = {"starts": 48, "rounds": 120}

    starts: int = 24
    rounds: int = 60
    steps: int = 40
    tolerance: float = 0.02
    sure: float = 0.001
    sharpen: int = 6
    inner: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        counts = (self.starts, self.rounds, self.steps, self.inner)
        if min(counts) < 1 or self.sharpen < 0 or not 0 < self.sure <= self.tolerance < 1:
            raise PrivlabError(
                f"{self.name} takes starts, rounds, steps and inner ≥ 1, sharpen ≥ 0 and 0 < sure ≤ tolerance < 1. "
                f"Found {', '.join(map(str, counts))}, {self.sharpen}, {self.sure:g} and {self.tolerance:g}."
            )

    def tokens(
        self,
        block: PreNormBlock,
        seen: Observation,
        i: int,
        count: int,
        near: Near | None = None,
        usual: Float[Tensor, "p d"] | None = None,
        most: int | None = None,
    ) -> Separated:
        """Find the tokens of one release, from guesses first; none, if they are not fewer than the model's width.

        Args:
            block: the first block, in float64.
            seen: the observation, with the gradients of the block's MLP.
            i: number of the release.
            count: number of tokens in the release: those of all its images, class and register tokens included.
            near: guesses of some tokens, with what is known of each.
            usual: tokens of other images, from which half of the starts are taken.
            most: the tokens after which the search ends; None for all of them.

        Warns:
            PrivlabWarning: if `count` is not less than the width.
        """
        G1, G2 = (seen.gradients[name][i] for name in (FC1, FC2))
        if count >= G1.shape[1]:
            warnings.warn(
                f"{self.name}: {count} tokens, but gradients of width {G1.shape[1]} tell at most {G1.shape[1] - 1} "
                "apart. No token is found: a low score here is no evidence of privacy.",
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
            near=near,
            usual=usual,
            most=most,
        )

    def counts(self, tokens: Sequence[Separated]) -> dict[str, Int[Tensor, " b"]]:
        """Return how many tokens of each image were found, and how many beyond doubt, as fields of `Reconstruction`."""
        found = [len(each.u) for each in tokens]
        sure = [int((each.residual < self.sure).sum()) for each in tokens]
        device = tokens[0].u.device
        return {"tokens": torch.tensor(found, device=device), "tokens_sure": torch.tensor(sure, device=device)}
