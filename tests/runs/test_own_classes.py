"""Attacks and defenses of one's own, by instance: nothing is installed."""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import privlab
from privlab.attacks import ATTACKS, PatchGradient
from privlab.base import PrivlabError
from privlab.defenses import DEFENSES, GradientNoise
from privlab.evaluation import completed
from privlab.grids import Engine, specify
from privlab.release import effects_of
from privlab.runs import execute
from privlab.threat import Attack, Feed, GradientDefense

TINY: dict[str, Any] = {"weights": "random", "img_size": 32, "limit": 1, "metrics": "psnr", "progress": False}

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


@dataclass(frozen=True)
class Grey:
    """Return one grey, whatever was released."""

    level: float = 0.5

    def __call__(self, seen: Any) -> Tensor:
        """Return images."""
        count = len(next(iter(seen.gradients.values())))
        return torch.full((count, *seen.model.image_shape), self.level)


@dataclass
class HTTPGrey:
    """A dataclass that is not frozen, and so has no hash."""

    level: float = 0.5

    def __call__(self, seen: Any) -> Tensor:
        """Return images."""
        return Grey(self.level)(seen)


@dataclass(frozen=True)
class Shifted:
    """Add a constant to every gradient."""

    by: float = 0.0

    def release(self, gradients: Mapping[str, Tensor], draws: Sequence[Generator]) -> dict[str, Tensor]:
        """Return what is released."""
        return {name: g + self.by for name, g in gradients.items()}


@dataclass(frozen=True)
class UniformNoise:
    """Add uniform noise, and do not say how much."""

    width: float = 0.01

    def release(self, gradients: Mapping[str, Tensor], draws: Sequence[Generator]) -> dict[str, Tensor]:
        """Return what is released."""
        noisy = {}
        for name, g in gradients.items():
            noise = torch.stack([torch.rand(g.shape[1:], generator=draw) for draw in draws])
            noisy[name] = g + self.width * (noise.to(g) - 0.5)
        return noisy


@dataclass(frozen=True)
class Inverted:
    """Feed negatives."""

    def __call__(self, images: Tensor, patch: int, draws: Sequence[Generator]) -> Feed:
        """Return what is fed."""
        return replace(Feed.undefended(images, patch), images=1 - images)


def test_what_a_class_leaves_out_has_a_default() -> None:
    made = completed(Grey(0.25), "attack")
    assert isinstance(made, Attack)
    assert isinstance(made, Grey)
    assert (made.name, made.paper, made.requires, made.parameters) == ("grey", "", frozenset(), ("*",))
    assert (made.level, made) == (0.25, completed(Grey(0.25), "attack"))
    assert not hasattr(Grey, "name")  # the class that was given is left as it is
    other = completed(HTTPGrey(), "attack")
    assert other.name == "http-grey"
    assert len({other, completed(HTTPGrey(), "attack")}) == 2
    installed = PatchGradient(rtol=1e-6)
    assert (completed(installed, "attack"), type(completed(installed, "attack"))) == (installed, PatchGradient)


def test_the_variance_of_noise_is_measured() -> None:
    defense = completed(UniformNoise(width=0.6), "defense")
    assert isinstance(defense, GradientDefense)
    variance = defense.variance({"w": torch.zeros(2, 50, 50)})["w"]
    assert variance.mean().item() == pytest.approx(0.6**2 / 12, rel=0.02)


def test_an_attack_and_a_defense_run_by_instance(tmp_path: Path) -> None:
    run = privlab.attack(
        "vit_ti",
        settings="c",
        attacks=[Grey(), "patch-gradient"],
        defense=Shifted(by=1e-9),
        out=tmp_path / "run",
        **TINY,
    )
    frame = run.records
    assert set(frame.status) == {"ok"}
    by_attack = frame[frame.geometry == "in_place"].set_index("attack").psnr
    assert by_attack["grey"] < 30 < 100 < by_attack["patch-gradient"]
    assert set(frame.defense) == {"shifted"}
    stated = json.loads((tmp_path / "run" / "run.json").read_text())["specification"]
    assert stated["attacks"][1] == "patch-gradient"
    assert stated["attacks"][0]["class"].endswith("test_own_classes:Grey")
    assert (stated["attacks"][0]["options"]["level"], len(stated["defense"][0]["options"]["source_sha256"])) == (
        0.5,
        64,
    )


def test_a_defense_of_images_is_met_by_what_reads_it() -> None:
    run = privlab.attack("vit_ti", settings="b,c", attacks="patch-gradient", defense=Inverted(), **TINY)
    frame = run.records
    psnr = frame[(frame.attack == "patch-gradient") & (frame.geometry == "in_place")].set_index("setting").psnr
    assert psnr["c"] < 30 < 100 < psnr["b"]  # what was fed comes back, which is not the image


