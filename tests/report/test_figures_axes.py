"""Curves and trade-offs: what is drawn equals a naive computation, and is told apart without colour."""

import math
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure as NamedImage

from privlab.base import PrivlabError
from privlab.grids import Figure
from privlab.report.figures import MARKERS, PALETTE, place_labels
from privlab.report.figures.draw import draw
from privlab.report.tables import CaseFacts, Results
from privlab.report.tables.rows import leakage

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("drawing.py"))))
IMAGES, GAMMAS, TABLE_5, curves, groups, line, made, naive, record, said, table, texts = (
    drawing.IMAGES,
    drawing.GAMMAS,
    drawing.TABLE_5,
    drawing.curves,
    drawing.groups,
    drawing.line,
    drawing.made,
    drawing.naive,
    drawing.record,
    drawing.said,
    drawing.table,
    drawing.texts,
)


# Curves


def test_curve_shows_the_means_the_intervals_what_was_printed_and_the_control(curves: Results) -> None:
    picture = draw(curves, Figure("curve", "c", "psnr", "gamma"))
    for label, who in (("paper's attack", "april"), ("worst case", "worst case")):
        drawn = line(picture, label)
        np.testing.assert_allclose(drawn.get_xdata(), GAMMAS)
        np.testing.assert_allclose(drawn.get_ydata(), [naive(curves, i, who).mean() for i in range(3)])
    printed = line(picture, "as published").get_ydata()
    np.testing.assert_allclose(printed[:2], [20 - 5 * g for g in GAMMAS[:2]])
    assert math.isnan(printed[2])
    control = np.mean([naive(curves, i, "control:mean").mean() for i in range(3)])
    np.testing.assert_allclose(line(picture, "leakiest control").get_ydata(), control)


def test_bands_are_the_intervals_of_the_table(curves: Results) -> None:
    picture = draw(curves, Figure("curve", "c", "psnr", "gamma"))
    bands = [c for c in picture.axes[0].collections if isinstance(c, PolyCollection)]
    for band, kind in zip(bands, ("paper", "worst"), strict=True):
        ends = [row.scores["psnr"] for row in leakage(curves) if row.kind == kind]
        drawn = {tuple(point) for point in np.asarray(band.get_paths()[0].vertices).round(9).tolist()}
        wanted = {(g, round(v, 9)) for g, score in zip(GAMMAS, ends, strict=True) for v in (score.low, score.high)}
        assert drawn == wanted


def test_every_series_of_a_curve_differs_in_line_marker_or_fill(groups: Results) -> None:
    picture = draw(groups, Figure("curve", "c", "psnr", "gamma"))
    series = [one for one in picture.axes[0].get_lines() if one.get_label() != "leakiest control"]
    looks = {(one.get_linestyle(), one.get_marker(), one.get_fillstyle()) for one in series}
    assert len(looks) == len(series) == 6
    assert {"vit_s", "deit_s", "paper's attack", "worst case", "as published"} <= set(texts(picture))
    assert len(set(MARKERS)) == len(MARKERS) == len(set(PALETTE)) == len(PALETTE)


def test_a_curve_of_utility_has_one_line_in_per_cent(curves: Results) -> None:
    picture = draw(curves, Figure("curve", "c", "correct", "gamma"))
    means = [100 * naive(curves, i, "april", "correct").mean() for i in range(3)]
    np.testing.assert_allclose(line(picture, "measured here").get_ydata(), means)
    assert len(picture.axes[0].get_lines()) == 1


def test_without_a_papers_attack_the_worst_case_stands_alone(curves: Results) -> None:
    picture = draw(
        replace(curves, layout=replace(curves.layout, paper_attack=None)), Figure("curve", "c", "psnr", "gamma")
    )
    assert "paper's attack" not in texts(picture)
    assert len(line(picture, "worst case").get_ydata()) == 3


