"""The leakage table: its rows, its columns and its notes as plain text, which writers put into a format."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from privlab.evaluation import CONTROLS
from privlab.grids import KNOWN, Layout
from privlab.report.tables.leakage import Row, conditions_that_differ
from privlab.report.tables.per_image import BOUND, SINGLE, WORST, lead_metric, sign_of
from privlab.report.tables.results import Results

OF_WORST = f"{WORST}: {BOUND}; its leakiest score over all attacks and draws, by each metric's own direction"
OF_ADVERSARIES = "both: as it is, or reassembled (the adversary put patches in order), whichever leaks more"
OF_EXACT = "exact: every grey level is right; a mean PSNR over exact images is one of rounding"
OF_ORACLE = (
    "oracle: before scoring, the evaluator put the patches that were moved where they fit the image best, for attacks "
    f"and controls alike; {CONTROLS[2]} would be the image itself, and is left out"
)
_MEASURED_KINDS = ("paper", "worst", "single", "attack")
_SHORT_TITLES = {
    "placement_accuracy": "placed",
    "neighbour_accuracy": "neighbours",
    "f_sim": "F-SIM",
    "fft2d_mjp": "FFT2D (MJP)",
}


def of_interval(level: float) -> str:
    """Return the note that explains what stands behind ±: an interval of the confidence level `level`, in (0, 1)."""
    return f"±: farther end of the {100 * level:g} % interval of the mean over the images, by Student's t"


def of_single(metrics: Sequence[str]) -> str:
    """Return the note that explains the best single attack."""
    by = metric_title(lead_metric(metrics))
    return f"{SINGLE}: that with the leakiest mean over the images, by {by}, as the evaluator finds it"


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


def mean_text(mean: float, low: float, high: float, decimals: int) -> tuple[str, str]:
    """Return a mean as text, and how far away the farther end of its interval is; an empty text without an interval.

    Args:
        mean: the mean.
        low: the lower end of its interval.
        high: the upper end of its interval.
        decimals: digits after the point.
    """
    reach = max(high - mean, mean - low)
    return figure_text(mean, decimals), figure_text(reach, decimals) if math.isfinite(reach) else ""


def count_text(images: int, exact: int | None, failed: int) -> str:
    """Return numbers of images as text: "20 (18 exact, 1 failed)".

    Args:
        images: those that have a score.
        exact: those of them with every grey level right; None where that was not measured. 0 and None are not shown.
        failed: those that have a failed record; 0 is not shown.
    """
    more = [f"{count} {what}" for count, what in ((exact, "exact"), (failed, "failed")) if count]
    return f"{images}" + (f" ({', '.join(more)})" if more else "")


@dataclass(frozen=True)
class Caption:
    """The text around a table: its title, the paper of the published figures, and remarks below it, as on conditions.

    `verdicts` has a line for each case, by its number.
    """

    title: str = ""
    source: str | None = None
    remarks: tuple[str, ...] = ()
    verdicts: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Results) -> "Caption":
        """Return the caption of results; its remarks are the conditions that differ from the paper's."""
        return cls(results.title, results.source, tuple(conditions_that_differ(results)))


Cell = tuple[str, str, bool]
"""A mean, its interval or an empty text, and whether it is in bold."""


