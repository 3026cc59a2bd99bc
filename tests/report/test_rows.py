import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privlab.evaluation import exact_db
from privlab.grids import Layout
from privlab.report.tables import (
    SINGLE,
    WORST,
    CaseFacts,
    Results,
    Row,
    Score,
    Scored,
    conditions_that_differ,
    headline,
)
from privlab.report.tables.rows import leakage

LAYOUT = Layout(columns=("mse", "psnr", "correct"), paper_attack="april")
COLUMNS = ["case", "attack", "geometry", "image", "image_sha256", "status", "reason", "seed", "draw", "external"]


def record(case: int, attack: str, image: str, draw: int = 0, **values: Any) -> dict[str, Any]:
    """Return a record of an image whose hash is its name, eight times."""
    named = dict(zip(COLUMNS, (case, attack, "in_place", image, image * 8, "ok", None, 0, draw, None), strict=True))
    return named | dict.fromkeys(LAYOUT.columns, math.nan) | values


def results(records: Sequence[Mapping[str, Any]], *cases: CaseFacts, layout: Layout = LAYOUT, **rest: Any) -> Results:
    frame = pd.DataFrame(list(records), columns=[*COLUMNS, *LAYOUT.columns])
    facts = {"conditions": {}, "facts": {}, "source": None} | rest
    return Results(name="t", title="T", cases=cases or (CaseFacts("one"),), layout=layout, figures=(), records=frame,
                   path=Path(), **facts)  # fmt: skip


def row_of(rows: Sequence[Row], kind: str, attack: str | None = None, case: int = 0) -> Row:
    (found,) = [row for row in rows if row.kind == kind and row.case == case and attack in (None, row.attack)]
    return found


def means(row: Row) -> dict[str, float]:
    return {name: score.mean for name, score in row.scores.items()}


TWO = [
    record(0, "april", "a", mse=0.1, psnr=10.0, correct=1.0),
    record(0, "april", "b", mse=0.3, psnr=5.0, correct=0.0),
    record(0, "patch-gradient", "a", mse=0.2, psnr=12.0, correct=1.0),
    record(0, "patch-gradient", "b", mse=0.1, psnr=5.0, correct=0.0),
    record(0, "control:mean", "a", mse=0.001, psnr=30.0),
    record(0, "control:mean", "b", mse=0.001, psnr=30.0),
]


def test_means_and_worst_case_by_hand() -> None:
    rows = leakage(results(TWO))
    assert [(row.kind, row.attack) for row in rows] == [
        ("paper", "april"),
        ("worst", WORST),
        ("single", SINGLE),
        ("attack", "april"),
        ("attack", "patch-gradient"),
        ("control", "control:mean"),
    ]
    assert means(row_of(rows, "paper")) == pytest.approx({"mse": 0.2, "psnr": 7.5, "correct": 0.5})
    assert means(row_of(rows, "worst")) == pytest.approx({"mse": 0.1, "psnr": 8.5, "correct": 0.5})
    assert row_of(rows, "worst").leakiest == {
        "mse": {"april": 1, "patch-gradient": 1},
        "psnr": {"april": 1, "patch-gradient": 2},  # both reach 5 dB on the second image
    }
    assert {row.images for row in rows} == {2}
    assert {row.failed for row in rows} == {0}
    assert means(row_of(rows, "control"))["psnr"] == 30.0


def test_worst_case_names_every_attack_that_reaches_it() -> None:
    found = Scored(results(TWO).records, ["psnr", "correct"]).reached
    assert found.to_dict("list") == {
        "case": [0, 0, 0],
        "image": ["aaaaaaaa", "bbbbbbbb", "bbbbbbbb"],
        "metric": ["psnr"] * 3,
        "value": [12.0, 5.0, 5.0],
        "attack": ["patch-gradient", "april", "patch-gradient"],
        "geometry": ["in_place"] * 3,
    }


