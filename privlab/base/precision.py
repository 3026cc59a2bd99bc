"""Number formats: computation in the precision of the tensors, and the step of eight-bit integers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["full_precision", "int8_step", "to_int8"]


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute in the tensors' own precision: TF32 and autocast would change the released gradient, and the leak."""
    matmul, conv = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = conv


def int8_step(x: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """Return s = max |x| / 127 of each row, in a shape that broadcasts to x.

    Rounding to multiples of s keeps the largest magnitude, so that what is rounded shows its own step.

    Args:
        x: one tensor a row.
    """
    return x.flatten(1).abs().amax(1).view(-1, *[1] * (x.ndim - 1)) / 127


def to_int8(x: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """Return s · round(x / s) with the step s of each row: 255 levels, symmetric about zero.

    Args:
        x: one tensor a row.
    """
    step = int8_step(x)
    return (x / step.where(step > 0, 1)).round() * step
