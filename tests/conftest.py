"""What several tests need: tiny models, photographs, and where trained weights and more photographs may be."""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer
    from torch import Tensor

    from privlab.victims import VictimModel

# Heavy packages are imported where they are used: the process that only starts the workers of `-n` reads this file too.

# No test depends on how busy a machine is. What is drawn depends on the test alone, so that a red test is red for all;
# `pytest --hypothesis-profile=explore` draws at random, to look for faults, and prints how to repeat what it finds.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("fixed")

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"

os.environ |= {"COLUMNS": "80", "LINES": "24"}  # what the workers of `-n` have: one process wraps its lines as they do
sys.path.insert(0, str(ROOT))  # the tests try the clone that they are in, also where a copy of privlab is installed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `.ci/run` take another tenth of the slow tests for each commit."""
    parser.addoption("--tenth", type=int, choices=range(10), help="run this tenth of the tests, by their names")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small inputs gain nothing from threads, which wait for one another on a busy machine; a forked child has none."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache's folder, an empty one."""
    monkeypatch.setenv("PRIVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit status, and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Return the one line that says what was wrong: nothing else may explain it, and no traceback."""
        assert self.status == 2
        lines = [line for line in self.err.splitlines() if line.startswith("Error: ")]
        assert len(lines) == 1
        assert self.err.endswith(lines[0] + "\n")
        assert self.out == ""
        return lines[0].removeprefix("Error: ")

    @property
    def json(self) -> Any:
        """Return what was printed as JSON."""
        assert self.status == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run `privlab` as its entry point does."""
    from privlab.cli import _status

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = _status([str(argument) for argument in arguments])
        outcome = Outcome(status, *capsys.readouterr())
        assert "--debug" in arguments or "Traceback" not in outcome.err
        assert "a fault of privlab" not in outcome.err
        return outcome

    return run


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """Return the path of a file or folder beside the checkout; skip where it is not there."""

    def find(name: str) -> Path:
        if not (path := SHARED / name).exists():
            pytest.skip(f"needs {name} beside the checkout")
        return path

    return find


@pytest.fixture(scope="session")
def tiny_vit() -> "Callable[..., VisionTransformer]":
    """Return a maker of small ViTs: 3 × 16 × 16 in float64, 4 × 4 patches (N = 16, K = 48), seeded weights."""
    import torch
    from timm.models.vision_transformer import VisionTransformer

    def make(seed: int = 0, **options: object) -> VisionTransformer:
        settings = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 7}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            vit = VisionTransformer(**(settings | options))
            for parameter in vit.parameters():  # timm starts biases at zero, which would hide mistakes
                torch.nn.init.normal_(parameter, std=0.2)
        return vit.double().eval()

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_vit: "Callable[..., VisionTransformer]") -> "Callable[..., VictimModel]":
    """Return a maker of small victim models with E_unk, normalised by three different means and deviations."""
    import torch

    from privlab.victims import VictimModel

    def make(seed: int = 0, *, unknown: bool = True, **options: object) -> VictimModel:
        vit = tiny_vit(seed, **options)
        unk = torch.linspace(-0.3, 0.3, vit.embed_dim).view(1, 1, -1) if unknown else None
        return VictimModel(vit, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), unk).double().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def photographs() -> "Callable[[int, int], Tensor]":
    """Return a maker of (n, side) ↦ n bundled photographs in [0, 1]."""
    import torch
    from torch import Tensor

    from privlab.images import Preprocessing, open_images

    def make(n: int, side: int) -> Tensor:
        cut = Preprocessing(size=(side, side), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic")
        return torch.stack([cut(image.pixels) for image in open_images("samples", limit=n) if image.pixels])

    return make


@pytest.fixture(scope="session")
def crops(photographs: "Callable[[int, int], Tensor]") -> "Tensor":
    """Return 384 different crops of 16 × 16 pixels of six photographs; not to be written to."""
    tiles = photographs(6, 128).unfold(2, 16, 16).unfold(3, 16, 16)
    return tiles.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


@pytest.fixture
def vit() -> "VisionTransformer":
    """Return a ViT of 16 patches, width 64 and two blocks."""
    import timm
    import torch
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng():
        torch.manual_seed(2)
        size: dict[str, Any] = {"img_size": 64, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10}
        made = timm.create_model("vit_tiny_patch16_224", **size)
    assert isinstance(made, VisionTransformer)
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other tenths, and skip the GPU tests where there is no GPU."""
    import torch

    if (tenth := config.getoption("--tenth")) is not None:
        left_out = [item for item in items if crc32(item.nodeid.encode()) % 10 != tenth]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % 10 == tenth]

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Let forked children collect no garbage of this process: what it is about may have a thread that they lack."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
