"""The way of an image, and of an update, through the package: few rooms, none of them twice, and few types."""

import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import privlab
from privlab.images import Data, apart_from, open_images

ROOT = Path(__file__).parents[1]
BUDGETS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["privlab"]["lines"]
ROOMS = {room: name for name in BUDGETS for room in name.split(" + ")}
"""The room of the plan that each folder is part of: evaluation, runs, grids and stores are one pipeline."""
MOST = 6
MOST_TYPES = 8
SIDE = 32

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


class Carriers:
    """Notes which types of privlab are made with something of a private image in one of their fields.

    That is its pixels, a picture in a file's format, what was fed or released of it, or a reconstruction; and an
    object that holds any of these. Bundled photographs, which are public, do not count, nor what an attack or a metric
    computes with inside. Nor does a case, which says where its data are, or a list of names and hashes.
    """

    def __init__(self, victim: privlab.Victim) -> None:
        self.types: set[type] = set()
        photographs = [victim.preprocessing(image.pixels) for image in open_images("samples") if image.pixels]
        self.public = torch.stack(photographs)
        apart_from(["none"], self.public[:1], victim.preprocessing)  # keeps whole photographs, which are public too
        self.image_shape = victim.model.image_shape
        self.token_shape = tuple(victim.model.vit.pos_embed.shape[1:])

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Look at each object of privlab as soon as it has its fields."""
        if event != "return" or frame.f_code.co_name != "__init__":
            return
        made = frame.f_locals.get("self")
        room = type(made).__module__.split(".")[:2]
        if not is_dataclass(made) or room[0] != "privlab" or room[1] in ("attacks", "metrics"):
            return
        if any(self.shows(getattr(made, part.name, None)) for part in fields(made)):
            self.types.add(type(made))

    def shows(self, value: object) -> bool:
        """Return whether a value is something of a private image, or holds it."""
        if isinstance(value, torch.Tensor):
            if value.shape[-3:] == self.image_shape:
                images = value.reshape(-1, *self.image_shape)
                return any(not (self.public == image).flatten(1).all(1).any() for image in images)
            return tuple(value.shape[-2:]) == self.token_shape
        if isinstance(value, bytes):
            return value.startswith(b"\x89PNG")
        if isinstance(value, Mapping):
            return any(map(self.shows, value.values()))
        if isinstance(value, list | tuple):
            return any(map(self.shows, value))
        if not is_dataclass(value) or isinstance(value, type | Data):
            return False
        return type(value) in self.types and any(self.shows(getattr(value, part.name)) for part in fields(value))


SHARED_TYPES = {"Data", "NamedImage", "Batch", "Feed", "Reconstruction", "Result"}
RELEASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "gradients": ({"attacks": "patch-gradient,april", "settings": ["a", "c"]}, {"Observation"}),
    "features": (
        {"release": privlab.Features(), "attacks": "least-squares", "defense": "row-permutation"},
        {"Sent", "FeatureObservation"},
    ),
    "update": (
        {"release": privlab.Update(privlab.Client(lr=0.01)), "attacks": "patch-gradient", "settings": "a"},
        {"ClientData", "Observation"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_few_types_carry_an_image(release: str) -> None:
    """From the call to the record and the pictures; the types are named, so that another one is noticed."""
    options, own_types = RELEASES[release]
    images = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    carriers = Carriers(privlab.victim("cifar_vit"))
    sys.setprofile(carriers.profile)
    try:
        privlab.attack("cifar_vit", images, [3, 4], metrics="psnr", progress=False, **options)
    finally:
        sys.setprofile(None)
    names = {kind.__name__ for kind in carriers.types}
    assert names == SHARED_TYPES | own_types
    assert len(names) <= MOST_TYPES
