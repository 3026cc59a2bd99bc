"""The leakage table of rows and layout, and the words of all tables: figures, headings and notes."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType

from privlab.evaluation import CONTROLS
from privlab.grids import KNOWN, Layout, beside
from privlab.metrics import METRICS, PLACEMENT
from privlab.report.tables.per_image import BOUND, SINGLE, WORST, lead_metric, sign_of
from privlab.report.tables.results import Results
from privlab.report.tables.rows import Row, conditions_that_differ
from privlab.report.tables.writers import Cell, Column, Line, Table

_MEASURED_KINDS = ("paper", "worst", "single", "attack")
_SHORT_TITLES = {
    "placement_accuracy": "placed",
    "neighbour_accuracy": "neighbours",
    "f_sim": "F-SIM",
    "fft2d_mjp": "FFT2D (MJP)",
}


def metric_title(metric: str) -> str:
    """Return a metric's name as tables, figures and pages print it: "PSNR"."""
    first, _, rest = metric.partition("_")
    acronym = f"{first.upper()} {rest}".rstrip()
    name = acronym if first in ("mse", "psnr", "ssim", "fft2d", "lpips") else metric
    return _SHORT_TITLES.get(metric, name).replace("_", " ")


def heading(metric: str) -> str:
    """Return a metric as the heading of a column, with an arrow to where it leaks: "PSNR ↑"."""
    return f"{metric_title(metric)} {KNOWN[metric].arrow}".rstrip()


def decimals(layout: Layout, metric: str) -> int:
    """Return the number of decimals with which a metric is shown."""
    return layout.decimals.get(metric, KNOWN[metric].decimals)


def unit_of(metric: str) -> str:
    """Return the unit behind a figure of a metric: "dB", or the metric's name if it has no unit."""
    return {"psnr": "dB", "psnr_affine": "dB of psnr_affine"}.get(metric, metric)


