"""The table of a run: a row for each attack, the best one and the worst case, with means over the images."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from privlab.defenses import Jigsaw
from privlab.evaluation import CONTROL, GEOMETRIES, UNDEFINED, Specification, defense_of
from privlab.grids import KNOWN, Layout, beside, papers_attack
from privlab.metrics import METRICS, PLACEMENT
from privlab.release import effects_of
from privlab.report.tables.case_verdicts import certified, scope
from privlab.report.tables.leakage import measure
from privlab.report.tables.per_image import SINGLE, WORST, Scored, attack_label, lead_metric
from privlab.report.tables.results import by_case
from privlab.report.tables.table import (
    OF_ADVERSARIES,
    OF_EXACT,
    OF_ORACLE,
    OF_WORST,
    count_text,
    heading,
    mean_text,
    metric_title,
    of_interval,
    of_single,
    some,
)
from privlab.threat import Client

if TYPE_CHECKING:
    from privlab.report.run import Run

_SETTINGS = {
    "a": "a, nothing is defended, and the private image x is the reference",
    "b": "b, the defense is at work, and x̃, what the client fed, is the reference: an order that is lost costs nothing",
    "c": "c, the defense is at work, and the private image x is the reference",
}
"""What each setting feeds, and with what it compares reconstructions (MJP, section 5.4)."""

_KINDS = ("paper", "worst", "single", "attack", "control")


def summarise(records: pd.DataFrame, metrics: Sequence[str], geometry: str = "in_place") -> pd.DataFrame:
    """Return one row per victim, setting and attack: `n` images scored, `failed` ones, and each METRIC.

    Each victim and setting has the paper's attack, the worst case, the best single attack by the lead metric, the other
    attacks in the order in which they ran, and the controls (`kind`). Scores are averaged over the draws of an image;
    the worst case takes its leakiest one over attacks, draws and the geometries that an adversary can make, by each
    metric's own direction; `leakiest` says by the lead metric on how many images each attack reached it, and which is
    the best single one. `exact` counts the images of which every grey level is right, or None. METRIC_low and
    METRIC_high are the ends of the interval of the mean (`mean_interval`), METRIC_std is the standard deviation over
    the images (n − 1); what no image has is NaN.

    Args:
        records: those of one `privlab attack`.
        metrics: the names of the metrics; those of placement that were measured are added.
        geometry: "in_place", "oracle" or "reassembled": in which attacks and controls are scored.
    """
    cased, cases = by_case(records)
    there = cased.loc[(cased.geometry == geometry) | cased.attack.str.startswith(CONTROL)]
    names = [*metrics, *(name for name in PLACEMENT if there[name].notna().any())]
    scored, lead = Scored(cased, names, geometry), lead_metric(names)
    images = scored.images
    groups = images.groupby(["case", "attack"], sort=False)
    table = groups.agg(n=("scored", "sum"), failed=("failed", "sum"))
    ends = {(case, attack): cell.scores for (case, attack, _), cell in measure(images, names, Layout.interval)}
    for name in names:
        table[name] = groups[name].mean()
        table[f"{name}_std"] = groups[name].std()
        for end in ("low", "high"):
            table[f"{name}_{end}"] = [getattr(ends[key][name], end) for key in table.index]
    exact = groups.exact.sum(min_count=1).dropna().astype(int).to_dict()
    reached = scored.reached.loc[scored.reached.metric == lead]
    who = [attack_label(attack, where) for attack, where in zip(reached.attack, reached.geometry, strict=True)]
    behind = {(case, WORST): dict(Counter(np.array(who)[reached.case == case].tolist())) for case in range(len(cases))}
    behind |= {(case, SINGLE): {name: int(table.n[case, SINGLE])} for case, (name, _) in scored.single.items()}
    blocks = there.dropna(subset=["block"]).groupby(["case", "attack"]).block.first().to_dict()
    rows = [
        {
            **cases[case].options,
            **{"block": blocks.get((case, attack)), "attack": attack, "kind": kind},
            "leakiest": behind.get((case, attack)),
            **table.loc[(case, attack)].to_dict(),
            "exact": exact.get((case, attack)),
        }
        for case in range(len(cases))
        for kind, attack in _order(there.attack[there.case == case].unique().tolist())
        if (case, attack) in table.index
    ]
    counts = pd.Series([row.pop("exact") for row in rows], dtype=object)
    return pd.DataFrame(rows).astype({"n": int, "failed": int}).assign(exact=counts)


def elsewhere(records: pd.DataFrame, metrics: Sequence[str], table: pd.DataFrame, geometry: str) -> list[str]:
    """Return a line per other geometry: what the paper's attack, the worst case and the best attack have there.

    It is the lead metric of `metrics` that is compared. Figures that are the same as in the geometry of the table, that
    of `summarise`, are left out.

    Args:
        records: those of one `privlab attack`.
        metrics: the names of the metrics, of which the lead metric is told.
        table: the rows of `summarise`.
        geometry: that of the table.
    """
    laid_out = set(records.geometry[~records.attack.str.startswith(CONTROL)])  # of attacks: controls lead no row
    others = [name for name in GEOMETRIES if name != geometry and name in laid_out]
    if not others:
        return []
    lead, lines = lead_metric(metrics), []
    here = _leading(table, lead)
    for other in others:
        there = _leading(summarise(records, [lead], other), lead)
        if found := {name: value for name, value in there.items() if here.get(name) != value}:
            told = "; ".join(f"{name} {value}" for name, value in found.items())
            lines.append(f"geometry {other} (--geometry {other}), {metric_title(lead)}: {told}")
    return lines


def _leading(table: pd.DataFrame, lead: str) -> dict[str, str]:
    """Return the lead metric of the headline rows of each case as text, by the names of the rows."""
    rows = table.loc[table.kind.isin(["paper", "worst", "single"])].to_dict("records")
    several = _several(table)
    return {" ".join([*(str(row[c]) for c in several), row["attack"]]): _value(row, lead, " ± ") for row in rows}


def _several(table: pd.DataFrame) -> list[str]:
    """Return which columns tell the cases of a table apart."""
    return [column for column in ("victim", "setting", "defense") if table[column].nunique() > 1]


def explanations(table: pd.DataFrame, metrics: Sequence[str], geometry: str) -> list[str]:
    """Return the lines that explain a table of `summarise`: settings, intervals, worst case, best attack, geometry.

    Args:
        table: the rows of `summarise`.
        metrics: its metrics, of which the lead metric is named.
        geometry: that of the table.
    """
    reassembled = any("(reassembled)" in name for behind in table.leakiest if behind for name in behind)
    settings = [said for setting, said in _SETTINGS.items() if (table.setting == setting).any()]
    return [
        f"Settings: {'; '.join(settings)}.",
        *([of_interval(Layout.interval)] if any(table.n > 1) else []),
        OF_WORST,
        of_single(metrics),
        *([OF_ADVERSARIES] if reassembled and geometry != GEOMETRIES[1] else []),
        *([OF_ORACLE] if geometry == GEOMETRIES[1] else []),
        *([OF_EXACT] if any(table.exact) else []),
    ]


def certificates(records: pd.DataFrame) -> list[str]:
    """Return one line for each victim on how well reconstructions explain the updates, which needs no private image.

    It has the mean of `explained` over the images, and how many of them are proven: above the share that no wrong image
    has reached.
    """
    rows = records.loc[records.explained.notna() & (records.geometry == GEOMETRIES[0])]
    rows = rows.assign(certified=certified(rows))
    lines = []
    for victim, of_victim in rows.groupby("victim", sort=False):
        told = ", ".join(
            f"{attack} {found.explained.mean():.4f} ({int(found.certified.sum())} of {len(found)} proven)"
            for attack, found in of_victim.groupby("attack", sort=False)
        )
        lines.append(f"{victim}: share of the update that a reconstruction explains, no image being known: {told}")
    return lines


def _order(attacks: Sequence[str]) -> list[tuple[str, str]]:
    """Return the kind and the name of each row of a victim and setting, in their order."""
    paper = papers_attack(attacks)
    kinds = {attack: "control" if attack.startswith(CONTROL) else "attack" for attack in attacks}
    kinds |= {WORST: "worst", SINGLE: "single"} | ({paper: "paper"} if paper else {})
    return sorted(((kind, attack) for attack, kind in kinds.items()), key=lambda pair: _KINDS.index(pair[0]))


def shown_metrics(metrics: Sequence[str], table: pd.DataFrame) -> list[str]:
    """Return the metrics that the table shows, in the order of MJP's Table 5; the records hold the others too.

    Metrics of other packages follow, and, where features are released, the metrics of rows, keys and utility that were
    measured.
    """
    order = (
        *("mse", "fft2d", "fft2d_mjp", "psnr", "psnr_affine", "ssim", "ssim_skimage"),
        *("lpips_alex", "lpips_vgg", "lpips_squeeze", "f_sim", *METRICS.added),
    )
    shown = [name for name in order if name in metrics and name not in beside(metrics)]
    return [*shown, *(name for name in PLACEMENT if name in table)]


def missing_metrics(outcome: "Run", shown: Sequence[str]) -> list[str]:
    """Return one line for each shown metric that is n/a, or has fewer images than there are, with the reason."""
    scored = outcome.records.loc[outcome.records.status == "ok"]
    tried = " " + scored.metrics.fillna("") + " "
    reasons = {name: f"{reason.partition(':')[0]}; see the warning" for name, reason in outcome.missing.items()}
    reasons |= {
        name: f"for {count} of {len(scored)} records: {reason}"
        for name, reason in UNDEFINED.items()
        if name in shown and (count := int((scored[name].isna() & tried.str.contains(f" {name} ", regex=False)).sum()))
    }
    return [f"{name}: n/a ({reasons[name]})" for name in shown if name in reasons]


def verdicts(outcome: "Run") -> list[str]:
    """Return one line per victim on its weights, defense and seed, and one on the threat model."""
    spec, lines = outcome.spec, []
    for base in outcome.victims:
        at_work = [defense_of(spec, base, setting) for setting in spec.settings]
        parts = (part for stack in at_work for part in stack.parts)
        shuffles = [part for part in parts if effects_of(base.model, [part]).patches != "kept"]
        told = (f"γ = {part.gamma:g}" if isinstance(part, Jigsaw) else f"shuffled by {part.name}" for part in shuffles)
        gamma = ", ".join(dict.fromkeys(told)) or "no jigsaw"
        defense = ", ".join(f"{d!r} in setting {s}" for s, d in zip(spec.settings, at_work, strict=True))
        unknown = f", E_unk {base.weights.unknown}" if base.weights.unknown else ""
        origin = f"weights {base.weights.origin}{unknown} (SHA-256 {base.weights.sha256[:12]})"
        lines.append(f"{base.name}: {origin}; defense {defense}; {gamma}; seed {spec.seed}{_how(spec)}")
    return [*lines, scope(outcome.records)]


def _how(spec: Specification) -> str:
    """Return the other options of a run on which its numbers depend: draws, gradient batch, client, cut and force."""
    draws = f"; {spec.draws} draws of each image" if spec.draws > 1 else ""
    batch = f"; {spec.gradient_batch} images in one gradient" if spec.gradient_batch > 1 else ""
    batch += "" if spec.local_training is None else f"; {_trained_by(spec.local_training)}"
    batch += f"; features after block {spec.cut_layer}" if spec.cut_layer else ""
    return draws + batch + ("; FORCED: attacks run where their formulas do not hold" if spec.force else "")


def _trained_by(client: Client) -> str:
    """Return a client's images, steps and optimiser, and those other settings that are not the defaults."""
    usual = Client(optimiser=client.optimiser)
    told = {f.name for f in fields(client)} - {"optimiser", "images", "clients", "steps", "epochs"}
    own = ", ".join(
        f"{f.name} {getattr(client, f.name)}"
        for f in fields(client)
        if f.name in told and (f.name == "lr" or getattr(client, f.name) != getattr(usual, f.name))
    )
    images, steps = some(client.images, "image"), some(client.total_steps, "step")
    of = "updates of clients" if client.clients == 1 else f"means of the updates of {client.clients} clients"
    return f"{of} with {images} and {steps} of {client.optimiser}, {own}"


