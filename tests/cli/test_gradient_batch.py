"""Clients that release one gradient of several images: what runs, what is refused, and what the records say."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor

import privlab
from privlab.attacks import ATTACKS
from privlab.base import PrivlabWarning
from privlab.evaluation import CONTROLS, Batch, Public, Rows, plan
from privlab.grids import specify
from privlab.images import NamedImage, Others
from privlab.metrics import assign_images
from privlab.patches import patchify, unpatchify
from privlab.threat import Capability, Gradient, Observation, Reconstruction
from privlab.victims import victim

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


@dataclass(frozen=True)
class Confidant:
    """An attack that was told the images, and returns those of a release in another order."""

    name: ClassVar[str] = "confidant"
    paper: ClassVar[str] = "none"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.KNOWS_WEIGHTS})
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed",)

    secret: ClassVar[Sequence[Tensor]] = ()
    seen: ClassVar[list[tuple[int, int]]] = []

    def __call__(self, seen: Observation) -> Tensor:
        """Return the next images, backwards."""
        self.seen.append((len(seen.gradients["pos_embed"]), seen.images_per_release))
        last = sum(n for _, n in self.seen)
        return torch.stack([*self.secret[last - self.seen[-1][1] : last]]).flip(0)


@pytest.fixture
def confidant(monkeypatch: pytest.MonkeyPatch, photos: Path) -> type[Confidant]:
    monkeypatch.setitem(ATTACKS, "confidant", Confidant)
    monkeypatch.setattr(Confidant, "seen", [])
    base = victim("vit_ti", weights="random", img_size=32)
    secret = [base.preprocessing(picture.pixels) for picture in privlab.open_images(photos) if picture.pixels]
    monkeypatch.setattr(Confidant, "secret", secret)
    return Confidant


def run(photos: Path, **options: Any) -> pd.DataFrame:
    """Return the records of a tiny run."""
    return privlab.attack("vit_ti", images=photos, weights="random", img_size=32, metrics="psnr", **options).records


def test_reconstructions_are_assigned_to_the_images(confidant: type[Confidant], photos: Path) -> None:
    """In whichever order an attack returns them; the last gradient is of what is left, and its records say so."""
    frame = run(photos, attacks="confidant", settings="a", gradient_batch=2, limit=3)
    own = frame[frame.attack == "confidant"]
    assert confidant.seen == [(1, 2), (1, 1)]
    assert (own.psnr > 100).all()
    assert own[own.geometry == "in_place"].batch_images.tolist() == [2, 2, 1]
    assert own[own.geometry == "in_place"].batch.nunique() == 2
    assert {json.loads(text)["gradient_batch"] for text in frame.conditions} == {2}
    assert frame[frame.attack.isin(CONTROLS)].batch.isna().all()


@dataclass(frozen=True)
class Witness:
    """An attack that notes the zero rows of each release, and returns grey."""

    name: ClassVar[str] = "witness"
    paper: ClassVar[str] = "none"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.KNOWS_WEIGHTS})
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed", "patch_embed.proj.weight")

    seen: ClassVar[list[Tensor]] = []

    def __call__(self, seen: Observation) -> Tensor:
        """Return grey images."""
        self.seen.append((seen.gradients["pos_embed"][:, 0, 1:] == 0).all(2))
        return torch.full((len(self.seen[-1]) * seen.images_per_release, *seen.model.image_shape), 0.5)


@pytest.mark.slow
def test_images_of_a_release_share_a_mask_and_releases_do_not(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    """Clients of one image have masks of their own, be they computed side by side; the records say which way it is."""
    monkeypatch.setitem(ATTACKS, "witness", Witness)
    monkeypatch.setattr(Witness, "seen", [])
    options = {"weights": "random", "img_size": 64, "metrics": "psnr", "settings": "c", "gamma": 0.5, "limit": 2}
    frames = {
        (B, per): privlab.attack(
            "vit_ti_mjp", images=photos, attacks="witness", gradient_batch=B, options=(f"per={per}",), **options
        ).records
        for B in (1, 2)
        for per in ("batch", "image")
    }
    alone, same, shared, own = Witness.seen
    assert torch.equal(alone, same)
    assert not torch.equal(alone[0], alone[1])
    assert torch.equal(shared[0], alone[0])  # that of the first image
    assert torch.equal(own[0], alone[0] & alone[1])  # what both hide
    for (B, per), frame in frames.items():
        rows = frame[frame.attack == "witness"]
        assert {json.loads(text).get("per") for text in rows.defense_params} == {per if B > 1 else None}
        assert (rows.status == "ok").all()
    assert frames[1, "batch"].psnr.tolist() == frames[1, "image"].psnr.tolist()


def test_a_smaller_last_gradient_is_warned_of(confidant: type[Confidant], photos: Path) -> None:
    with pytest.warns(privlab.base.warnings.PrivlabWarning, match=r"gradient.*1.*2"):
        run(photos, attacks="confidant", settings="a", gradient_batch=2, limit=3)


def test_shuffled_images_are_assigned_by_what_was_fed() -> None:
    """Patches in an order of the adversary's own do not hide whose they are."""
    fed = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    loose = torch.ones(3, 16, dtype=torch.bool)
    mixed = unpatchify(patchify(fed, 4).flip(1), (3, 16, 16))
    tokens = torch.arange(3)
    found = assign_images(Reconstruction(mixed[[2, 0, 1]], loose=loose, tokens=tokens[[2, 0, 1]]), fed, 4)
    assert torch.equal(found.images, mixed)
    assert found.tokens is not None
    assert found.tokens.tolist() == [0, 1, 2]
    plain = assign_images(Reconstruction(fed[[1, 2, 0]]), fed, 4)
    assert torch.equal(plain.images, fed)


