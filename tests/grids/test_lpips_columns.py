"""An experiment that asks for "lpips", where AlexNet's backbone is not at hand, and where it is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from privlab.evaluation import SETTINGS
from privlab.grids import Experiment, lay_out, prepare
from privlab.grids.definition import name_lpips
from privlab.report.tables import conditions_that_differ, load_results
from privlab.stores import RunDirectory, Store

CPU = torch.device("cpu")
MORE = """
[table]
columns = ["psnr", "lpips"]
decimals = { lpips = 3 }

[[figure]]
kind = "distribution"
y = "lpips"

[[case]]
published = { lpips_alex = 0.36 }
"""

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Say which network is at hand for who names none."""
    return lambda net: monkeypatch.setattr(
        "privlab.evaluation.lpips_choice.net_at_hand", lambda *_, **__: (net, None if net == "alex" else "Not here.")
    )


def test_every_place_has_the_name_of_the_network(
    experiment: Callable[..., Experiment], at_hand: Callable[[str], None]
) -> None:
    asked = experiment(MORE, metrics=None)
    for net in ("alex", "squeeze"):
        at_hand(net)
        found, told = name_lpips(asked, {})
        name = f"lpips_{net}"
        assert found.layout.columns == ("psnr", name)
        assert found.layout.decimals == {name: 3}
        assert [figure.y for figure in found.figures] == [name]
        assert all(name in spec.metrics and "lpips" not in spec.metrics for spec in found.cases[0].runs)
        assert (told is None) == (net == "alex")
        assert name_lpips(found, {}) == (found, None) or name_lpips(found, {})[0].layout == found.layout


@pytest.mark.parametrize(
    ("metrics", "column"),
    [
        (["psnr", "lpips_squeeze"], "lpips_squeeze"),
        (["psnr", "lpips_alex", "lpips_squeeze"], "lpips_alex"),
        (["psnr"], "lpips_alex"),
    ],
)
def test_a_column_follows_the_metrics_that_are_named(
    experiment: Callable[..., Experiment], at_hand: Callable[[str], None], metrics: list[str], column: str
) -> None:
    at_hand("squeeze")
    found, told = name_lpips(experiment(MORE, metrics=metrics), {})
    assert (found.layout.columns, told) == (("psnr", column), None)
    assert found.cases[0].runs[0].metrics == tuple(metrics)


def test_without_alexnet_there_is_a_figure_in_a_column_of_its_own(
    experiment: Callable[..., Experiment], done: Callable[..., int], tmp_path: Path
) -> None:
    asked = experiment(MORE, metrics=None)
    done(asked, tmp_path / "run", chunk=4)
    records = Store(tmp_path / "run").frame()
    assert records.lpips_squeeze.notna().all()
    assert records.lpips_alex.isna().all()
    results = load_results(tmp_path / "run")
    assert results.layout.columns == ("psnr", "lpips_squeeze")
    assert sum(message.startswith("LPIPS is by SqueezeNet") for message in results.facts["warnings"]) == 1
    said = " ".join(line for line in conditions_that_differ(results) if line.startswith("LPIPS: "))
    assert said.startswith("LPIPS: paper: by AlexNet, ")
    assert said.endswith(" 0.36 / here: lpips_squeeze, another distance, with which the paper's figures do not stand")


def test_a_paper_s_figures_stand_beside_alexnet_s(
    experiment: Callable[..., Experiment], done: Callable[..., int], tmp_path: Path
) -> None:
    """Also where it is n/a: a column that is named shows what is there."""
    done(experiment(MORE.replace('"lpips"', '"lpips_alex"', 1), metrics=None), tmp_path / "run", chunk=4)
    results = load_results(tmp_path / "run")
    assert results.layout.columns == ("psnr", "lpips_alex")
    assert list(results.facts["missing_metrics"]) == ["lpips_alex"]
    assert results.records.lpips_squeeze.isna().all()
    assert results.records.lpips_alex.isna().all()
    assert not any(line.startswith("LPIPS: ") for line in conditions_that_differ(results))


def test_a_table_that_goes_on_keeps_its_network(
    experiment: Callable[..., Experiment],
    done: Callable[..., int],
    at_hand: Callable[[str], None],
    tmp_path: Path,
    options: Any,
) -> None:
    asked = experiment(MORE, metrics=None)
    path = tmp_path / "run"
    assert done(replace(asked, cases=asked.cases[:1]), path) == 4
    at_hand("alex")
    grid, tasks = prepare(asked, path, options())
    assert (grid.experiment.layout.columns, tasks) == (("psnr", "lpips_squeeze"), [])
    assert lay_out(asked, CPU, begun=RunDirectory(path).begun()).missing == {}
    assert set(SETTINGS) >= {task.settings[0] for task in grid.tasks}
