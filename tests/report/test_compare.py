import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privlab.grids import Layout
from privlab.report.tables import WORST, CaseFacts, Moved, Results
from privlab.report.tables.compare import compare

LAYOUT = Layout(columns=("mse", "psnr"), paper_attack="april")


def run(
    psnr: Callable[[int, int], float],
    *,
    images: int = 12,
    first: int = 0,
    attacks: tuple[str, ...] = ("april", "other"),
) -> Results:
    """Return a run of one case, where an attack's PSNR on image i is psnr(number of the attack, i)."""
    rows = [
        {"case": 0, "attack": attack, "geometry": "in_place", "image": f"{i}", "image_sha256": f"{i:08}", "seed": 0}
        | {"draw": 0, "status": "ok", "reason": None, "external": None, "mse": math.nan, "psnr": psnr(a, i)}
        for a, attack in enumerate(attacks)
        for i in range(first, first + images)
    ]
    return Results("t", "T", None, (CaseFacts("one", "g"),), LAYOUT, (), {}, pd.DataFrame(rows), {}, Path())


def plain(a: int, i: int) -> float:
    return 10.0 + a + (7 * i) % 5


def cells(moved: list[Moved]) -> dict[tuple[str, str], str]:
    return {(cell.attack, cell.metric): cell.what for cell in moved}


def test_the_same_run_has_not_moved() -> None:
    assert compare(run(plain), run(plain)) == []


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_the_order_of_rows_moves_nothing(random: Any) -> None:
    old, new = run(plain), run(lambda a, i: plain(a, i) + i % 3)
    order = list(range(len(new.records)))
    random.shuffle(order)
    torn = replace(new, records=new.records.iloc[order])
    assert repr(compare(old, torn)) == repr(compare(old, new))
    assert compare(new, torn) == []


def test_a_shift_of_one_attack_moves_it_and_the_worst_case() -> None:
    """A paired shift of 0.1 dB is seen, though the images spread over several dB."""
    moved = compare(run(plain), run(lambda a, i: plain(a, i) + 0.1 * a + (0.02 if i % 2 else -0.02)))
    assert cells(moved) == {("other", "psnr"): "moved", (WORST, "psnr"): "moved"}
    other = moved[0]
    assert (other.case, other.group, other.images, other.leaks_more) == ("one", "g", 12, True)
    assert other.difference == pytest.approx(0.1)
    assert 0 < other.low < other.difference < other.high
    assert other.new - other.old == pytest.approx(0.1)
    assert str(other).startswith("g, one, other: PSNR ↑ 12.83 → 12.93, moved by 0.10 [0.09, 0.11]")
    assert str(other).endswith("over 12 images, leaks more")


def test_noise_moves_about_as_many_cells_as_the_interval_says() -> None:
    rng = np.random.default_rng(0)
    names = tuple(f"attack-{i}" for i in range(200))
    old = run(lambda a, i: plain(a, i) + rng.normal(), images=40, attacks=names)
    new = run(lambda a, i: plain(a, i) + rng.normal(), images=40, attacks=names)
    assert 2 <= len(compare(old, new)) <= 25  # 5 % of 201, and the ends of a bootstrap are a little short


def test_rounding_is_no_move() -> None:
    assert compare(run(plain), run(lambda a, i: plain(a, i) * (1 + 1e-7))) == []


def test_exact_is_exact_however_rounding_falls() -> None:
    old, new = run(lambda a, i: 142.0 - i), run(lambda a, i: 118.0 + 2 * i)
    old.records["mse"], new.records["mse"] = 1e-14, 2e-12
    assert compare(old, new) == []
    moved = compare(old, run(lambda a, i: 60.0 + i))
    assert [(cell.old, cell.leaks_more) for cell in moved if cell.metric == "psnr"] == [(100.0, False)] * 3


def test_direction_of_a_metric_that_leaks_downwards() -> None:
    old, new = run(plain), run(plain)
    old.records["mse"], new.records["mse"] = 0.5, 0.25
    moved = compare(old, new)
    assert {(cell.metric, cell.leaks_more, cell.difference) for cell in moved} == {("mse", True, -0.25)}
    assert compare(new, old)[0].leaks_more is False


def test_cells_of_one_run_alone() -> None:
    old, new = run(plain, attacks=("april", "gone")), run(plain, attacks=("april", "come"))
    new.records["mse"] = 0.5
    found = cells(compare(old, new))
    assert found == {
        ("april", "mse"): "only in the new run",
        ("come", "mse"): "only in the new run",
        ("come", "psnr"): "only in the new run",
        ("gone", "psnr"): "only in the old run",
        (WORST, "mse"): "only in the new run",
    }
    lines = [str(cell) for cell in compare(old, new)]
    assert "g, one, gone: PSNR ↑ only in the old run: 12.83" in lines
    assert "g, one, come: MSE ↓ only in the new run: 0.5000" in lines


