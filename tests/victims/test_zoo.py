"""The victims that come with privlab: their size, their cards, and the accuracy that these state."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from privlab.base import PrivlabWarning
from privlab.experiments.methods.consistency import measure_consistency
from privlab.experiments.training.position_accuracy import position_accuracy
from privlab.experiments.training.reading import read_examples
from privlab.images import open_images
from privlab.reassembly import load_predictor
from privlab.victims import PLACERS, ZOO, hash_of, read_state, shipped_file, show, victim

SHIPPED = [name for name in ZOO if shipped_file(name)]
CIFAR, TINY_IMAGENET = "data/cifar10_jpeg.parquet", "data/tiny_imagenet_25k.parquet"


def card_of(name: str) -> dict[str, object]:
    path = shipped_file(name)
    assert path is not None
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def test_some_are_there() -> None:
    assert set(SHIPPED) == set(ZOO)
    assert all(shipped_file(name) for name in PLACERS)


@pytest.mark.parametrize("name", [*SHIPPED, *PLACERS])
def test_small_in_half_precision_and_with_a_card_that_names_no_folder(name: str) -> None:
    path = shipped_file(name)
    assert path is not None
    assert path.stat().st_size < 3e6
    state = read_state(path)
    assert {each.dtype for each in state.values()} == {torch.float16}
    card = card_of(name)
    stated = card["predictor_sha256" if name in PLACERS else "sha256"]
    assert stated == hash_of({key: each.float() for key, each in state.items()})
    assert show(name)["matches"]
    text = path.with_suffix(".json").read_text(encoding="utf-8")
    assert not any(word.startswith("/") for word in text.replace('"', " ").split())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_card_of_another_convention_says_so(name: str) -> None:
    """Those of MJP were made before DAL had raw coordinates, and before `per`."""
    card = card_of(name)
    assert ("DAL had its places in [0, 1]" in str(card.get("remark"))) == (card["recipe"] == "mjp")


@pytest.mark.parametrize("name", SHIPPED)
def test_trained_weights_are_the_default_and_need_no_network(
    name: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = victim(name)
    assert found.weights.origin == f"pretrained:{name}"
    assert found.weights.sha256 == card_of(name)["sha256"]
    assert found.weights.unknown == ("trained" if name.startswith("cifar_vit_mjp") else None)
    assert not [each for each in recwarn if issubclass(each.category, PrivlabWarning)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_the_accuracy_is_that_of_the_card(name: str, shared: Callable[[str], Path]) -> None:
    """On 1000 of the 10,000 test images, within what so few can tell: four standard deviations."""
    data = read_examples(open_images(shared(CIFAR), split="test", limit=1000), (32, 32))
    stated = card_of(name)["test"]
    assert isinstance(stated, dict)
    found = measure_consistency(victim(name).model, data).accuracy
    assert abs(found - stated["accuracy"]) < 4 * (stated["accuracy"] * (1 - stated["accuracy"]) / 1000) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACERS)
def test_the_places_are_as_right_as_the_card_says(name: str, shared: Callable[[str], Path]) -> None:
    """On 200 of the images that it states; the shares of 12,800 patches that hang together within their images."""
    path, stated = shipped_file(name), card_of(name)["test"]
    assert path is not None
    assert isinstance(stated, dict)
    predictor = load_predictor(path)
    file = CIFAR if PLACERS[name].architecture == "cifar_vit" else TINY_IMAGENET
    source = open_images(shared(file), split=stated["split"], limit=200)
    found = position_accuracy(predictor, read_examples(source, predictor.model.image_shape[1:], labelled=False))
    cells = [key for key in stated if key.startswith("accuracy_")]
    assert cells
    assert all(abs(found[key] - stated[key]) < 0.06 for key in cells)
