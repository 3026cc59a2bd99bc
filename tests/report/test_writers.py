"""A table in each format, as it is written and as it is read back."""

import csv
import io
import json
import math
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from privlab.base import PrivlabError
from privlab.grids import KNOWN, Layout
from privlab.report.tables import (
    FORMATS,
    SINGLE,
    CaseFacts,
    Results,
    Score,
    Table,
    conditions_that_differ,
    figure_text,
    heading,
    leakage_table,
)
from privlab.report.tables.writers import Cell, Column, Line, csv_cell

by_hand = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("rows_by_hand.py"))))
BY, CAPTION, LAYOUT, NAN, ROWS = by_hand.BY, by_hand.CAPTION, by_hand.LAYOUT, by_hand.NAN, by_hand.ROWS
laid_out, of, row, written = by_hand.laid_out, by_hand.of, by_hand.row, by_hand.written
to_csv, to_html, to_json, to_latex, to_markdown = (
    by_hand.to_csv,
    by_hand.to_html,
    by_hand.to_json,
    by_hand.to_latex,
    by_hand.to_markdown,
)

MARKDOWN = r"""**Table 5**

| case |  | images | MSE ↓ | PSNR ↑ |
| :-- | :-- | --: | --: | --: |
| **(1) a \& b** |  |  |  |  |
| DeiT-S | published | — | 0.0350 | 18.9 |
|  | paper's attack: april | 2 (1 failed) | 0.0625 ± 0.0156 | 17.5 ± 0.5 |
|  | worst case: new 75 %, april 25 % | 2 | **1.2e-9** ± 2.0e-10 | **∞** |
| **(2)** |  |  |  |  |
| MJP\_\{γ\} | paper's attack: april<sup>a</sup> | — | n/a | n/a |
|  | worst case: x<sup>b</sup> | 1 | **0.2000** | **7.0** |
|  | x (external)<sup>c</sup> | 1 | **0.2000** | **7.0** |
|  | control: mean | 1 | 0.1000 | 10.0 |

<sup>a</sup> cannot run: april (no PE)

<sup>b</sup> not among the attacks: april (no PE)

<sup>c</sup> external, measured elsewhere: Fu 2021, Table 2

published: MJP (2023)

worst case: the best attack of each image, chosen by the evaluator: an upper bound; its leakiest score over all attacks and draws, by each metric's own direction; a share says how often an attack reaches it, over images and columns

±: farther end of the 95 % interval of the mean over the images, by Student's t

n = 2: a mean over two images is shown without an interval, which would say nothing

bold: the leakiest figure, measured here, of its column and group

weights: paper: trained / here: random
"""  # noqa: E501

CSV = """\
group,case,row,attack,images,exact,failed,refused,external,mse,mse_low,mse_high,mse_images,mse_leakiest,psnr,psnr_low,psnr_high,psnr_images,psnr_leakiest
(1) a & b,DeiT-S,published,,0,,0,,,0.035,,,0,,18.94,,,0,
(1) a & b,DeiT-S,paper,april,2,,1,,,0.0625,0.0546875,0.078125,2,,17.5,17.25,18.0,2,
(1) a & b,DeiT-S,worst,worst case,2,,0,,,1.23e-09,1.13e-09,1.43e-09,2,april: 1; new: 1,inf,80.0,inf,2,new: 2
(2),MJP_{γ},paper,april,0,,0,april: no PE,,,,,0,,,,,0,
(2),MJP_{γ},worst,worst case,1,,0,april: no PE,,0.2,,,2,x: 1,7.0,,,2,
(2),MJP_{γ},attack,x,1,,0,,"Fu 2021, Table 2",0.2,,,2,,7.0,,,2,
(2),MJP_{γ},control,control:mean,1,,0,,,0.1,,,2,,10.0,,,2,
"""


def test_markdown_as_written() -> None:
    assert to_markdown(ROWS, LAYOUT, **CAPTION) == MARKDOWN


def test_csv_as_written() -> None:
    assert to_csv(ROWS, LAYOUT) == CSV


def test_csv_reads_back() -> None:
    table = pd.read_csv(io.StringIO(to_csv(ROWS, LAYOUT)))
    assert table.psnr.tolist() == pytest.approx([18.94, 17.5, math.inf, math.nan, 7.0, 7.0, 10.0], nan_ok=True)
    assert table.failed.sum() == 1