@dataclass(frozen=True, eq=False)
class Table:
    """A leakage table, with its cells and notes as text before any markup.

    Args:
        rows: all rows of `leakage`, or those of its `headline`.
        layout: the columns, with their decimals, and the level of the intervals.
        caption: the title, the source of published figures, remarks, and verdicts.
    """

    rows: Sequence[Row]
    layout: Layout
    caption: Caption = field(default_factory=Caption)

    def lines(self) -> Iterator[tuple[Literal["group", "case", "row"], Row]]:
        """Yield the lines of the table: each row, and a group and a case before their first rows."""
        above = None
        for row in self.rows:
            if row.group is not None and (above is None or above.group != row.group):
                yield "group", row
            if above is None or (above.group, above.case) != (row.group, row.case):
                yield "case", row
            yield "row", row
            above = row

    def cells(self, row: Row) -> list[Cell]:
        """Return the cells of a row, one for each column."""
        return [self.cell(row, name) for name in self.layout.columns]

    def cell(self, row: Row, name: str) -> Cell:
        """Return the cell of a row for one metric."""
        score = row.scores[name]
        mean, interval = mean_text(score.mean, score.low, score.high, decimals(self.layout, name))
        return mean, interval, row.kind in _MEASURED_KINDS and self._leakiest.get((row.group, name)) == mean

    def name(self, row: Row) -> str:
        """Return the name of a row within its case, with the attacks behind a worst case or a best attack."""
        if row.kind in ("worst", "single"):
            return ": ".join(filter(None, (WORST if row.kind == "worst" else SINGLE, self.behind(row))))
        attack = (row.attack or "").replace(":", ": ")
        name = {"published": "published", "paper": f"paper's attack: {attack}"}.get(row.kind, attack)
        return f"{name} (external)" if row.external and row.kind != "published" else name

    def behind(self, row: Row) -> str:
        """Return the attacks that reach the worst case most often, with their share of all images and columns."""
        counts = Counter[str]()
        for name in self.layout.columns:
            counts.update(row.leakiest.get(name, {}))
        scored = sum(row.scores[name].images for name in self.layout.columns if name in row.leakiest)
        order = sorted(counts, key=lambda attack: (-counts[attack], attack))
        if len(order) < 2:
            return "".join(order)
        more = f", {len(order) - 2} more" if len(order) > 2 else ""
        return ", ".join(f"{attack} {counts[attack] / scored:.0%}".replace("%", " %") for attack in order[:2]) + more

    def images(self, row: Row) -> str:
        """Return the numbers of images that were scored, that are exact, and that failed, as text."""
        return count_text(row.images, row.exact, row.failed) if row.images or row.failed else "—"

    def mark(self, row: Row) -> str:
        """Return the letters of a row's footnotes."""
        return ",".join(self._marks[text] for text in _footnotes(row))

    def notes(self) -> list[tuple[str, str]]:
        """Return the lines under the table, each with its mark; general lines have none."""
        kinds, geometry = {row.kind for row in self.rows}, self.layout.geometry
        shared = any("%" in self.behind(row) for row in self.rows)
        shares = "; a share says how often an attack reaches it, over images and columns" if shared else ""
        behind = {attack for row in self.rows for of in row.leakiest.values() for attack in of}
        reassembled = geometry != "oracle" and any("(reassembled)" in attack for attack in behind)
        interval = any(math.isfinite(row.scores[name].low) for row in self.rows for name in self.layout.columns)
        within = "column and group" if any(row.group is not None for row in self.rows) else "column"
        general = [
            ("published" in kinds and self.caption.source, f"published: {self.caption.source}"),
            ("worst" in kinds, OF_WORST + shares),
            ("single" in kinds, of_single(self.layout.columns)),
            (reassembled, OF_ADVERSARIES),
            (any(row.exact for row in self.rows), OF_EXACT),
            (interval, of_interval(self.layout.interval)),
            (self._leakiest, f"bold: the leakiest figure, measured here, of its {within}"),
            (geometry == "oracle", OF_ORACLE),
            (geometry == "reassembled", "reassembled: before scoring, the adversary put patches in order"),
        ]
        said = [text for holds, text in general if holds]
        cases = {row.case: f"{row.group} {row.label}" if row.group else row.label for row in self.rows}
        verdicts = self.caption.verdicts
        said += [f"verdict: {label}: {verdicts[case]}" for case, label in cases.items() if case in verdicts]
        own = [(mark, text) for text, mark in self._marks.items()]
        return own + [("", text) for text in (*said, *self.caption.remarks)]

    @cached_property
    def _marks(self) -> dict[str, str]:
        """Return a letter for each different footnote."""
        texts = dict.fromkeys(text for row in self.rows for text in _footnotes(row))
        return {text: _letters(i) for i, text in enumerate(texts)}

    @cached_property
    def _leakiest(self) -> dict[tuple[str | None, str], str]:
        """Return, as it is printed, the leakiest figure that was measured here in each group, for each metric."""
        best: dict[tuple[str | None, str], float] = {}
        for row in self.rows if self.layout.bold else ():
            for name in filter(sign_of, self.layout.columns if row.kind in _MEASURED_KINDS else ()):
                mean = row.scores[name].mean
                if not math.isnan(mean):
                    leakier = max if sign_of(name) > 0 else min
                    best[row.group, name] = leakier(mean, best.get((row.group, name), mean))
        return {(group, name): figure_text(mean, decimals(self.layout, name)) for (group, name), mean in best.items()}


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
