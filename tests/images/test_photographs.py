"""Nothing learns from a photograph under attack: image priors, controls and public images leave out its file."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

import privlab
from privlab.attacks.gradients.patch_gradient import PatchGradient
from privlab.attacks.solvers import photograph_gradients, photograph_windows
from privlab.attacks.solvers.prior import PRIORS
from privlab.base import PrivlabError
from privlab.images import NamedImage, Preprocessing, apart_from, common, kin, open_images, photographs, sample_file
from privlab.images.sources import SAMPLES
from privlab.threat import Capability, FeatureObservation, Observation, Reconstruction
from privlab.victims import VictimModel

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")

CUT = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3, 0.9, "bicubic")
EVERY = tuple(f"samples/{name}" for name, *_ in SAMPLES)
KIN = {f"samples/{name}": {f"samples/{n}" for n, f, *_ in SAMPLES if f == file} for name, file, *_ in SAMPLES}


@pytest.fixture(scope="module")
def pictures() -> dict[str, NamedImage]:
    """Return the bundled photographs by name."""
    return {image.name: image for image in open_images("samples")}


def left_of(sha256: str, pixels: Image.Image) -> tuple[str, ...] | None:
    """Return what is left of the bundled photographs for one private image."""
    return apart_from([sha256], CUT(pixels)[None], CUT)[0]


def pixels_of(image: NamedImage) -> Image.Image:
    """Return the pixels of an image that was read."""
    assert image.pixels is not None
    return image.pixels


@pytest.mark.parametrize("name", EVERY)
def test_all_crops_of_a_private_file_are_left_out(name: str, pictures: dict[str, NamedImage]) -> None:
    others = tuple(other for other in EVERY if other not in KIN[name])
    image = pictures[name]
    assert left_of(image.sha256, pixels_of(image)) == others
    assert left_of("a copy under another hash", pixels_of(image)) == others, "by its pixels"
    assert left_of(image.sha256, Image.new("RGB", (64, 64))) == others, "by its hash"
    assert kin([image.sha256]) == {pictures[other].sha256 for other in KIN[name]}


@pytest.mark.parametrize("name", ["astronaut-0", "coffee-1"])
def test_a_file_and_its_compressed_copies_are_known(name: str, pictures: dict[str, NamedImage]) -> None:
    file = {sample: file for sample, file, *_ in SAMPLES}[name]
    (whole,) = open_images(sample_file(file))
    others = tuple(other for other in EVERY if other not in KIN[f"samples/{name}"])
    assert left_of(whole.sha256, pixels_of(whole)) == left_of("", pixels_of(whole)) == others
    assert kin([whole.sha256]) - {whole.sha256} == {pictures[other].sha256 for other in KIN[f"samples/{name}"]}
    copy = io.BytesIO()
    pixels_of(pictures[f"samples/{name}"]).save(copy, "JPEG", quality=60)
    assert left_of("", Image.open(copy)) == others


def test_other_images_leave_all() -> None:
    noise = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    flat = torch.linspace(0, 1, 21)[:, None, None, None].expand(-1, 3, 32, 32)
    for images in (noise, flat):
        assert apart_from(["x"] * len(images), images, CUT) == [None] * len(images)
    assert kin(["x"]) == {"x"}


def test_of_one_gradient_what_is_left_is_left_for_all_images() -> None:
    first, second = EVERY[:4], EVERY[2:6]
    assert common([None, None]) is None
    assert common([first, None, second]) == EVERY[2:4]
    assert common([EVERY[:1], EVERY[1:]]) == ()
    with pytest.raises(PrivlabError, match="all of them under attack"):
        photographs((32, 32), ())


@pytest.mark.parametrize("name", PRIORS)
def test_a_prior_learns_from_the_photographs_that_are_named(name: str, tiny_model: Callable[..., VictimModel]) -> None:
    """Nothing of the others is in it: it is that of a world which has no others; with all, it is what it was."""
    model = tiny_model()
    every, some = photograph_windows(model, name), photograph_windows(model, name, EVERY[:3])
    for bank, same in zip(every.filters, photograph_windows(model, name, EVERY).filters, strict=True):
        assert torch.equal(bank, same)
    assert any(not torch.equal(*banks) for banks in zip(every.filters, some.filters, strict=True))
    std, images = model.std.double().flatten(), photographs(model.image_shape[1:])[:3]
    assert len(images) == 3
    steps = torch.cat([images.diff(dim=dim).transpose(0, 1).flatten(1) for dim in (3, 2)], 1)
    Γ = (steps @ steps.mT / steps.shape[1] + 1e-5 * torch.eye(3, dtype=torch.float64)) / (std[:, None] * std)
    assert_close(photograph_gradients(model, EVERY[:3]), Γ, rtol=1e-12, atol=1e-12)


SEEN: list[Observation | FeatureObservation] = []
"""What the attacks below were called with."""


@dataclass(frozen=True)
class Watching(PatchGradient):
    """An attack that keeps what it is called with."""

    name: ClassVar[str] = "watching"

    def __call__(self, seen: Observation) -> Tensor:
        """Keep it."""
        SEEN.append(seen)
        return super().__call__(seen)


@dataclass(frozen=True)
class Noting:
    """The same, of features."""

    name: ClassVar[str] = "noting"
    paper: ClassVar[str] = "a test"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.RELEASED_FEATURES})

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Keep it."""
        SEEN.append(seen)
        return Reconstruction(torch.full((len(seen.features), *seen.model.image_shape), 0.5))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Any], pd.DataFrame]]:
    """Attack with one of the above; return what it saw, and the records."""
    monkeypatch.setitem(privlab.attacks.ATTACKS, "watching", Watching)
    monkeypatch.setitem(privlab.attacks.ATTACKS, "noting", Noting)

    def run(attack: str, **options: Any) -> tuple[list[Any], pd.DataFrame]:
        SEEN.clear()
        given = {"weights": "random", "img_size": 32, "metrics": "psnr", "attacks": attack} | options
        records = privlab.attack("vit_ti", settings="a", **given).records
        assert (records.status == "ok").all()
        return list(SEEN), records

    return run


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, str]:
    """Return the files of two images that are no bundled photographs."""
    paths = (tmp_path / "one.png", tmp_path / "two.png")
    for i, path in enumerate(paths):
        pixels = torch.randint(256, (40, 40, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(path)
    return str(paths[0]), str(paths[1])


def test_each_photograph_is_attacked_by_what_the_others_tell(watch: Callable[..., Any]) -> None:
    seen, records = watch("watching", limit=10, batch_size=10)
    left = [set(EVERY) - set(each.photographs) for each in seen]
    assert left == [KIN[name] for name in EVERY[:9]], "the tenth is of the first one's file, and goes with it"
    assert [len(each.gradients["pos_embed"]) for each in seen] == [2, *[1] * 8]
    assert (records[records.attack == "watching"].psnr > 60).all(), "each is held against its own image"


def test_an_attack_under_one_key_gets_all_releases_and_what_is_left_for_all(
    watch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watching, "one_key", True, raising=False)
    (seen,), records = watch("watching", limit=10)
    assert len(seen.gradients["pos_embed"]) == 10, "whatever the device attacks at a time"
    assert set(EVERY) - set(seen.photographs) == frozenset().union(*(KIN[name] for name in EVERY[:10]))
    assert (records[records.attack == "watching"].psnr > 60).all()


def test_several_images_in_one_gradient_leave_what_none_of_them_is(watch: Callable[..., Any]) -> None:
    options = {"gradient_batch": 2, "limit": 4, "block": "stock", "force": True}
    seen, _ = watch("watching", **options)
    assert [set(EVERY) - set(each.photographs) for each in seen] == [
        KIN[EVERY[0]] | KIN[EVERY[1]],
        KIN[EVERY[2]] | KIN[EVERY[3]],
    ]


def test_images_of_ones_own_are_attacked_together_as_ever(watch: Callable[..., Any], own: tuple[str, str]) -> None:
    (seen,), _ = watch("watching", images=own)
    assert seen.photographs is None
    assert len(seen.gradients["pos_embed"]) == 2


def test_public_images_and_controls_leave_out_the_private_file(
    watch: Callable[..., Any], own: tuple[str, str], pictures: dict[str, NamedImage]
) -> None:
    (seen,), records = watch("noting", limit=1, release="features", client_batch=1)
    assert len(seen.public) == len(EVERY) - 2
    (every,), _ = watch("noting", images=own, release="features")
    assert len(every.public) == len(EVERY)
    kept = [i for i, name in enumerate(EVERY) if name not in KIN[EVERY[0]]]
    assert torch.equal(seen.public, every.public[kept])
    cut = privlab.victims.named.victim("vit_ti", weights="random", img_size=32).preprocessing
    private = cut(pixels_of(pictures[EVERY[0]]))
    mse = float((seen.public.mean(0) - private).double().square().mean())
    psnr = records[records.attack == "control:mean"].psnr.iloc[0]
    assert psnr == pytest.approx(-10 * torch.tensor(mse).log10().item(), abs=1e-3)
