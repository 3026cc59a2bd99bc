"""Verdicts with power: each word by a case made for it, and each condition of "holds" by a case that lacks it alone."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from privlab.metrics import METRICS
from privlab.report.tables import CaseVerdict, Facts, scope
from privlab.report.tables.case_verdicts import STATES, WORDS, Evidence, state_of, verdicts_of

NAMES = ["plain", "defended"]
LEVELS = {
    0: {"patch-gradient": 60.0, "mjp-subspace": 60.0, "control:mean": 12.0, "control:other": 8.0},
    1: {"patch-gradient": 10.0, "mjp-subspace": 11.9, "control:mean": 12.0, "control:other": 8.0},
}
IMAGES = [f"{i:02d}" for i in range(24)]
NOISE = np.random.default_rng(0).normal(size=len(IMAGES))
CHANCE = -np.log1p(-(np.arange(len(IMAGES)) + 0.5) / len(IMAGES))
CHANCE -= CHANCE.mean()
"""Gains of mean zero with their long tail above, where the interval is Student's."""


def records(levels: Mapping[int, Mapping[str, float]] = LEVELS, **values: Any) -> pd.DataFrame:
    """Return 24 images for each case and attack: undefended, and under MJP; no attack is ahead under it on average."""
    rows = [
        {
            **{"case": case, "victim_params": "{}", "weights_sha256": "0" * 64, "block": "stock"},
            **{"release": "gradients", "dtype": "float32", "conditions": "{}", "attack_params": "{}"},
            **{"batch": None, "batch_images": None, "setting": "ac"[case], "defense": ("none", "mjp")[case]},
            **{"attack": attack, "geometry": "in_place", "image": image, "image_sha256": image * 8},
            **{"status": "ok", "beyond_range": None, "schema": 5, "external": None},
            **{
                "psnr": level + (0 if attack.startswith("control:") else NOISE[i]),
                "ssim": 0.5,
                "psnr_affine": 14.0,
                "psnr_affine_mirrored": 14.0,
            },
        }
        | values
        for case, attacks in levels.items()
        for attack, level in attacks.items()
        for i, image in enumerate(IMAGES)
    ]
    return pd.DataFrame(rows)


def cells(rows: pd.DataFrame, *metrics: str, **options: Any) -> list[CaseVerdict]:
    return verdicts_of(Facts(rows, NAMES, metrics or ("psnr",), **options))


def word(rows: pd.DataFrame, *metrics: str, **options: Any) -> tuple[str, str]:
    """Return the verdict on the defended case, and why."""
    said = cells(rows, *metrics, **options)[1]
    return said.word, said.why


def of(rows: pd.DataFrame, case: int, attack: str = "mjp-subspace") -> "pd.Series[bool]":
    return (rows.case == case) & (rows.attack == attack)


def change(rows: pd.DataFrame, where: "pd.Series[bool]", **values: object) -> pd.DataFrame:
    """Return the rows with other values where it is said."""
    return rows.assign(**{name: rows[name].astype(object).where(~where, value) for name, value in values.items()})


def test_a_defense_holds_beside_its_positive_control() -> None:
    plain, held = cells(records())
    assert (plain.word, plain.state) == ("leaks", "beyond the control")
    assert str(plain).endswith("; no defense is at work")
    assert plain.measure is not None
    assert plain.measure.ahead == 24
    assert held.word == "holds"
    assert held.measure is not None
    assert held.positive is not None
    assert (held.measure.attack, held.positive.attack) == ("mjp-subspace", "mjp-subspace")
    assert held.positive.mean == pytest.approx(60 + NOISE.mean())
    assert held.positive.control_mean == 12
    gain = held.positive.gain
    assert gain.images == 24
    assert gain.mean == pytest.approx(48 + NOISE.mean())
    assert gain.low < gain.mean < gain.high
    text = str(held)
    assert text.startswith("holds against mjp-subspace (")
    assert (
        "which leaks without the defense (24 of 24 images; 59.89 dB against 12.00 of control:mean, a gain of 47.89 ["
        in text
    )
    assert "secure" not in text


def test_a_defense_is_broken_by_the_attack_that_leaks_most() -> None:
    rows = records(LEVELS | {1: {**LEVELS[1], "mjp-subspace": 20.0, "mjp-full": 25.0}})
    said = cells(rows)[1]
    assert said.word == "broken"
    assert str(said).startswith("broken by mjp-full (24 of 24 images; 2")
    assert " dB against 12.00 of control:mean, a gain of 1" in str(said)
    assert str(said).endswith("])")
    assert word(rows[rows.case == 1].assign(case=1))[0] == "broken"  # it needs no positive control


