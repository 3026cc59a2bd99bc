"""The command line run in this process on tiny inputs, without a network and without anybody's caches."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image

from privlab.cli import _status

TINY = ("--model", "vit_ti", "--weights", "random", "--img-size", "32", "--no-strips")


@dataclass(frozen=True)
class Result:
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


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Inputs as small as these gain nothing from threads, which wait for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = str(tmp_path_factory.mktemp("caches"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TORCH_HOME", empty)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", empty)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run `privlab` as its entry point does."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        status = _status([str(argument) for argument in arguments])
        result = Result(status, *capsys.readouterr())
        assert "--debug" in arguments or "Traceback" not in result.err
        assert "a fault of privlab" not in result.err
        return result

    return run


@pytest.fixture
def attack(cli: Callable[..., Result], photos: Path, tmp_path: Path) -> Callable[..., Result]:
    """Run `privlab attack` on the photos with a tiny random victim; later options win."""

    def run(*arguments: object) -> Result:
        images = () if "--images" in arguments else ("--images", photos)
        return cli("attack", *TINY, *images, "--out", tmp_path / "run", *arguments)

    return run


@pytest.fixture
def records(tmp_path: Path) -> Callable[..., pd.DataFrame]:
    """Read the records of a run as its user would."""
    return lambda path=tmp_path / "run": pd.read_parquet(path / "records")


@pytest.fixture
def picture(tmp_path: Path) -> Callable[..., Path]:
    """Write a picture of coloured noise, different for each name."""

    def save(name: str, mode: str = "RGB", size: tuple[int, int] = (40, 36), **options: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(zlib.crc32(path.name.encode()))
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize(size, Image.Resampling.BICUBIC).convert(mode).save(path, **options)
        return path

    return save


@pytest.fixture
def photos(picture: Callable[..., Path]) -> Path:
    """Return a folder of three pictures."""
    paths = [picture(f"photos/{name}.png") for name in "abc"]
    return paths[0].parent


@pytest.fixture(scope="session")
def state() -> dict[str, torch.Tensor]:
    """Return weights of the tiny victim, in timm's layout; not to be written to."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10).state_dict()
