"""The table of a run: a row for each attack, the best one and the worst case, with means over the images."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import pandas as pd

from privlab.defenses import Jigsaw
from privlab.evaluation import CONTROL, GEOMETRIES, UNDEFINED, Specification, defense_of
from privlab.grids import KNOWN, Layout, beside
from privlab.metrics import DECIBELS, METRICS, PLACEMENT
from privlab.release import effects_of
from privlab.report.tables.case_verdicts import certified, scope
from privlab.report.tables.formats import Cell, Column, Line, Table
from privlab.report.tables.leakage import Row, headline
from privlab.report.tables.results import Results, case_names
from privlab.report.tables.table import decimals, figure_text, heading, mean_text, metric_title, some
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


def rows_once(results: Results) -> list[Row]:
    """Return the rows of a run, each attack once and in the order in which the attacks ran.

    Each case has the paper's attack, the worst case, the best single attack, the other attacks, and the controls.
    """
    ran = results.records[["case", "attack"]].drop_duplicates().itertuples(index=False, name=None)
    place = {pair: number for number, pair in enumerate(ran)}
    paper = results.layout.paper_attack
    rows = [row for row in results.rows if row.kind in _KINDS and (row.kind != "attack" or row.attack != paper)]
    return sorted(rows, key=lambda row: (row.case, _KINDS.index(row.kind), place.get((row.case, row.attack or ""), -1)))


def blocks_of(results: Results) -> dict[tuple[int, str], str]:
    """Return the first block of the model on which each attack ran, by case and attack."""
    stated = results.records.dropna(subset=["block"]).drop_duplicates(["case", "attack"])
    return dict(zip(zip(stated.case, stated.attack, strict=True), stated.block, strict=True))


def summarise(results: Results) -> pd.DataFrame:
    """Return `rows_once` as data: `n` images scored, `failed` ones, and each METRIC, with those of placement.

    Scores are averaged over the draws of an image; the worst case takes its leakiest one over attacks, draws and the
    geometries that an adversary can make, by each metric's own direction; `leakiest` says by the lead metric on how
    many images each attack reached it, and which is the best single one. `exact` counts the images of which every grey
    level is right, or None. METRIC_low and METRIC_high are the ends of the interval of the mean (`mean_interval`),
    METRIC_std is the standard deviation over the images (n − 1); what no image has is NaN.
    """
    names = [*results.layout.columns, *measured_placement(results)]
    results = results.laid_out(columns=tuple(names))
    groups = results.scored.images.groupby(["case", "attack"], sort=False)
    means, deviations = groups[names].mean(), groups[names].std()
    blocks, rows = blocks_of(results), []
    for row in rows_once(results):
        if (key := (row.case, row.attack or "")) not in means.index:
            continue
        line: dict[str, object] = {**results.cases[row.case].options, "block": blocks.get(key), "attack": row.attack}
        nobody = {} if row.kind == "worst" else None
        line |= {"kind": row.kind, "leakiest": row.leakiest.get(results.lead, nobody)}
        line |= {"n": row.images, "failed": row.failed}
        for name in names:
            score = row.scores[name]
            line |= {name: means.at[key, name], f"{name}_std": deviations.at[key, name]}
            line |= {f"{name}_low": score.low, f"{name}_high": score.high}
        rows.append(line | {"exact": row.exact})
    counts = pd.Series([row.pop("exact") for row in rows], dtype=object)
    return pd.DataFrame(rows).assign(exact=counts)


def measured_placement(results: Results) -> list[str]:
    """Return the metrics of rows, keys and utility that were measured, if features are released."""
    records = results.records
    there = records.loc[(records.geometry == results.layout.geometry) | records.attack.str.startswith(CONTROL)]
    return [name for name in PLACEMENT if name not in results.layout.columns and there[name].notna().any()]


def overview(results: Results) -> Table:
    """Return a line for each case: the paper's attack, the best single attack, its exact images, and the best control.

    They are compared by the lead metric.
    """
    lead, lines = results.lead, []
    for case, name in enumerate(case_names(results)):
        paper, best = results.row(case, "paper"), results.row(case, "single") or results.row(case, "worst")
        control = results.leakiest_control(case, lead)
        exact = "—" if best is None or best.exact is None else f"{best.exact} of {best.images}"
        figures = (_figure(row, results.layout, lead) for row in (paper, best, control))
        attacked, *words = (Cell(text) for text in (name, *figures))
        lines.append(Line([attacked, *words[:2], Cell(exact), words[2]]))
    heads = ("attacked", "paper's attack", "best attack", "exact", "leakiest control")
    note = f"{heading(lead)}: means over the images; the arrow points to what leaks. Exact: every grey level is right."
    return Table([Column(head, "count" if head == "exact" else "words") for head in heads], lines, [("", note)])


def _figure(row: Row | None, layout: Layout, metric: str) -> str:
    """Return an attack or a control with its mean as text."""
    if row is None:
        return "—"
    score = row.scores[metric]
    name = "".join(row.leakiest.get(metric, ())) if row.kind == "single" else row.attack
    unit = " dB" if metric in DECIBELS and math.isfinite(score.mean) else ""
    return f"{name}: {figure_text(score.mean, decimals(layout, metric))}{unit}"


def elsewhere(results: Results) -> list[str]:
    """Return a line per other geometry: what the paper's attack, the worst case and the best attack have there.

    It is the lead metric that is compared. Figures that are the same as in the geometry of the results are left out.
    """
    attacked = results.records.loc[~results.records.attack.str.startswith(CONTROL)]  # controls lead no row
    lead, lines = results.lead, []
    here = _headline_figures(results)
    for other in GEOMETRIES:
        if other == results.layout.geometry or not (attacked.geometry == other).any():
            continue
        there = _headline_figures(results.laid_out(columns=(lead,), geometry=other))
        if found := [f"{name} {text}" for name, text in there.items() if here.get(name) != text]:
            lines.append(f"geometry {other} (--geometry {other}), {metric_title(lead)}: {'; '.join(found)}")
    return lines


def _headline_figures(results: Results) -> dict[str, str]:
    """Return the lead metric of the headline rows of each case as text, by the names of the rows."""
    lead, several, figures = results.lead, len(results.cases) > 1, {}
    for row in headline(results.rows):
        if not row.images:
            continue
        score = row.scores[lead]
        name = f"{row.label}, {row.attack}" if several else str(row.attack)
        figures[name] = " ± ".join(filter(None, mean_text(score.mean, score.low, score.high, KNOWN[lead].decimals)))
    return figures


def settings_text(records: pd.DataFrame) -> str:
    """Return what each setting of a run feeds, and with what it compares reconstructions."""
    return f"Settings: {'; '.join(text for name, text in _SETTINGS.items() if (records.setting == name).any())}."


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


def shown_metrics(metrics: Sequence[str]) -> list[str]:
    """Return the metrics that a table shows, in the order of MJP's Table 5; the records hold the others too.

    Metrics of other packages follow.
    """
    order = (
        *("mse", "fft2d", "fft2d_mjp", "psnr", "psnr_affine", "ssim", "ssim_skimage"),
        *("lpips_alex", "lpips_vgg", "lpips_squeeze", "f_sim", *METRICS.added),
    )
    return [name for name in order if name in metrics and name not in beside(metrics)]


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
