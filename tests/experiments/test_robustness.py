"""Robustness of classifiers: against naive loops, one image at a time."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from privlab.base import PrivlabError
from privlab.experiments.methods.robustness import (
    ALEXNET,
    Corrupted,
    Outputs,
    aupr,
    aurra,
    corruption_errors,
    mean_corruption_error,
    natural,
    outlier_aupr,
)
from privlab.victims import victim


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=1, max_size=12, unique_by=lambda pair: pair[0])
)
def test_aurra_is_the_mean_accuracy_of_the_most_confident(pairs: list[tuple[int, bool]]) -> None:
    ordered = [correct for _, correct in sorted(pairs, reverse=True)]
    accuracies = [sum(ordered[:k]) / k for k in range(1, len(ordered) + 1)]
    got = aurra([confidence for confidence, _ in pairs], [correct for _, correct in pairs])
    assert got == pytest.approx(sum(accuracies) / len(accuracies))


@pytest.mark.slow
@given(scores=st.lists(st.integers(0, 6), min_size=2, max_size=12), split=st.integers(1, 11))
def test_aupr_sums_precision_over_the_gains_of_recall(scores: list[int], split: int) -> None:
    """Ties share a threshold."""
    pytest.importorskip("sklearn")
    split = min(split, len(scores) - 1)
    high, low = scores[:split], scores[split:]
    area, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        hits = sum(score >= threshold for score in high)
        called = hits + sum(score >= threshold for score in low)
        area, recall = area + hits / called * (hits / len(high) - recall), hits / len(high)
    assert aupr(high, low) == pytest.approx(area)


def test_aupr_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(PrivlabError, match="Found 0 and 1"):
        aupr([], [0.5])
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(PrivlabError, match="pip install 'privlab"):
        aupr([0.5], [0.4])


def test_mce_is_the_mean_of_ratios_over_complete_corruptions() -> None:
    errors = {"fog": (0.1, 0.2, 0.3, 0.4, 0.5), "snow": (0.5,) * 5}
    rows = [Corrupted(name, s + 1, 10, error) for name, some in errors.items() for s, error in enumerate(some)]
    partial = [Corrupted("frost", 1, 10, 0.9), *(Corrupted("unknown", s, 10, 1.0) for s in range(1, 6))]
    got = mean_corruption_error([*rows, *partial], ALEXNET)
    assert got is not None
    assert got == (pytest.approx((0.3 / 0.819324 + 0.5 / 0.866816) / 2), 2)
    assert mean_corruption_error(partial, ALEXNET) is None


def test_a_model_as_bad_as_alexnet_has_an_mce_of_one() -> None:
    assert len(ALEXNET) == 15
    rows = [Corrupted(name, severity, 1, error) for name, error in ALEXNET.items() for severity in range(1, 6)]
    assert mean_corruption_error(rows, ALEXNET) == (pytest.approx(1), 15)


def test_natural_images_are_told_among_their_own_classes() -> None:
    logits = torch.tensor([[9.0, 1, 0, 2], [9.0, 3, 0, 1], [9.0, 0, 0, 5]])
    got = natural(Outputs(logits, torch.tensor([3, 1, 1])))
    assert (got.images, got.classes) == (3, 2)
    assert got.accuracy == pytest.approx(2 / 3)
    assert got.aurra == pytest.approx((0 + 1 / 2 + 2 / 3) / 3)  # the wrong one is the surest: 5 against 0


def test_outliers_are_told_from_inliers_of_their_classes() -> None:
    pytest.importorskip("sklearn")
    inliers = Outputs(torch.tensor([[4.0, 0, 0], [0, 4.0, 0], [0.1, 0, 0]]), torch.tensor([0, 1, 2]))
    unsure, sure = torch.tensor([[0.5, 0, 0.0]]), torch.tensor([[6.0, 0, 0]])
    assert outlier_aupr(Outputs(unsure, torch.tensor([-1])), inliers) == pytest.approx(0.5)
    both = Outputs(torch.cat([unsure, sure]), torch.tensor([0, 1]))  # the third inlier is of another class
    assert outlier_aupr(both, inliers) == pytest.approx(0.5 * 1 + 0.5 * 2 / 4)
    assert outlier_aupr(Outputs(unsure, torch.tensor([0])), inliers) == 0.5  # of one class alone, all are sure


@pytest.fixture
def corrupted(tmp_path: Path) -> Path:
    """Return a folder as ImageNet-C with two corruptions at two severities, ten classes of one image."""
    rng = np.random.default_rng(0)
    for name in ("fog", "snow"):
        for severity in ("1", "3"):
            for label in range(10):
                path = tmp_path / "c" / name / severity / f"class{label}" / "a.png"
                path.parent.mkdir(parents=True)
                Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return tmp_path / "c"


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_errors_by_corruption_are_those_of_single_images(corrupted: Path) -> None:
    subject = victim("cifar_vit", weights="random")
    seen: list[tuple[int, int | None]] = []
    rows = corruption_errors(subject, corrupted, show=lambda done, total: seen.append((done, total)), size=3)
    assert [(row.corruption, row.severity, row.images) for row in rows] == [
        *(("fog", 1, 10), ("fog", 3, 10)),
        *(("snow", 1, 10), ("snow", 3, 10)),
    ]
    for row in rows:
        wrong = 0
        for label in range(10):
            with Image.open(corrupted / row.corruption / str(row.severity) / f"class{label}" / "a.png") as opened:
                image = torch.from_numpy(np.array(opened)).permute(2, 0, 1)[None] / 255
            wrong += int(subject.model(image).argmax()) != label
        assert row.error == pytest.approx(wrong / 10)
    assert seen[-1] == (4, 4)


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_folders_laid_out_otherwise_are_one_line(corrupted: Path, tmp_path: Path) -> None:
    subject = victim("cifar_vit", weights="random")
    for root, words in (
        (tmp_path / "none", "No folder"),
        (corrupted / "fog", "severities 1 to 5"),
        (tmp_path, "Found 'fog'"),
    ):
        with pytest.raises(PrivlabError, match=words):
            corruption_errors(subject, root, show=lambda *_: None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PrivlabError, match="holds no CORRUPTION/SEVERITY"):
        corruption_errors(subject, tmp_path / "empty", show=lambda *_: None)
    for image in (corrupted / "snow" / "3" / "class9").iterdir():
        image.unlink()
    (corrupted / "snow" / "3" / "class9").rmdir()
    with pytest.raises(PrivlabError, match="10 classes apart"):
        corruption_errors(subject, corrupted, show=lambda *_: None)
