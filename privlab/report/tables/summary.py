"""What is said of one run besides its leakage table: one line for each case, and the conditions of its figures."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from privlab.evaluation import CONTROL, GEOMETRIES, UNDEFINED, Case
from privlab.metrics import DECIBELS, EXACT_DB, PLACEMENT
from privlab.report.tables.case_verdicts import certified
from privlab.report.tables.cells import decimals, figure_text, heading, metric_title, some
from privlab.report.tables.results import Results, case_names
from privlab.report.tables.rows import Row
from privlab.report.tables.writers import Cell, Column, Line, Table
from privlab.threat import Client

_SETTINGS = {
    "a": "nothing is defended, and reconstructions are compared with the private image",
    "b": "the defense is at work, and reconstructions are compared with what the client fed, shuffled or not",
    "c": "the defense is at work, and reconstructions are compared with the private image",
}
"""What each setting feeds, and with what it compares reconstructions (MJP, section 5.4)."""


def overview(results: Results) -> Table:
    """Return a line for each case: the paper's attack, the best single attack, its exact images, and the best control.

    They are compared by the lead metric.
    """
    lead, lines, above = results.lead, [], False
    for case, name in enumerate(case_names(results)):
        compared = _paper_and_best(results, case)
        best = compared["best attack"] or results.row(case, "worst")
        compared |= {"best attack": best, "leakiest control": results.leakiest_control(case, lead)}
        exact = "—" if best is None or best.exact is None else f"{best.exact} of {best.images}"
        paper, attack, control = (Cell(_figure(row, results)) for row in compared.values())
        lines.append(Line([Cell(name), paper, attack, Cell(exact), control]))
        above |= any(row is not None and math.inf > row.scores[lead].mean > EXACT_DB for row in compared.values())
    heads = ("attacked", "paper's attack", "best attack", "exact", "leakiest control")
    notes = [
        f"{heading(lead)}: means over the images; the arrow points to what leaks. Exact: number of images of which "
        "every grey level is right. Control: an image that no attack made, such as the mean of other photographs.",
        _settings_text(results.records),
    ]
    if above and lead in DECIBELS:
        notes.append(
            f"Above {EXACT_DB:g} dB only rounding is measured; the verdict counts such a score as {EXACT_DB:g}."
        )
    columns = [Column(head, "count" if head == "exact" else "words") for head in heads]
    return Table(columns, lines, [("", note) for note in notes if note])


def _paper_and_best(results: Results, case: int) -> dict[str, Row | None]:
    return {"paper's attack": results.row(case, "paper"), "best attack": results.row(case, "single")}


def _figure(row: Row | None, results: Results) -> str:
    """Return an attack or a control with its mean by the lead metric; in a terminal, the figure has its own line."""
    if row is None:
        return "—"
    lead = results.lead
    score = row.scores[lead]
    name = "".join(row.leakiest.get(lead, ())) if row.kind == "single" else row.attack or ""
    unit = " dB" if lead in DECIBELS and math.isfinite(score.mean) else ""
    return f"{name.removeprefix(CONTROL)}:\n{figure_text(score.mean, decimals(results.layout, lead))}{unit}"


def with_placement(results: Results) -> Results:
    """Return the results with a column for each metric of rows, keys and utility that was measured."""
    records, layout = results.records, results.layout
    there = records.loc[(records.geometry == layout.geometry) | records.attack.str.startswith(CONTROL)]
    more = [name for name in PLACEMENT if name not in layout.columns and there[name].notna().any()]
    return results.laid_out(columns=(*layout.columns, *more))


def remarks_of(results: Results, spec: Case, missing: Mapping[str, str]) -> Iterator[str]:
    """Yield what `--details` says of one run: its geometries and settings, what is n/a, what is proven, and its origin.

    Args:
        results: those of the run, with the columns of its table.
        spec: what was run.
        missing: the reason for each metric that could not be computed.
    """
    geometry, records = results.layout.geometry, results.records
    yield f"arrows point to what leaks; geometry {geometry}"
    yield from _elsewhere(results)
    yield _settings_text(records)
    yield from _missing(results, missing)
    yield from certificates(records)
    yield from origins(results.facts, spec)


def _elsewhere(results: Results) -> Iterator[str]:
    """Yield a line for each other geometry: what the paper's attack and the best one have there, if that differs."""
    attacked = results.records.loc[~results.records.attack.str.startswith(CONTROL)]
    for geometry in GEOMETRIES:
        if geometry == results.layout.geometry or not (attacked.geometry == geometry).any():
            continue
        there = results.laid_out(columns=(results.lead,), geometry=geometry)
        found = []
        for case, name in enumerate(case_names(results)):
            here = _paper_and_best(results, case)
            for what, row in _paper_and_best(there, case).items():
                attack, _, figure = _figure(row, there).partition("\n")
                if row and row.images and figure not in _figure(here[what], results):
                    found.append(f"{name}, {what}, {attack} {figure}")
        if found:
            yield f"geometry {geometry} (--geometry {geometry}), {metric_title(results.lead)}: {'; '.join(found)}"