def test_x_may_be_an_option_of_a_defense() -> None:
    cases = [CaseFacts(f"{s}", None, {"set": f"gaussian-noise.std={s}"}) for s in (0.01, 0.1, 5)]
    picture = draw(made(cases, [30, 20, 10]), Figure("curve", "c", "psnr", "set"))
    np.testing.assert_allclose(line(picture, "worst case").get_xdata(), [0.01, 0.1, 5])
    assert picture.axes[0].get_xlabel() == "standard deviation of the noise"
    assert picture.axes[0].get_xscale() == "log"


@pytest.mark.parametrize(
    ("xs", "scale"),
    [
        ((1e-3, 1e-2, 1e-1), "log"),
        ((0.0, 1e-3, 1e-2, 1e-1), "symlog"),
        ((0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0), "linear"),
        ((-1.0, 1.0, 1000.0), "linear"),
        ((5.0,), "linear"),
    ],
)
def test_x_is_logarithmic_where_ratios_are_even(xs: tuple[float, ...], scale: str) -> None:
    cases = [CaseFacts(f"{x}", None, {"sigma": x}) for x in xs]
    picture = draw(made(cases, [30.0 - i for i in range(len(xs))]), Figure("curve", "c", "psnr", "sigma"))
    assert picture.axes[0].get_xscale() == scale
    np.testing.assert_allclose(line(picture, "worst case").get_xdata(), xs)


def test_axes_say_the_unit_and_where_it_leaks(curves: Results) -> None:
    labels = {
        y: draw(curves, Figure("curve", "c", y, "gamma")).axes[0].get_ylabel() for y in ("psnr", "mse", "correct")
    }
    assert labels == {
        "psnr": "PSNR (dB)   leakier →",
        "mse": "MSE   ← leakier",
        "correct": "correct (%)   more useful →",
    }


def test_external_points_are_marked_and_named(curves: Results) -> None:
    records = curves.records.copy()
    records.loc[(records.case == 1) & (records.attack == "april"), "external"] = "Doe 2025, Table 1"
    picture = draw(replace(curves, records=records), Figure("curve", "c", "psnr", "gamma"))
    assert texts(picture).count("†") == 2  # the paper's attack, and the worst case in which it took part
    assert "† measured elsewhere: Doe 2025, Table 1" in said(picture)


@pytest.mark.parametrize(
    ("options", "x", "message"),
    [
        ([{"model": "a"}, {"model": "b"}], "model", "needs numbers on x. Found model = 'a', 'b'."),
        ([{"gamma": True}, {"gamma": "nan"}], "gamma", "needs numbers on x"),
        ([{"gamma": 0.1}, {"gamma": 0.2}], "gama", "Unknown x 'gama'. Did you mean gamma?"),
        ([{"gamma": 0.1}, {"gamma": 0.1}], "gamma", "needs one case for each x and group. Found 'C0' and 'C1' at 0.1."),
        ([{"gamma": 0.1, "model": f"m{i}"} for i in range(9)], "gamma", "can show 8 groups of cases. Found 9."),
    ],
)
def test_a_curve_needs_a_number_for_each_case_of_a_group(options: list[dict[str, Any]], x: str, message: str) -> None:
    results = made([CaseFacts(f"C{i}", None, o) for i, o in enumerate(options)], [15.0] * len(options))
    with pytest.raises(PrivlabError, match=re.escape(message)):
        draw(results, Figure("curve", "c", "psnr", x))


def test_groups_keep_cases_apart_that_options_do_not() -> None:
    results = made([CaseFacts("A", "one", {"gamma": 0.1}), CaseFacts("B", "two", {"gamma": 0.1})], [15, 16])
    assert {"one", "two"} <= set(texts(draw(results, Figure("curve", "c", "psnr", "gamma"))))


# Trade-offs


