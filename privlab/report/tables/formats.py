"""The formats of a leakage table: LaTeX in plain ASCII, Markdown, CSV, JSON, and a layout for a terminal."""

import csv
import io
import json
import math
import re
import unicodedata
from dataclasses import asdict

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from privlab.base import check_name, plain_data
from privlab.grids import KNOWN
from privlab.report.tables.leakage import Row
from privlab.report.tables.per_image import BOUND
from privlab.report.tables.table import Cell, Table, heading

FORMATS = ("latex", "csv", "markdown", "json")
"""The formats of a table, by `--format`."""

_DOCUMENT = r"""\documentclass{article}
\usepackage{booktabs,graphicx}
\usepackage[paperwidth=210mm,paperheight=%(height)dmm,margin=15mm]{geometry}
\pagestyle{empty}
\begin{document}
\noindent\textbf{%(title)s}\par\bigskip
\noindent\footnotesize
\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%%
%(tabular)s}
%(notes)s\end{document}
"""

_TEX = {c: f"\\{c}" for c in "{}$&#_%"} | {"[": "{[}", "*": "{*}"}  # the two would be read as options of a line's end
_TEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "{''}"}
_TEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "—": r"\textemdash{}", "–": r"\textendash{}"}
_LETTERS = r"\o \O \l \L \ss \ae \AE \oe \OE ' `` '' \dots \S"
_TEX |= dict(zip("øØłŁßæÆœŒ’“”…§", _LETTERS.split(), strict=True))
_SIGNS = r"\pm \times \cdot - \le \ge \approx \ne \infty \uparrow \downarrow \to \nabla ^\circ \gamma \sigma \lambda"
_SIGNS += r" \alpha \beta \delta \epsilon \eta \theta \mu \pi \rho \tau \phi \varphi \omega \Delta \Sigma \Phi \Omega"
_TEX |= {c: f"${tex}$" for c, tex in zip("±×·−≤≥≈≠∞↑↓→∇°γσλαβδεηθμπρτϕφωΔΣΦΩ", _SIGNS.split(), strict=True)}
_ACCENTS = dict(
    zip("\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327", "`'^~=u.\"rHvc", strict=True)
)


def render(form: str, table: Table, *, standalone: bool = False) -> str:
    """Return a leakage table as text, in one of `FORMATS`.

    Args:
        form: "latex", "csv", "markdown" or "json".
        table: its rows, columns and caption.
        standalone: whether LaTeX is a whole document; the other formats do not read it.

    Raises:
        PrivlabError: for an unknown format.
    """
    check_name("format", form, FORMATS)
    if form == "latex":
        return _latex_table(table, standalone=standalone)
    return {"markdown": _markdown_table, "json": _json, "csv": _csv}[form](table)


def _markdown_table(table: Table) -> str:
    """Return a table of GitHub's Markdown, its title above and its notes below."""
    columns, title = table.layout.columns, table.caption.title
    empty = [""] * (1 + len(columns))
    lines = [["case", "", "images", *(_markdown(heading(name)) for name in columns)]]
    lines.append([":--", ":--", *["--:"] * (1 + len(columns))])
    label = ""
    for kind, row in table.lines():
        if kind == "group":
            lines.append([f"**{_markdown(row.group or '')}**", "", *empty])
        elif kind == "case":
            label = _markdown(row.label)
        else:
            cells = [
                (f"**{mean}**" if bold else mean) + (f" ± {interval}" if interval else "")
                for mean, interval, bold in table.cells(row)
            ]
            lines.append([label, _markdown(table.name(row)) + _superscript(table.mark(row)), table.images(row), *cells])
            label = ""
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = (f"{_superscript(mark)} {_markdown(note)}".lstrip() for mark, note in table.notes())
    return (f"**{_markdown(title)}**\n\n" if title else "") + text + "".join(f"\n{note}\n" for note in notes)


def _superscript(mark: str) -> str:
    return f"<sup>{mark}</sup>" if mark else ""


