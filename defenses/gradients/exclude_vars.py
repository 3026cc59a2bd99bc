"""`exclude-vars`: NVFlare's filter that leaves whole parameters out of what is sent."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import PrivlabError
from privlab.threat import Effects

__all__ = ["ExcludeVars"]


@dataclass(frozen=True)
class ExcludeVars:
    r"""Release the gradients or updates of those parameters alone in whose names `pattern` is not found.

    NVFlare takes a regular expression, or a list of names; a list is `^(name|name)$` here. Its default leaves nothing
    out.

    Args:
        pattern: a regular expression that is looked for in timm's parameter names, such as `pos_embed` or `^head\.`;
            "" leaves nothing out.

    Source: NVFlare 2.9 (Apache-2.0), nvflare/app_common/filters/exclude_vars.py, with its default.
    """

    name: ClassVar[str] = "exclude-vars"
    paper: ClassVar[str] = "NVFlare's ExcludeVars"

    acts_as: ClassVar[Effects] = Effects()

    pattern: str = ""

    def __post_init__(self) -> None:
        """Raise PrivlabError if the pattern is no regular expression."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise PrivlabError(
                f"pattern of exclude-vars must be a regular expression. Found '{self.pattern}': {error}."
            ) from None

    def withholds(self, names: Collection[str]) -> frozenset[str]:
        """Return those of the names that are not released."""
        return frozenset(name for name in names if self.pattern and re.search(self.pattern, name))

    def release(
        self, gradients: Mapping[str, Float[Tensor, "b ..."]], draws: Sequence[Generator]
    ) -> dict[str, Float[Tensor, "b ..."]]:
        """Return the gradients or updates that are not excluded, as they are."""
        return {name: g for name, g in gradients.items() if name not in self.withholds(gradients)}

    def variance(self, released: Mapping[str, Float[Tensor, "b ..."]]) -> dict[str, Float[Tensor, "b ..."]]:
        """Return 0: what is released is exact."""
        return {name: torch.zeros_like(g) for name, g in released.items()}