def test_draws_are_averaged_within_an_image_but_the_worst_case_takes_the_leakiest() -> None:
    records = [record(0, "april", "a", draw, psnr=value) for draw, value in enumerate((10.0, 20.0, 30.0))]
    rows = leakage(results([*records, record(0, "april", "b", psnr=40.0)]))
    assert row_of(rows, "paper").scores["psnr"].mean == 30.0  # of 20 and 40, not of four figures
    assert row_of(rows, "paper").images == 2
    assert row_of(rows, "worst").scores["psnr"].mean == 35.0


def test_equal_draws_have_exactly_their_mean() -> None:
    """0.1 + 0.1 + 0.1 is above 0.3 in floating point, which must not beat the worst case."""
    rows = leakage(results([record(0, "april", "a", draw, psnr=0.1) for draw in range(3)]))
    assert row_of(rows, "paper").scores["psnr"].mean == row_of(rows, "worst").scores["psnr"].mean == 0.1


def test_geometry_of_the_layout_is_read_and_controls_have_one() -> None:
    bound = [r | {"geometry": "oracle", "psnr": 50.0} for r in TWO if not r["attack"].startswith("control")]
    rows = leakage(results([*TWO, *bound], layout=replace(LAYOUT, geometry="oracle")))
    assert row_of(rows, "paper").scores["psnr"].mean == 50.0
    assert row_of(rows, "control").scores["psnr"].mean == 30.0
    assert row_of(leakage(results([*TWO, *bound])), "paper").scores["psnr"].mean == 7.5


def laid(geometry: str, attack: str, **psnr: float) -> list[dict[str, Any]]:
    return [record(0, attack, image, psnr=value) | {"geometry": geometry} for image, value in psnr.items()]


ADVERSARY = [
    *(laid("in_place", "april", a=10.0, b=9.0) + laid("in_place", "patch-gradient", a=8.0, b=20.0)),
    *(laid("reassembled", "april", a=10.0, b=9.0) + laid("reassembled", "patch-gradient", a=30.0, b=4.0)),
    *(laid("oracle", "april", a=50.0, b=51.0) + laid("oracle", "patch-gradient", a=40.0, b=41.0)),
]


@pytest.mark.parametrize("geometry", ["in_place", "reassembled"])
def test_the_worst_case_takes_the_leakiest_geometry_of_an_adversary_and_never_the_oracle(geometry: str) -> None:
    rows = leakage(results(ADVERSARY, layout=replace(LAYOUT, geometry=geometry)))
    worst, single = row_of(rows, "worst"), row_of(rows, "single")
    assert worst.scores["psnr"].mean == 25.0  # 30 of the first image reassembled, 20 of the second as it is
    assert worst.leakiest["psnr"] == {"patch-gradient (reassembled)": 1, "patch-gradient": 1}
    assert single.scores["psnr"].mean == 17.0  # the mean of 30 and 4, above 14 as it is
    assert single.leakiest["psnr"] == {"patch-gradient (reassembled)": 2}
    found = Scored(results(ADVERSARY).records, ["psnr"], geometry).leakiest_geometries
    assert found[["attack", "geometry", "value"]].to_numpy().tolist() == [
        ["april", "in_place", 9.5],  # both are alike: as it is
        ["patch-gradient", "reassembled", 17.0],
    ]


def test_under_the_oracle_all_rows_are_the_oracles() -> None:
    rows = leakage(results(ADVERSARY, layout=replace(LAYOUT, geometry="oracle")))
    assert row_of(rows, "worst").scores["psnr"].mean == 50.5
    assert row_of(rows, "worst").leakiest["psnr"] == {"april (oracle)": 2}
    assert row_of(rows, "single").leakiest["psnr"] == {"april (oracle)": 2}


def test_controls_are_those_of_the_geometry_image_by_image() -> None:
    """Where no control has an oracle row, as in older stores, it stands as it is; shuffled patches never do."""
    mean, shuffled = "control:mean", "control:shuffled"
    plain = laid("in_place", mean, a=10.0, b=12.0) + laid("in_place", shuffled, a=5.0, b=5.0)
    old = [row | {"geometry": None} for row in plain]

    def controls(records: list[dict[str, Any]], geometry: str) -> dict[str | None, float]:
        rows = leakage(results([*ADVERSARY, *records], layout=replace(LAYOUT, geometry=geometry)))
        return {row.attack: row.scores["psnr"].mean for row in rows if row.kind == "control"}

    oracle = laid("oracle", mean, a=20.0)  # nothing was moved in the second image
    for stored in (plain, old):
        assert controls([*stored, *oracle], "oracle") == {mean: 16.0}
        assert controls([*stored, *oracle], "in_place") == {mean: 11.0, shuffled: 5.0}
        assert controls([*stored, *oracle], "reassembled") == {mean: 11.0, shuffled: 5.0}
        assert controls(stored, "oracle") == {mean: 11.0}


