"""Figures: what is drawn equals a naive computation, is readable in grey, is refused in one line, and never changes."""

import math
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as NamedImage
from PIL import Image

from privlab.base import PrivlabError
from privlab.grids import Figure
from privlab.report.figures import Scale, write_figures
from privlab.report.figures.draw import draw
from privlab.report.tables import CaseFacts, Results
from privlab.report.tables.rows import leakage
from privlab.stores import Place

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("drawing.py"))))
IMAGES, TABLE_5, bars, curves, grey, groups, line, lines, made, naive, record, said, table, texts, visible = (
    drawing.IMAGES,
    drawing.TABLE_5,
    drawing.bars,
    drawing.curves,
    drawing.grey,
    drawing.groups,
    drawing.line,
    drawing.lines,
    drawing.made,
    drawing.naive,
    drawing.record,
    drawing.said,
    drawing.table,
    drawing.texts,
    drawing.visible,
)


# Distributions


def test_a_distribution_has_a_row_for_each_attack_with_its_median_and_range(groups: Results) -> None:
    two = replace(groups, cases=groups.cases[:2], records=groups.records[groups.records.case < 2])
    picture = draw(two, Figure("distribution", "d"))
    ax = picture.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["april", "patch-gradient", "worst case"] * 2
    whose = [(case, who) for case in range(2) for who in ("april", "patch-gradient", "worst case")]
    drawn = {label: lines(picture, label) for label in ("_median", "_range", "_images")}
    for i, (case, who) in enumerate(whose):
        scores = naive(two, case, who)
        np.testing.assert_allclose(drawn["_median"][i].get_xdata(), np.median(scores))
        np.testing.assert_allclose(drawn["_range"][i].get_xdata(), [scores.min(), scores.max()])
        np.testing.assert_allclose(drawn["_images"][i].get_xdata(), np.sort(scores))
        box = bars(picture)[i]
        np.testing.assert_allclose([box.get_x(), box.get_x() + box.get_width()], np.quantile(scores, [0.25, 0.75]))
    looks = {(bar.get_hatch(), round(grey(bar.get_facecolor()), 1)) for bar in bars(picture)}
    assert len(looks) == 3


def test_many_images_are_shown_by_quantiles_with_the_least_and_the_greatest() -> None:
    rows = [record(0, "april", f"{i:064x}", psnr=float(i * 7919 % 1999)) for i in range(1999)]
    picture = draw(made([CaseFacts("A")], [], records=pd.DataFrame(rows)), Figure("distribution", "d"))
    dots = lines(picture, "_images")[0].get_xdata()
    assert (len(dots), dots[0], dots[-1]) == (100, 0, 1998)
    assert np.abs(np.diff(dots) - 1998 / 99).max() <= 1
    assert "dots: 100 quantiles." in said(picture)


def test_a_mean_from_elsewhere_is_no_distribution(curves: Results) -> None:
    mean = record(0, "theirs", "", psnr=33.0) | {"external": "Doe 2025"}
    results = replace(curves, records=pd.concat([curves.records, pd.DataFrame([mean])], ignore_index=True))
    picture = draw(results, Figure("distribution", "d"))
    assert "theirs †" not in texts(picture)
    assert len(bars(picture)) == 9


# Claims


def test_bars_are_what_was_printed_the_papers_attack_and_the_worst_case(table: Results) -> None:
    picture = draw(table, Figure("claim", "c", "psnr"))
    width = [bar.get_width() for bar in bars(picture)]
    for i, (*_, psnr) in enumerate(TABLE_5):
        wanted = [psnr, naive(table, i, "april").mean(), naive(table, i, "worst case").mean()]
        np.testing.assert_allclose(width[3 * i : 3 * i + 3], wanted)
        assert {f"{value:.2f}" for value in wanted} <= {text.get_text().split()[0] for text in picture.axes[0].texts}
    intervals = [line.get_xdata() for line in lines(picture, "_interval")]
    rows = [row.scores["psnr"] for row in leakage(table) if row.kind in ("paper", "worst")]
    np.testing.assert_allclose(intervals, [(score.low, score.high) for score in rows])