def test_json_says_null_and_infinity() -> None:
    table = json.loads(to_json(ROWS, LAYOUT, **CAPTION), parse_constant=pytest.fail)
    assert {name: table[name] for name in ("title", "source", "remarks", "interval", "geometry")} == {
        "title": "Table 5",
        "source": "MJP (2023)",
        "remarks": ["weights: paper: trained / here: random"],
        "interval": 0.95,
        "geometry": "in_place",
    }
    assert table["metrics"] == {"mse": "lower leaks", "psnr": "higher leaks"}
    worst, refused = table["rows"][2], table["rows"][3]
    assert worst["scores"]["psnr"] == {"mean": "Infinity", "low": 80.0, "high": "Infinity", "images": 2}
    assert worst["leakiest"] == BY
    assert refused["scores"]["mse"]["mean"] is None
    assert refused["refused"] == {"april": "no PE"}


def test_verdicts_stand_under_the_table_and_beside_the_worst_case() -> None:
    cases = {row.case for row in ROWS}
    told = {**CAPTION, "verdicts": dict.fromkeys(cases, "no evidence: none")}
    for text in (to_markdown(ROWS, LAYOUT, **told), to_latex(ROWS, LAYOUT, **told)):
        assert text.count("verdict: ") == text.count("no evidence: none") == len(cases)
    lines = list(csv.DictReader(io.StringIO(to_csv(ROWS, LAYOUT, **told))))
    assert {line["verdict"] for line in lines if line["row"] == "worst"} == {"no evidence: none"}
    assert {line["verdict"] for line in lines if line["row"] != "worst"} == {""}
    assert json.loads(to_json(ROWS, LAYOUT, **told))["verdicts"][str(min(cases))] == "no evidence: none"


@pytest.mark.parametrize("form", FORMATS)
def test_render_is_each_format(form: str) -> None:
    own = {"csv": CSV, "markdown": MARKDOWN}
    assert written(form, ROWS, LAYOUT, **CAPTION) == own.get(form, written(form, ROWS, LAYOUT, **CAPTION))
    assert written(form, [], LAYOUT)


def test_render_refuses_an_unknown_format() -> None:
    with pytest.raises(PrivlabError, match=r"'latx'.*latex\?"):
        written("latx", ROWS, LAYOUT)


def test_bold_is_left_out_where_the_layout_says_so() -> None:
    plain = replace(LAYOUT, bold=False)
    assert "textbf" not in to_latex(ROWS, plain)
    assert "**0" not in to_markdown(ROWS, plain)
    assert "bold:" not in to_markdown(ROWS, plain)


def test_bold_is_the_leakiest_of_what_was_measured_in_the_group() -> None:
    rows = [
        row("published", Score(0.01), Score(40.0)),  # measured elsewhere
        row("attack", of(0.2), of(20.04), attack="x"),
        row("attack", of(0.1), of(20.0), attack="y"),
        row("control", of(0.01), of(50.0), attack="control:mean"),
        row("attack", of(0.5), of(1.0), 1, attack="x"),
    ]
    bold = [re.findall(r"\*\*([\d.]+)\*\*", line) for line in to_markdown(rows, LAYOUT).splitlines()[2:]]
    assert [line for line in bold if line] == [["20.0"], ["0.1000", "20.0"], ["0.5000", "1.0"]]  # a tie as printed


def test_utility_has_no_arrow_and_no_bold() -> None:
    layout = Layout(columns=("correct",))
    rows = [replace(ROWS[1], scores={"correct": of(0.8)})]
    assert heading("correct") == "correct"
    assert "| 0.8000 |" in to_markdown(rows, layout)


def test_caption_of_results() -> None:
    case = CaseFacts("one")
    records = pd.DataFrame(
        {"case": [0], "attack": ["x"], "status": ["ok"], "image_sha256": ["a"], "weights": ["random"]}
    )
    ran = Results("t", "T", "MJP", (case,), LAYOUT, (), {"weights": "trained"}, records, {}, Path())
    assert conditions_that_differ(ran) == ["weights: paper: trained / here: random"]
    text = leakage_table(ran, ROWS[:1]).render("markdown")
    assert text.startswith("**T**\n")
    assert text.endswith("\n\npublished: MJP\n\nweights: paper: trained / here: random\n")