def test_the_best_single_attack_was_scored_on_half_of_the_images_or_more() -> None:
    few = laid("in_place", "lucky", a=99.0)
    many = laid("in_place", "april", a=10.0, b=9.0, c=8.0)
    assert row_of(leakage(results([*few, *many])), "single").leakiest["psnr"] == {"april": 3}
    assert row_of(leakage(results([*few, *many[:2]])), "single").leakiest["psnr"] == {"lucky": 1}
    lower = [row | {"mse": 1 / row["psnr"]} for row in [*few, *many]]
    rows = leakage(results(lower, layout=replace(LAYOUT, columns=("correct", "mse"))))
    assert row_of(rows, "single").scores["mse"].mean == pytest.approx((1 / 10 + 1 / 9 + 1 / 8) / 3)


def test_exact_images_are_counted_by_the_size_of_the_image() -> None:
    """Every draw of an image must be exact, of the worst case any attack's."""
    small = {"victim_params": json.dumps({"input": [3, 32, 32]})}
    level = exact_db(3 * 32 * 32)
    records = [
        *(record(0, "april", "a", draw, psnr=value) | small for draw, value in enumerate((level + 1, level - 1))),
        *(record(0, "april", image, psnr=level + 1) | small for image in "bc"),
        record(0, "patch-gradient", "a", psnr=level + 0.1) | small,
        record(0, "control:mean", "a", psnr=12.0) | small,
    ]
    frame = pd.DataFrame(records)
    rows = leakage(replace(results([]), records=frame))
    assert {(row.kind, row.attack): row.exact for row in rows if row.kind != "paper"} == {
        ("worst", WORST): 3,
        ("single", SINGLE): 2,
        ("attack", "april"): 2,
        ("attack", "patch-gradient"): 1,
        ("control", "control:mean"): 0,
    }
    unknown = leakage(replace(results([]), records=frame.drop(columns="victim_params")))
    assert row_of(unknown, "worst").exact == 0  # such a PSNR says nothing of a larger image
    assert row_of(leakage(results([record(0, "april", "a", mse=0.1)])), "paper").exact is None


@given(st.integers(1, 5000), st.floats(0, 5), st.integers(0, 2**32 - 1))
def test_above_that_psnr_every_grey_level_is_right(values: int, above: float, seed: int) -> None:
    """However the squared error is spread; half a grey level in one value has just that PSNR."""
    draw = np.random.default_rng(seed)
    error = draw.dirichlet(np.full(values, draw.choice([0.001, 1.0]))) if values > 1 else np.ones(1)
    error = np.sqrt(error * values * 10 ** (-(exact_db(values) + above + 1e-9) / 10))
    assert error.max() < 1 / 510
    one = np.zeros(values)
    one[0] = 1 / 510
    assert -10 * math.log10((one**2).mean()) == pytest.approx(exact_db(values))


def test_infinite_and_missing_scores() -> None:
    records = [record(0, "april", "a", psnr=math.inf, mse=0.0)]
    rows = leakage(results([*records, *(record(0, "april", name, psnr=20.0) for name in "bc")]))
    psnr, mse, correct = (row_of(rows, "paper").scores[name] for name in ("psnr", "mse", "correct"))
    assert psnr == Score(math.inf, 0.0, math.inf, 3)
    assert mse.mean == 0.0
    assert (mse.images, math.isnan(mse.low)) == (1, True)
    assert math.isnan(correct.mean)
    assert correct.images == 0


