"""`exclude-vars`: NVFlare's filter that leaves whole parameters out of what is sent."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from privlab.base import PrivlabError
from privlab.threat import Effects, Gradients


@dataclass(frozen=True)
class ExcludeVars:
    r"""Release the gradients or updates of those parameters alone in whose names `pattern` is not found.

    Idea: The client leaves out the gradients or updates of some parameters. All others are released as they are.
    Attacks that read a missing parameter cannot run, and others can.

    Steps: all parameters → leave out those that match

    Algorithm: NVFlare takes a regular expression, or a list of names; a list is `^(name|name)$` here.

    Fails if: other parameters suffice: what it leaves in is exact, and other attacks read that.

    Cost: It changes what the server trains with, and may slow training down.

    Studies: filters

    Args:
        pattern: a regular expression that is looked for in timm's parameter names, such as `pos_embed` or `^head\.`;
            "" leaves nothing out.

    Source: NVFlare 2.9 (Apache-2.0), nvflare/app_common/filters/exclude_vars.py, with its default. [@roth2022nvflare]
    """

    name: ClassVar[str] = "exclude-vars"
    paper: ClassVar[str] = "NVFlare's ExcludeVars"
    order: ClassVar[int] = 220

    acts_as: ClassVar[Effects] = Effects()

    pattern: str = ""

    def __post_init__(self) -> None:
        """Raise PrivlabError if the pattern is not a regular expression."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise PrivlabError(
                f"pattern of exclude-vars must be a regular expression. Found '{self.pattern}': {error}."
            ) from None

    def withholds(self, names: Collection[str]) -> frozenset[str]:
        """Return those of the names that are not released."""
        return frozenset(name for name in names if self.pattern and re.search(self.pattern, name))

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return the gradients or updates that are not excluded, as they are."""
        return {name: g for name, g in gradients.items() if name not in self.withholds(gradients)}

    def variance(self, released: Gradients) -> Gradients:
        """Return 0: what is released is exact."""
        return {name: torch.zeros_like(g) for name, g in released.items()}