def _markdown(text: str) -> str:
    """Escape characters that Markdown or HTML would read as markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$&])", r"\\\1", " ".join(text.split()))


def _csv(table: Table) -> str:
    """Return one line per row, figures in full: METRIC, METRIC_low, METRIC_high, METRIC_images and METRIC_leakiest.

    For a worst case the last says on how many images each attack reached it, and for the best single attack which one
    it is. What was not measured is empty. Of the caption, verdicts alone are shown, beside their worst case.
    """
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    columns, verdicts = table.layout.columns, table.caption.verdicts
    facts = ["group", "case", "row", "attack", "images", "exact", "failed", "refused", "external"]
    facts += ["verdict"] if verdicts else []
    write([*facts, *(name + end for name in columns for end in ("", "_low", "_high", "_images", "_leakiest"))])
    for row in table.rows:
        refused = "; ".join(f"{attack}: {reason}" for attack, reason in row.refused.items())
        line = [row.group, row.label, row.kind, row.attack, row.images, row.exact, row.failed, refused, row.external]
        if verdicts:
            line.append(verdicts.get(row.case) if row.kind == "worst" else None)
        for name in columns:
            score = row.scores[name]
            leakiest = "; ".join(f"{attack}: {count}" for attack, count in row.leakiest.get(name, {}).items())
            ends = ["" if math.isnan(value) else repr(value) for value in (score.mean, score.low, score.high)]
            line += [*ends, score.images, leakiest]
        write([" ".join(value.split()) if isinstance(value, str) else value for value in line])
    return out.getvalue()


def _json(table: Table) -> str:
    """Return the rows as JSON: a figure that was not measured is null, an infinite one "Infinity"."""
    layout = table.layout
    metrics = {name: KNOWN[name].direction for name in layout.columns}
    about = {"metrics": metrics, "interval": layout.interval, "geometry": layout.geometry, "worst_case": BOUND}
    whole = asdict(table.caption) | about | {"rows": [asdict(row) for row in table.rows]}
    return json.dumps(plain_data(whole), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def _latex_table(table: Table, *, standalone: bool) -> str:
    r"""Return a tabular for \input, which needs booktabs, and its notes; or a whole document of one page that fits it.

    Each case has a line, and its rows follow below; means and intervals have columns of their own, so that they align.
    Only a document, which is returned if `standalone`, shows the title.
    """
    columns = table.layout.columns
    heads = "".join(rf" & \multicolumn{{2}}{{c}}{{{to_tex(heading(name))}}}" for name in columns)
    across = rf"\multicolumn{{{2 + 2 * len(columns)}}}{{@{{}}l@{{}}}}"
    pairs = r"r@{\,}l" * len(columns)
    lines = [rf"\begin{{tabular}}{{@{{}}lr{pairs}@{{}}}}", r"\toprule", rf" & images{heads} \\"]
    above = "head"
    for kind, row in table.lines():
        if above == "head" or kind == "group":
            lines.append(r"\midrule")
        elif kind == "case" and above == "row":
            lines.append(r"\addlinespace")
        if kind == "row":
            name = to_tex(table.name(row)) + _tex_mark(table.mark(row))
            cells = [rf"\quad {name}", to_tex(table.images(row)), *(_tex_cell(*cell) for cell in table.cells(row))]
            lines.append(" & ".join(cells) + r" \\")
        else:
            text = rf"\textit{{{_tex_text(row.group or '')}}}" if kind == "group" else _tex_text(row.label)
            lines.append(rf"{across}{{{text}}} \\")
        above = kind
    tabular = "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])
    notes = "".join(rf"\noindent{_tex_mark(mark)} {_tex_text(text)}\par" + "\n" for mark, text in table.notes())
    notes = "\\par\\smallskip{\\footnotesize\\raggedright\n" + notes + "}\n" if notes else ""
    if not standalone:
        return f"{tabular}\n{notes}"
    height = 50 + 4 * (len(lines) + sum(1 + len(text) // 90 for _, text in table.notes()))
    title = to_tex(table.caption.title) or "~"
    return _DOCUMENT % {"height": max(297, height), "title": title, "tabular": tabular, "notes": notes}


def to_tex(text: str) -> str:
    """Return text as LaTeX in plain ASCII; a character without a LaTeX name here is shown as [U+…]."""
    whole = unicodedata.normalize("NFC", " ".join(text.split()))
    letters = "".join(c if c in _TEX else unicodedata.normalize("NFD", c) for c in whole)
    return re.sub("-(?=-)", "-{}", re.sub(f"(.)([{''.join(_ACCENTS)}]*)", _letter, letters))


def _letter(found: re.Match[str]) -> str:
    letter, kind = found[1], unicodedata.decomposition(found[1])
    if letter in _TEX or " " <= letter <= "~":
        out = _TEX.get(letter, letter)
        out += "{}" if re.fullmatch(r"\\[A-Za-z]+", out) else ""
    elif kind.startswith("<"):  # a variant of other letters, such as a subscript
        plain = to_tex(unicodedata.normalize("NFKD", letter))
        out = {"<super>": rf"\textsuperscript{{{plain}}}", "<sub>": f"$_{{{plain}}}$"}.get(kind.split()[0], plain)
    else:
        out = f"{{[}}U+{ord(letter):04X}]"
    for accent in found[2]:
        out = f"\\{_ACCENTS[accent]}{{{out}}}"
    return out


def _tex_text(text: str) -> str:
    """Return a line as LaTeX; "gamma" in a case's label, as experiments spell it, is printed as γ."""
    return to_tex(re.sub(r"\bgamma\b(?=[ =]+[\d.])", "γ", text))