def test_a_mean_over_two_images_has_no_interval() -> None:
    rows = leakage(results([record(0, "april", "a", psnr=10.0), record(0, "april", "b", psnr=20.0)]))
    score = row_of(rows, "paper").scores["psnr"]
    assert (score.mean, score.images) == (15.0, 2)
    assert math.isnan(score.low)
    assert math.isnan(score.high)
    assert math.isnan(row_of(rows, "worst").scores["correct"].mean)


def test_failures_are_counted_and_never_scored() -> None:
    failed = {"status": "failed", "reason": "no"}
    torn = {"image_sha256": "", "image": "torn.png"} | failed
    records = [
        *TWO,
        record(0, "april", "c", psnr=99.0) | failed,
        record(0, "patch-gradient", "c", psnr=7.0),
        *(record(0, attack, "x") | torn for attack in ("april", "patch-gradient")),
        *(record(0, "april", "y") | torn | {"image": "torn too.png"} for _ in range(2)),
    ]
    rows = leakage(results(records))
    assert (row_of(rows, "paper").images, row_of(rows, "paper").failed) == (2, 3)
    assert (row_of(rows, "attack", "patch-gradient").images, row_of(rows, "attack", "patch-gradient").failed) == (3, 1)
    assert (row_of(rows, "worst").images, row_of(rows, "worst").failed) == (3, 3)
    assert row_of(rows, "worst").scores["psnr"].mean == 8.0


def test_an_image_with_one_failed_draw_is_scored_and_counted_as_failed() -> None:
    records = [record(0, "april", "a", psnr=10.0), record(0, "april", "a", 1, status="failed")]
    row = row_of(leakage(results(records)), "paper")
    assert (row.images, row.failed, row.scores["psnr"].mean) == (1, 1, 10.0)


def test_a_case_without_records_has_its_published_figures_and_its_refusals() -> None:
    case = CaseFacts("two", "g", published={"psnr": 19.27, "correct": 78.1}, refused={"april": "no PE", "x": "no"})
    rows = leakage(results(TWO, CaseFacts("one"), case))
    of_case = [row for row in rows if row.case == 1]
    assert [(row.kind, row.attack) for row in of_case] == [
        *(("published", None), ("paper", "april"), ("worst", WORST), ("attack", "april"), ("attack", "x"))
    ]
    assert headline(of_case) == of_case[:3]
    published, paper, worst, attack, other = of_case
    assert published.scores["psnr"] == pytest.approx(Score(19.27), nan_ok=True)
    assert published.scores["correct"].mean == pytest.approx(0.781)  # printed in per cent
    assert math.isnan(published.scores["mse"].mean)
    assert paper.refused == attack.refused == {"april": "no PE"}
    assert worst.refused == case.refused
    assert other.refused == {"x": "no"}
    assert all(math.isnan(score.mean) for row in (paper, worst, attack) for score in row.scores.values())
    assert {(row.images, row.failed, row.group, row.label) for row in of_case} == {(0, 0, "g", "two")}


def test_no_records_at_all() -> None:
    rows = leakage(results([], layout=replace(LAYOUT, paper_attack=None)))
    assert [(row.kind, row.images) for row in rows] == [("worst", 0)]


def test_external_results_stand_apart() -> None:
    records = [
        *TWO,
        record(0, "april", "a", psnr=50.0, external="Lu 2022"),
        record(0, "theirs", "b", psnr=60.0, external="Fu 2021"),
        record(0, "theirs", "", psnr=70.0, external="their Table 2") | {"image": None, "image_sha256": None},
    ]
    rows = leakage(results(records))
    assert row_of(rows, "paper").scores["psnr"].mean == 7.5
    assert row_of(rows, "paper").external is None
    april = [(row.external, row.scores["psnr"].mean) for row in rows if (row.kind, row.attack) == ("attack", "april")]
    assert april == [(None, 7.5), ("Lu 2022", 50.0)]
    theirs = [(r.external, r.images, r.scores["psnr"].mean) for r in rows if r.attack == "theirs"]
    assert theirs == [("Fu 2021", 1, 60.0), ("their Table 2", 0, 70.0)]
    assert row_of(rows, "worst").scores["psnr"].mean == 55.0  # a figure of no known image has no part in it
    assert row_of(rows, "worst").external == "Lu 2022; Fu 2021"  # a figure of no image is in no worst case


