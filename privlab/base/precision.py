"""Computation in the precision of the tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["full_precision"]


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