def _tex_cell(mean: str, interval: str, bold: bool) -> str:
    mean, interval = (re.sub(r"e([+-])0?(\d+)$", _tex_power, to_tex(figure)) for figure in (mean, interval))
    mean = rf"\textbf{{\boldmath {mean}}}" if bold else mean
    return f"{mean} & " + (rf"\scriptsize$\pm$\,{interval}" if interval else "")


def _tex_power(found: re.Match[str]) -> str:
    return rf"$\cdot10^{{{found[1].lstrip('+')}{found[2]}}}$"


def _tex_mark(mark: str) -> str:
    return rf"\textsuperscript{{{mark}}}" if mark else ""


def to_rich(table: Table, *, stacked: bool = False) -> RichTable:
    """Lay the table out for a terminal: a line for each case, published, paper's attack, worst case, best attack.

    If it is `stacked`, each row has a line of its own: for a narrow terminal, or to show all rows of `leakage`.
    """
    shown = RichTable(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    (_stack if stacked else _side_by_side)(table, shown)
    shown.title = Text(table.caption.title) if table.caption.title else None
    shown.caption = Text("\n".join(f"({mark}) {text}" if mark else text for mark, text in table.notes()))
    shown.title_justify = shown.caption_justify = "left"
    return shown


def _stack(table: Table, shown: RichTable) -> None:
    """Lay out each row under a line for its case, with intervals under their means."""
    shown.add_column("case")
    shown.add_column("images", justify="right")
    for name in table.layout.columns:
        shown.add_column(heading(name), justify="right", no_wrap=True)
    for kind, row in table.lines():
        if kind == "row":
            name = table.name(row) + (f" ({mark})" if (mark := table.mark(row)) else "")
            counts = table.images(row).replace(" (", "\n(")
            shown.add_row(Text("  " + name.replace(": ", ":\n    ")), counts, *map(_text, table.cells(row)))
        elif kind == "group":
            _add_group(shown, row)
        else:
            shown.add_row(Text(row.label))


def _side_by_side(table: Table, shown: RichTable) -> None:
    """Lay out a line for each case: for each metric what was published, and the headline rows of what was measured."""
    cases: dict[int, dict[str, Row]] = {}
    for row in table.rows:
        cases.setdefault(row.case, {})[row.kind] = row
    attack = next((row.attack for row in table.rows if row.kind == "paper"), None)
    heads = {"published": "paper", "paper": attack or "", "worst": "worst", "single": "single"}
    kinds = [kind for kind in heads if any(kind in rows for rows in cases.values())]
    bounds = {"worst": "worst case by"} | ({"single": "best single attack"} if "single" in kinds else {})
    shown.add_column("case", min_width=min(32, max((len(row.label) for row in table.rows), default=0)))
    for name in table.layout.columns:
        for kind in kinds:
            above = heading(name) if kind == kinds[0] else ""
            shown.add_column(f"{above}\n{heads[kind]}", justify="right", no_wrap=True)
    shown.add_column("images", justify="right")
    for head in bounds.values():
        shown.add_column(head)
    for kind, row in table.lines():
        rows = cases[row.case]
        if kind == "group":
            _add_group(shown, row)
        elif kind == "case":
            marks = dict.fromkeys(mark for kind in kinds if kind in rows and (mark := table.mark(rows[kind])))
            cells = [
                _text(table.cell(rows[kind], name) if kind in rows else ("", "", False))
                for name in table.layout.columns
                for kind in kinds
            ]
            label = row.label + (f" ({','.join(marks)})" if marks else "")
            by = [Text(table.behind(rows[kind]) if kind in rows else "") for kind in bounds]
            shown.add_row(Text(label), *cells, table.images(rows.get("worst", row)), *by)


def _add_group(shown: RichTable, row: Row) -> None:
    shown.add_section()
    shown.add_row(Text(row.group or "", "italic"))


def _text(cell: Cell) -> Text:
    mean, interval, bold = cell
    return Text.assemble((mean, "bold" if bold else ""), f"\n± {interval}" if interval else "")