def test_the_paper_attack_may_be_external() -> None:
    rows = leakage(results([record(0, "april", "a", psnr=50.0, external="Lu 2022")]))
    assert (row_of(rows, "paper").external, row_of(rows, "paper").scores["psnr"].mean) == ("Lu 2022", 50.0)


def test_records_of_an_older_schema_lack_columns() -> None:
    old = replace(results(TWO), records=results(TWO).records.drop(columns=["external", "correct"]))
    assert math.isnan(row_of(leakage(old), "paper").scores["correct"].mean)
    assert row_of(leakage(old), "paper").scores["psnr"].mean == 7.5


VALUES = {"mse": st.floats(0, 1), "psnr": st.floats(0, 200) | st.just(math.inf), "correct": st.sampled_from([0.0, 1.0])}
RECORDS = st.lists(
    st.builds(
        lambda values, ok, empty, **named: (
            record(**named, **values)
            | ({} if ok else {"status": "failed"})
            | ({"image_sha256": ""} if empty and not ok else {})
        ),
        case=st.integers(0, 1),
        attack=st.sampled_from(["april", "patch-gradient", "theirs", "control:mean"]),
        image=st.sampled_from("abc"),
        draw=st.integers(0, 2),
        ok=st.sampled_from([True, True, True, False]),
        empty=st.booleans(),
        values=st.fixed_dictionaries({name: value | st.just(math.nan) for name, value in VALUES.items()}),
    ),
    max_size=40,
)
CASES = (CaseFacts("one"), CaseFacts("two"))


@pytest.mark.slow
@given(RECORDS)
@settings(max_examples=50)
def test_worst_case_is_at_least_as_leaky_on_every_image(records: list[dict[str, Any]]) -> None:
    table = results(records).scored.images.to_dict("records")
    worst = {(row["case"], row["image"]): row for row in table if row["attack"] == WORST}
    for row in table:
        if row["attack"] == WORST or row["control"]:
            continue
        for name, leaks in (("mse", -1), ("psnr", 1)):
            if not math.isnan(row[name]):
                assert leaks * worst[row["case"], row["image"]][name] >= leaks * row[name]
    reached = results(records).scored.reached.to_dict("records")
    for row in reached:
        assert worst[row["case"], row["image"]][row["metric"]] == row["value"]
        own = [r for r in records if all(r[key] == row[key] for key in ("case", "attack"))]
        assert row["value"] in [r[row["metric"]] for r in own if r["image_sha256"] == row["image"]]


