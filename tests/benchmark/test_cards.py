"""Tracks are frozen, and cards say what is so: each mistake is one line."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privlab.base import PrivlabError
from privlab.benchmark.cards import TEMPLATES, instances, parse_card, read_card, write_template
from privlab.benchmark.measure import Photographs
from privlab.benchmark.plugins import ALLOWED, check_source
from privlab.benchmark.results import PACKAGE
from privlab.benchmark.tracks import TRACKS, VERSION, photographs, track
from privlab.images import open_images

FROZEN = {
    "gradients": "8d08235a385f5fd6",
    "updates": "c752236dca607094",
    "local-training": "4bdaeaaf622089c5",
    "features": "c77e525bc3264e95",
    "weights": "d2b7cd0fd648067a",
    "dishonest-server": "0058fd6d4877ec2e",
}
"""The first digits of the hashes of version privlab/1. Whoever changes a track makes a new version."""

CARD = """
track = "gradients"
version = "privlab/1"
kind = "defense"
name = "pruning"
uses = "gradient-pruning"
paper = "a paper"
secret_bits = 0
epsilon = "none"
[parameters]
keep = 0.1
[utility]
measure = "top-1"
how = "not measured"
"""


def card(text: str = CARD) -> Any:
    return parse_card(text, Path("my.toml"))


def test_the_tracks_are_frozen() -> None:
    assert {name: track(name).sha256[:16] for name in TRACKS} == FROZEN
    assert {track(name).version for name in TRACKS} == {VERSION}
    assert all(track(name).draws >= 10 for name in TRACKS)


def test_the_photographs_of_the_halves_are_different_ones() -> None:
    parts = [set(photographs(part)) for part in ("bundled", "public", "hidden")]
    assert [len(part) for part in parts] == [14, 50, 50]
    assert not parts[0] & parts[1]
    assert not parts[1] & parts[2]
    assert parts[0] == {image.sha256 for image in open_images("samples")}
    assert all(name.startswith("hidden-") for name in photographs("hidden").values())


def test_photographs_are_chosen_by_hash_whatever_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    wanted = {}
    for i, image in enumerate(open_images("samples", limit=2)):
        assert image.pixels
        image.pixels.save(folder / f"{i}.png")
        wanted[hashlib.sha256((folder / f"{i}.png").read_bytes()).hexdigest()] = str(i)
    monkeypatch.setattr("privlab.benchmark.measure.photographs", lambda part: wanted)
    how, hashes = Photographs(folder=str(folder)), [*wanted][::-1]
    assert [image.sha256 for image in how.chosen("public", hashes)] == hashes
    (folder / "1.png").unlink()
    with pytest.raises(PrivlabError, match="1 of 2 public photographs"):
        how.chosen("public", hashes)


def test_the_other_photographs_need_a_folder() -> None:
    with pytest.raises(PrivlabError, match="--images FOLDER"):
        Photographs().chosen("hidden", [*photographs("hidden")])


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("cards/*.toml")), ids=lambda path: path.stem)
def test_every_card_of_the_package_tells_the_truth(path: Path) -> None:
    found = read_card(path)
    assert found.track == "weights" or instances(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.replace("keep = 0.1", "keep = 2.0"), "keep"),
        (lambda t: t.replace("keep = 0.1", ""), "leaves out keep of 'gradient-pruning', which is 0.1"),
        (
            lambda t: t.replace("keep = 0.1", "keep = 0.1\nsteps = 3"),
            "states steps, which is not a parameter of 'gradient-pruning'",
        ),
        (lambda t: t.replace('"gradient-pruning"', '"gradient-prunning"'), "Did you mean gradient-pruning"),
        (lambda t: t.replace('"gradient-pruning"', '"row-permutation"'), "acts on features"),
    ],
)
def test_a_card_that_lies_about_its_class_is_refused(change: Callable[[str], str], said: str) -> None:
    with pytest.raises(PrivlabError, match=said):
        instances(card(change(CARD)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.replace('"gradients"', '"gradient"'), "Unknown track 'gradient'. Did you mean gradients"),
        (lambda t: t.replace("privlab/1", "privlab/2"), "of version 'privlab/2', and this package has .* 'privlab/1'"),
        (lambda t: t.replace('paper = "a paper"', ""), "does not state paper"),
        (lambda t: t.replace("secret_bits = 0", ""), "does not state secret_bits"),
        (lambda t: t.replace('kind = "defense"', 'kind = "defence"'), "Did you mean defense"),
        (lambda t: t.replace('"none"', '"unknown"'), 'epsilon must be a finite number or "none"'),
        (lambda t: t.replace("name =", "nmae =").replace("nmae", "nme", 1), "Unknown table or key"),
        (lambda t: t.replace("secret_bits = 0", "secret_bits = true"), "secret_bits must be a finite number"),
        (lambda t: t.replace('how = "not measured"', ""), r"\[utility\] does not state how"),
        (lambda t: t.replace("[parameters]", 'victim = "vit_b"\n[parameters]'), "Unknown victim of the track"),
        (lambda t: "=", "is no TOML"),
        (lambda t: t.replace("defense", "attack").replace("gradient-pruning", "april+deconvolution"), "has one attack"),
        (
            lambda t: t.replace("defense", "attack").replace('uses = "', 'uses = "" #').replace('"pruning"', '"a+b"'),
            "has one attack",
        ),
        (lambda t: t.replace("defense", "attack").replace('"gradients"', '"weights"'), "takes no other one"),
    ],
)
def test_a_card_with_a_mistake_is_refused(change: Callable[[str], str], said: str) -> None:
    with pytest.raises(PrivlabError, match=said):
        card(change(CARD))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_are_cards_and_sources_that_may_enter(kind: str, tmp_path: Path) -> None:
    path, source = write_template(kind, tmp_path / "mine")
    assert read_card(path).kind == ("defense" if kind == "check" else kind)
    check_source(source.read_text(), "template")
    with pytest.raises(PrivlabError, match="already exists"):
        write_template(kind, tmp_path / "mine")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import time", "time"),
        ("from datetime import datetime", "datetime"),
        ("import socket", "socket"),
        ("from urllib import request", "urllib"),
        ("import os", "os"),
        ("import torch; torch.hub", "hub"),
        ("import torch; torch.load('x')", "load"),
        ("from torch.utils import data", "torch.utils"),
        ("import numpy; numpy.datetime64('now')", "datetime64"),
        ("__import__('time')", "__import__"),
        ("print.__globals__", "__globals__"),
        ("open('x')", "open"),
        ("from privlab.images import open_images", "privlab.images"),
        ("from privlab.attacks.solvers.prior import photographs", "photographs"),
        ("from . import other", "other"),
    ],
)
def test_a_source_that_reads_clock_network_files_or_photographs_is_refused(line: str, name: str) -> None:
    with pytest.raises(PrivlabError, match=f"line 2: an entry may not use '.*{name}"):
        check_source(f"import math\n{line}\n", "my.py")


def test_a_source_that_is_no_python_is_refused() -> None:
    with pytest.raises(PrivlabError, match=r"my\.py.*1.*Python"):
        check_source("def", "my.py")


def test_the_documentation_names_what_a_plug_in_may_import() -> None:
    told = (Path(__file__).parents[2] / "docs/how-to/benchmark.md").read_text("utf-8")
    assert [name for name in sorted(ALLOWED) if f"`{name}`" not in told] == []