def some(n: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def figure_text(value: float, decimals: int) -> str:
    """Return a figure as a table prints it: "n/a" for NaN, "∞", and powers of ten where the decimals would print 0."""
    if not math.isfinite(value):
        return "n/a" if math.isnan(value) else "∞" if value > 0 else "−∞"
    form = f".{decimals}f" if value == 0 or abs(value) >= 10**-decimals else ".1e"  # 0.0000 would hide an exact attack
    return ("−" if value < 0 else "") + f"{abs(value):{form}}".replace("e-0", "e-")


def shown_metrics(metrics: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics that the table of a run shows, in the order of MJP's Table 5; the records hold the others too.

    Metrics of other packages follow, and then those of rows, keys and utility.
    """
    order = (
        *("mse", "fft2d", "fft2d_mjp", "psnr", "psnr_affine", "ssim", "ssim_skimage"),
        *("lpips_alex", "lpips_vgg", "lpips_squeeze", "f_sim", *METRICS.added, *PLACEMENT),
    )
    return tuple(name for name in order if name in metrics and name not in beside(metrics))


def leakage_table(
    results: Results,
    rows: Sequence[Row],
    *,
    remarks: Sequence[str] = (),
    verdicts: Mapping[int, str] = MappingProxyType({}),
) -> Table:
    """Return the leakage table of results: a line for each row, with the mean and its interval by each metric.

    Records have every metric, and `data` adds victim, setting, defense and the options of each case. The table of one
    run of `privlab attack` shows the metrics that `shown_metrics` names, and on which block each attack ran.

    Args:
        results: the title, the columns, the level of the intervals, and the conditions that differ from the paper's.
        rows: all of its rows, or those of `headline`.
        remarks: the last lines below the table.
        verdicts: the verdict on each case, by its number.
    """
    layout, blocks = results.layout, None
    if "specification" in results.facts:
        stated = results.records.dropna(subset=["block"]).drop_duplicates(["case", "attack"])
        blocks = stated.set_index(["case", "attack"]).block.to_dict()
        layout = replace(layout, columns=shown_metrics(layout.columns))
    remarks = [*conditions_that_differ(results), *remarks]
    footnotes = dict.fromkeys(text for row in rows for text in _footnotes(row))
    marks = {text: _letters(i) for i, text in enumerate(footnotes)}
    leakiest = _leakiest_figures(rows, layout) if layout.bold else {}
    lines, above = [], None
    for row in rows:
        if row.group is not None and (above is None or above.group != row.group):
            lines.append(Line(heading=row.group, of_group=True))
        if above is None or (above.group, above.case) != (row.group, row.case):
            lines.append(Line(heading=row.label))
        above = row
        name = Cell(_name(row, layout.columns), mark=",".join(marks[text] for text in _footnotes(row)))
        block = [] if blocks is None else [Cell(blocks.get((row.case, row.attack), "—"))]
        lines.append(Line([name, *block, Cell(_counts(row)), *_figures(row, layout, leakiest)]))
    cases = {row.case: f"{row.group} {row.label}" if row.group else row.label for row in rows}
    notes = [(mark, text) for text, mark in marks.items()] + [("", text) for text in _notes(results, rows, layout)]
    within = "column and group" if any(row.group is not None for row in rows) else "column"
    notes += [("", f"bold: the leakiest figure, measured here, of its {within}")] if leakiest else []
    notes += [("", f"verdict: {label}: {verdicts[case]}") for case, label in cases.items() if case in verdicts]
    whole, stated = results.layout, results.records.reindex(columns=["case", "victim", "setting", "defense"])
    named = stated.drop_duplicates("case").set_index("case").to_dict("index")
    about = {"title": results.title, "source": results.source, "remarks": remarks, "verdicts": dict(verdicts)}
    about |= {"metrics": {name: KNOWN[name].direction for name in whole.columns}, "interval": whole.interval}
    about |= {"geometry": whole.geometry, "worst_case": BOUND, "rows": [asdict(row) for row in rows]}
    words = [Column("")] if blocks is None else [Column(""), Column("block")]
    return Table(
        [*words, Column("images", "count"), *(Column(heading(name), "figure") for name in layout.columns)],
        lines,
        notes + [("", text) for text in remarks],
        results.title,
        [_record(row, whole.columns, verdicts) for row in rows],
        [named.get(row.case, {}) | results.cases[row.case].options for row in rows],
        about,
    )


def _notes(results: Results, rows: Sequence[Row], layout: Layout) -> list[str]:
    """Return the lines that explain the rows, as far as they are needed."""
    columns, geometry, kinds = layout.columns, layout.geometry, {row.kind for row in rows}
    behind = {attack for row in rows for of in row.leakiest.values() for attack in of}
    shares = "; a share says how often an attack reaches it, over images and columns"
    notes = [
        ("published" in kinds and results.source, f"published: {results.source}"),
        (
            "worst" in kinds,
            f"{WORST}: {BOUND}; its leakiest score over all attacks and draws, by each metric's own direction"
            + (shares if any("%" in _behind(row, columns) for row in rows) else ""),
        ),
        (
            "single" in kinds,
            f"{SINGLE}: that with the leakiest mean over the images, by {metric_title(lead_metric(columns))}, as the "
            "evaluator finds it",
        ),
        (
            geometry != "oracle" and any("(reassembled)" in attack for attack in behind),
            "both: as it is, or reassembled (the adversary put patches in order), whichever leaks more",
        ),
        (
            any(row.exact for row in rows),
            "exact: every grey level is right; a mean PSNR over exact images is one of rounding",
        ),
        (
            any(math.isfinite(row.scores[name].low) for row in rows for name in columns),
            f"±: farther end of the {100 * layout.interval:g} % interval of the mean over the images, by Student's t",
        ),
        (
            any(s.images == 2 and math.isnan(s.low) for row in rows for s in map(row.scores.__getitem__, columns)),
            "n = 2: a mean over two images is shown without an interval, which would say nothing",
        ),
        (
            geometry == "oracle",
            "oracle: before scoring, the evaluator put the patches that were moved where they fit the image best, for "
            f"both attacks and controls; {CONTROLS[2]} would be the image itself, and is left out",
        ),
        (geometry == "reassembled", "reassembled: before scoring, the adversary put patches in order"),
    ]
    return [text for holds, text in notes if holds]


def _figures(row: Row, layout: Layout, leakiest: Mapping[tuple[str | None, str], str]) -> list[Cell]:
    """Return the mean of a row by each metric, and how far away the farther end of its interval is, if it has one."""
    cells = []
    for name in layout.columns:
        score, n = row.scores[name], decimals(layout, name)
        mean, reach = figure_text(score.mean, n), max(score.high - score.mean, score.mean - score.low)
        bold = row.kind in _MEASURED_KINDS and leakiest.get((row.group, name)) == mean
        cells.append(Cell(mean, figure_text(reach, n) if math.isfinite(reach) else "", bold))
    return cells


def _counts(row: Row) -> str:
    """Return the number of images as text: "20 (18 exact, 1 failed)"."""
    more = [f"{count} {what}" for count, what in ((row.exact, "exact"), (row.failed, "failed")) if count]
    counts = f"{row.images}" + (f" ({', '.join(more)})" if more else "")
    return counts if row.images or row.failed else "—"


def _record(row: Row, columns: Sequence[str], verdicts: Mapping[int, str]) -> dict[str, object]:
    """Return a row with its figures in full: METRIC, METRIC_low, METRIC_high, METRIC_images and METRIC_leakiest.

    For a worst case the last says on how many images each attack reached it, and for the best single attack which one
    it is. What was not measured is None. If there are verdicts, each follows its worst case.
    """
    record: dict[str, object] = {"group": row.group, "case": row.label, "row": row.kind, "attack": row.attack}
    record |= {"images": row.images, "exact": row.exact, "failed": row.failed}
    record["refused"] = "; ".join(f"{attack}: {reason}" for attack, reason in row.refused.items())
    record["external"] = row.external
    if verdicts:
        record["verdict"] = verdicts.get(row.case) if row.kind == "worst" else None
    for name in columns:
        score = row.scores[name]
        for end, value in (("", score.mean), ("_low", score.low), ("_high", score.high)):
            record[name + end] = None if math.isnan(value) else value
        record[f"{name}_images"] = score.images
        leakiest = row.leakiest.get(name, {})
        record[f"{name}_leakiest"] = "; ".join(f"{attack}: {count}" for attack, count in leakiest.items())
    return record


def _name(row: Row, columns: Sequence[str]) -> str:
    """Return the name of a row within its case, with the attacks behind a worst case or a best attack."""
    if row.kind in ("worst", "single"):
        return ": ".join(filter(None, (WORST if row.kind == "worst" else SINGLE, _behind(row, columns))))
    attack = (row.attack or "").replace(":", ": ")
    name = {"published": "published", "paper": f"paper's attack: {attack}"}.get(row.kind, attack)
    return f"{name} (external)" if row.external and row.kind != "published" else name


def _behind(row: Row, columns: Sequence[str]) -> str:
    """Return the attacks that reach the worst case most often, with their share of all images and columns."""
    counts = Counter[str]()
    for name in columns:
        counts.update(row.leakiest.get(name, {}))
    scored = sum(row.scores[name].images for name in columns if name in row.leakiest)
    order = sorted(counts, key=lambda attack: (-counts[attack], attack))
    if len(order) < 2:
        return "".join(order)
    more = f", {len(order) - 2} more" if len(order) > 2 else ""
    return ", ".join(f"{attack} {counts[attack] / scored:.0%}".replace("%", " %") for attack in order[:2]) + more


def _leakiest_figures(rows: Sequence[Row], layout: Layout) -> dict[tuple[str | None, str], str]:
    """Return, as it is printed, the leakiest figure that was measured here in each group, for each metric."""
    best: dict[tuple[str | None, str], float] = {}
    for row in rows:
        for name in filter(sign_of, layout.columns if row.kind in _MEASURED_KINDS else ()):
            mean = row.scores[name].mean
            if not math.isnan(mean):
                leakier = max if sign_of(name) > 0 else min
                best[row.group, name] = leakier(mean, best.get((row.group, name), mean))
    return {(group, name): figure_text(mean, decimals(layout, name)) for (group, name), mean in best.items()}


def _footnotes(row: Row) -> list[str]:
    """Return the footnotes of a row: why attacks cannot run, and what was measured elsewhere."""
    attacks: dict[str, list[str]] = {}
    for attack, reason in row.refused.items():
        attacks.setdefault(reason, []).append(attack)
    without = "not among the attacks: " if row.kind == "worst" else "cannot run: "
    refused = [without + "; ".join(f"{', '.join(names)} ({reason})" for reason, names in attacks.items())]
    what = "over results measured elsewhere too" if row.kind == "worst" else "external, measured elsewhere"
    return (refused if attacks else []) + ([f"{what}: {row.external}"] if row.external else [])


def _letters(number: int) -> str:
    """Return a, b, … z, aa, ab and so on."""
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)