def test_controls_of_a_batch_are_assigned_as_reconstructions_are(
    confidant: type[Confidant], photos: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each image has another photograph, which none of the batch is, and the pairs are those of least squared error."""
    rng, tmp_path = np.random.default_rng(1), tmp_path_factory.mktemp("public")
    for i in range(4):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    frame = run(photos, attacks=confidant.name, settings="a", gradient_batch=3, limit=3, public=str(tmp_path))
    base = victim("vit_ti", weights="random", img_size=32)
    private, public = (
        torch.stack([base.preprocessing(p.pixels) for p in privlab.open_images(folder) if p.pixels])
        for folder in (photos, tmp_path)
    )
    errors = (private[:3, None] - public[None, :3]).double().square().mean((2, 3, 4))
    total, best = min((sum(errors[i, j] for i, j in enumerate(order)), order) for order in permutations(range(3)))
    wanted = [-10 * math.log10(errors[i, j]) for i, j in enumerate(best)]
    found = frame[frame.attack == "control:other"].set_index("image").psnr
    assert sorted(found) == pytest.approx(sorted(wanted))
    assert total <= errors.diagonal().sum()


def test_no_control_is_a_photograph_under_attack() -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(3, 3, 8, 8, generator=draw)
    batch = Batch([NamedImage(f"{i}", f"{i}", None) for i in range(3)], images)
    public = {f"{i}": torch.rand(3, 8, 8, generator=draw) for i in range(2, 7)}  # that of "2" is one of the batch
    draws = [torch.Generator().manual_seed(i) for i in range(3)]

    def made(names: Sequence[str], *, together: bool = True) -> dict[str, torch.Tensor]:
        colour = torch.tensor((0.5, 0.25, 1.5))[:, None, None]
        found = Public(Others({name: public[name] for name in names}), colour)
        return found.controls(batch, 4, draws, together=together)

    mean, other, shuffled, flat = CONTROLS
    full = made("23456")
    left = torch.stack([public[name] for name in "345"])
    assert torch.equal(full[other], left)
    assert torch.allclose(full[mean], torch.stack([public[name] for name in "3456"]).mean(0).expand(3, -1, -1, -1))
    assert torch.equal(patchify(full[shuffled], 4).sort(1)[0], patchify(images, 4).sort(1)[0])
    assert torch.equal(full[flat], torch.tensor((0.5, 0.25, 1.0))[:, None, None].expand_as(images))
    with pytest.warns(PrivlabWarning, match=r"2.*photographs.*3"):
        assert torch.equal(made("234")[other], torch.stack([public[name] for name in "343"]))
    with pytest.warns(PrivlabWarning, match=r"0.*photographs"):
        assert list(made("2")) == [shuffled, flat]
    alone = made("23", together=False)
    assert torch.equal(alone[other], torch.stack([public[name] for name in "223"]))  # of "2" another one than its own


def test_attacks_for_one_image_are_refused_by_name(attack: Callable[..., Any]) -> None:
    error = attack("--attack", "patch-gradient", "--gradient-batch", 2).error
    assert "Attack 'patch-gradient'" in error
    assert "batch_size_one (each released gradient belongs to one image)" in error


@pytest.mark.slow
def test_a_forced_one_is_held_against_each_image(attack: Callable[..., Any], records: Callable[..., Any]) -> None:
    """`patch-gradient` returns one mix of both, which is neither."""
    forced = ("--gradient-batch", 2, "--force", "--block", "stock", "--limit", 2)
    done = attack("--attack", "patch-gradient", *forced, "--details")
    assert done.status == 0
    assert "; 2 images in one gradient; FORCED: " in " ".join(done.out.split())
    frame = records()
    mixed = frame[(frame.attack == "patch-gradient") & (frame.geometry == "in_place")]
    assert mixed.batch_images.tolist() == [2, 2]
    assert (mixed.psnr < 30).all()


@pytest.mark.slow
def test_breachings_searches_take_batches(attack: Callable[..., Any], records: Callable[..., Any]) -> None:
    budget = ("--set", "optim.max_iterations=2", "--set", "restarts.num_trials=1")
    done = attack("--attack", "breaching:invertinggradients", *budget, "--gradient-batch", 2, "--limit", 2)
    assert done.status == 0
    frame = records()
    assert (frame[frame.attack == "breaching:invertinggradients"].status == "ok").all()
    assert "batch_size_one" in attack("--attack", "breaching:rgap", "--gradient-batch", 2).error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gradient-batch", 0), "0 is not in the range x>=1"),
        (
            ("--gradient-batch", 3, "--limit", 2, "--attack", "breaching:modern"),
            "must be at most the number of images, 2. Found 3",
        ),
        (("--gradient-batch", 2, "--release", "features"), "use client_batch"),
    ],
)
def test_mistakes(attack: Callable[..., Any], options: tuple[object, ...], said: str) -> None:
    assert said in attack(*options).error


GOLDEN = {
    "gradients": "dee8411ed866ab6a4bf58b7e24a0c902",
    "forced": "6731aa763d01a763bba938b3217bfa26",
    "features": "07ec22099c24a31e30273aa55460117b",
}
"""The keys of cells before gradients could be of several images; of features, since MJP draws per batch."""


@pytest.mark.parametrize("kind", GOLDEN)
def test_the_keys_of_one_image_are_what_they_were(kind: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "gradients": {},
        "forced": {"force": True, "block": "stock"},
        "features": {"release": "features", "client_batch": 4},
    }
    name = "pe-assignment" if kind == "features" else "patch-gradient"
    spec = specify(model=("vit_ti_mjp",), setting=("c",), attack=(name,), **options[kind])
    base = victim("vit_ti_mjp", weights="random", img_size=32)
    base = replace(base, weights=replace(base.weights, sha256="0" * 64))
    keys = Rows(spec, base, ("a" * 64,)).cells("c", plan(spec, base))
    assert keys[name] == GOLDEN[kind]
    if kind == "gradients":
        one = specify("vit_ti_mjp", "c", attack="breaching:modern")
        two = replace(one, release=Gradient(2))
        cells = [Rows(s, base, ("a" * 64,)).cells("c", plan(s, base)) for s in (one, two)]
        assert cells[0]["breaching:modern"] != cells[1]["breaching:modern"]