def to_rich(table: pd.DataFrame, metrics: Sequence[str], *, stacked: bool = False) -> Table:
    """Lay a table of `summarise` out for a terminal; the arrow shows the leaky direction of each metric.

    Args:
        table: the rows of `summarise`.
        metrics: those that get a column, each mean ± the farther end of its interval.
        stacked: whether the interval stands below the mean, for a narrow terminal.
    """
    several = _several(table)
    narrow = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": 0}
    shown = Table(header_style="bold", **narrow if stacked else {})
    for column in (*several, "attack", "block"):
        shown.add_column(column, no_wrap=True)
    for name in metrics:
        shown.add_column(heading(name), justify="right", no_wrap=True)
    shown.add_column("images", justify="right")
    for row in table.to_dict("records"):
        values = [_value(row, name, "\n± " if stacked else " ± ") for name in metrics]
        images = count_text(row["n"], row["exact"], row["failed"])
        name = row["attack"] + (f"\n({about})" if (about := _about(row)) else "")
        block = row["block"] if isinstance(row["block"], str) else "—"  # controls have none
        shown.add_row(*(str(row[c]) for c in several), name, block, *values, images)
    return shown


def _about(row: Mapping[Hashable, Any]) -> str:
    """Return the text under a name: that an attack is the paper's, or which attacks are behind the worst case."""
    if row["leakiest"] is None:
        return "the paper's" if row["kind"] == "paper" else ""
    order = sorted(row["leakiest"].items(), key=lambda pair: -pair[1])
    said = [(name.replace(" (", "\n("), n) for name, n in order]  # "april (reassembled)" in two lines
    return said[0][0] if len(said) == 1 else ";\n".join(f"{name} {n} of {row['n']}" for name, n in said)


def _value(row: Mapping[Hashable, Any], name: str, between: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return between.join(filter(None, mean_text(row[name], low, high, KNOWN[name].decimals)))