def test_what_leaks_but_not_beyond_the_interval_breaks_nothing() -> None:
    ahead = 0.1 - NOISE.mean()  # a mean gain of 0.1 dB, where the images differ by a decibel
    rows = records(LEVELS | {1: {**LEVELS[1], "mjp-subspace": 12 + ahead}})
    assert word(rows)[0] == "holds"
    rows = records(LEVELS | {1: {**LEVELS[1], "mjp-subspace": 13.2 + ahead}})
    assert word(rows)[0] == "broken"


def test_the_best_of_many_attacks_is_ahead_by_chance() -> None:
    """One interval of 95 % lies above zero here; that of one among six tries does not."""
    gain = CHANCE + 0.5
    one = records({0: LEVELS[0], 1: {"mjp-subspace": 0.0, "control:mean": 12.0}})
    alone = change(one, of(one, 1)).assign(psnr=one.psnr.where(~of(one, 1), np.tile(12 + gain, len(one))[: len(one)]))
    assert word(alone)[0] == "broken"
    others = {f"other-{i}": 5.0 for i in range(5)}
    many = records({0: LEVELS[0], 1: {"mjp-subspace": 0.0, "control:mean": 12.0, **others}})
    many = many.assign(psnr=many.psnr.where(~of(many, 1), np.tile(12 + gain, len(many))[: len(many)]))
    assert word(many)[0] == "holds"


def test_the_best_of_two_metrics_is_ahead_by_chance_too() -> None:
    """One interval of 95 % lies above zero here; that of one among two tries, the other by structure, does not."""
    rows = records({0: LEVELS[0], 1: {"mjp-subspace": 0.0, "control:mean": 12.0}})
    ahead = np.tile(12.43 + CHANCE, len(rows))[: len(rows)]
    rows = rows.assign(psnr=rows.psnr.where(~of(rows, 1), ahead))
    assert word(rows.drop(columns=["psnr_affine", "psnr_affine_mirrored"]))[0] == "broken"
    assert word(rows)[0] == "holds"


@pytest.mark.slow
def test_one_image_given_back_exactly_breaks_a_defense() -> None:
    rows = records()
    one = rows.assign(psnr=rows.psnr.where(~(of(rows, 1) & (rows.image == "07")), 131.0))
    said = cells(one)[1]
    assert said.word == "broken"
    assert said.measure is not None
    assert said.measure.exact == 1
    assert "images, 1 exactly; " in str(said)
    alone = one[(one.image == "07") & (one.case == 1)]
    assert str(cells(alone)[1]).startswith(
        "leaks by mjp-subspace (1 of 1 image, 1 exactly; 100.00 dB against 12.00 of "
    )
    assert word(rows[(rows.image == "07")])[0] == "no evidence"


@pytest.mark.slow
def test_a_metric_that_leaks_breaks_where_the_first_does_not() -> None:
    rows = records()
    rows = rows.assign(ssim=rows.ssim.where(~of(rows, 1, "patch-gradient"), 0.7 + rows.psnr / 1000))
    assert word(rows, "psnr")[0] == "holds"
    said = cells(rows, "psnr", "ssim")[1]
    assert str(said).startswith("broken by patch-gradient (24 of 24 images; 0.7099 ssim")
    assert " ssim against 0.5000 of control:" in str(said)
    worse = rows.assign(mse=1 - rows.ssim)  # a lower one leaks
    assert word(worse, "psnr", "mse")[0] == "broken"
    assert word(rows.assign(fft2d_mjp=1 - rows.ssim), "psnr", "fft2d_mjp")[0] == "holds"  # it compares means


def test_an_attack_on_noise_is_another_one_where_there_is_none() -> None:
    """It declares which, and that one's options are its own; an attack that declares none has no such control."""
    rows = records(attack_params='{"rtol": 0}').assign(defense=lambda r: r.defense.replace("mjp", "gradient-noise"))
    rows = rows.loc[(rows.attack != "mjp-subspace") & ~of(rows, 1, "patch-gradient")]
    adaptive = rows.loc[of(rows, 0, "patch-gradient")].assign(case=1, defense="gradient-noise", setting="c")
    adaptive = adaptive.assign(attack="patch-gradient-adaptive", attack_params='{"rounds": 6}', psnr=11.9)
    said, why = word(pd.concat([rows, adaptive], ignore_index=True))
    assert said == "holds"
    assert "which leaks, as patch-gradient, without the defense (24 of 24 images; " in why
    other = adaptive.assign(attack="gradient-likelihood")
    assert "no positive control" in word(pd.concat([rows, other], ignore_index=True))[1]


