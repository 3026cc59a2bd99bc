"""Defenses that are given by recorded gradients: what is measured of them, and what is refused in one line."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from privlab import capture
from privlab.images import open_images
from privlab.victims import victim

CARD = """
track = "gradients"
version = "privlab/1"
kind = "defense"
name = "recorded"
releases = "releases"
paper = "A. Author (2026)"
secret_bits = 0
epsilon = "none"
[utility]
measure = "accuracy"
how = "not measured"
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a card with the plain gradients of the bundled photographs, of which the last is of noise."""
    folder, base = tmp_path_factory.mktemp("recorded"), victim("cifar_vit")
    (folder / "releases").mkdir()
    model, rows = base.model.vit.requires_grad_(True), [("name", "sha256")]
    for i, image in enumerate(open_images("samples")):
        assert image.pixels
        x = base.preprocessing(image.pixels)[None]
        x = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) if i == 13 else x
        model.zero_grad()
        logits = base.model(x)
        cross_entropy(logits, logits.argmax(1)).backward()
        capture(model, folder / f"releases/{i}.safetensors", batch_size=1)
        rows.append((f"{i}.safetensors", image.sha256))
    with (folder / "releases/manifest.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (folder / "card.toml").write_text(CARD)
    return folder


@pytest.mark.slow
def test_recorded_gradients_are_attacked_and_scored(recorded: Path, cli: Callable[..., Any]) -> None:
    out = recorded / "made.json"
    judged = cli("benchmark", "submit", recorded / "card.toml", "--out", out, "--json").json["judged"]
    (row,) = (
        row for row in cli("benchmark", "list", "--entries", recorded, "--json").json if row["name"] == "recorded"
    )
    assert judged["known_by"] == []  # nobody knows what made them
    assert row["rank"] is None
    assert row["measured_utility"] is None
    assert 93 < row["worst_case"] < 97  # 13 of 14 exactly, at most 100 dB, and noise
    assert judged["by"]["patch-gradient"] == 14
    said = cli("benchmark", "verify", out).error
    assert "recorded releases cannot be measured again. The hash and the versions are right" in said


def altered(recorded: Path, folder: Path, **kinds: Any) -> Path:
    """Return a card whose first file was captured otherwise."""
    (folder / "releases").mkdir()
    for path in (recorded / "releases").iterdir():
        (folder / "releases" / path.name).symlink_to(path)
    first = folder / "releases/0.safetensors"
    first.unlink()
    model = victim("cifar_vit").model.vit.requires_grad_(True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if kinds.pop("moved", False):
        with torch.no_grad():
            model.head.weight.add_(1)  # type: ignore[union-attr, operator]
    capture(model, first, **{"batch_size": 1, **kinds})
    (folder / "card.toml").write_text(CARD)
    return folder / "card.toml"


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ({"moved": True}, "must come from the track's cifar_vit, whose weights have SHA-256"),
        ({"hash_weights": False}, "Found none."),
        ({"batch_size": 2}, "must be the gradient of one photograph. Found 2 images."),
    ],
)
def test_other_releases_are_refused(
    recorded: Path, tmp_path: Path, cli: Callable[..., Any], kinds: dict[str, Any], said: str
) -> None:
    assert said in cli("benchmark", "submit", altered(recorded, tmp_path, **kinds), "--out", tmp_path / "x.json").error


def test_a_release_that_is_missing_is_told(recorded: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    card = altered(recorded, tmp_path)
    (tmp_path / "releases/13.safetensors").unlink()
    assert "13.safetensors" in cli("benchmark", "submit", card, "--out", tmp_path / "x.json").error


def test_recorded_releases_are_of_gradients_and_of_the_bundled_photographs(
    recorded: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    said = cli("benchmark", "submit", recorded / "card.toml", "--images", tmp_path).error
    assert "Entry 'recorded' holds releases of the bundled photographs only. Leave out --images" in said
    (tmp_path / "card.toml").write_text(CARD.replace('"gradients"', '"features"'))
    said = cli("benchmark", "submit", tmp_path / "card.toml").error
    assert (
        "recorded releases are only supported for a defense on the track 'gradients'. Found an entry of kind 'defense'"
        in said
    )
