"""By which network a run that asks for "lpips" is scored: AlexNet where it can be had, else the SqueezeNet of privlab.

The choice is made once, at the start of a run, and is part of its case and in the name of the column. A run
that goes on keeps it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from privlab.evaluation.case import Case
from privlab.metrics import net_at_hand
from privlab.metrics.names import LPIPS

_BY_SQUEEZE = "LPIPS is by SqueezeNet, not AlexNet; see `privlab explain lpips`."


def choose_lpips(
    weights: Iterable[str | None], begun: Mapping[str, Any], *, download: bool = True
) -> tuple[str, str | None]:
    """Return the metric that "lpips" stands for in a run, and a warning unless it is AlexNet's.

    Args:
        weights: the places of the backbones that the run names, None for none: AlexNet's must be in each of them.
        begun: what `run.json` states of the run so far, whose metric is kept; empty for a new one.
        download: whether a missing backbone is downloaded.

    Raises:
        LpipsUnavailable: if a place that is named holds no backbone.
    """
    if (earlier := begun_lpips(begun)) is not None:
        return earlier, _BY_SQUEEZE if earlier == "lpips_squeeze" else None
    found = [net_at_hand(None if path is None else Path(path), download=download) for path in dict.fromkeys(weights)]
    reason = next((reason for _, reason in found if reason is not None), None)
    return ("lpips_alex", None) if reason is None else ("lpips_squeeze", _BY_SQUEEZE)


def begun_lpips(begun: Mapping[str, Any]) -> str | None:
    """Return the metric that "lpips" stands for in the part of a run that `run.json` states; None if in none of it."""
    try:
        jobs = (job for case in begun.get("cases", ()) for job in case["jobs"])
        measured = {name for job in jobs for name in job["specification"]["metrics"]}
        measured -= {*begun.get("missing_metrics", ())}
    except (TypeError, KeyError, AttributeError):  # the run.json of another program
        return None
    return next((name for name in ("lpips_alex", "lpips_squeeze") if name in measured), None)


def named_lpips(names: Iterable[str], metric: str | None) -> tuple[str, ...]:
    """Return names with `metric` in the place of "lpips", each once; as they are where `metric` is None."""
    return tuple(dict.fromkeys(metric if name == LPIPS and metric is not None else name for name in names))


def with_lpips(spec: Case, begun: Mapping[str, Any], *, download: bool = True) -> tuple[Case, str | None]:
    """Return a case that names the metric which "lpips" stands for, and a warning as `choose_lpips` does.

    Args:
        spec: what is run; it is returned as it is if it does not ask for "lpips".
        begun: as in `choose_lpips`.
        download: as in `choose_lpips`.
    """
    if LPIPS not in spec.metrics:
        return spec, None
    metric, warning = choose_lpips([spec.lpips_weights], begun, download=download)
    return replace(spec, metrics=named_lpips(spec.metrics, metric)), warning
