"""A leakage table as text: LaTeX, Markdown, CSV, JSON, and a layout for a terminal."""

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich import box
from rich.table import Table
from rich.text import Text

from privlab.base import check_name
from privlab.grids import KNOWN, Layout
from privlab.report.tables.latex import latex_table
from privlab.report.tables.leakage import Row
from privlab.report.tables.per_image import BOUND
from privlab.report.tables.sheet import Caption, Cell, Sheet, behind, figure_text, heading, images, row_name

__all__ = ["FORMATS", "Caption", "figure_text", "heading", "plain_data", "render", "to_rich"]

FORMATS = ("latex", "csv", "markdown", "json")
"""The formats of a table, by `--format`."""

_NO_CAPTION = Caption()


def render(
    form: str, rows: Sequence[Row], layout: Layout, caption: Caption = _NO_CAPTION, *, standalone: bool = False
) -> str:
    """Return a leakage table as text, in one of `FORMATS`.

    Args:
        form: "latex", "csv", "markdown" or "json".
        rows: all rows of `leakage`, or those of its `headline`.
        layout: the columns, with their decimals, and the level of the intervals.
        caption: the title, the source of published figures, remarks, and verdicts.
        standalone: whether LaTeX is a whole document; the other formats do not read it.

    Raises:
        PrivlabError: for an unknown format.
    """
    check_name("format", form, FORMATS)
    if form == "latex":
        return latex_table(rows, layout, caption, standalone=standalone)
    return {"markdown": _markdown_table, "json": _json, "csv": _csv}[form](rows, layout, caption)


def _markdown_table(rows: Sequence[Row], layout: Layout, caption: Caption) -> str:
    """Return a table of GitHub's Markdown, its title above and its notes below."""
    sheet = Sheet(rows, layout, caption)
    empty = [""] * (1 + len(layout.columns))
    lines = [["case", "", "images", *(_markdown(heading(name)) for name in layout.columns)]]
    lines.append([":--", ":--", *["--:"] * (1 + len(layout.columns))])
    label = ""
    for kind, row in sheet.lines():
        if kind == "group":
            lines.append([f"**{_markdown(row.group or '')}**", "", *empty])
        elif kind == "case":
            label = _markdown(row.label)
        else:
            cells = [
                (f"**{mean}**" if bold else mean) + (f" ± {interval}" if interval else "")
                for mean, interval, bold in sheet.cells(row)
            ]
            mark = f"<sup>{mark}</sup>" if (mark := sheet.mark(row)) else ""
            lines.append([label, _markdown(row_name(row, layout)) + mark, images(row), *cells])
            label = ""
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = "".join(f"\n{f'<sup>{mark}</sup> ' if mark else ''}{_markdown(text)}\n" for mark, text in sheet.notes())
    return (f"**{_markdown(caption.title)}**\n\n" if caption.title else "") + table + notes


def _csv(rows: Sequence[Row], layout: Layout, caption: Caption) -> str:
    """Return one line per row, figures in full: METRIC, METRIC_low, METRIC_high, METRIC_images and METRIC_leakiest.

    For a worst case the last says on how many images each attack reached it, and for the best single attack which one
    it is. What was not measured is empty. Of the caption, verdicts alone are shown, beside their worst case.
    """
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    facts = ["group", "case", "row", "attack", "images", "exact", "failed", "refused", "external"]
    facts += ["verdict"] if caption.verdicts else []
    ends = ("", "_low", "_high", "_images", "_leakiest")
    write([*facts, *(name + end for name in layout.columns for end in ends)])
    for row in rows:
        refused = "; ".join(f"{attack}: {reason}" for attack, reason in row.refused.items())
        line = [row.group, row.label, row.kind, row.attack, row.images, row.exact, row.failed, refused, row.external]
        if caption.verdicts:
            line.append(caption.verdicts.get(row.case) if row.kind == "worst" else None)
        for name in layout.columns:
            score = row.scores[name]
            leakiest = "; ".join(f"{attack}: {count}" for attack, count in row.leakiest.get(name, {}).items())
            ends = ["" if math.isnan(value) else repr(value) for value in (score.mean, score.low, score.high)]
            line += [*ends, score.images, leakiest]
        write([" ".join(value.split()) if isinstance(value, str) else value for value in line])
    return out.getvalue()