def test_structure_whose_scale_is_lost_breaks_a_defense() -> None:
    """PSNR is a control's; after gain and offset the attack is ahead, and the verdict says by what."""
    rows = records()
    seen = change(rows, of(rows, 1), psnr_affine=15.0)
    assert word(rows)[0] == "holds"
    said, why = word(seen)
    assert said == "broken"
    assert "mjp-subspace (24 of 24 images; " in why
    assert "dB of psnr_affine against 14.00 of " in why
    mirrored = change(seen, of(seen, 1), psnr_affine_mirrored=15.0)  # what is in any smooth picture
    assert word(mirrored)[0] == "holds"


@pytest.mark.slow
@pytest.mark.parametrize("lost", [{"psnr_affine_mirrored": math.nan}, {"psnr_affine_mirrored": None}])
def test_nothing_holds_where_structure_was_not_measured(lost: dict[str, object]) -> None:
    rows = records()
    said, why = word(change(rows, of(rows, 1), **lost))
    assert said == "no evidence"
    named = "structure without its scale (psnr_affine, correlation, gms_affine)"
    assert why == f": {named} was not compared with the mirrored image"
    assert word(rows.drop(columns=[*lost])) == (said, why)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"weights_sha256": "1" * 64},
        {"victim_params": '{"input": [3, 64, 64]}'},
        {"block": "april"},
        {"release": "features"},
        {"dtype": "bfloat16"},
        {"conditions": '{"labels": "predicted"}'},
        {"attack_params": '{"steps": 20}'},
        {"batch_images": 4},
        {"batch": "another"},
        {"image_sha256": "another"},
        {"external": "Doe et al. 2025"},
        {"status": "failed"},
    ],
)
def test_a_control_under_other_conditions_does_not_count(changed: dict[str, object]) -> None:
    rows = records()
    said, why = word(change(rows, of(rows, 0), **changed))
    assert said == "no evidence"
    assert why.startswith(": no positive control; ")
    assert "--setting a,c" in why


def test_a_control_must_be_of_every_image() -> None:
    rows = records()
    assert word(rows[~of(rows, 0) | (rows.image != "05")])[1].startswith(": no positive control; ")
    more = rows[~of(rows, 1) | (rows.image != "05")]  # of more images than the case: these do not count
    said = cells(more)[1]
    assert said.word == "holds"
    assert said.positive is not None
    assert said.positive.gain.images == 23
    lost = change(rows, of(rows, 0) & (rows.image == "05"), status="failed", psnr=math.nan)
    assert word(lost)[1].startswith(": no positive control; ")


def test_another_defended_case_is_no_control() -> None:
    rows = records()
    assert word(rows.assign(defense="mjp"))[1].startswith(": no positive control; ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"attack": "patch-gradient-prior"}, "no attack that was scored knows the defense"),
        ({"schema": 3}, "no record says whether an attack was in its range"),
        (
            {"beyond_range": "N = 9 ≥ D = 9"},
            "every attack that knows the defense is outside its stated range (mjp-subs",
        ),
    ],
)
def test_what_a_defense_may_not_hold_against(changed: dict[str, object], reason: str) -> None:
    rows = records()
    said, why = word(change(rows, of(rows, 1), **changed))
    assert (said, why[2 : 2 + len(reason)]) == ("no evidence", reason)


def test_an_attack_that_failed_on_an_image_is_none_to_hold_against() -> None:
    rows = records()
    lost = change(rows, of(rows, 1) & (rows.image == "03"), status="failed", psnr=math.nan)
    assert word(lost) == ("no evidence", ": attacks that know the defense failed")


def test_an_attack_outside_its_range_on_an_image_is_none_to_hold_against() -> None:
    rows = records()
    why = word(change(rows, of(rows, 1) & (rows.image == "03"), beyond_range="N = 9 ≥ D = 9"))[1]
    assert why.startswith(": every attack that knows the defense is outside its stated range (mjp-subspace: N = 9 ")


