"""A server's memory does not grow with the batches that it has served."""

from pathlib import Path
from typing import Any

import pytest
import torch

BATCHES = 1000


def resident(pid: int) -> int:
    """Return the memory that a process holds, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_batches(spawn: Any, tiny: Any, tmp_path: Path) -> None:
    served = spawn("serve", state=tmp_path / "state", every=250)
    address, contract = served.line(), tiny.contract(lr=1e-6)
    features = torch.linspace(-1, 1, 17 * 32).view(1, 17, 32)
    sizes = []
    with tiny.Client(address, tiny.TOKEN).session(contract) as remote:
        for step in range(1, BATCHES + 1):
            remote.forward(step, features)
            remote.backward(step, features)
            remote.saved = remote.durable
            if step >= 260:  # once it has written a checkpoint
                sizes.append(resident(served.process.pid))
    assert max(sizes) - sizes[0] < 2**22
