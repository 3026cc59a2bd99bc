"""An experiment that asks for "lpips", with the metric that this stands for in its cases, columns and figures."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from privlab.evaluation.lpips_choice import choose_lpips, named_lpips
from privlab.grids.definition import Experiment
from privlab.metrics.names import LPIPS

__all__ = ["name_lpips"]


def name_lpips(experiment: Experiment, begun: Mapping[str, Any]) -> tuple[Experiment, str | None]:
    """Return an experiment without the name "lpips", and a warning where the metric in its place is not AlexNet's.

    One metric takes its place everywhere, so that cases can be compared. Where no case asks for "lpips", its column is
    that of the metric which the cases name, AlexNet's if they name several or none.

    Args:
        experiment: what is run; it is returned as it is if it does not ask for "lpips".
        begun: what `run.json` states of the run so far, whose metric is kept; empty for a new one.

    Raises:
        LpipsUnavailable: if a case names a place of the backbones that holds none.
    """
    runs = [spec for case in experiment.cases for spec in case.runs]
    metrics = {name for spec in runs for name in spec.metrics}
    warning = None
    if LPIPS in metrics:
        asked = (spec.lpips_weights for spec in runs if LPIPS in spec.metrics)
        metric, warning = choose_lpips(asked, begun)
    else:
        measured = [name for name in ("lpips_alex", "lpips_squeeze", "lpips_vgg") if name in metrics]
        metric = (*measured, "lpips_alex")[0]
    layout = experiment.layout
    cases = tuple(
        replace(case, runs=tuple(replace(spec, metrics=named_lpips(spec.metrics, metric)) for spec in case.runs))
        for case in experiment.cases
    )
    figures = tuple(
        replace(figure, y=named_lpips([figure.y], metric)[0], x=figure.x and named_lpips([figure.x], metric)[0])
        for figure in experiment.figures
    )
    decimals = {named_lpips([name], metric)[0]: places for name, places in layout.decimals.items()}
    layout = replace(layout, columns=named_lpips(layout.columns, metric), decimals=decimals)
    return replace(experiment, cases=cases, layout=layout, figures=figures), warning
