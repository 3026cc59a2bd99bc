"""The command line run in this process on tiny inputs, without a network and without anybody's caches."""

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from privlab import capture_update
from privlab.images import open_images
from privlab.release import Recorder
from privlab.release.capture import capture
from privlab.victims import save, victim

TINY = ("--model", "vit_ti", "--weights", "random", "--img-size", "32", "--no-strips")
SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.05}
STATED = tuple(w for name, value in {**SGD, "steps": 5}.items() for w in ("--set", f"client.{name}={value}"))


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = str(tmp_path_factory.mktemp("caches"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TORCH_HOME", empty)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", empty)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def attack(cli: Callable[..., Any], photos: Path, tmp_path: Path) -> Callable[..., Any]:
    """Run `privlab attack` on the photos with a tiny random victim; later options win."""

    def run(*arguments: object) -> Any:
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


@pytest.fixture
def weights(state: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """Return a file with the client's weights: ViT-Ti at 32 pixels with ten classes."""
    save(state, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


@pytest.fixture
def step(state: dict[str, torch.Tensor], tmp_path: Path, photos: Path) -> Callable[..., Path]:
    """Take a training step of plain PyTorch on the first photo, or on noise too, and return the captured file.

    `preprocess` is the client's own; with an `optimiser`, what it adds to the weights is captured as the gradient.
    """

    def take(
        labels: tuple[int, ...] = (7,),
        batch_size: int | None = None,
        hash_weights: bool = True,
        preprocess: Callable[[Image.Image], torch.Tensor] | None = None,
        optimiser: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> Path:
        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        vit.load_state_dict(state)
        assert isinstance(vit, VisionTransformer)
        pixels = next(iter(open_images(photos / "a.png"))).pixels
        assert pixels is not None
        x = (preprocess or victim(vit).preprocessing)(pixels)[None]
        draw = torch.Generator().manual_seed(0)
        x = torch.cat([x, torch.rand(len(labels) - 1, *x.shape[1:], generator=draw)])
        loss = F.cross_entropy(vit((x - 0.5) / 0.5), torch.tensor(labels))
        loss.backward()
        if optimiser is not None:
            optimiser(vit.parameters()).step()
            for name, parameter in vit.named_parameters():
                parameter.grad = parameter.detach() - state[name]
            vit.load_state_dict(state)
        path = tmp_path / "update.safetensors"
        capture(vit, path, batch_size=batch_size or len(labels), hash_weights=hash_weights)
        return path

    return take


@pytest.fixture
def audit(cli: Callable[..., Any], weights: Path, tmp_path: Path) -> Callable[..., Any]:
    """Audit a file with the client's model; later options win."""

    def run(path: Path, *arguments: object) -> Any:
        base = ("--model", "vit_ti", "--weights", weights, "--img-size", "32", "--out", tmp_path / "audit")
        return cli("audit", "gradients", path, *base, *arguments)

    return run


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Return a recording of two training steps and an inference of a tiny victim, rows permuted."""
    with pytest.warns(UserWarning, match="RANDOM"):
        model = victim("vit_ti", weights="random", img_size=64).model
    draw = torch.Generator().manual_seed(0)
    session = Recorder(tmp_path / "recorded", {"model": "vit_ti"}, lambda line: None).session("alice", {})
    for step in (1, 2):
        tokens = model.embed(torch.rand(3, 3, 64, 64, generator=draw))
        session.step(step, tokens[:, torch.randperm(17, generator=draw)], None)
    session.inference(model.embed(torch.rand(2, 3, 64, 64, generator=draw)))
    return tmp_path / "recorded"


@pytest.fixture(scope="session")
def rounds() -> dict[str, tuple[Path, Path]]:
    """Return the files of those trainings that several tests ask for, by their settings; not to be written to."""
    return {}


@pytest.fixture
def trained(
    state: dict[str, torch.Tensor],
    photos: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    rounds: dict[str, tuple[Path, Path]],
) -> Callable[..., tuple[Path, Path]]:
    """Return files of the weights before and after a training of plain PyTorch on the first photo, of label 7."""

    def train(
        steps: int = 5,
        images: int = 1,
        mean: Any = 0.5,
        std: Any = 0.5,
        target: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[Path, Path]:
        settings = repr((steps, images, mean, std, target, sorted(options.items())))
        if settings not in rounds:
            folder = tmp_path_factory.mktemp("round")
            rounds[settings] = train_in(folder, steps, images, mean, std, target, options)
        (tmp_path / "round").mkdir(exist_ok=True)
        before, after = (shutil.copy(path, tmp_path / "round") for path in rounds[settings])
        return Path(before), Path(after)

    def train_in(
        folder: Path, steps: int, images: int, mean: Any, std: Any, target: torch.Tensor | None, options: dict[str, Any]
    ) -> tuple[Path, Path]:
        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        assert isinstance(vit, VisionTransformer)
        vit.load_state_dict(state)
        pixels = next(iter(open_images(photos / "a.png"))).pixels
        assert pixels is not None
        x = victim(vit).preprocessing(pixels)[None]
        x = torch.cat([x, torch.rand(images - 1, *x.shape[1:], generator=torch.Generator().manual_seed(0))])
        optimiser = torch.optim.SGD(vit.parameters(), **(SGD | options))
        for _ in range(steps):
            optimiser.zero_grad()
            labels = torch.tensor([7, 2][:images]) if target is None else target
            F.cross_entropy(vit.eval()((x - mean) / std), labels).backward()
            optimiser.step()
        return capture_update(state, vit, folder)

    return train


@pytest.fixture
def audit_update(cli: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Audit a pair of files with the client's model and the settings that it states; later options win."""

    def run(files: tuple[Path, Path], *arguments: object, stated: tuple[str, ...] = STATED) -> Any:
        base = ("--model", "vit_ti", "--img-size", "32", "--client", "sgd", *stated, "--out", tmp_path / "audit")
        return cli("audit", "update", *files, *base, *arguments)

    return run