def test_shares_are_explained_where_there_are_any() -> None:
    assert "a share says" in to_markdown(ROWS, LAYOUT)
    assert "a share says" not in to_markdown(ROWS[3:], LAYOUT)


def test_groups_and_titles_may_be_missing() -> None:
    rows = [replace(one, group=None) for one in ROWS]
    assert "textit" not in to_latex(rows, LAYOUT)
    assert to_markdown(rows, LAYOUT).startswith("| case |")
    assert "of its column\n" in to_markdown(rows, LAYOUT)


def test_oracle_is_said_under_the_table() -> None:
    assert "oracle: before scoring" in to_latex(ROWS, replace(LAYOUT, geometry="oracle"))


def test_a_footnote_for_each_different_text() -> None:
    rows = [row("attack", NAN, NAN, attack="x", refused={"x": f"reason {i % 30}"}) for i in range(60)]
    marks = re.findall(r"<sup>(\w+)</sup> cannot run: x \(reason (\d+)\)", to_markdown(rows, LAYOUT))
    assert marks[25:28] == [("z", "25"), ("aa", "26"), ("ab", "27")]
    assert len(marks) == 30


def test_attacks_refused_for_one_reason_share_it() -> None:
    rows = [replace(ROWS[2], refused={"b": "no PE", "c": "batch", "a": "no PE"})]
    assert "not among the attacks: b, a (no PE); c (batch)" in to_markdown(rows, LAYOUT)


def test_the_best_single_attack_and_exact_images_stand_beside_the_worst_case() -> None:
    by = {name: {"new (reassembled)": 2} for name in LAYOUT.columns}
    rows = [*ROWS[:2], replace(ROWS[2], exact=1), replace(ROWS[2], kind="single", attack=SINGLE, leakiest=by, exact=1)]
    text = to_markdown(rows, LAYOUT)
    assert "best single attack: new (reassembled) | 2 (1 exact) |" in text
    assert "best single attack: that with the leakiest mean over the images, by PSNR, as the evaluator finds it" in text
    assert "both: as it is, or reassembled (the adversary put patches in order), whichever leaks more" in text
    assert text.count("a mean PSNR over exact images is one of rounding") == 1
    assert r"\quad best single attack: new (reassembled) & 2 (1 exact)" in to_latex(rows, LAYOUT)
    line = to_csv(rows, LAYOUT).splitlines()[-1]
    assert line.startswith("(1) a & b,DeiT-S,single,best single attack,2,1,0,,,")
    assert line.endswith("new (reassembled): 2")
    told = json.loads(to_json(rows, LAYOUT))
    assert told["worst_case"] == "the best attack of each image, chosen by the evaluator: an upper bound"
    assert (told["rows"][3]["kind"], told["rows"][3]["exact"]) == ("single", 1)
    assert "exact" not in to_markdown(ROWS, LAYOUT)


def test_three_attacks_behind_a_worst_case() -> None:
    by = {"mse": {"a": 2, "b": 1, "c": 1}, "psnr": {"b": 2}}
    assert "worst case: b 75 %, a 50 %, 1 more |" in to_markdown([replace(ROWS[2], leakiest=by)], LAYOUT)


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        *((0.0, 4, "0.0000"), (0.0001, 4, "0.0001"), (0.00009, 4, "9.0e-5"), (-0.5, 2, "−0.50"), (12.345, 1, "12.3")),
        *((math.nan, 2, "n/a"), (math.inf, 2, "∞"), (-math.inf, 2, "−∞"), (-1e-9, 2, "−1.0e-9"), (3.0, 0, "3")),
    ],
)
def test_shown(value: float, decimals: int, text: str) -> None:
    assert figure_text(value, decimals) == text


def test_headings() -> None:
    assert [heading(name) for name in ("mse", "fft2d", "fft2d_mjp", "lpips_alex", "lpips_vgg", "f_sim")] == [
        *("MSE ↓", "FFT2D ↓", "FFT2D (MJP) ↓", "LPIPS alex ↓", "LPIPS vgg ↓", "F-SIM ↑")
    ]
    assert heading("placement_accuracy") == "placed ↑"
    assert len({heading(name) for name in KNOWN}) == len(KNOWN)


# For a terminal