def test_bars_are_told_apart_without_colour(table: Results) -> None:
    three = bars(draw(table, Figure("claim", "c", "psnr")))[:3]
    looks = [(bar.get_hatch() or "", grey(bar.get_facecolor())) for bar in three]
    assert len({hatch for hatch, _ in looks}) == 2
    plain = [shade for hatch, shade in looks if not hatch]
    assert max(plain) - min(plain) > 0.4


@pytest.mark.slow
def test_what_was_not_measured_is_said_and_never_a_bar(table: Results) -> None:
    records = table.records[(table.records.case != 2) | (table.records.attack != "april")]
    refused = replace(table.cases[2], refused={"april": "no position embeddings"})
    none = table.records[table.records.case != 5]
    picture = draw(
        replace(table, cases=(*table.cases[:2], refused, *table.cases[3:]), records=records), Figure("claim", "c")
    )
    assert "cannot run" in texts(picture)
    assert "Cannot run in some cases: april." in said(picture)
    assert len(bars(picture)) == 29
    assert texts(draw(replace(table, records=none), Figure("claim", "c"))).count("n/a") == 2


@pytest.mark.slow
def test_an_infinite_mean_reaches_the_tick_of_infinity(table: Results) -> None:
    records = table.records.copy()
    exact = (records.case == 0) & (records.attack == "patch-gradient")
    records.loc[exact, "psnr"] = math.inf
    records.loc[exact, "mse"] = 0.0
    exact_results = replace(table, records=records)
    picture = draw(exact_results, Figure("claim", "c", "psnr"))
    ticks = dict(
        zip(picture.axes[0].get_xticks(), (t.get_text() for t in picture.axes[0].get_xticklabels()), strict=True)
    )
    worst = bars(picture)[2]
    assert ticks[worst.get_width()] == "∞"
    assert max(bar.get_width() for bar in bars(picture) if bar is not worst) < worst.get_width()
    for kind in ("distribution", "trade-off"):
        assert "∞" in texts(draw(exact_results, Figure(kind, "f", "psnr")))


def test_an_error_of_zero_has_a_place_on_a_logarithmic_axis(curves: Results) -> None:
    records = curves.records.copy()
    records.loc[records.index[records.attack == "patch-gradient"], "mse"] = [0.0, 0.0, *np.geomspace(1e-9, 1e-3, 40)]
    picture = draw(replace(curves, records=records), Figure("distribution", "d", "mse"))
    ax = picture.axes[0]
    assert ax.get_xscale() == "log"
    ticks = dict(zip((t.get_text() for t in ax.get_xticklabels()), ax.get_xticks(), strict=True))
    assert ticks["0"] == min(lines(picture, "_images")[1].get_xdata()) > 0


def test_failures_are_counted_and_left_out(table: Results) -> None:
    records = table.records.copy()
    failed = records.index[(records.case == 0) & (records.attack == "april")][:2]
    records.loc[failed, ["status", "psnr"]] = "failed", math.nan
    picture = draw(replace(table, records=records), Figure("claim", "c"))
    assert "Failed, and left out: 2 reconstructions." in said(picture)
    kept = records[(records.case == 0) & (records.attack == "april") & (records.status == "ok")].psnr.mean()
    np.testing.assert_allclose(bars(picture)[1].get_width(), kept)


# Contact sheets


class Kept(Results):
    """Results whose pictures are PNGs of one colour, named after case, image and content."""

    def picture(self, case: int, image_sha256: str, what: str) -> Place | None:  # noqa: D102
        path = self.path / f"{case}-{image_sha256}-{what}.png"
        return Place(path) if path.exists() else None


CONTENT = ("private", "fed", "april", "patch-gradient")


@pytest.fixture
def kept(table: Results, tmp_path: Path) -> Results:
    for case in range(len(table.cases)):
        for i, image in enumerate(IMAGES):
            for j, what in enumerate(CONTENT):
                Image.new("RGB", (16, 12), (case * 20, i * 30, j * 60)).save(tmp_path / f"{case}-{image}-{what}.png")
    fields: dict[str, Any] = {name: getattr(table, name) for name in table.__dataclass_fields__}
    return Kept(**{**fields, "path": tmp_path})