@pytest.mark.slow
@given(RECORDS, st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_a_permutation_of_the_rows_changes_nothing(records: list[dict[str, Any]], random: Any) -> None:
    before = results(records, *CASES)
    order = list(range(len(records)))
    random.shuffle(order)
    after = replace(before, records=before.records.iloc[order])  # with the index as torn
    assert repr(leakage(after)) == repr(leakage(before))
    pd.testing.assert_frame_equal(after.scored.images, before.scored.images, check_exact=True)


@pytest.mark.slow
@given(RECORDS)
@settings(max_examples=30)
def test_failures_and_means_are_those_of_a_plain_loop(records: list[dict[str, Any]]) -> None:
    rows = leakage(results(records, *CASES))
    attacks = {(r["case"], r["attack"]) for r in records}
    assert {(row.case, row.attack) for row in rows if row.kind in ("attack", "control")} == attacks
    for case, attack in attacks:
        kind = "control" if attack.startswith("control:") else "attack"
        row = row_of(rows, kind, attack, case)
        own = [r for r in records if (r["case"], r["attack"]) == (case, attack)]
        assert row.failed == len({r["image_sha256"] or "name:" + r["image"] for r in own if r["status"] == "failed"})
        by_image: dict[str, list[dict[str, Any]]] = {}
        for r in own:
            if r["status"] == "ok":
                by_image.setdefault(r["image"], []).append(r)
        assert row.images == len(by_image)
        for name in LAYOUT.columns:
            values = [[r[name] for r in of if not math.isnan(r[name])] for of in by_image.values()]
            plain = [sum(of) / len(of) for of in values if of]
            mean = sum(plain) / len(plain) if plain else math.nan
            assert row.scores[name].mean == pytest.approx(mean, nan_ok=True)
            assert row.scores[name].images == len(plain)
            if math.isfinite(row.scores[name].low):
                assert row.scores[name].low <= max(plain)
                assert row.scores[name].high >= min(plain)
    for case in (0, 1):
        failed = {
            r["image_sha256"] or "name:" + r["image"]
            for r in records
            if r["case"] == case and r["status"] == "failed" and not r["attack"].startswith("control:")
        }
        assert row_of(rows, "worst", case=case).failed == len(failed)


def test_many_records_have_the_means_of_a_plain_loop() -> None:
    images, attacks, cases = 50, 8, 25
    rng = np.random.default_rng(0)
    case, attack, image = (part.ravel() for part in np.indices((cases, attacks, images)))
    frame = pd.DataFrame({"case": case, "attack": attack.astype(str), "image_sha256": image.astype(str)})
    frame = frame.assign(geometry="in_place", image="i", status="ok", reason=None, seed=0, draw=0, external=None)
    frame = frame.assign(mse=rng.random(len(frame)), psnr=rng.random(len(frame)), correct=math.nan)
    rows = leakage(replace(results([], *(CaseFacts(str(i)) for i in range(cases))), records=frame))
    assert len(rows) == cases * (3 + attacks)
    means = frame.groupby(["case", "attack"]).psnr.mean()
    for row in (row for row in rows if row.kind == "attack"):
        assert row.scores["psnr"].mean == pytest.approx(means[row.case, row.attack])
        assert row.images == images


def conditions(paper: Mapping[str, str], layout: Layout = LAYOUT, **columns: Any) -> list[str]:
    ran = results(TWO, conditions=paper, layout=layout, facts={"images": {"source": "photos"}})
    given = {"weights": "random", "block": "april", "label_origin": "predicted", "victim": "deit_s"} | columns
    return conditions_that_differ(replace(ran, records=ran.records.assign(**given)))


def test_conditions_that_differ() -> None:
    paper = {"images": "1000 of ImageNet", "weights": "trained", "attack": "APRIL", "block": "april", "labels": "true"}
    assert conditions(paper) == [
        "images: paper: 1000 of ImageNet / here: 2 of photos",
        "weights: paper: trained / here: random",
        "labels: paper: true / here: predicted",
    ]


def test_only_conditions_that_are_certainly_met_have_no_line() -> None:
    assert conditions({"images": "2 of photos", "weights": "random", "model": "DeiT_S", "geometry": "in place"}) == []
    assert conditions({"weights": "trained"}, weights="pretrained:deit") == []
    assert conditions({"labels": "ground truth"}, label_origin="folder") == []
    assert conditions({"optimiser": "SGD"}) == ["optimiser: paper: SGD / here: not recorded"]  # cannot be told


def test_block_is_that_of_the_paper_attack() -> None:
    blocks = ["april", "april", "stock", "stock", None, None]
    assert conditions({"block": "april"}, block=blocks) == []
    assert conditions({"block": "stock"}, block=blocks) == ["block: paper: stock / here: april"]


def test_geometry_and_refusal_are_conditions() -> None:
    assert conditions({}, replace(LAYOUT, geometry="oracle")) == ["geometry: paper: in_place / here: oracle"]
    assert conditions({"attack": "APRIL"}, replace(LAYOUT, paper_attack=None)) == [
        "attack: paper: APRIL / here: none is named"
    ]
    refused = results(TWO, CaseFacts("one"), CaseFacts("two", refused={"april": "no PE"}))
    assert conditions_that_differ(refused) == ["attack on two: paper: april / here: refused: no PE"]


def test_images_differ_by_case() -> None:
    ran = results([*TWO, record(1, "april", "a")], *CASES, conditions={"images": "1000"})
    assert conditions_that_differ(ran) == ["images: paper: 1000 / here: 1 to 2"]
    none = results([], conditions={"images": "1000"})
    assert conditions_that_differ(none) == ["images: paper: 1000 / here: 0"]