def test_trade_off_shows_utility_against_leakage(curves: Results) -> None:
    picture = draw(curves, Figure("trade-off", "t", "psnr"))
    utility = [100 * naive(curves, i, "april", "correct").mean() for i in range(3)]
    for label, who in (("paper's attack", "april"), ("worst case", "worst case")):
        np.testing.assert_allclose(line(picture, label).get_xdata(), utility)
        np.testing.assert_allclose(line(picture, label).get_ydata(), [naive(curves, i, who).mean() for i in range(3)])
    looks = {
        (line(picture, n).get_marker(), line(picture, n).get_fillstyle()) for n in ("paper's attack", "worst case")
    }
    assert len(looks) == 2


def test_a_trade_off_may_show_utility_against_the_worst_case(curves: Results) -> None:
    drawn = line(draw(curves, Figure("trade-off", "t", "correct", "mse")), "measured here")
    utility = [100 * naive(curves, i, "april", "correct").mean() for i in range(3)]
    np.testing.assert_allclose(drawn.get_ydata(), utility)
    worst = [curves.laid_out(columns=("mse",)).score(i, "worst", "mse").mean for i in range(3)]
    np.testing.assert_allclose(drawn.get_xdata(), worst)


@pytest.mark.slow
def test_trade_off_takes_the_papers_accuracy_where_none_was_measured(table: Results) -> None:
    picture = draw(table, Figure("trade-off", "t", "psnr", "correct"))
    np.testing.assert_allclose(line(picture, "worst case").get_xdata(), [accuracy for _, _, accuracy, _ in TABLE_5])
    assert "as published" in picture.axes[0].get_xlabel()


def test_names_that_find_no_room_stand_in_a_list(table: Results) -> None:
    picture = draw(table, Figure("trade-off", "t", "psnr"))
    assert {f"{n}" for n in range(1, 11)} <= {text.get_text() for text in picture.axes[0].texts}
    assert "1 ViT-S, (1) setting a; 2 DeiT-S, (1) setting a;" in said(picture)
    few = replace(table, cases=table.cases[4:6], records=table.records[table.records.case.isin([4, 5])])
    few = replace(few, records=few.records.assign(case=few.records.case - 4))
    assert {"ViT-S", "DeiT-S"} == {text.get_text() for text in draw(few, Figure("trade-off", "t")).axes[0].texts}


@settings(max_examples=15)
@given(points=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
def test_labels_lie_on_no_other_label_and_on_no_point(points: list[tuple[float, float, float]]) -> None:
    picture = NamedImage(figsize=(3.3, 3.0))
    ax = picture.add_subplot()
    ax.set(xlim=(-0.2, 1.2), ylim=(-0.2, 1.2))
    joins = [np.array([(x, y), (x, z)]) for x, y, z in points]
    if not place_labels(picture, ax, joins, [f"{i}" for i in range(len(joins))]):
        assert not ax.texts
        return
    renderer = FigureCanvasAgg(picture).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in ax.texts]
    marks = ax.transData.transform(np.concatenate(joins))
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert not any(box.contains(*mark) for box in boxes for mark in marks.tolist())
    assert len(boxes) == len(points)


@pytest.mark.slow
def test_a_trade_off_needs_both_figures(table: Results) -> None:
    bare = replace(table, cases=tuple(replace(case, published={}) for case in table.cases))
    with pytest.raises(PrivlabError, match="correct"):
        draw(bare, Figure("trade-off", "t"))
    with pytest.raises(PrivlabError, match=r"trade-off.*'gamma'"):
        draw(bare, Figure("trade-off", "t", "psnr", "gamma"))
    crowd = made([CaseFacts(f"C{i}", None, {}, {"correct": 0.5}) for i in range(70)], [])
    same = pd.DataFrame([record(case, "april", IMAGES[0], psnr=15.0) for case in range(70)])
    crowd = replace(crowd, records=same)
    with pytest.raises(PrivlabError, match=r"70.*cases"):
        draw(crowd, Figure("trade-off", "t"))
