"""How an experiment is laid out on this machine: its cells, its images, and what it lacks."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from privlab.base import PrivlabError
from privlab.evaluation import CONTROLS
from privlab.grids import Experiment, lay_out, prepare

CPU = torch.device("cpu")


def test_layout_names_every_cell_and_image(experiment: Callable[..., Experiment], photos: Path) -> None:
    grid = lay_out(experiment('[grid]\nsetting = ["a", "c"]\ngamma = [0.5, 1]', seeds=[0, 1]), CPU)
    assert [task.case for task in grid.tasks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(set(task.cells) == {"patch-gradient", *CONTROLS} for task in grid.tasks)
    assert [image.name for image in grid.tasks[0].images] == ["a.png", "b.png", "c.png", "d.png"]
    plain, shuffled = (Counter(task.cells["patch-gradient"] for task in grid.tasks[i : i + 4]) for i in (0, 4))
    assert set(plain.values()) == {2}  # setting a knows no γ
    assert set(shuffled.values()) == {1}
    assert f"{photos}: 4 images" in grid.facts()["images"]["source"]


def test_content_that_lies_there_twice_counts_once(
    experiment: Callable[..., Experiment], image: Callable[..., Path], tmp_path: Path
) -> None:
    for name in ("b", "a", "c"):
        image(tmp_path / "twice" / f"{name}.png", 7)
    (tmp_path / "twice" / "d.png").write_bytes(b"no image")
    (task,) = lay_out(experiment(images=[str(tmp_path / "twice")]), CPU).tasks
    assert [(image.place, image.name) for image in task.images] == [(0, "a.png"), (3, "d.png")]
    assert all(len(image.sha256) == 64 for image in task.images)


def test_attack_that_can_run_on_no_case_is_refused(experiment: Callable[..., Experiment]) -> None:
    with pytest.raises(PrivlabError, match=r"^'patch-gradient'"):
        lay_out(experiment(model="vit_ti_nope"), CPU)
    mixed = '[[case]]\n[[case]]\nlabel = "without"\nmodel = "vit_ti_nope"'
    tasks = lay_out(experiment(mixed), CPU).tasks
    assert [list(task.refused) for task in tasks] == [[], ["patch-gradient"]]
    assert list(tasks[1].cells) == list(CONTROLS)


def test_metric_that_cannot_be_computed_here(experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    grid = lay_out(experiment(metrics=["psnr", "f_sim", "lpips_alex"]), CPU)
    assert [task.metrics for task in grid.tasks] == [("psnr",)]
    assert set(grid.missing) == {"f_sim", "lpips_alex"}
    assert sum("is n/a: " in message for message in grid.messages) == 2


def test_victim_is_loaded_once_for_all_its_cases(
    experiment: Callable[..., Experiment], tmp_path: Path, options: Any
) -> None:
    cases = "".join(f'[[case]]\nlabel = "{i}"\nmodel = "{m}"\n' for i, m in enumerate(["vit_ti", "deit_ti"] * 2))
    _, tasks = prepare(experiment(cases, metrics=["mse"]), tmp_path / "run", options(chunk=2))
    assert [task.spec.victim.models[0] for task in tasks] == ["deit_ti"] * 2 + ["vit_ti"] * 2


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"model": "vit_tiny"}, "Unknown model 'vit_tiny'. Did you mean"),
        ({"images": ["/nowhere"]}, "No file or folder '/nowhere'."),
        ({"public": ["/nowhere"]}, "No file or folder '/nowhere'."),
        ({"offset": 4}, "offset must be less than the number of images, 4. Found 4."),
        ({"manifest": "/nowhere.csv"}, "Cannot read the manifest '/nowhere.csv'"),
        ({"img_size": 33}, "--img-size 33 does not fit vit_ti"),
        ({"weights": "/nowhere.pth"}, "No weights file at '/nowhere.pth'"),
        ({"labels": "/nowhere.csv"}, "Cannot read the labels '/nowhere.csv'"),
        ({"setting": "c", "defense": "mjp"}, "Defense 'mjp' puts E_unk at the masked slots, and vit_ti has none."),
    ],
)
def test_part_that_there_is_not(experiment: Callable[..., Experiment], run: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivlabError) as caught:
        lay_out(experiment(**run), CPU)
    assert str(caught.value).startswith(message)


def test_a_backbone_is_looked_for_once_for_all_cases(
    experiment: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the network does not answer, each look takes seconds."""
    tried: list[str] = []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("privlab.victims.weights.reachable", lambda url: bool(tried.append(url)))
    grid = "[grid]\ngamma = [0.2, 0.3, 0.4]"
    for metrics in (["psnr", "lpips_alex"], ["psnr", "lpips"]):
        tried.clear()
        lay_out(experiment(grid, metrics=metrics, setting="c"), CPU)
        assert len(tried) == 1