def test_fewer_than_twenty_images_are_no_evidence() -> None:
    rows = records()
    assert word(rows[rows.image < "20"])[0] == "holds"
    said, why = word(rows[rows.image < "19"])
    assert said == "no evidence"
    assert why.startswith(": 19 images; 20 are needed; the best is ")
    seen = records(LEVELS | {1: {**LEVELS[1], "mjp-subspace": 38.6 - NOISE[0]}})
    assert word(seen[seen.image < "20"])[0] == "broken"
    for few in (1, 2, 19):
        said, why = word(seen[seen.image < f"{few:02d}"])
        assert said == "no evidence"
        assert why.startswith(
            f": {few} image{'s' * (few > 1)}; 20 are needed; the best is mjp-subspace ({few} of {few} "
        )
    assert word(seen[seen.image < "01"])[1].endswith("38.60 dB against 12.00 of control:mean, a gain of 26.60)")


def test_a_positive_control_that_does_not_leak_is_none() -> None:
    rows = records({0: {**LEVELS[0], "mjp-subspace": 11.0}, 1: LEVELS[1]})
    said, why = word(rows)
    assert said == "no evidence"
    assert why.startswith(": the positive control does not leak (")


def test_what_leaks_as_little_undefended_leaves_it_open() -> None:
    """Undefended, the attack is ahead by 1.2 dB, and the interval under the defense leaves as much open."""
    shift = -NOISE.mean()
    rows = records({0: {**LEVELS[0], "mjp-subspace": 13.2 + shift}, 1: {**LEVELS[1], "mjp-subspace": 12.2 + shift}})
    said, why = word(rows)
    assert said == "no evidence"
    assert why.startswith(": what may leak is no less than what leaks undefended (")


def test_cases_without_scores_or_controls() -> None:
    rows = records()
    assert word(rows[rows.case == 0]) == ("no evidence", ": no attack was run")
    assert word(rows[rows.attack.str.startswith("control:")]) == ("no evidence", ": no attack was run")
    lost = change(
        rows.assign(reason=None),
        ~rows.attack.str.startswith("control:"),
        status="failed",
        psnr=math.nan,
        reason="it burned.",
    )
    assert word(lost) == ("no evidence", ": no attack was scored; it burned")
    nothing = rows.assign(psnr=math.nan, psnr_affine=math.nan)
    assert word(nothing) == ("no evidence", ": no attack has a score that is a number")
    assert word(rows[~rows.attack.str.startswith("control:")]) == ("no evidence", ": no negative control was scored")
    assert word(rows.assign(correct=1.0), "correct")[1].endswith("no metric of leakage of privlab's own was measured")
    plain = cells(records({0: {**LEVELS[0], "mjp-subspace": 9.0, "patch-gradient": 9.0}, 1: LEVELS[1]}))[0]
    assert str(plain).startswith("no evidence: no defense is at work, and no attack is seen to leak; the best is ")


@pytest.mark.parametrize(
    ("state", "word", "changed"),
    [
        ("not run", "no evidence", {"tried": 0, "scored": 0, "images": 0, "measured": False}),
        ("failed", "no evidence", {"scored": 0, "images": 0, "measured": False}),
        ("not a number", "no evidence", {"images": 0, "measured": False}),
        ("exact", "broken", {"exact": 1, "measured": False}),
        ("exact", "leaks", {"exact": 1, "images": 1}),
        ("exact", "leaks", {"exact": 1, "defended": False}),
        ("exact", "leaks", {"exact": 1, "images": 1, "defended": False, "measured": False}),
        ("certified", "broken", {"certified": 1, "gap": "no positive control"}),
        ("certified", "leaks", {"certified": 2, "images": 2, "defended": False}),
        ("few images", "no evidence", {"images": 19, "beyond": True, "plugin": True}),
        ("few images", "no evidence", {"images": 1, "measured": False}),
        ("beyond the control", "broken", {"beyond": True}),
        ("beyond the control", "leaks", {"beyond": True, "defended": False}),
        ("by a plug-in metric alone", "no evidence", {"plugin": True}),
        ("by a plug-in metric alone", "no evidence", {"plugin": True, "defended": False, "measured": False}),
        ("no control", "no evidence", {"measured": False}),
        ("nothing defended", "no evidence", {"defended": False}),
        ("not shown to hold", "no evidence", {"gap": "no positive control"}),
        ("holds", "holds", {}),
    ],
)
def test_a_word_follows_from_the_state_of_a_case(state: str, word: str, changed: dict[str, Any]) -> None:
    assert state_of(Evidence(**changed)) == (state, word)
    assert state in [name for name, *_ in STATES]
    assert word in WORDS


def test_an_exact_image_leaks_without_a_control() -> None:
    one = records().loc[lambda r: of(r, 1) & (r.image == "07")].assign(psnr=131.0)
    assert str(cells(one)[1]) == "leaks by mjp-subspace (1 of 1 image exactly)"
    assert str(cells(one.assign(case=0, defense="none"))[0]).startswith("leaks by mjp-subspace (1 of 1 image exactly)")
    assert cells(one.assign(psnr=math.inf))[1].word == "leaks"


