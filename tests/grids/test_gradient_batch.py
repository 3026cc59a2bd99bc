"""Experiments whose clients release one gradient of several images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privlab.base import PrivlabError
from privlab.stores import Store

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
FORCED = {"attack": ["breaching:modern"], "set": ["optim.max_iterations=1", "restarts.num_trials=1"]}


@pytest.mark.slow
def test_batches_are_released_resumed_and_told_apart(
    experiment: Callable[..., Any], done: Callable[..., int], tmp_path: Path
) -> None:
    """A batch is one task's; what is done is not done again, and of another size nothing is."""
    study = experiment("[grid]\ngradient_batch = [1, 2]", **FORCED)
    run = tmp_path / "run"
    assert done(study, run) == 4 + 2
    assert done(study, run) == 0
    frame = Store(run).frame()
    own = frame[(frame.attack == "breaching:modern") & (frame.geometry == "in_place")]
    assert (own.status == "ok").all()
    together = own[own.batch.notna()]
    assert len(own) == 8
    assert together.groupby("batch").batch_images.agg(list).tolist() == [[2, 2], [2, 2]]
    assert together.cell.nunique() == 1
    assert done(experiment(gradient_batch=4, **FORCED), run) == 1


def test_a_batch_of_more_than_there_is(
    experiment: Callable[..., Any], done: Callable[..., int], tmp_path: Path
) -> None:
    with pytest.raises(PrivlabError, match=r"number.*4.*5"):
        done(experiment(gradient_batch=5, **FORCED), tmp_path / "run")


def test_an_attack_for_one_image_is_a_footnote(
    experiment: Callable[..., Any], done: Callable[..., int], tmp_path: Path
) -> None:
    """Where it runs on no case, that is a mistake."""
    with pytest.raises(PrivlabError, match=r"'patch-gradient'.*case.*batch_size_one"):
        done(experiment(gradient_batch=2), tmp_path / "run")
