"""The table of a run: one row per victim, setting, block and attack, the mean and the spread over the images."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from privlab.defenses import Jigsaw
from privlab.metrics import METRICS
from privlab.placement import PLACEMENT
from privlab.plan import defense_of
from privlab.records import CONTROL
from privlab.run import Outcome

__all__ = ["KNOWN", "flags", "shown_metrics", "summarise", "to_rich", "verdicts", "worst_cases"]

KNOWN = METRICS | PLACEMENT
"""What a column of the table may be."""

_CELL = ["victim", "setting", "defense", "block", "attack"]


def summarise(records: pd.DataFrame, metrics: Sequence[str], geometry: str = "in_place") -> pd.DataFrame:
    """Return one row per cell: `n` images scored, `failed` images, and METRIC, METRIC_std for each metric.

    The spread is the standard deviation over the images (n − 1). Each setting of a victim has its attacks
    first, then its controls. A metric that was measured on no image is NaN.
    """
    wanted = (records.geometry == geometry) | records.attack.str.startswith(CONTROL)
    rows = records.loc[wanted]
    groups = rows.groupby(_CELL, sort=False, dropna=False)
    table = groups.agg(
        n=("status", lambda s: int((s == "ok").sum())), failed=("status", lambda s: int((s != "ok").sum()))
    )
    for name in [*metrics, *(name for name in PLACEMENT if rows[name].notna().any())]:
        table[name] = groups[name].mean()
        table[f"{name}_std"] = groups[name].std()
    table = table.reset_index()
    place = {cell: i for i, cell in enumerate(dict.fromkeys(zip(table.victim, table.setting, strict=True)))}
    order = [
        (place[victim, setting], attack.startswith(CONTROL), i)
        for i, (victim, setting, attack) in enumerate(zip(table.victim, table.setting, table.attack, strict=True))
    ]
    return table.iloc[[i for _, _, i in sorted(order)]].reset_index(drop=True)


def flags(table: pd.DataFrame) -> list[str]:
    """Return a line for each attack whose mean PSNR is no better than that of a control of its setting."""
    lines: list[str] = []
    if "psnr" not in table:
        return lines
    for _, rows in table.groupby(["victim", "setting"], sort=False):
        victim, setting = rows.victim.iloc[0], rows.setting.iloc[0]
        is_control = rows.attack.str.startswith(CONTROL)
        controls = rows[is_control].set_index("attack").psnr.dropna()
        lines += [
            f"{victim}, setting {setting}: {row.attack} ({row.psnr:.2f} dB) does not beat {controls.idxmax()} "
            f"({controls.max():.2f} dB): it has shown nothing, which is no evidence of privacy"
            for row in rows[~is_control].itertuples()
            if len(controls) and row.psnr <= controls.max()
        ]
    return lines


def worst_cases(records: pd.DataFrame, geometry: str = "in_place") -> list[str]:
    """Return a line for each victim and setting with several attacks: per image the highest PSNR, and whose it is."""
    scored = records[(records.geometry == geometry) & ~records.attack.str.startswith(CONTROL) & records.psnr.notna()]
    lines = []
    for _, rows in scored.groupby(["victim", "setting"], sort=False):
        victim, setting = rows.victim.iloc[0], rows.setting.iloc[0]
        if rows.attack.nunique() > 1:
            worst = rows.loc[rows.groupby(["image_sha256", "seed", "draw"]).psnr.idxmax()]
            whose = ", ".join(f"{name} on {n}" for name, n in worst.attack.value_counts().items())
            means = rows.groupby("attack", sort=False).psnr.mean()
            others = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
            lines.append(
                f"{victim}, setting {setting}: worst case {worst.psnr.mean():.2f} dB PSNR over "
                f"{len(worst)} images ({whose}); alone {others}"
            )
    return lines


def shown_metrics(metrics: Sequence[str], table: pd.DataFrame) -> list[str]:
    """Return the metrics that the table shows, in the order of MJP's Table 5; the records hold the others too.

    Where features are released, what was measured of rows, keys and utility follows.
    """
    beside = ("ssim_skimage", "fft2d_mjp")
    order = (
        *("mse", "fft2d", "fft2d_mjp", "psnr", "ssim", "ssim_skimage"),
        *("lpips_alex", "lpips_vgg", "lpips_squeeze", "f_sim"),
    )
    shown = [name for name in order if name in metrics and name not in beside] or list(metrics)
    return [*shown, *(name for name in PLACEMENT if name in table)]


def verdicts(outcome: Outcome) -> list[str]:
    """Return one line per victim that says what the numbers stand on."""
    spec = outcome.spec
    lines = []
    for base in outcome.victims:
        at_work = [defense_of(spec, base, setting) for setting in spec.settings]
        shuffles = (part for stack in at_work for part in stack.parts if isinstance(part, Jigsaw))
        gamma = ", ".join(dict.fromkeys(f"γ = {part.gamma:g}" for part in shuffles)) or "no jigsaw"
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
    shown = (
        Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
        if stacked
        else Table(header_style="bold")
    )
    for column in (*several, "attack", "block"):
        shown.add_column(column, no_wrap=True)
    for name in metrics:
        shown.add_column(f"{_title(name)} {KNOWN[name].arrow}", justify="right", no_wrap=True)
    shown.add_column("images", justify="right")
    for row in table.to_dict("records"):
        values = [_value(row, name, "\n± " if stacked else " ± ") for name in metrics]
        images = f"{row['n']}" + (f" ({row['failed']} failed)" if row["failed"] else "")
        block = row["block"] if isinstance(row["block"], str) else "—"  # controls have none
        shown.add_row(*(str(row[c]) for c in several), row["attack"], block, *values, images)
    return shown


def _title(name: str) -> str:
    if name in PLACEMENT:
        return {"placement_accuracy": "placed", "neighbour_accuracy": "neighbours"}.get(name, name.replace("_", " "))
    first, _, rest = name.upper().partition("_")
    return first if rest in ("", "ALEX") else f"{first} {rest.lower()}"


def _value(row: Mapping[Hashable, Any], name: str, between: str) -> str:
    mean, spread, n = row[name], row[f"{name}_std"], KNOWN[name].decimals
    if math.isnan(mean):
        return "n/a"
    shape = f".{n}f" if abs(mean) >= 10**-n or mean == 0 else ".1e"  # 0.0000 would not tell 85 dB from 140 dB
    return f"{mean:{shape}}" + ("" if math.isnan(spread) else f"{between}{spread:{shape}}")
