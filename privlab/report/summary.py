"""The table of a run: a row for each attack and for the worst case, the mean and the spread over the images."""

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from privlab.defenses import Jigsaw
from privlab.geometries import UNDEFINED
from privlab.metrics import METRICS
from privlab.placement import PLACEMENT
from privlab.plan import Specification, defense_of
from privlab.records import CONTROL, GEOMETRIES
from privlab.report.flags import Flag, lead_metric, red_flags
from privlab.report.leakage import WORST, per_image, worst_case
from privlab.report.power import scope
from privlab.report.results import by_case, papers_attack
from privlab.run import Outcome

__all__ = ["KNOWN", "flags", "not_measured", "shown_metrics", "summarise", "to_rich", "verdicts"]

KNOWN = METRICS | PLACEMENT
"""What a column of the table may be."""

_KINDS = ("paper", "worst", "attack", "control")


def summarise(records: pd.DataFrame, metrics: Sequence[str], geometry: str = "in_place") -> pd.DataFrame:
    """Return one row per victim, setting and attack: `n` images scored, `failed` ones, METRIC and METRIC_std of each.

    Each victim and setting has the paper's attack, the worst case, the other attacks in the order in which they ran,
    and the controls (`kind`). Scores are averaged over the draws of an image; the worst case takes its leakiest one
    over attacks and draws, by each metric's own direction; `leakiest` says by the lead metric on how many images each
    attack reached it. The spread is the standard deviation over the images (n − 1); what no image has is NaN.
    """
    cased, cases = by_case(records)
    there = cased.loc[(cased.geometry == geometry) | cased.attack.str.startswith(CONTROL)]
    names = [*metrics, *(name for name in PLACEMENT if there[name].notna().any())]
    images = per_image(cased, names, geometry)
    groups = images.groupby(["case", "attack"], sort=False)
    table = groups.agg(n=("scored", "sum"), failed=("failed", "sum"))
    for name in names:
        table[name] = groups[name].mean()
        table[f"{name}_std"] = groups[name].std()
    reached = worst_case(cased, [lead_metric(names)], geometry)
    behind = [dict(Counter(reached.attack[reached.case == case])) for case in range(len(cases))]
    blocks = there.dropna(subset=["block"]).groupby(["case", "attack"]).block.first().to_dict()
    rows = [
        {
            **cases[case].options,
            **{"block": blocks.get((case, attack)), "attack": attack, "kind": kind},
            "leakiest": behind[case] if kind == "worst" else None,
            **table.loc[(case, attack)].to_dict(),
        }
        for case in range(len(cases))
        for kind, attack in _ordered(there.attack[there.case == case].unique().tolist())
        if (case, attack) in table.index
    ]
    return pd.DataFrame(rows).astype({"n": int, "failed": int})


def elsewhere(records: pd.DataFrame, metrics: Sequence[str], geometry: str) -> list[str]:
    """Return what the paper's attack and the worst case have in the other geometries, in a line for each.

    By the lead metric; a geometry that changes nothing is left out.
    """
    lead, lines = lead_metric(metrics), []
    here = _leading(summarise(records, [lead], geometry), lead)
    for other in [name for name in GEOMETRIES if name != geometry and (records.geometry == name).any()]:
        found = _leading(summarise(records, [lead], other), lead)
        if found != here:
            told = "; ".join(f"{name} {value}" for name, value in found.items())
            lines.append(f"geometry {other} (--geometry {other}), {_title(lead)}: {told}")
    return lines


def _leading(table: pd.DataFrame, lead: str) -> dict[str, str]:
    """Return the lead metric of the paper's attack and of the worst case of each case, by their names, in words."""
    rows = table.loc[table.kind.isin(["paper", "worst"])].to_dict("records")
    several = [column for column in ("victim", "setting", "defense") if table[column].nunique() > 1]
    return {" ".join([*(str(row[c]) for c in several), row["attack"]]): _value(row, lead, " ± ") for row in rows}


def flags(records: pd.DataFrame, metrics: Sequence[str], geometry: str = "in_place") -> list[Flag]:
    """Return the red flags of a run."""
    cased, cases = by_case(records)
    return red_flags(cased, [case.label for case in cases], lead_metric(metrics), geometry)


def _ordered(attacks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the name of each row of a victim and setting, in their order."""
    paper = papers_attack(attacks)
    kinds = {attack: "control" if attack.startswith(CONTROL) else "attack" for attack in attacks}
    kinds |= {WORST: "worst"} | ({paper: "paper"} if paper else {})
    yield from sorted(((kind, attack) for attack, kind in kinds.items()), key=lambda pair: _KINDS.index(pair[0]))


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


def not_measured(outcome: Outcome, shown: Sequence[str]) -> list[str]:
    """Return why figures of the shown metrics are n/a, or over fewer images than there are: one line for each."""
    scored = outcome.records.loc[outcome.records.status == "ok"]
    tried = " " + scored.metrics.fillna("") + " "
    reasons = {name: f"{reason.partition(':')[0]}; see the warning" for name, reason in outcome.missing.items()}
    reasons |= {
        name: f"for {count} of {len(scored)} records: {reason}"
        for name, reason in UNDEFINED.items()
        if name in shown and (count := int((scored[name].isna() & tried.str.contains(f" {name} ", regex=False)).sum()))
    }
    return [f"{name}: n/a ({reasons[name]})" for name in shown if name in reasons]


def verdicts(outcome: Outcome) -> list[str]:
    """Return one line per victim that says what the numbers stand on, and one for the threat model."""
    spec = outcome.spec
    lines = []
    for base in outcome.victims:
        at_work = [defense_of(spec, base, setting) for setting in spec.settings]
        shuffles = (part for stack in at_work for part in stack.parts if isinstance(part, Jigsaw))
        gamma = ", ".join(dict.fromkeys(f"γ = {part.gamma:g}" for part in shuffles)) or "no jigsaw"
        defense = ", ".join(f"{d!r} in setting {s}" for s, d in zip(spec.settings, at_work, strict=True))
        unknown = f", E_unk {base.weights.unknown}" if base.weights.unknown else ""
        origin = f"weights {base.weights.origin}{unknown} (SHA-256 {base.weights.sha256[:12]})"
        lines.append(f"{base.name}: {origin}; defense {defense}; {gamma}; seed {spec.seed}{_how(spec)}")
    return [*lines, scope(outcome.records)]


def _how(spec: Specification) -> str:
    """Return what else of a run its numbers stand on."""
    draws = f"; {spec.draws} draws of each image" if spec.draws > 1 else ""
    batch = f"; {spec.gradient_batch} images in one gradient" if spec.gradient_batch > 1 else ""
    return draws + batch + ("; FORCED: attacks run where their formulas do not hold" if spec.force else "")


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
        name = row["attack"] + (f"\n({about})" if (about := _about(row)) else "")
        block = row["block"] if isinstance(row["block"], str) else "—"  # controls have none
        shown.add_row(*(str(row[c]) for c in several), name, block, *values, images)
    return shown


def _about(row: Mapping[Hashable, Any]) -> str:
    """Return what stands under an attack's name: that it is the paper's; of the worst case the attacks behind it."""
    if row["kind"] != "worst":
        return "the paper's" if row["kind"] == "paper" else ""
    order = sorted(row["leakiest"].items(), key=lambda pair: -pair[1])
    return (
        "".join(name for name, _ in order)
        if len(order) < 2
        else ",\n".join(f"{name} {n} of {row['n']}" for name, n in order)
    )


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
