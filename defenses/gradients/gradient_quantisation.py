"""`gradient-quantisation`: the gradient is released in fewer bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Generator

from privlab.base import Checked, int8_step, to_int8
from privlab.threat import Effects, Gradients

_FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class GradientQuantisation(Checked):
    """Release the gradient rounded to `dtype`, stored in the precision that it had.

    Idea: The client rounds its gradient to fewer bits. The rounding error is bounded, and the adversary knows the
    bound. An attack that expects exact equations suffers from it where the system is ill conditioned.

    Steps: gradient g → round to dtype

    Fails if: the system of equations is well conditioned: the error is bounded, so that it still gives the image. It
    gives no guarantee.

    Cost: It changes what the server trains with, and may slow training down.

    Studies: gradients

    Args:
        dtype: bf16 or fp16; or int8, s · round(g/s) with s = max |g| / 127 for each parameter of each image. fp16 turns
            magnitudes below 2⁻²⁵ into zero, and magnitudes above 65504 into 65504.

    Source: 8-bit gradients after QSGD (Alistarh et al., NeurIPS 2017), rounded to nearest; half precision as a defense,
    Deep Leakage from Gradients (Zhu et al., NeurIPS 2019), Section 5.1. [@alistarh2017qsgd; @zhu2019dlg]
    """

    name: ClassVar[str] = "gradient-quantisation"
    paper: ClassVar[str] = "after QSGD (Alistarh et al. 2017); DLG (Zhu et al. 2019), Section 5.1"
    order: ClassVar[int] = 140

    acts_as: ClassVar[Effects] = Effects(gradients="rounded")

    dtype: Annotated[str, ("int8", *_FLOATS)] = "int8"

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return the rounded gradients."""
        if self.dtype == "int8":
            return {name: to_int8(g) for name, g in gradients.items()}
        kind = _FLOATS[self.dtype]
        most = torch.finfo(kind).max
        return {name: g.clamp(-most, most).to(kind).to(g) for name, g in gradients.items()}

    def variance(self, released: Gradients) -> Gradients:
        """Return s²/12; s is the distance between neighbouring numbers of the type."""
        if self.dtype == "int8":  # rounding keeps the largest entry, so the released gradient has the same step
            return {name: (int8_step(g).square() / 12).expand_as(g) for name, g in released.items()}
        kind = torch.finfo(_FLOATS[self.dtype])
        smallest = kind.tiny * kind.eps
        return {
            name: (torch.exp2(g.abs().clamp(min=kind.tiny).log2().floor()) * kind.eps).clamp(min=smallest).square() / 12
            for name, g in released.items()
        }
