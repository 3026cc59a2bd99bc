"""Number formats: computation in the precision of the tensors, and the step of eight-bit integers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base.errors import PrivlabError


@contextmanager
def without_tf32() -> Iterator[None]:
    """Multiply float32 in float32, in all threads; one thread may enter this and another one leave it."""
    matmul, conv = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = conv


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute in the tensors' own precision: TF32 and autocast would change the released gradient, and the leak."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with without_tf32(), torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
        yield


@contextmanager
def gradients_enabled() -> Iterator[None]:
    """Let autograd record within the context, also under `torch.no_grad`.

    Raises:
        PrivlabError: under `torch.inference_mode`, whose tensors autograd cannot use.
    """
    if torch.is_inference_mode_enabled():
        raise PrivlabError(
            "Gradients cannot be computed under torch.inference_mode: leave it, or use torch.no_grad in its place."
        )
    with torch.enable_grad():
        yield


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
