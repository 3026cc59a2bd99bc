"""One table, whose cells and notes are plain text, and its writers: terminal, Markdown, LaTeX, CSV, JSON and HTML."""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from typing import Literal

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.protocol import rich_cast
from rich.table import Table as RichTable
from rich.text import Text

from privlab.base import check_name, plain_data, printable

FORMATS = ("latex", "csv", "markdown", "json", "html")
"""The formats of a table, by `--format`."""

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


_INDENT, _NAME_WIDTH = 2, 20
"""Columns of a terminal by which a name is indented under its case, and those that a long name has at least."""


@dataclass(frozen=True)
class Column:
    """A column: its heading, and whether it holds words, counts, or figures with an interval."""

    head: str
    kind: Literal["words", "count", "figure"] = "words"


@dataclass(frozen=True)
class Cell:
    """The text of a cell; a figure may have an interval and be bold, and a name may have letters of footnotes."""

    text: str
    interval: str = ""
    bold: bool = False
    mark: str = ""

    @property
    def markup(self) -> str:
        """Return it for rich; the interval is under the figure."""
        text = escape(printable(self.text))
        text = f"[bold]{text}[/bold]" if self.bold else text
        return text + (f"\n± {self.interval}" if self.interval else "") + (f" ({self.mark})" if self.mark else "")


@dataclass(frozen=True)
class Line:
    """The cells of a line, one for each column; or the heading of the lines below it: of a case, or of a group."""

    cells: Sequence[Cell] = ()
    heading: str = ""
    of_group: bool = False