def test_a_metric_of_the_old_layout_alone_is_compared() -> None:
    old, new = run(plain), run(lambda a, i: plain(a, i) + 1)
    assert cells(compare(old, replace(new, layout=replace(LAYOUT, columns=("mse",)))))[WORST, "psnr"] == "moved"


def test_cases_are_matched_by_group_and_label_and_not_by_place() -> None:
    old = replace(run(plain), cases=(CaseFacts("one", "g"), CaseFacts("two", "g")))
    new = run(plain)
    moved = replace(new, cases=(CaseFacts("two", "g"), CaseFacts("one", "g")), records=new.records.assign(case=1))
    assert compare(old, moved) == []
    other = replace(moved, cases=(CaseFacts("two", "g"), CaseFacts("one", "h")))
    assert {(cell.group, cell.what) for cell in compare(old, other)} == {
        ("g", "only in the old run"),
        ("h", "only in the new run"),
    }


def test_cases_of_one_name_are_told_apart_by_their_order() -> None:
    twins = (CaseFacts("one", "g"), CaseFacts("one", "g"))
    both = pd.concat([run(plain).records, run(lambda a, i: 20.0).records.assign(case=1)], ignore_index=True)
    assert compare(*[replace(run(plain), cases=twins, records=both)] * 2) == []


@pytest.mark.parametrize(("shift", "moved"), [(0.0, False), (0.1, False), (5.0, True)])
def test_runs_without_a_common_image(shift: float, moved: bool) -> None:
    found = compare(run(plain, images=40), run(lambda a, i: plain(a, i) + shift, images=40, first=100))
    assert bool(found) is moved
    for cell in found:
        assert (cell.images, cell.difference) == (0, pytest.approx(shift))
        assert cell.low < cell.difference < cell.high
        assert "no image in common" in str(cell)


def test_only_common_images_are_paired() -> None:
    """Ten images of twelve are the same: what the others do to the mean is no move."""
    assert compare(run(plain), run(plain, first=2)) == []


def test_one_image_has_no_interval_so_every_difference_counts() -> None:
    (cell, worst) = compare(
        run(plain, images=1, attacks=("april",)), run(lambda a, i: 10.5, images=1, attacks=("april",))
    )
    assert (cell.difference, math.isnan(cell.low), worst.attack) == (0.5, True, WORST)
    assert str(cell) == "g, one, april: PSNR ↑ 10.00 → 10.50, moved by 0.50, over 1 image, leaks more"


def test_infinite_figures() -> None:
    exact = run(lambda a, i: math.inf)
    assert compare(exact, exact) == []
    (gained, _, _) = compare(run(plain), exact)
    assert (gained.difference, gained.leaks_more) == (math.inf, True)
    (lost, _, _) = compare(exact, run(plain))
    assert (lost.difference, lost.leaks_more) == (-math.inf, False)
    assert "∞ → 11.83, moved by −∞" in str(lost)


def test_infinite_figures_that_cross_are_no_move() -> None:
    """One image is exact in the old run, another in the new one: the interval of the difference holds everything."""
    old, new = (run(lambda a, i, at=at: math.inf if i == at else plain(a, i)) for at in (0, 1))
    assert compare(old, new) == []


def test_more_failures_are_told() -> None:
    old, new = run(plain), run(plain)
    new.records.loc[(new.records.attack == "april") & (new.records.image_sha256 < "00000003"), "status"] = "failed"
    moved = compare(old, new)
    assert [(cell.attack, cell.what, cell.old, cell.new) for cell in moved] == [
        ("april", "more failures", 0, 3),
        (WORST, "more failures", 0, 3),
    ]
    assert str(moved[0]) == "g, one, april: 3 images failed, 0 before"
    assert compare(new, old) == []


def test_controls_are_not_compared() -> None:
    names = ("april", "control:mean")
    assert compare(run(plain, attacks=names), run(lambda a, i: plain(a, i) + 5 * a, attacks=names)) == []


def test_external_results_are_named_so() -> None:
    old, new = run(plain), run(lambda a, i: plain(a, i) + a)
    for results in (old, new):
        results.records.loc[results.records.attack == "other", "external"] = "Fu 2021"
    assert [cell.attack for cell in compare(old, new)] == ["other (external)", WORST]
