"""A leakage table as LaTeX: plain ASCII that any engine sets, in any encoding."""

import re
import unicodedata

from privlab.report.tables.table import Table, heading

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


def latex_table(table: Table, *, standalone: bool) -> str:
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
