"""A table in LaTeX: as it is written, with any text in it, and as pdflatex reads it."""

import re
import runpy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privlab.grids import KNOWN, Layout
from privlab.report.tables import to_tex

by_hand = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("rows_by_hand.py"))))
CAPTION, LAYOUT, ROWS = by_hand.CAPTION, by_hand.LAYOUT, by_hand.ROWS
laid_out, of = by_hand.laid_out, by_hand.of
to_latex = by_hand.to_latex

LATEX = r"""% It needs \usepackage{booktabs,graphicx}.
\begin{table}[htbp]
\centering
\caption{Table 5}
\label{tab:table-5}
\footnotesize
\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%
\begin{tabular}{@{}lrr@{\,}lr@{\,}l@{}}
\toprule
 & images & \multicolumn{2}{c}{MSE $\downarrow$} & \multicolumn{2}{c}{PSNR $\uparrow$} \\
\midrule
\multicolumn{6}{@{}l@{}}{\textit{(1) a \& b}} \\
\multicolumn{6}{@{}l@{}}{DeiT-S} \\
\quad published & \textemdash{} & 0.0350 &  & 18.9 &  \\
\quad paper's attack: april & 2 (1 failed) & 0.0625 & \scriptsize$\pm$\,0.0156 & 17.5 & \scriptsize$\pm$\,0.5 \\
\quad worst case: new 75 \%, april 25 \% & 2 & \textbf{\boldmath 1.2$\cdot10^{-9}$} & \scriptsize$\pm$\,2.0$\cdot10^{-10}$ & \textbf{\boldmath $\infty$} &  \\
\midrule
\multicolumn{6}{@{}l@{}}{\textit{(2)}} \\
\multicolumn{6}{@{}l@{}}{MJP\_\{$\gamma$\}} \\
\quad paper's attack: april\textsuperscript{a} & \textemdash{} & n/a &  & n/a &  \\
\quad worst case: x\textsuperscript{b} & 1 & \textbf{\boldmath 0.2000} &  & \textbf{\boldmath 7.0} &  \\
\quad x (external)\textsuperscript{c} & 1 & \textbf{\boldmath 0.2000} &  & \textbf{\boldmath 7.0} &  \\
\quad control: mean & 1 & 0.1000 &  & 10.0 &  \\
\bottomrule
\end{tabular}}
\par\smallskip{\footnotesize\raggedright
\noindent\textsuperscript{a} cannot run: april (no PE)\par
\noindent\textsuperscript{b} not among the attacks: april (no PE)\par
\noindent\textsuperscript{c} external, measured elsewhere: Fu 2021, Table 2\par
\noindent published: MJP (2023)\par
\noindent worst case: the best attack of each image, chosen by the evaluator: an upper bound; its leakiest score over all attacks and draws, by each metric's own direction; a share says how often an attack reaches it, over images and columns\par
\noindent $\pm$: farther end of the 95 \% interval of the mean over the images, by Student's t\par
\noindent n = 2: a mean over two images is shown without an interval, which would say nothing\par
\noindent bold: the leakiest figure, measured here, of its column and group\par
\noindent weights: paper: trained / here: random\par
}
\end{table}
"""  # noqa: E501


def test_latex_as_written() -> None:
    assert to_latex(ROWS, LAYOUT, **CAPTION) == LATEX


def test_latex_is_a_float_with_caption_label_and_its_notes_within_or_after_it() -> None:
    table = laid_out(ROWS, LAYOUT, **CAPTION)
    named = {"caption": "50 % of γ", "label": "t"}
    inside, outside = (table.render("latex", **named, notes_outside=out) for out in (False, True))
    for text in (inside, outside):
        assert r"\caption{50 \% of $\gamma$}" in text
        assert r"\label{t}" in text
        assert text.count(r"\smallskip") == 1
    assert inside.index(r"\smallskip") < inside.index(r"\end{table}")
    assert outside.index(r"\smallskip") > outside.index(r"\end{table}")


# Escapes


@given(st.text())
def test_any_text_is_ascii_in_latex_with_nothing_left_to_read(text: str) -> None:
    tex = to_tex(text)
    assert tex.isascii()
    assert all(" " <= letter <= "~" for letter in tex)
    bare = re.sub(r"\\(textbackslash|text\w+|[a-zA-Z]+|.)", "", tex)
    assert not re.search(r"[\\#%&~]", bare)
    assert bare.count("$") % 2 == 0
    depth = 0
    for brace in re.sub(r"\\[{}]", "", tex):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        assert depth >= 0
    assert depth == 0


