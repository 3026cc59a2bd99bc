"""What a notebook shows: strips of a run, public facts of an observation, images of a reconstruction, and progress."""

import base64
import io
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import privlab
from privlab.attacks import PatchGradient
from privlab.defenses import GradientNoise
from privlab.images import facts_html, images_html
from privlab.runs.notebook import shown_progress
from privlab.threat import Capability, FeatureObservation, Observation, Reconstruction
from privlab.training import TrainingProgress
from privlab.training.loop import tell

ATTACKS = ["patch-gradient"]


class Shown(HTMLParser):
    """The words and images of a piece of HTML, whose tags must all be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.images: list[bytes] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an image, or the name of a tag that must be closed."""
        if tag != "img":
            self.open.append(tag)
            return
        kind, data = (dict(attrs)["src"] or "").split(",")
        assert kind == "data:image/png;base64"
        assert dict(attrs)["alt"]
        self.images.append(base64.b64decode(data))

    def handle_endtag(self, tag: str) -> None:
        """Close the last tag."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep words."""
        self.words.append(data)

    @property
    def text(self) -> str:
        """Return all words."""
        return " ".join(self.words)


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_a_run_is_shown_with_its_verdict_its_table_and_the_strips_of_its_first_images() -> None:
    run = privlab.attack("cifar_vit", attacks=ATTACKS, limit=4, metrics=["psnr"], batch_size=2)
    files = sorted((run.path / "strips").glob("*.png"))
    shown = Shown(run._repr_html_())
    assert shown.images == [file.read_bytes() for file in files[:3]]
    assert "leaks" in shown.text
    assert {"attacked", "paper's attack", "best attack", "exact", "leakiest control"} <= set(shown.words)
    assert "patch-gradient: " in shown.text
    assert "Few images" in shown.text


def test_names_are_escaped() -> None:
    assert Shown(facts_html("<i>", {"<u>": "<script>", "nothing": None})).words == ["<i>", "<u>", "<script>"]
    assert len(Shown(images_html(torch.zeros(1, 3, 2, 2), '"><script>')).images) == 1


def test_an_observation_shows_what_the_adversary_has_and_no_image(
    tiny_model: Callable[..., Any], photographs: Callable[..., torch.Tensor]
) -> None:
    images = photographs(2, 8)
    noise = GradientNoise(multiplier=0.125)
    labels, names = torch.tensor([3, 5]), PatchGradient.parameters
    seen = privlab.observe(tiny_model(img_size=8), images, labels, names, defense=noise)
    shown = Shown(seen._repr_html_())
    assert shown.images == []
    for name in names:
        at = shown.words.index(f"the gradients of {name}")
        assert shown.words[at + 1] == " × ".join(map(str, seen.gradients[name].shape))
    assert "multiplier=0.125" in shown.text
    for capability in Capability:
        assert (capability.meaning in shown.text) == (capability in seen.grants)


def test_an_observation_with_many_gradients_counts_those_that_it_leaves_out(tiny_model: Callable[..., Any]) -> None:
    gradients = {f"blocks.{i}.norm1.bias": torch.zeros(1, 4) for i in range(9)}
    text = Shown(Observation(tiny_model(img_size=8), gradients, frozenset())._repr_html_()).text
    assert "blocks.5.norm1.bias" in text
    assert "blocks.6.norm1.bias" not in text
    assert "3 more parameters" in text


def test_an_observation_of_features_shows_their_shape_and_no_image(tiny_model: Callable[..., Any]) -> None:
    features, public = torch.rand(2, 5, 4), torch.rand(7, 3, 8, 8)
    seen = FeatureObservation(tiny_model(img_size=8), features, (), public, frozenset({Capability.CLASS_TOKEN}))
    shown = Shown(seen._repr_html_())
    assert shown.images == []
    assert {"features, 2 × 5 × 4", "7", "none", Capability.CLASS_TOKEN.meaning} <= set(shown.words)


def test_a_reconstruction_shows_its_images() -> None:
    images = torch.rand(2, 3, 4, 6)
    images[1, 0, 0, 0] = float("nan")
    images[1, 1, 0, 0] = 7.0
    shown = Shown(Reconstruction(images, tokens=torch.tensor([5, 6]))._repr_html_())
    pixels = (np.array(Image.open(io.BytesIO(png))) for png in shown.images)
    first, second = (torch.from_numpy(each).permute(2, 0, 1) for each in pixels)
    assert torch.equal(first, (images[0] * 255).round().byte())
    assert second[:2, 0, 0].tolist() == [0, 255]
    assert "5, 6" in shown.words
    assert Shown(Reconstruction(images[:, :1])._repr_html_()).words == []


def test_a_large_batch_is_cut() -> None:
    shown = Shown(Reconstruction(torch.rand(11, 1, 2, 2))._repr_html_())
    assert len(shown.images) == 8
    assert shown.words == ["and 3 more"]


@pytest.mark.parametrize(("wanted", "terminal"), [(True, True), (True, False), (False, True)])
def test_progress_is_shown_on_a_terminal_alone(wanted: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr(sys, "stderr", stream := Stream())
    with shown_progress(shown=wanted) as progress:
        progress(0, 4, None)
        tell(TrainingProgress(3, 20, 0.0, 0.0, 0.0, 1.0, 1.0))
        progress(4, 4, None)
    assert bool(stream.getvalue()) == (wanted and terminal)
    if stream.getvalue():
        assert re.search(r"images:.* 0/4 .*step 3 of 20.* 4/4 ", stream.getvalue(), re.DOTALL)


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_a_run_tells_of_every_image(tmp_path: Path) -> None:
    from privlab.grids import specify
    from privlab.runs import execute

    told: list[tuple[int, int]] = []
    execute(
        specify("cifar_vit", attack=ATTACKS, limit=3, metrics=["psnr"]),
        tmp_path / "run",
        batch_size=2,
        strips=False,
        progress=lambda done, total, last: told.append((done, total)),
    )
    assert told == [(0, 3), (2, 3), (3, 3)]
