"""Every metric with tensors of a card, those of trained networks among them; and re-assembly."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from privlab.metrics import METRICS, load_embedding, load_lpips, psnr_region, score
from privlab.metrics.lpips_backbones import LPIPS_BACKBONES
from privlab.reassembly import (
    REASSEMBLIES,
    Borders,
    ByMp3,
    DropPosNetwork,
    Mp3Network,
    load_predictor,
    save_predictor,
    tiles,
)
from privlab.victims import VictimModel

Off = Callable[[Any], Any]
Out = Callable[[], AbstractContextManager[Any]]
TRUNKS = {"alex": "alexnet", "vgg": "vgg16", "squeeze": "squeezenet1_1"}
EMBEDDING = "test_vit"


@pytest.fixture
def pairs(photographs: Callable[[int, int], Tensor], card: Any) -> tuple[Tensor, Tensor]:
    """Return three photographs of 64 × 64 pixels, and reconstructions of them, on the CPU."""
    images = photographs(3, 64).double()
    return (images + 0.1 * images.flip(0)).clamp(0, 1), images


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with random backbones and a random embedding: which device they compute on is of interest."""
    folder, draw = tmp_path_factory.mktemp("weights"), Generator().manual_seed(0)

    def random(module: nn.Module, part: str = "") -> dict[str, Tensor]:
        shapes = {name: tensor.shape for name, tensor in module.state_dict().items() if name.startswith(part)}
        return {name: 0.05 * torch.randn(shape, generator=draw, device="cpu") for name, shape in shapes.items()}

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for net, trunk in TRUNKS.items():
            prefix = LPIPS_BACKBONES[net].prefix
            save_file(random(getattr(torchvision.models, trunk)(), "features"), folder / f"{prefix}.safetensors")
        save_file(random(timm.create_model(EMBEDDING)), folder / "embedding.safetensors")
    return folder


def learned_on(device: torch.device, planted: Path) -> dict[str, Any]:
    """Return the metrics of trained networks, on a device."""
    learned: dict[str, Any] = {f"lpips_{net}": load_lpips(net, planted, device) for net in TRUNKS}
    return learned | {"f_sim": load_embedding(f"timm:{EMBEDDING}@{planted / 'embedding.safetensors'}", device)}


def scored(x: Tensor, y: Tensor, learned: dict[str, Any]) -> dict[str, Tensor]:
    """Return every metric of this package, and that of a region."""
    return score(x, y, [*METRICS], learned) | {"psnr_region": psnr_region(x, y, y.mean(1) > 0.5)}


@pytest.mark.slow
def test_every_metric_scores_on_the_card_as_on_the_cpu(
    planted: Path, pairs: tuple[Tensor, Tensor], card: Any, off: Off, no_card: Out
) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        with no_card():
            wanted = scored(*pairs, learned_on(torch.device("cpu"), planted))
        x, y = (images.to("cuda:0") for images in pairs)
        learned = learned_on(torch.device("cuda:0"), planted)
        before = card.waits.copy()
        found = scored(x, y, learned)
    assert found.keys() == wanted.keys() == {*METRICS, "psnr_region"}
    assert [name for name, values in found.items() if not values.is_cuda] == []
    assert all(wanted[name].unique().numel() == 3 for name in wanted)  # no metric is blind to these images
    waits, checked = card.waits - before, ("item", "privlab/metrics/formulas.py:of")
    assert {place: n for place, n in waits.items() if place != checked} == {}
    assert waits[checked] <= 10  # the range of either image: for the formulas, each LPIPS and the region
    for name, values in found.items():  # all images at once on a card, a few at a time on a CPU
        torch.testing.assert_close(off(values), wanted[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def predictors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return files of small, untrained predictors."""
    folder, files = tmp_path_factory.mktemp("predictors"), {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=2, num_classes=3)
        model = VictimModel(vit.eval(), (0.5,) * 3, (0.25,) * 3).requires_grad_(False)
        for made in (Mp3Network(model), DropPosNetwork(model, width=32, depth=1, heads=2)):
            files[made.name] = str(folder / f"{made.name}.safetensors")
            save_predictor(made, Path(files[made.name]))
    return files


def test_a_predictor_that_is_shared_is_not_moved(
    predictors: dict[str, str], photographs: Callable[[int, int], Tensor], card: Any
) -> None:
    patches, known = tiles(photographs(1, 16), 4).to("cuda:0"), torch.zeros(1, 16, dtype=torch.bool, device="cuda:0")
    ByMp3(predictors["mp3"], borders=False)(patches, (4, 4), known)
    shared = load_predictor(Path(predictors["mp3"]))
    assert {parameter.device.type for parameter in shared.parameters()} == {"cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REASSEMBLIES.values(), ids=list(REASSEMBLIES))
@pytest.mark.parametrize("anchored", [True, False])
def test_reassembly_returns_the_same_order(
    predictors: dict[str, str],
    photographs: Callable[[int, int], Tensor],
    card: Any,
    off: Off,
    no_card: Out,
    kind: Any,
    anchored: bool,
) -> None:
    patches = tiles(photographs(2, 16), 4)[:, torch.randperm(16, generator=Generator().manual_seed(1))]
    known = torch.zeros(2, 16, dtype=torch.bool)
    known[:, :4] = anchored
    for solver in (
        [kind()] if kind is Borders else [kind(predictors[kind.name], borders=each) for each in (True, False)]
    ):
        with no_card(), sdpa_kernel(SDPBackend.MATH):
            wanted = solver(patches, (4, 4), known)
        with sdpa_kernel(SDPBackend.MATH):
            found = solver(patches.to("cuda:0"), (4, 4), known.to("cuda:0"))
        assert found.is_cuda
        assert torch.equal(off(found), wanted)