@pytest.mark.parametrize(
    ("text", "tex"),
    [
        ("50 % & $1_2 #3", r"50 \% \& \$1\_2 \#3"),
        ("a\\b^c~d", r"a\textbackslash{}b\textasciicircum{}c\textasciitilde{}d"),
        ("Müller, Łukasz, Žižek, Ørsted", r"M\"{u}ller, \L{}ukasz, \v{Z}i\v{z}ek, \O{}rsted"),
        ("γ ≠ 0.27 ± x̃²", r"$\gamma$ $\ne$ 0.27 $\pm$ \~{x}\textsuperscript{2}"),
        ("--out [x]*", r"-{}-out {[}x]{*}"),
        ("中\x07", "{[}U+4E2D]{[}U+0007]"),
        ("two\nlines", "two lines"),
    ],
)
def test_latex_of(text: str, tex: str) -> None:
    assert to_tex(text) == tex


# LaTeX that compiles

NASTY = "".join(map(chr, range(0x21, 0x250))) + "γ Ω ∇ ∞ x̃ ² 中 🙂 --o [x] ``"


def documents() -> dict[str, str]:
    nasty = [replace(one, label=f"[{NASTY}", group=f"* {NASTY[:90]}", refused={NASTY: NASTY}) for one in ROWS]
    wide = Layout(columns=tuple(KNOWN))
    many = [
        replace(one, case=i, label=f"case {i}", scores=dict.fromkeys(KNOWN, of(0.123, 0.01)))
        for i in range(60)
        for one in ROWS[:3]
    ]
    return {
        "golden": to_latex(ROWS, LAYOUT, **CAPTION, standalone=True),
        "gamma": to_latex([replace(one, label="gamma 0.27") for one in ROWS], LAYOUT, **CAPTION, standalone=True),
        "nasty": to_latex(nasty, LAYOUT, title=NASTY, source=NASTY, remarks=(NASTY,), standalone=True),
        "large": to_latex(many, wide, standalone=True),
        "empty": to_latex([], LAYOUT, standalone=True),
        "fragment": "\\documentclass{article}\\usepackage{booktabs,graphicx}\\begin{document}"
        "\\input{part}\\end{document}",
    }


def test_gamma_of_a_label_is_a_letter_in_latex() -> None:
    """A grid's cases are called after their options, and so are the verdicts on them."""
    rows = [replace(one, label="gamma 0.27, defense gamma") for one in ROWS[:3]]
    told = to_latex(rows, LAYOUT, **CAPTION, verdicts={0: "broken"})
    assert r"{@{}l@{}}{$\gamma$ 0.27, defense gamma} \\" in told
    assert r"$\gamma$ 0.27, defense gamma: broken" in told


@pytest.mark.slow
@pytest.mark.parametrize("name", documents())
def test_latex_is_well_formed(name: str) -> None:
    text = documents()[name] if name != "fragment" else LATEX
    begun = re.findall(r"\\(begin|end)\{(\w+)\}", text)
    stack: list[str] = []
    for word, environment in begun:
        if word == "begin":
            stack.append(environment)
        else:
            assert stack.pop() == environment
    assert stack == []
    tabular = text[text.index("\\begin{tabular}") : text.index("\\end{tabular}")]
    columns = len(re.findall("[lr]", re.sub(r"@\{[^}]*\}", "", re.findall(r"tabular\}\{(.*)\}", tabular)[0])))
    for line in tabular.splitlines()[1:]:
        if not line.startswith("\\") or line.startswith(("\\quad", "\\multicolumn")):
            spans = [int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line)]
            assert len(re.findall(r"(?<!\\)&", line)) + 1 + sum(spans) == columns
            assert line.endswith(" \\\\")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("name", documents())
def test_latex_compiles_to_one_page_that_holds_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "table.tex").write_text(documents()[name], encoding="ascii")
    (tmp_path / "part.tex").write_text(LATEX, encoding="ascii")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=120)
    log = done.stdout.decode("latin-1")
    assert done.returncode == 0, log[-2000:]
    assert "(1 page," in log
    assert "Missing character" not in log
    assert "Overfull \\vbox" not in log
    if name not in ("nasty", "fragment"):  # a label of 500 letters cannot be broken
        assert "Overfull" not in log
