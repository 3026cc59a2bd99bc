"""The table of a run: one row per victim, setting, block and attack, the mean and the spread over the images."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd
from rich.table import Table

from privlab.defenses import Jigsaw
from privlab.evaluate import CONTROL
from privlab.metrics import METRICS
from privlab.plan import defense_of
from privlab.run import Outcome

__all__ = ["shown_metrics", "summarise", "to_rich", "verdicts"]

_CELL = ["victim", "setting", "defense", "block", "attack"]


def summarise(records: pd.DataFrame, metrics: Sequence[str], geometry: str = "in_place") -> pd.DataFrame:
    """Return one row per cell: `n` images scored, `failed` images, and METRIC, METRIC_std for each metric.

    The spread is the standard deviation over the images (n − 1). Rows keep the order in which cells were run,
    attacks first, controls last. A metric that was measured on no image is NaN.
    """
    wanted = (records.geometry == geometry) | records.attack.str.startswith(CONTROL)
    rows = records[wanted].assign(block=records.block.fillna("—"))
    groups = rows.groupby(_CELL, sort=False, dropna=False)
    table = groups.agg(
        n=("status", lambda s: int((s == "ok").sum())), failed=("status", lambda s: int((s != "ok").sum()))
    )
    for name in metrics:
        table[name] = groups[name].mean()
        table[f"{name}_std"] = groups[name].std()
    table = table.reset_index()
    return table.sort_values(
        "attack", key=lambda names: names.str.startswith(CONTROL), kind="stable", ignore_index=True
    )


def shown_metrics(metrics: Sequence[str]) -> list[str]:
    """Return the metrics that the table shows, in the order of MJP's Table 5; the records hold the others too."""
    beside = ("ssim_skimage", "fft2d_mjp")
    order = ("mse", "fft2d", "fft2d_mjp", "psnr", "ssim", "ssim_skimage", "lpips_alex", "lpips_vgg", "lpips_squeeze")
    return [name for name in order if name in metrics and name not in beside] or list(metrics)


def verdicts(outcome: Outcome) -> list[str]:
    """Return one line per victim that says what the numbers stand on."""
    spec = outcome.spec
    lines = []
    for base in outcome.victims:
        at_work = [defense_of(spec, base, setting) for setting in spec.settings]
        gamma = ", ".join(dict.fromkeys(f"γ = {d.gamma:g}" for d in at_work if isinstance(d, Jigsaw))) or "no shuffle"
        defense = ", ".join(f"{d!r} in setting {s}" for s, d in zip(spec.settings, at_work, strict=True))
        unknown = f", E_unk {base.weights.unknown}" if base.weights.unknown else ""
        origin = f"weights {base.weights.origin}{unknown} (SHA-256 {base.weights.sha256[:12]})"
        lines.append(f"{base.name}: {origin}; defense {defense}; {gamma}; seed {spec.seed}")
    return lines


def to_rich(table: pd.DataFrame, metrics: Sequence[str], *, stacked: bool = False) -> Table:
    """Lay the table out for a terminal; the arrow shows the leaky direction of each metric.

    `stacked` puts the spread under the mean, for a narrow terminal.
    """
    several = [column for column in ("victim", "setting", "defense") if table[column].nunique() > 1]
    shown = Table(header_style="bold")
    for column in (*several, "attack", "block"):
        shown.add_column(column, no_wrap=True)
    for name in metrics:
        shown.add_column(f"{_title(name)} {METRICS[name].arrow}", justify="right", no_wrap=True)
    shown.add_column("images", justify="right")
    for row in table.to_dict("records"):
        values = [_value(row, name, "\n± " if stacked else " ± ") for name in metrics]
        images = f"{row['n']}" + (f" ({row['failed']} failed)" if row["failed"] else "")
        shown.add_row(*(str(row[c]) for c in several), row["attack"], row["block"], *values, images)
    return shown


def _title(name: str) -> str:
    first, _, rest = name.upper().partition("_")
    return first if rest in ("", "ALEX") else f"{first} {rest.lower()}"


def _value(row: Mapping[Hashable, Any], name: str, between: str) -> str:
    mean, spread, n = row[name], row[f"{name}_std"], METRICS[name].decimals
    if math.isnan(mean):
        return "n/a"
    return f"{mean:.{n}f}" + ("" if math.isnan(spread) else f"{between}{spread:.{n}f}")