def _json(rows: Sequence[Row], layout: Layout, caption: Caption) -> str:
    """Return the rows as JSON: a figure that was not measured is null, an infinite one "Infinity"."""
    metrics = {name: KNOWN[name].direction for name in layout.columns}
    about = {"metrics": metrics, "interval": layout.interval, "geometry": layout.geometry, "worst_case": BOUND}
    table = asdict(caption) | about | {"rows": [asdict(row) for row in rows]}
    return json.dumps(plain_data(table), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def to_rich(rows: Sequence[Row], layout: Layout, caption: Caption = _NO_CAPTION, *, stacked: bool = False) -> Table:
    """Lay the table out for a terminal: a line for each case, published, paper's attack, worst case, best attack.

    Args:
        rows: all rows of `leakage`, or those of its `headline`.
        layout: the columns, with their decimals, and the level of the intervals.
        caption: the title; the source, remarks and verdicts stand below the table.
        stacked: whether each row has a line of its own: for a narrow terminal, or to show all rows of `leakage`.
    """
    sheet = Sheet(rows, layout, caption)
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    (_stack if stacked else _side_by_side)(sheet, table)
    notes = sheet.notes()
    table.title = Text(caption.title) if caption.title else None
    table.caption = Text("\n".join(f"({mark}) {text}" if mark else text for mark, text in notes))
    table.title_justify = table.caption_justify = "left"
    return table


def _stack(sheet: Sheet, table: Table) -> None:
    """Lay out each row under a line for its case, with intervals under their means."""
    table.add_column("case")
    table.add_column("images", justify="right")
    for name in sheet.layout.columns:
        table.add_column(heading(name), justify="right", no_wrap=True)
    for kind, row in sheet.lines():
        if kind == "row":
            name = row_name(row, sheet.layout) + (f" ({mark})" if (mark := sheet.mark(row)) else "")
            counts = images(row).replace(" (", "\n(")
            table.add_row(Text("  " + name.replace(": ", ":\n    ")), counts, *map(_text, sheet.cells(row)))
        elif kind == "group":
            table.add_section()
            table.add_row(Text(row.group or "", "italic"))
        else:
            table.add_row(Text(row.label))


def _side_by_side(sheet: Sheet, table: Table) -> None:
    """Lay out a line for each case: for each metric what was published, and the headline rows of what was measured."""
    cases: dict[int, dict[str, Row]] = {}
    for row in sheet.rows:
        cases.setdefault(row.case, {})[row.kind] = row
    attack = next((row.attack for row in sheet.rows if row.kind == "paper"), None)
    heads = {"published": "paper", "paper": attack or "", "worst": "worst", "single": "single"}
    kinds = [kind for kind in heads if any(kind in rows for rows in cases.values())]
    table.add_column("case", min_width=min(32, max((len(row.label) for row in sheet.rows), default=0)))
    for name in sheet.layout.columns:
        for kind in kinds:
            above = heading(name) if kind == kinds[0] else ""
            table.add_column(f"{above}\n{heads[kind]}", justify="right", no_wrap=True)
    table.add_column("images", justify="right")
    table.add_column("worst case by")
    if "single" in kinds:
        table.add_column("best single attack")
    for kind, row in sheet.lines():
        rows = cases[row.case]
        if kind == "group":
            table.add_section()
            table.add_row(Text(row.group or "", "italic"))
        elif kind == "case":
            marks = dict.fromkeys(mark for kind in kinds if kind in rows and (mark := sheet.mark(rows[kind])))
            cells = [
                _text(sheet.cell(rows[kind], name) if kind in rows else ("", "", False))
                for name in sheet.layout.columns
                for kind in kinds
            ]
            worst = rows.get("worst", row)
            label = row.label + (f" ({','.join(marks)})" if marks else "")
            of = ("worst", "single") if "single" in kinds else ("worst",)
            by = [Text(behind(rows[kind], sheet.layout) if kind in rows else "") for kind in of]
            table.add_row(Text(label), *cells, images(worst), *by)


def _text(cell: Cell) -> Text:
    mean, interval, bold = cell
    return Text.assemble((mean, "bold" if bold else ""), f"\n± {interval}" if interval else "")


def plain_data(value: object) -> object:
    """Return data that JSON can hold: NaN becomes null, infinity a text."""
    if isinstance(value, Mapping):
        return {key: plain_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _markdown(text: str) -> str:
    """Escape characters that Markdown or HTML would read as markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$&])", r"\\\1", " ".join(text.split()))