def test_an_image_of_one_colour_that_a_control_equals_shows_no_leak() -> None:
    """Both are exact by infinitely many decibels, or one of them by rounding."""
    for exact in (math.inf, 131.0):
        rows = records({0: LEVELS[0], 1: {"mjp-subspace": 0.0, "control:flat": 0.0}}).query("case == 1")
        rows = rows.assign(psnr=math.inf, psnr_affine=math.inf, psnr_affine_mirrored=math.inf)
        rows = rows.assign(psnr=rows.psnr.where(rows.attack != "mjp-subspace", exact))
        said, why = word(rows[rows.image == "07"])
        assert said == "no evidence"
        assert why.startswith(
            ": 1 image; 20 are needed; the best is mjp-subspace (0 of 1 image; 100.00 dB against 100.00 "
        )
        assert why.endswith("; a control is exact too on 1 image, as where there is one colour")
        assert word(rows)[0] == "no evidence"


def test_a_certificate_shows_a_leak_of_one_image() -> None:
    rows = records()
    proven = rows.assign(explained=np.where(of(rows, 1), 0.9999, math.nan))
    one = proven[proven.image == "07"]
    assert str(cells(one)[1]).startswith("leaks by mjp-subspace (1 of 1 image certified: ")
    assert word(proven)[0] == "broken"
    assert word(one.assign(explained=one.explained - 0.01))[0] == "no evidence"
    assert word(change(one, of(one, 1), status="failed"))[0] == "no evidence"


def test_a_metric_of_another_package_shows_no_leak_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = records()
    rows = rows.assign(ssim=rows.ssim.where(~of(rows, 1), 0.9))
    assert word(rows, "psnr", "ssim")[0] == "broken"
    monkeypatch.setitem(METRICS.added, "ssim", METRICS["ssim"])
    said, why = word(rows, "psnr", "ssim")
    assert said == "no evidence"
    assert why.startswith(
        ": only a metric of another package shows a leak, by mjp-subspace (24 of 24 images; 0.9000 ssim"
    )
    assert word(records(), "psnr", "ssim")[0] == "holds"


def test_figures_and_verdict_do_not_contradict_each_other() -> None:
    """The interval that is printed is above zero where the word says so, and nowhere else."""
    rows = records()
    for level in (11.0, 12.5, 13.0, 13.2, 13.4, 14.0, 20.0):
        said = cells(change(rows, of(rows, 1), psnr=0.0).assign(psnr=rows.psnr.where(~of(rows, 1), level + CHANCE[0])))[
            1
        ]
        assert said.measure is not None
        assert (said.word == "broken") == (said.measure.gain.low > 0)


def test_a_reassembled_picture_is_held_against_the_plain_one() -> None:
    """The jigsaw is undone by the geometry; nothing is re-assembled where nothing was shuffled."""
    rows = records().assign(defense=lambda r: r.defense.replace("mjp", "jigsaw"))
    assert word(rows)[1] == ": no attack that was scored knows the defense"
    rows = rows.assign(geometry=rows.geometry.where((rows.case == 0) | rows.attack.str.startswith("c"), "reassembled"))
    assert word(rows, geometry="reassembled")[0] == "holds"


def test_a_verdict_names_the_geometry_that_breaks_a_defense() -> None:
    rows = records(LEVELS | {1: {**LEVELS[1], "mjp-subspace": 25.0}})
    rows = rows.assign(geometry=rows.geometry.where(rows.attack != "mjp-subspace", "reassembled"))
    assert str(cells(rows)[1]).startswith("broken by mjp-subspace (reassembled) (24 of 24 images; 2")


def test_setting_b_says_of_what() -> None:
    rows = records(LEVELS | {1: {**LEVELS[1], "mjp-subspace": 20.0}})
    assert str(cells(change(rows, rows.case == 1, setting="b"))[1]).endswith("] of the shuffled image)")


def test_the_order_of_the_records_does_not_matter() -> None:
    rows = records()
    assert cells(rows.sample(frac=1, random_state=1)) == cells(rows)


def test_the_threat_model_is_named() -> None:
    said = scope(records())
    assert "honest-but-curious server that knows the weights, sees the gradients of one release of each image" in said
    assert "Outside it: a server that changes the weights, several rounds of one image" in said
    assert "sees the features of one release of each image, owns public images" in scope(records(release="features"))