def shown_pictures(picture: NamedImage) -> list[tuple[int, int, int]]:
    """Return case, image and content of each picture, in the order in which they are drawn."""
    colors = [np.asarray(image.get_array())[0, 0].tolist() for image in picture.axes[0].get_images()]
    return [(r // 20, g // 30, b // 60) for r, g, b in colors]


@pytest.mark.slow
def test_a_sheet_shows_the_leakiest_the_median_and_the_least_leaky_image(kept: Results) -> None:
    picture = draw(kept, Figure("sheet", "s", "psnr"))
    wanted = []
    for case in range(len(kept.cases)):
        scores = naive(kept, case, "worst case")
        order = np.argsort(-scores)
        for i in (order[0], order[3], order[6]):
            by = CONTENT[2 + int(naive(kept, case, "april")[i] < scores[i])]
            wanted += [(case, i, CONTENT.index(what)) for what in ("private", "fed", "april", by)]
    assert shown_pictures(picture) == wanted
    assert f"{naive(kept, 0, 'worst case').max():.2f}" in texts(picture)
    assert picture.get_size_inches()[0] == 6.9


def test_a_sheet_of_one_case_takes_a_column(kept: Results) -> None:
    one = replace(kept, cases=kept.cases[:1], records=kept.records[kept.records.case == 0])
    picture = draw(one, Figure("sheet", "s", "mse"))
    leakiest = int(np.argmax(naive(kept, 0, "worst case")))
    assert shown_pictures(picture)[0] == (0, leakiest, 0)
    assert picture.get_size_inches()[0] == 3.3


def test_a_picture_that_was_not_kept_is_said_to_be_missing(kept: Results) -> None:
    for path in kept.path.glob("*-fed.png"):
        path.unlink()
    picture = draw(kept, Figure("sheet", "s"))
    assert texts(picture).count("no image") == 30
    assert len(shown_pictures(picture)) == 90


@pytest.mark.slow
def test_a_sheet_needs_pictures_that_can_be_read(kept: Results, table: Results) -> None:
    with pytest.raises(PrivlabError, match="'nowhere'"):
        draw(table, Figure("sheet", "s"))
    for path in kept.path.glob("0-*-april.png"):
        path.write_bytes(b"torn")
    with pytest.raises(PrivlabError, match=r"'.*april.png'"):
        draw(kept, Figure("sheet", "s"))


# All kinds

KINDS = [
    *(Figure(kind, kind, y) for kind in ("claim", "distribution", "trade-off") for y in ("psnr", "mse")),
    Figure("sheet", "sheet"),
]


LONG = ", fine-tuned with MJP at γ = 0.27 without the unknown position embedding of the slots that it shuffles"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("figure", "longer"),
    [*((figure, "") for figure in KINDS), *((figure, LONG) for figure in KINDS if figure.kind != "trade-off")],
    ids=lambda value: f"{value.kind}-{value.y}" if isinstance(value, Figure) else "long" if value else "short",
)
def test_all_text_lies_within_the_figure_and_on_no_other_text(kept: Results, figure: Figure, longer: str) -> None:
    cases = tuple(
        replace(
            case,
            label=case.label + longer,
            group=case.group and case.group + longer,
            published={**case.published, "mse": 0.03},
        )
        for case in kept.cases
    )
    picture = draw(replace(kept, cases=cases), figure)
    renderer = FigureCanvasAgg(picture).get_renderer()
    picture.draw(renderer)
    boxes = [
        (text.get_text(), text.get_window_extent(renderer)) for text in visible(picture) if text.get_text().strip()
    ]
    width, height = picture.get_size_inches() * picture.dpi
    for text, box in boxes:
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
    clashes = [
        (a, b)
        for i, (a, one) in enumerate(boxes)
        for b, other in boxes[:i]
        if one.padded(-1).overlaps(other.padded(-1))
    ]
    assert not clashes


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(kept: Results, curves: Results, tmp_path: Path) -> None:
    few = replace(kept, cases=kept.cases[:3], records=kept.records[kept.records.case < 3], figures=tuple(KINDS[::2]))
    before = dict(matplotlib.rcParams)
    for results in (few, replace(curves, figures=(Figure("curve", "curve", "psnr", "gamma"),))):
        first = write_figures(results, tmp_path / "first")
        with matplotlib.rc_context({"font.size": 20, "pdf.fonttype": 3, "svg.hashsalt": None, "lines.linewidth": 9}):
            shuffled = replace(results, records=results.records.sample(frac=1, random_state=0))
            again = write_figures(shuffled, tmp_path / "again")
        assert [path.name for path in first] == [f"{f.name}.{kind}" for f in results.figures for kind in ("pdf", "svg")]
        for one, other in zip(first, again, strict=True):
            assert one.read_bytes() == other.read_bytes(), one.name
    assert dict(matplotlib.rcParams) == before


def test_files_embed_their_fonts_and_hold_no_date(curves: Results, tmp_path: Path) -> None:
    pdf, svg = write_figures(replace(curves, figures=(Figure("curve", "γ", "psnr", "gamma"),)), tmp_path)
    assert b"/FontFile2" in pdf.read_bytes()  # TrueType
    assert b"/Type3" not in pdf.read_bytes()
    assert b"CreationDate" not in pdf.read_bytes()
    assert "<dc:date>" not in svg.read_text("utf-8")


@pytest.mark.parametrize(
    ("figure", "message"),
    [
        (Figure("pie", "p"), "Unknown figure 'pie'"),
        (Figure("claim", "c", "pnsr"), "Unknown metric 'pnsr'. Did you mean psnr"),
        (Figure("claim", "c", "ssim"), "The figure 'c' needs values of ssim. Found none in 'made'."),
        (Figure("claim", "c", "mse"), "The claim 'c' needs published figures of mse. Found none in 'made'."),
        (Figure("distribution", "d", "ssim"), "The figure 'd' needs values of ssim. Found none in 'made'."),
        (Figure("distribution", "d", "correct"), "A distribution shows what leaks. Found y = correct."),
        (Figure("sheet", "s", "correct"), "A sheet shows what leaks. Found y = correct."),
        (Figure("curve", "c", "ssim", "gamma"), "The figure 'c' needs values of ssim. Found none in 'made'."),
        (Figure("curve", "c"), "Unknown x ''."),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(curves: Results, figure: Figure, message: str) -> None:
    with pytest.raises(PrivlabError, match=re.escape(message)) as error:
        draw(curves, figure)
    assert "\n" not in str(error.value)


def test_a_figure_that_cannot_be_drawn_keeps_no_other_from_being_written(curves: Results, tmp_path: Path) -> None:
    lacking, whole = Figure("claim", "c", "ssim"), Figure("curve", "a", "psnr", "gamma")
    said = "1 of 2 figures not drawn: The figure 'c' needs values of ssim. Found none in 'made'."
    said += f" The others are in {tmp_path}."
    with pytest.raises(PrivlabError, match=f"^{re.escape(said)}$"):
        write_figures(replace(curves, figures=(lacking, whole)), tmp_path, ("svg",))
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    with pytest.raises(PrivlabError, match=r"^1.*1.*'made'"):
        write_figures(replace(curves, figures=(lacking,)), tmp_path / "none", ("svg",))


def test_what_cannot_be_written_is_refused_before_anything_is(curves: Results, tmp_path: Path) -> None:
    one = Figure("curve", "a", "psnr", "gamma")
    with pytest.raises(PrivlabError, match="Unknown format of figures 'pgf'"):
        write_figures(replace(curves, figures=(one,)), tmp_path / "out", ("pdf", "pgf"))
    with pytest.raises(PrivlabError, match="Two figures are named 'a'"):
        write_figures(replace(curves, figures=(one, one)), tmp_path / "out")
    with pytest.raises(PrivlabError, match=r"without a folder. Found '../a'"):
        write_figures(replace(curves, figures=(replace(one, name="../a"),)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(PrivlabError, match="cannot be written: "):
        write_figures(replace(curves, figures=(one,)), tmp_path / "file")


SCORES = st.lists(
    st.floats(0, 1e6, allow_subnormal=False) | st.just(math.inf) | st.just(math.nan), min_size=1, max_size=20
)


@given(values=SCORES, log=st.booleans())
def test_a_scale_keeps_the_order_and_makes_every_score_finite(values: list[float], log: bool) -> None:
    scale = Scale.over(values, log=log)
    known = sorted(value for value in values if not math.isnan(value))
    places = scale.place(known)
    assert np.isfinite(places).all()
    assert (np.diff(places) >= 0).all()
    assert not scale.log or (places > 0).all()
    finite = [value for value in known if math.isfinite(value)]
    assert not finite or scale.top is None or scale.top > max(finite)
    assert np.isnan(scale.place([math.nan])).all()
