"""`gradient-quantisation`: the gradient is released in fewer bits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import check_name, int8_step, to_int8
from privlab.threat import Effects

__all__ = ["GradientQuantisation"]

_FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class GradientQuantisation:
    """Release the gradient rounded to `dtype`, stored in the precision that it had.

    Args:
        dtype: bf16 or fp16; or int8, s · round(g/s) with s = max |g| / 127 for each parameter of each image. fp16 turns
            magnitudes below 2⁻²⁵ into zero, and magnitudes above 65504 into 65504.

    Source: 8-bit gradients after QSGD (Alistarh et al., NeurIPS 2017), rounded to nearest; half precision as a
    defense, Deep Leakage from Gradients (Zhu et al., NeurIPS 2019), Section 5.1.
    """

    name: ClassVar[str] = "gradient-quantisation"
    paper: ClassVar[str] = "after QSGD (Alistarh et al. 2017); DLG (Zhu et al. 2019), Section 5.1"

    acts_as: ClassVar[Effects] = Effects(gradients="rounded")

    dtype: str = "int8"

    def __post_init__(self) -> None:
        """Raise PrivlabError if `dtype` is unknown."""
        check_name("dtype of gradient-quantisation", self.dtype, ("int8", *_FLOATS))

    def release(
        self, gradients: Mapping[str, Float[Tensor, "b ..."]], draws: Sequence[Generator]
    ) -> dict[str, Float[Tensor, "b ..."]]:
        """Return the rounded gradients."""
        if self.dtype == "int8":
            return {name: to_int8(g) for name, g in gradients.items()}
        kind = _FLOATS[self.dtype]
        most = torch.finfo(kind).max
        return {name: g.clamp(-most, most).to(kind).to(g) for name, g in gradients.items()}

    def variance(self, released: Mapping[str, Float[Tensor, "b ..."]]) -> dict[str, Float[Tensor, "b ..."]]:
        """Return s²/12; s is the distance between neighbouring numbers of the type."""
        if self.dtype == "int8":  # rounding keeps the largest entry, so the released gradient has the same step
            return {name: (int8_step(g).square() / 12).expand_as(g) for name, g in released.items()}
        kind = torch.finfo(_FLOATS[self.dtype])
        smallest = kind.tiny * kind.eps
        return {
            name: (torch.exp2(g.abs().clamp(min=kind.tiny).log2().floor()) * kind.eps).clamp(min=smallest).square() / 12
            for name, g in released.items()
        }
