"""The search for tokens that attacks on the first block share: its options, and what it found.

Several attacks separate tokens in the same way. They inherit from `TokenSearch` the options, the call of `separate` for
the gradients of the first block's MLP, and the numbers of tokens found. `mirrored` and `tokens_of` make tokens of
public photographs, from which a search may start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.tokens.equations import Separated, separate
from privlab.attacks.tokens.spans import Mlp, Near
from privlab.base import AtLeast0, AtLeast1, Checked, Fraction, check_range, draw_for, warn
from privlab.images import photographs
from privlab.threat import Observation
from privlab.victims import PreNormBlock

FC1, FC2 = "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight"


@dataclass(frozen=True)
class TokenSearch(Checked):
    """The options of an attack that searches for tokens, and the search.

    Args:
        starts: random starts of the search for tokens in each round.
        rounds: the most rounds of the search.
        steps: steps of the Levenberg-Marquardt method in each search.
        tolerance: the relative residual below which a solution may be a token.
        sure: the relative residual below which a solution certainly is one.
        sharpen: the most steps of the Gauss-Newton method.
        inner: steps of conjugate gradients in each of them.
        seed: seed of the starts.

    Raises:
        PrivlabError: if a number is out of range.
    """

    name: ClassVar[str]
    search: ClassVar[bool] = True
    at_full: ClassVar[Mapping[str, int]] = {"starts": 48, "rounds": 120}

    starts: AtLeast1 = 24
    rounds: AtLeast1 = 60
    steps: AtLeast1 = 40
    tolerance: Fraction = 0.02
    sure: Fraction = 0.001
    sharpen: AtLeast0 = 6
    inner: AtLeast1 = 20
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_range(self.sure <= self.tolerance, f"sure of {self.name}", "at most tolerance", self.sure)

    def tokens(
        self,
        block: PreNormBlock,
        seen: Observation,
        releases: Sequence[int],
        count: int,
        near: Sequence[Near | None] = (),
        usual: Float[Tensor, "p d"] | None = None,
        most: int | None = None,
    ) -> list[Separated]:
        """Find the tokens of releases, from guesses first; none, if they are not fewer than the model's width.

        Args:
            block: the first block, in float64.
            seen: the observation, with the gradients of the block's MLP.
            releases: numbers of the releases.
            count: number of tokens in a release: those of all its images, class and register tokens included.
            near: for each release, guesses of some tokens, with what is known of each.
            usual: tokens of other images, from which half of the starts are taken.
            most: the tokens after which the search ends; None for all of them.

        Warns:
            PrivlabWarning: if `count` is not less than the width.
        """
        G1, G2 = (seen.gradients[name][releases] for name in (FC1, FC2))
        # Tokens are vectors in a space of width d: d or more of them span it all, and every u lies in their span.
        if count >= (d := G1.shape[2]):
            warn(
                f"{self.name}: {count} tokens, but gradients of width {d} tell at most {d - 1} "
                "apart. No token is found: a low score here is no evidence of privacy.",
            )
            return [Separated(G[:0].double(), G[:0, 0].double(), count) for G in G1]
        return separate(
            Mlp.of(block),
            G1,
            G2,
            count,
            [draw_for(self.seed, self.name, "starts") for _ in releases],
            starts=self.starts,
            rounds=self.rounds,
            steps=self.steps,
            tolerance=self.tolerance,
            near=Near.of(near),
            usual=usual,
            most=most,
        )

    def counts(self, tokens: Sequence[Separated]) -> dict[str, Int[Tensor, " b"]]:
        """Return how many tokens of each image were found, and how many beyond doubt, as fields of `Reconstruction`."""
        found = [len(each.u) for each in tokens]
        sure = [int((each.residual < self.sure).sum()) for each in tokens]
        device = tokens[0].u.device
        return {"tokens": torch.tensor(found, device=device), "tokens_sure": torch.tensor(sure, device=device)}


def mirrored(seen: Observation) -> Float[Tensor, "i c h w"]:
    """Return the bundled photographs that may be used, and their mirror images."""
    model = seen.model
    # Mirrored along both axes and along each of them, every photograph counts four times.
    images = photographs(model.image_shape[1:], seen.photographs, model.image_shape[0]).to(model.mean)
    return torch.cat([images, images.flip(2), images.flip(3), images.flip(2, 3)])


@torch.no_grad()
def tokens_of(block: PreNormBlock, embedded: Float[Tensor, "i t d"]) -> Float[Tensor, "i t d"]:
    """Return what the block's MLP reads of embedded images, in float64."""
    return torch.stack([block.norm2(z + block.attention(z)) for z in embedded.double()])