def _settings_text(records: pd.DataFrame) -> str:
    """Return what each setting of a run feeds, and with what it compares reconstructions."""
    found = (f"Setting {name}: {text}." for name, text in _SETTINGS.items() if (records.setting == name).any())
    return " ".join(found)


def certificates(records: pd.DataFrame) -> list[str]:
    """Return one line for each victim on how well reconstructions explain the updates, which needs no private image.

    It has the mean of `explained` over the images, and how many of them are proven: above the share that no wrong image
    has reached.
    """
    rows = records.loc[records.explained.notna() & (records.geometry == GEOMETRIES[0])]
    rows = rows.assign(certified=certified(rows))
    lines = []
    for victim, of_victim in rows.groupby("victim", sort=False):
        shares = ", ".join(
            f"{attack} {found.explained.mean():.4f} ({int(found.certified.sum())} of {len(found)} proven)"
            for attack, found in of_victim.groupby("attack", sort=False)
        )
        lines.append(f"{victim}: share of the update that a reconstruction explains, no image being known: {shares}")
    return lines


def _missing(results: Results, missing: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each column that is n/a, or has fewer images than there are, with the reason."""
    scored = results.records.loc[results.records.status == "ok"]
    tried = " " + scored.metrics.fillna("") + " "
    for name in results.layout.columns:
        undefined = tried.str.contains(f" {name} ", regex=False) & scored[name].isna()
        if name in UNDEFINED and undefined.any():
            yield f"{name}: n/a (for {undefined.sum()} of {len(scored)} records: {UNDEFINED[name]})"
        elif name in missing:
            yield f"{name}: n/a ({missing[name].partition(':')[0]}; see the warning)"


def origins(facts: Mapping[str, Any], spec: Case) -> list[str]:
    """Return one line for each victim on its weights and defense, and on the options that decide its figures.

    Args:
        facts: what `run.json` states of a run.
        spec: what was run.
    """
    chosen = [f"seed {spec.seed}", *([f"{spec.draws} draws of each image"] if spec.draws > 1 else [])]
    several = spec.released == "gradients" and spec.release.images > 1
    chosen += [f"{spec.release.images} images in one gradient"] if several else []
    chosen += [] if spec.client is None else [_client_text(spec.client)]
    own_loss = facts.get("specification", {}).get("own_loss")  # a function, which a run on disk does not have
    chosen += [] if own_loss is None else [f"loss {own_loss['name']}"]
    chosen += [f"features after block {spec.cut_layer}"] if spec.cut_layer else []
    chosen += ["FORCED: attacks run where their formulas do not hold"] if spec.adversary.force else []
    lines = []
    for victim in facts["victims"]:
        name, weights = victim["name"], victim["weights"]
        unknown = f", E_unk {weights['unknown']}" if weights["unknown"] else ""
        defenses: Sequence[str] = [f"{facts['defenses'][f'{name}/{s}']} in setting {s}" for s in spec.settings]
        origin = f"weights {weights['origin']}{unknown} (SHA-256 {weights['sha256'][:12]})"
        lines.append(f"{name}: {origin}; defense {', '.join(defenses)}; {'; '.join(chosen)}")
    return lines


def _client_text(client: Client) -> str:
    """Return a client's steps, optimiser, rate and images, and its other settings that are not the defaults."""
    usual = Client(optimiser=client.optimiser)
    settings = vars(client) | ({} if isinstance(client.loss, str) else {"loss": "cross-entropy"})
    others = {name: value for name, value in settings.items() if name not in ("optimiser", "steps", "epochs")}
    shown = (
        f"{name} {value}" for name, value in others.items() if name in ("lr", "images") or value != getattr(usual, name)
    )
    return f"updates after {some(client.total_steps, 'step')} of {client.optimiser} ({', '.join(shown)})"
