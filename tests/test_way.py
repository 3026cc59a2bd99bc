"""The way of an image, and of an update, through the rooms: short, and never back into a room that it has left."""

import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import privlab

ROOT = Path(__file__).parents[1]
BUDGETS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["privlab"]["lines"]
ROOMS = {room: name for name in BUDGETS for room in name.split(" + ")}
"""The room of the plan that each folder is part of: evaluation, runs, grids and stores are one pipeline."""
MOST = 6

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


def room_of(file: str) -> str | None:
    """Return the room of a source file; None outside the package, and for `base`, which all rooms use."""
    path = Path(file)
    if not path.is_absolute() or not path.resolve().is_relative_to(ROOT):
        return None
    parts = path.resolve().relative_to(ROOT).parts
    folder = parts[1] if parts[0] == "privlab" else parts[0]
    return None if folder == "base" else ROOMS.get(folder)


@contextmanager
def rooms_on_the_stack() -> Iterator[set[tuple[str, ...]]]:
    """Collect, for every call, the rooms through which it was reached, from the outermost to the innermost."""
    known: dict[str, str | None] = {}
    found: set[tuple[str, ...]] = set()

    def room(frame: FrameType) -> str | None:
        file = frame.f_code.co_filename
        if file not in known:
            known[file] = room_of(file)
        return known[file]

    def profile(frame: FrameType | None, event: str, _: object) -> None:
        if event != "call" or frame is None or room(frame) is None:
            return
        rooms: list[str] = []
        while frame is not None:
            if (here := room(frame)) is not None and rooms[-1:] != [here]:
                rooms.append(here)
            frame = frame.f_back
        found.add(tuple(reversed(rooms)))

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def of_image(images: torch.Tensor, tmp_path: Path) -> None:
    options: dict[str, Any] = {"attacks": "patch-gradient,april", "metrics": "psnr", "progress": False}
    privlab.attack("cifar_vit", images, [3], settings=["a", "c"], out=tmp_path / "run", **options)


def of_update(images: torch.Tensor, tmp_path: Path) -> None:
    vit = privlab.victim("cifar_vit").model.vit.requires_grad_(True)
    torch.save(vit.state_dict(), tmp_path / "before.pth")
    torch.nn.functional.cross_entropy(vit(images), torch.tensor([3])).backward()
    torch.optim.SGD(vit.parameters(), lr=0.01).step()
    torch.save(vit.state_dict(), tmp_path / "after.pth")
    files = (tmp_path / "before.pth", tmp_path / "after.pth")
    client = privlab.Client(lr=0.01, steps=1)
    privlab.audit_update(*files, model="cifar_vit", client=client, normalisation="none", out=tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("way", [of_image, of_update])
def test_it_passes_few_rooms_and_never_returns_to_one(
    way: Callable[[torch.Tensor, Path], None], photographs: Any, tmp_path: Path
) -> None:
    with rooms_on_the_stack() as found:
        way(photographs(1, 32), tmp_path)
    assert any("attacks" in rooms for rooms in found)
    assert max(len(rooms) for rooms in found) <= MOST
    assert [rooms for rooms in found if len(set(rooms)) < len(rooms)] == []