@dataclass(frozen=True, eq=False)
class Table:
    """A table: its columns, its lines, and the notes under it, each with its mark or an empty text.

    It can be printed, and a notebook shows it.

    Args:
        columns: the columns, of which the first one names the lines.
        lines: the lines, from the top.
        notes: pairs of a mark and a text.
        title: the title, or an empty text.
        records: what CSV has a line for, by its columns; by default the cells.
        options: what `data` has of each record besides.
        facts: what JSON holds; by default the title, the records and the notes.
    """

    columns: Sequence[Column]
    lines: Sequence[Line]
    notes: Sequence[tuple[str, str]] = ()
    title: str = ""
    records: Sequence[Mapping[str, object]] = ()
    options: Sequence[Mapping[str, object]] = ()
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def data(self) -> pd.DataFrame:
        """Return the figures in full, with a row for each line; what was not measured is NaN."""
        pairs = zip_longest(self.options, self._flat(), fillvalue={})
        return pd.DataFrame([{**options, **record} for options, record in pairs])

    def render(
        self,
        form: str,
        *,
        standalone: bool = False,
        caption: str | None = None,
        label: str | None = None,
        notes_outside: bool = False,
    ) -> str:
        """Return the table as text, in one of `FORMATS`.

        Args:
            form: "latex", "csv", "markdown", "json" or "html"; only LaTeX reads the other arguments.
            standalone: whether it is a whole document.
            caption: the caption, as plain text; by default the title.
            label: the name by which the text refers to it; by default "tab:" and the title in kebab-case.
            notes_outside: whether the notes follow the float instead of being its last lines.

        Raises:
            PrivlabError: for an unknown format.
        """
        check_name("format", form, FORMATS)
        if form == "json":
            facts = self.facts or {"title": self.title, "rows": self._flat(), "notes": [text for _, text in self.notes]}
            return json.dumps(plain_data(facts), ensure_ascii=False, indent=2, allow_nan=False) + "\n"
        if form == "csv":
            return self._csv()
        headings = sum(not line.cells for line in self.lines)
        height = 4 * (4 + len(self.lines) + headings + sum(1 + len(text) // 90 for _, text in self.notes))
        return (
            _templates()
            .get_template(f"table.{_SUFFIX[form]}")
            .render(
                table=self,
                cases=self._has_cases,
                height=max(297, 50 + height),
                standalone=standalone,
                caption=self.title if caption is None else caption,
                label=f"tab:{_slug(self.title) or 'leakage'}" if label is None else label,
                notes_outside=notes_outside,
            )
        )

    def __rich__(self) -> RichTable:
        """Return the table for a terminal: an interval is placed under its figure, and names are wrapped to fit."""
        shown = RichTable(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        indent = _INDENT if self._has_cases else 0
        for place, column in enumerate(self.columns):
            cells = (line.cells[place] for line in self.lines if line.cells)
            texts = [column.head, *(Text.from_markup(cell.markup).plain for cell in cells)]
            longest = max(len(line) for text in texts for line in text.split("\n"))
            least = max((len(word) for text in texts for word in text.split()), default=0)
            if not any(each.kind == "figure" for each in self.columns):
                least = min(least, _NAME_WIDTH)  # no figure must stay whole, so a longer word is folded
            whole = column.kind != "words" or longest <= least
            if whole:
                least = longest  # rich would take the longest word for what a line needs, and cut it
            if place == 0 and indent:  # names would otherwise be wrapped to a word a line
                least = indent + max(least, min(_NAME_WIDTH, max(map(len, texts))))
            justify = "left" if column.kind == "words" else "right"
            shown.add_column(escape(column.head), justify=justify, min_width=least, no_wrap=whole, overflow="fold")
        for line in self.lines:
            if line.of_group:
                shown.add_section()
            if line.cells:
                first, *others = (cell.markup for cell in line.cells)
                shown.add_row(Padding(first, (0, 0, 0, indent), expand=False), *others)
            else:
                heading = escape(printable(line.heading))
                shown.add_row(f"[italic]{heading}[/italic]" if line.of_group else heading)
        shown.title = Text(printable(self.title)) if self.title else None
        shown.caption = Text(printable("\n".join(f"({mark}) {text}" if mark else text for mark, text in self.notes)))
        shown.title_justify = shown.caption_justify = "left"
        return shown

    def __str__(self) -> str:
        """Return what a terminal shows."""
        return terminal_text(self)

    def _repr_html_(self) -> str:
        return self.render("html")

    @property
    def _has_cases(self) -> bool:
        return any(not line.cells and not line.of_group for line in self.lines)

    def _flat(self) -> list[Mapping[str, object]]:
        """Return the records, or the cells by the headings of their columns."""
        heads = [column.head for column in self.columns]
        lines = (line.cells for line in self.lines if line.cells)
        return [*self.records] or [dict(zip(heads, (cell.text for cell in cells), strict=True)) for cells in lines]

    def _csv(self) -> str:
        """Return one line for each record; None is empty."""
        records = self._flat()
        out = io.StringIO()
        write = csv.writer(out, lineterminator="\n").writerow
        write([csv_cell(head) for head in (records[0] if records else [column.head for column in self.columns])])
        for record in records:
            write([csv_cell(" ".join(value.split())) if isinstance(value, str) else value for value in record.values()])
        return out.getvalue()


_FORMULA = re.compile(r"(?:^|(?<=[;\t\r\n]))(?=(?:[^\S\t\r\n]|[\x22\0])*[=+\-@\uff1d\uff0b\uff0d\uff20])")
"""Where a formula of a spreadsheet begins, also in full width, and in a cell that begins after a semicolon: some
spreadsheets divide a line there, whatever quotes the cell has."""


def csv_cell(text: str) -> str:
    """Return a text for a cell of CSV, with an apostrophe before what a spreadsheet would take for a formula."""
    try:
        float(text)
    except ValueError:
        return _FORMULA.sub("'", text)
    return text


def terminal_text(shown: RenderableType, width: int = 80) -> str:
    """Return what a terminal of a width shows; a table that has no place in it is wider, so that nothing is cut."""
    if isinstance(shown := rich_cast(shown), RichTable):
        width = max(width, Console(width=10_000).measure(shown).minimum)
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(shown, crop=False)
    return captured.get()


def _slug(text: str) -> str:
    """Return a text in kebab-case: "cifar_vit with MJP" is cifar-vit-with-mjp."""
    return "-".join(re.findall("[a-z0-9]+", text.lower()))


_SUFFIX = {"latex": "tex", "markdown": "md", "html": "html"}


@cache
def _templates() -> Environment:
    """Return the templates of this folder, whose tags have square brackets, since those of LaTeX are curly."""
    found = Environment(
        *("[%", "%]", "[[", "]]", "[#", "#]"),
        loader=PackageLoader("privlab.report", "tables"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    found.filters |= {"md": to_markdown, "tex": to_tex, "tex_words": _tex_words, "tex_figure": _tex_figure}
    return found


def to_markdown(text: str) -> str:
    """Escape characters that Markdown or HTML would read as markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$&])", r"\\\1", " ".join(text.split()))


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


def _tex_words(text: str) -> str:
    """Return a line as LaTeX; "gamma" in a case's label, as experiments spell it, is printed as γ."""
    return to_tex(re.sub(r"\bgamma\b(?=[ =]+[\d.])", "γ", text))


def _tex_figure(text: str) -> str:
    """Return a figure as LaTeX, with its power of ten as mathematics."""
    return re.sub(r"e([+-])0?(\d+)$", _tex_power, to_tex(text))


def _tex_power(found: re.Match[str]) -> str:
    return rf"$\cdot10^{{{found[1].lstrip('+')}{found[2]}}}$"
