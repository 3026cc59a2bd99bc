"""What several tests need: tiny models, photographs, and where trained weights and more photographs may be."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from privlab.images import Preprocessing, open_images
from privlab.victims import VictimModel

settings.register_profile("untimed", deadline=None)  # no test depends on how busy a machine is
settings.load_profile("untimed")

SHARED = Path(__file__).parents[1].parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """Return the path of a file or folder beside the checkout; skip where it is not there."""

    def find(name: str) -> Path:
        if not (path := SHARED / name).exists():
            pytest.skip(f"needs {name} beside the checkout")
        return path

    return find


@pytest.fixture(scope="session")
def tiny_vit() -> Callable[..., VisionTransformer]:
    """Return a maker of small ViTs: 3 × 16 × 16 in float64, 4 × 4 patches (N = 16, K = 48), seeded weights."""

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
def tiny_model(tiny_vit: Callable[..., VisionTransformer]) -> Callable[..., VictimModel]:
    """Return a maker of small victim models with E_unk, normalised by three different means and deviations."""

    def make(seed: int = 0, *, unknown: bool = True, **options: object) -> VictimModel:
        vit = tiny_vit(seed, **options)
        unk = torch.linspace(-0.3, 0.3, vit.embed_dim).view(1, 1, -1) if unknown else None
        return VictimModel(vit, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), unk).double().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def photographs() -> Callable[[int, int], Tensor]:
    """Return a maker of (n, side) ↦ n bundled photographs in [0, 1]."""

    def make(n: int, side: int) -> Tensor:
        cut = Preprocessing(size=(side, side), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic")
        return torch.stack([cut(picture.pixels) for picture in open_images("samples", limit=n) if picture.pixels])

    return make


@pytest.fixture(scope="session")
def crops(photographs: Callable[[int, int], Tensor]) -> Tensor:
    """Return 384 different crops of 16 × 16 pixels of six photographs; not to be written to."""
    tiles = photographs(6, 128).unfold(2, 16, 16).unfold(3, 16, 16)
    return tiles.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the GPU tests where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