def test_a_run_goes_on_with_the_same_source_alone(tmp_path: Path) -> None:
    options = TINY | {"out": tmp_path / "run"}
    privlab.attack("vit_ti", settings="a", attacks=Grey(), **options)
    parts = sorted((tmp_path / "run" / "records").iterdir())
    privlab.attack("vit_ti", settings="a", attacks=Grey(), **options)
    assert sorted((tmp_path / "run" / "records").iterdir()) == parts
    with pytest.raises(PrivlabError, match="another run"):
        privlab.attack("vit_ti", settings="a", attacks=Grey(0.25), **options)

    @dataclass(frozen=True)
    class Grey2(Grey):
        name = "grey"

        def __call__(self, seen: Any) -> Tensor:
            """Return images."""
            return super().__call__(seen) / 2

    with pytest.raises(PrivlabError, match="another run"):
        privlab.attack("vit_ti", settings="a", attacks=Grey2(), **options)


@dataclass(frozen=True)
class Bad:
    """Return what is no reconstruction."""

    how: str

    def __call__(self, seen: Any) -> Tensor:
        """Return images."""
        images = Grey()(seen)
        return {"shape": images[:, :, 1:], "nan": images * torch.nan, "range": images + 1}[self.how]


@pytest.mark.parametrize(("how", "reason"), [("shape", "instead of"), ("nan", "finite"), ("range", "instead of")])
def test_what_an_own_attack_returns_is_checked(how: str, reason: str) -> None:
    frame = privlab.attack("vit_ti", settings="a", attacks=Bad(how), **TINY).records
    failed = frame[frame.attack == "bad"]
    assert set(failed.status) == {"failed"}
    assert all(reason in text for text in failed.reason)


@dataclass(frozen=True)
class Lost:
    """Read a gradient that no client releases."""

    def __call__(self, seen: Any) -> Tensor:
        """Return images."""
        return seen.gradients["no.such.weight"]


def test_an_error_of_an_own_attack_names_its_line() -> None:
    frame = privlab.attack("vit_ti", settings="a", attacks=Lost(), **TINY).records
    (reason,) = set(frame[frame.attack == "lost"].reason)
    line = inspect.getsourcelines(Lost)[1] + 6
    assert reason == f"lost: KeyError: 'no.such.weight' ({Path(__file__).name}, line {line})"


@dataclass(frozen=True)
class SmallerHead:
    """Shrink the gradient of the head's bias alone, which it finds by its name."""

    def release(self, gradients: Mapping[str, Tensor], draws: Sequence[Generator]) -> dict[str, Tensor]:
        """Return what is released."""
        return {**gradients, "head.bias": gradients["head.bias"] / 2}


def test_a_defense_may_look_for_any_parameter_by_its_name() -> None:
    frame = privlab.attack("vit_ti", attacks="patch-gradient", defense=SmallerHead(), **TINY).records
    assert set(frame.status) == {"ok"}
    model = privlab.victim("vit_ti", weights="random", img_size=32).model
    assert effects_of(model, [completed(SmallerHead(), "defense")]).gradients == "rounded"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attacks": Grey}, r"class Grey: make it, Grey\(\)"),
        ({"attacks": object()}, "dataclass"),
        ({"attacks": Grey(torch.zeros(2))}, "number, a text or a list"),  # pyright: ignore[reportArgumentType]
        ({"defense": Grey}, "class Grey"),
        ({"defense": 3}, "Found 3"),
        ({"attacks": [Grey(), Grey(0.1)]}, "twice"),
        ({"attacks": [PatchGradient(), "patch-gradient"]}, "twice"),
        ({"defense": [GradientNoise(), GradientNoise(multiplier=1.0)]}, "twice"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        privlab.attack("vit_ti", **options, **TINY)


def test_a_name_that_is_taken() -> None:
    @dataclass(frozen=True)
    class April(Grey):
        """It has the name of an installed attack."""

    with pytest.raises(PrivlabError, match="name of an installed attack"):
        privlab.attack("vit_ti", attacks=April(), **TINY)


@pytest.mark.slow
def test_workers_know_classes_of_this_process(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Local(Grey):
        """No other process can import it."""

    spec = specify("vit_ti", "a", attack=Local(), **{name: TINY[name] for name in ("weights", "img_size")}, limit=2)
    execute(spec, tmp_path / "run", batch_size=1, engine=Engine(workers=2))
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["status"], facts["workers"]) == ("finished", 2)
    records = privlab.load(tmp_path / "run").records
    assert set(records[records.attack == "local"].status) == {"ok"}
    assert records[records.attack == "local"].image.nunique() == 2


def test_every_installed_class_may_be_given_as_an_instance() -> None:
    for attack in ATTACKS.values():
        (found,) = specify("cifar_vit", attack=attack()).adversary.attacks
        assert isinstance(found, attack)
    for defense in DEFENSES.values():
        (found,) = specify("cifar_vit", defense=defense()).defense
        assert isinstance(found, defense)