def printed(table: Table, width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text().splitlines()


def test_a_terminal_has_a_line_for_each_row_under_its_case() -> None:
    lines = [" ".join(line.split()) for line in printed(laid_out(ROWS, LAYOUT, **CAPTION), 120)]
    assert "images MSE ↓ PSNR ↑" in lines
    at = lines.index("DeiT-S")
    assert lines[at - 1 : at + 4] == [
        *("(1) a & b", "DeiT-S", "published — 0.0350 18.9"),
        *("paper's attack: april 2 (1 failed) 0.0625 17.5", "± 0.0156 ± 0.5"),
    ]
    assert "worst case: new 75 %, april 25 % 2 1.2e-9 ∞" in lines
    assert "paper's attack: april (a) — n/a n/a" in lines
    assert "(a) cannot run: april (no PE)" in lines
    assert "weights: paper: trained / here: random" in lines
    text = " ".join(lines)
    assert "±: farther end of the 95 % interval of the mean over the images, by Student's t" in text


def test_a_narrow_terminal_wraps_names_and_no_figure() -> None:
    lines = printed(laid_out(ROWS, LAYOUT, **CAPTION), 60)
    assert max(map(len, lines)) <= 60
    text = " ".join(" ".join(lines).split())
    assert "1.2e-9" in text
    assert "± 2.0e-10" in text
    assert "…" not in text


def test_text_is_no_markup_of_the_terminal() -> None:
    rows = [replace(one, label="[red]hot[/red]", group="[bold]") for one in ROWS[:3]]
    text = "\n".join(printed(laid_out(rows, LAYOUT, title="[b]"), 150))
    assert {"[red]hot[/red]", "[bold]", "[b]"} <= set(text.split())


# HTML, and tables of other things


def test_html_has_the_headings_the_cells_and_the_notes() -> None:
    text = to_html(ROWS, LAYOUT, **CAPTION)
    assert '<tr><th colspan="4" style="text-align:left"><bdi>(1) a &amp; b</bdi></th></tr>' in text
    assert "<td><bdi>0.0625</bdi> ± 0.0156</td>" in text
    assert "<td><b><bdi>1.2e-9</bdi></b> ± 2.0e-10</td>" in text
    assert "paper&#39;s attack: april</bdi><sup>a</sup></td>" in text
    assert "<p><sup>a</sup> cannot run: april (no PE)</p>" in text
    assert text.count("<tr>") == text.count("</tr>") == 1 + 4 + len(ROWS)


@pytest.mark.parametrize("form", FORMATS)
def test_any_table_has_all_formats(form: str) -> None:
    table = Table([Column("what"), Column("n", "count")], [Line([Cell("a & b"), Cell("3")])], [("", "note")], "T")
    text = table.render(form)
    assert "3" in text
    assert ("note" in text) == (form != "csv")
    if form == "csv":
        assert text == "what,n\na & b,3\n"
    if form == "markdown":
        assert text == "**T**\n\n| what | n |\n| :-- | --: |\n| a \\& b | 3 |\n\nnote\n"


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_keeps_the_columns_of_markdown_and_csv(label: str, reason: str) -> None:
    rows = [replace(one, label=label, refused={"x": reason}) for one in ROWS]
    table = [line for line in to_markdown(rows, LAYOUT).split("\n") if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in table} == {6}
    read = list(csv.DictReader(io.StringIO(to_csv(rows, LAYOUT), newline="")))
    assert [line["case"] for line in read] == [csv_cell(" ".join(label.split()))] * len(rows)
    assert {None} & set().union(*read) == set()


@pytest.mark.parametrize("name", ["=1+1", "+x", "-x.png", "@SUM(A1)"])
def test_no_name_is_a_formula(name: str) -> None:
    table = Table([Column("what"), Column("n", "count")], [Line([Cell(name), Cell("-3.5e-2")])])
    assert table.render("csv") == f"what,n\n'{name},-3.5e-2\n"


def test_no_name_reaches_the_terminal_as_a_command() -> None:
    title = "\x1b]0;mine\x07 \u202egnp.exe"
    text = str(Table([Column("what")], [Line([Cell("\x1b[2J" + "x" * 10**6)])], [("", title)], title))
    assert text.replace("\n", "").isprintable()
    assert len(text) < 30_000
