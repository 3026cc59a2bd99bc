"""Long computations: their parts on the cores of the machine, and how they say what is done."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Progress = Callable[[int, int | None], None]
"""A function that is called with the number of items that are done, and with the number of all, None if unknown."""

T = TypeVar("T")


def one_per_core(part: Callable[[int], T], count: int, device: torch.device) -> list[T]:
    """Return part(0), …, part(count − 1), computed on as many cores as torch has threads, in one thread each.

    Small matrix products gain nothing from the threads of one operation, which wait for each other. torch releases
    Python's lock within its operations, so that parts run side by side. Each of them is computed as in one thread,
    whatever the number of cores: so the results do not depend on it. On a GPU the parts follow one another.

    Args:
        part: one part of the work, which reads what the others do not write.
        count: number of parts.
        device: the device that the parts work on.
    """
    threads, learns = torch.get_num_threads(), torch.is_grad_enabled()
    if device.type != "cpu" or threads == 1:
        return [part(i) for i in range(count)]

    def begin() -> None:
        torch.set_num_threads(1)  # of this thread of Python alone, but it is also what new ones begin with
        torch.set_grad_enabled(learns)

    try:
        with ThreadPoolExecutor(min(threads, max(count, 1)), "part", begin) as pool:
            return list(pool.map(part, range(count)))
    finally:
        torch.set_num_threads(threads)
