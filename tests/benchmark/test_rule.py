"""The rule: worst case by photograph over every attack that entered, ranks, reasons, and the page."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privlab.benchmark.cards import instances, parse_card
from privlab.benchmark.measure import KEPT
from privlab.benchmark.page import (
    _LINE,
    _TOP,
    SCHEMA_VERSION,
    _spread,
    evaluation_record,
    fragment,
    site_files,
    write_site,
)
from privlab.benchmark.results import FORMAT, Result, entries, to_rows, write_result
from privlab.benchmark.rule import HIDDEN, conclude, judge, leakiest_of, standings, worst_of
from privlab.benchmark.tracks import photographs, track
from privlab.defenses import GradientNoise
from privlab.metrics import MIRRORED

OF = track("gradients")
IMAGES = [*photographs("bundled"), *photographs("public")]
CARD = """
track = "gradients"
version = "privlab/1"
kind = "{kind}"
name = "{name}"
uses = "gradient-pruning"
paper = "a paper"
secret_bits = 0
epsilon = "none"
[parameters]
keep = 0.1
[utility]
measure = "top-1"
how = "not measured"
[reported]
claim = "it holds"
"""


def rows(attack: str, scores: Sequence[float], setting: str = "c", draw: int = 0, **more: Any) -> pd.DataFrame:
    """Return the records of an attack on the first photographs."""
    common = {
        "case": "one step" if setting == "c" else "one step, undefended",
        "victim": "cifar_vit",
        "weights": "pretrained:x",
        "release": "gradients",
        "defense": "gradient-pruning" if setting == "c" else "none",
        "setting": setting,
        "attack": attack,
        "attack_params": "{}",
        "effort": "standard",
        "geometry": "in_place",
        "status": "ok",
        "draw": draw,
        "seed": 0,
        "schema": 8,
    } | more
    found = pd.DataFrame([common | {"image": sha, "image_sha256": sha} for sha in IMAGES[: len(scores)]])
    return found.assign(psnr=scores).reindex(columns=[*KEPT, "psnr"])


def records(known: Sequence[float], plain: Sequence[float], control: float = 10.0) -> pd.DataFrame:
    n = len(known)
    parts = [rows("patch-gradient-adaptive", known), rows("april", plain), rows("control:mean", [control] * n)]
    parts += [rows("patch-gradient", [90.0] * n, "a"), rows("control:mean", [control] * n, "a")]
    return pd.concat(parts, ignore_index=True)


def result(folder: Path, name: str, found: pd.DataFrame, utility: float = 0.5, **more: Any) -> Result:
    kind = more.pop("kind", "defense")
    data = {
        "format": FORMAT,
        "track": {"name": OF.name, "version": OF.version, "sha256": OF.sha256},
        "created": 0,
        "card": CARD.format(kind=kind, name=name),
        "plugin": None,
        "versions": {"privlab": "0"},
        "photographs": ["bundled", "public"],
        "admission": [],
        "judged": judge(found, OF),
        "utility": utility,
        "draws": 1,
        "rows": to_rows(found),
    } | more
    return write_result(data, folder / f"{name}.json")


def entered(folder: Path, theirs: pd.DataFrame, *, knows: bool = True, **more: Any) -> Result:
    """Return the result of an attack that is not installed here, on the entry "one"."""
    judged = {"one": judge(theirs, OF) | {"knows": knows}}
    own = {"kind": "attack", "judged": judged, "rows": to_rows(theirs.assign(entry="one")), "plugin": "the source"}
    return result(folder, "attack", theirs, **own, **more)


def test_a_weaker_entry_of_an_attack_lowers_no_score(tmp_path: Path) -> None:
    """Neither does it count as a larger budget that leaks less, whatever options its rows state."""
    high = [30.0] * len(IMAGES)
    own = result(tmp_path, "one", records(high, [12.0] * len(IMAGES)))
    (before,) = standings([own])
    weak = records([20.0] * len(IMAGES), [12.0] * len(IMAGES)).assign(attack_params='{"rounds": 99}')
    for theirs in (weak, weak.assign(attack_params=None), weak.assign(attack_params="{}"), weak.head(20)):
        (after,) = standings([own, entered(tmp_path, theirs)])
        found = after.score, after.rank, after.verdict
        assert found == (before.score, before.rank, before.verdict) == (30.0, 1, "broken")
    strong = weak.assign(psnr=weak.psnr.mask(weak.psnr == 20.0, 35.0))
    (after,) = standings([own, entered(tmp_path, strong)])
    assert (after.score, after.best_attack) == (35.0, "patch-gradient-adaptive")


@pytest.fixture
def high() -> np.ndarray:
    return np.linspace(20, 30, len(IMAGES))


def test_the_score_is_the_mean_of_the_leakiest_attack_of_each_photograph(high: np.ndarray) -> None:
    found = judge(records(high.tolist(), high[::-1].tolist()), OF)
    assert worst_of(found)["mean"] == pytest.approx(np.maximum(high, high[::-1]).mean())
    assert (found["verdict"], found["known_by"], found["images"]) == ("broken", ["patch-gradient-adaptive"], 64)
    assert set(found["by"].values()) == {32}
    order = np.maximum(high, high[::-1])[:14]
    assert found["worst_image"] == IMAGES[int(order.argmax())]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_photograph_that_is_given_back_exactly_counts_as_100_db(high: np.ndarray) -> None:
    found = judge(records([np.inf, *high[1:].tolist()], [5.0] * 64), OF)
    assert worst_of(found)["mean"] == pytest.approx((100 + high[1:].sum()) / 64)


def test_of_several_draws_the_worst_counts(high: np.ndarray) -> None:
    once = records(high.tolist(), [5.0] * 64)
    more = rows("patch-gradient-adaptive", (high + 2).tolist(), draw=1)
    assert worst_of(judge(pd.concat([once, more]), OF))["mean"] == pytest.approx((high + 2).mean())


def test_the_leakiest_case_is_the_first_of_those_that_differ_by_rounding() -> None:
    def leakiest(**means: float | None) -> str:
        return leakiest_of(
            {n: {"mean": each, "low": None, "high": None, "images": 64} for n, each in means.items()}, OF
        )

    assert leakiest(first=32.44, second=32.48) == leakiest(first=32.46, second=32.44) == "first"
    assert leakiest(first=32.3, second=32.48, third=32.5) == leakiest(first=None, second=5.0) == "second"
    assert leakiest(first=None) == leakiest() == ""


def test_the_score_is_that_of_one_attack_in_the_mean_over_draws(tmp_path: Path, high: np.ndarray) -> None:
    """Each of the two attacks is the best one of half of the photographs; one has a lucky draw of every photograph."""
    lucky = rows("patch-gradient-adaptive", (high + 4).tolist(), draw=1)
    own = result(tmp_path, "one", pd.concat([records(high.tolist(), (high[::-1] + 1).tolist()), lucky]), draws=2)
    (row,) = standings([own])
    assert (row.best_attack, row.score) == ("patch-gradient-adaptive", pytest.approx(high.mean() + 2))
    assert row.worst_case == pytest.approx(np.maximum(high + 4, high[::-1] + 1).mean())
    low, upper = (float(end) for end in row.score_interval if end is not None)
    assert low < row.score < upper
    assert f">{row.score:.2f}</b>" in fragment([row])


def test_ranks_follow_the_best_single_attack_and_not_the_worst_case(tmp_path: Path, high: np.ndarray) -> None:
    """The worst case of the first is 28 dB, by draws of 28 and 12 dB; that of the second is 21, as is every draw."""
    luck = pd.concat([records([28.0] * 64, [5.0] * 64), rows("patch-gradient-adaptive", [12.0] * 64, draw=1)])
    given = result(tmp_path, "luck", luck, draws=2), result(tmp_path, "steady", records([21.0] * 64, [5.0] * 64))
    found = {row.name: (row.rank, row.score, row.worst_case) for row in standings(given)}
    assert found == {"luck": (1, 20.0, 28.0), "steady": (2, 21.0, 21.0)}


def test_an_attack_on_a_few_photographs_is_no_score(tmp_path: Path, high: np.ndarray) -> None:
    own = result(tmp_path, "one", records(high.tolist(), [5.0] * 64))
    (row,) = standings([own, entered(tmp_path, rows("their-attack", [60.0] * 14))])
    assert (row.best_attack, row.score) == ("patch-gradient-adaptive", pytest.approx(high.mean()))
    assert row.worst_case == pytest.approx(np.where(np.arange(64) < 14, 60.0, high).mean(), abs=1e-3)


def test_a_new_attack_scores_a_defense_anew(tmp_path: Path, high: np.ndarray) -> None:
    own = result(tmp_path, "one", records([11.0] * 64, [5.0] * 64))
    attack = entered(tmp_path, rows("their-attack", high.tolist(), external="theirs"))
    before, after = standings([own])[0], standings([own, attack])[0]
    assert (before.worst_case, before.external) == (11.0, None)
    assert after.worst_case == pytest.approx(high.mean(), abs=1e-3)
    assert (after.ours, after.external_by, after.external_photographs) == (11.0, ("attack",), 64)
    assert after.best_known_by == "their-attack"
    assert standings([own])[0].best_known_by == "patch-gradient-adaptive"
    assert after.external == pytest.approx(high.mean(), abs=1e-3)
    assert set(after.known_by) == {"their-attack", "patch-gradient-adaptive"}
    assert after.unreliable == ()


@pytest.mark.parametrize(("theirs", "weaker"), [(-1.0, True), (1.0, False)])
def test_flags_are_those_of_the_rows_of_all_attacks(
    tmp_path: Path, high: np.ndarray, theirs: float, *, weaker: bool
) -> None:
    """An attack that knows the defense takes away that none does, and not that it is weaker than one that does not."""
    alone = pd.concat([rows("april", high.tolist()), rows("control:mean", [10.0] * 64)])
    own = result(tmp_path, "one", alone)
    attack = entered(tmp_path, rows("their-attack", (high + theirs).tolist()))
    before, after = standings([own])[0], standings([own, attack])[0]
    assert [reason.partition(":")[0] for reason in before.unreliable] == ["No adaptive attack"]
    said = ("Adaptive attack weaker: one step: their-attack 24.00 dB leaks less than april 25.00 dB",)
    assert (after.unreliable, after.rank) == ((said, None) if weaker else ((), 1))
    assert after.known_by == ("their-attack",)


def test_hidden_photographs_are_none_of_those_that_are_listed(tmp_path: Path, high: np.ndarray) -> None:
    """An attack that was run on the hidden half in place of listed photographs does not cover the track."""
    own = result(tmp_path, "one", pd.concat([rows("april", [5.0] * 64), rows("control:mean", [10.0] * 64)]))
    hidden = dict(zip(IMAGES[14:], photographs("hidden"), strict=False))
    theirs = rows("their-attack", high.tolist())
    elsewhere = theirs.assign(image_sha256=theirs.image_sha256.replace(hidden))
    reasons = standings([own, entered(tmp_path, elsewhere)])[0].unreliable
    assert reasons[-1] == "few photographs: 14 of 64 by an attack that knows the defense"
    assert standings([own, entered(tmp_path, theirs)])[0].unreliable == ()


def test_an_attack_whose_class_is_not_here_may_show_that_a_defense_holds(tmp_path: Path) -> None:
    mirrored = dict.fromkeys(MIRRORED.values(), 0.0)
    control = [rows("control:mean", [12.0 + i % 3 for i in range(64)], setting) for setting in "ac"]
    own = pd.concat([rows("april", [5.0] * 64), *control]).assign(**mirrored)
    theirs = [rows("their-attack", [dB] * 64, setting) for dB, setting in ((11.0, "c"), (60.0, "a"))]
    given = result(tmp_path, "one", own), entered(tmp_path, pd.concat(theirs).assign(**mirrored))
    (row,) = standings(given)
    assert (row.verdict, row.known_by, row.rank) == ("holds", ("their-attack",), 1)


@pytest.mark.slow
def test_an_adversary_with_more_images_has_controls_of_its_own(tmp_path: Path) -> None:
    """What it makes of them without a release is 13 dB; the mean with another adversary's control would be 12.5."""
    mirrored = dict.fromkeys(MIRRORED.values(), 0.0)
    own = [rows("control:mean", [12.0 + i % 3 for i in range(64)], setting) for setting in "ac"]
    own = pd.concat([rows("april", [5.0] * 64), *own]).assign(**mirrored)
    learned = [
        rows("their-attack", [dB + i % 3 for i in range(64)], setting) for dB, setting in ((12.8, "c"), (60.0, "a"))
    ]
    means = [rows("control:mean", [13.0 + i % 3 for i in range(64)], setting) for setting in "ac"]
    theirs = pd.concat([*learned, *means]).assign(**mirrored)
    given = [entered(tmp_path, theirs, public_sha256=sha) for sha in ("of its own", None)]
    ((of_its_own,), (of_all,)) = (standings([result(tmp_path, "one", own), each]) for each in given)
    assert (of_its_own.verdict, of_all.verdict) == ("holds", "broken")
    assert "control:mean of attack" in of_its_own.why


@pytest.mark.slow
def test_who_knows_a_defense_whose_class_is_not_here_its_file_says(tmp_path: Path, high: np.ndarray) -> None:
    found = pd.concat([records(high.tolist(), [5.0] * 64), rows("april", [5.0] * 64, draw=1)])
    found = found.replace("gradient-pruning", "their-defense").assign(defense_params="{}")
    judged = judge(found, OF, frozenset({"patch-gradient-adaptive"}))
    card = CARD.format(kind="defense", name="one").replace("gradient-pruning", "their-defense")
    own = result(tmp_path, "one", found, card=card, judged=judged, plugin="the source")
    theirs = rows("their-attack", [9.0] * 64, defense="their-defense", defense_params="{}")
    ignorant = entered(tmp_path, theirs, knows=False)
    (row,) = standings([own, ignorant])
    assert (row.known_by, row.unreliable, row.rank) == (("patch-gradient-adaptive",), (), 1)


@pytest.mark.parametrize("stem", ["features-gaussian-noise", "features-noise-rows"])
def test_an_attack_that_searches_whatever_the_noise_does_not_know_it(stem: str) -> None:
    (own,) = (each for each in entries() if each.path.stem == stem)
    found = conclude(own.card, own.rows)
    assert "class-token-key" in {*own.rows.attack}
    assert "class-token-key" not in found["known_by"]
    assert own.data["judged"]["known_by"] == found["known_by"]
    assert {"column-statistics", "pe-assignment"} <= {*found["known_by"]}


@pytest.mark.slow
def test_cutmix_has_a_rank_by_the_attack_that_leaks_more_than_those_that_ignore_it() -> None:
    stems = ["features-cutmix", "features-inversion-mae", "features-cutmix-completion"]
    own = [each for each in entries() if each.path.stem in stems]
    (whole,) = standings(own)
    assert (whole.rank, whole.unreliable) == (1, ())
    assert whole.why.startswith("broken by cutmix-completion")
    (row,) = standings(each for each in own if each.path.stem in stems[:2])
    assert row.rank is None
    assert [reason.partition(", ")[0] for reason in row.unreliable] == [
        "Adaptive attack weaker: embedding: inversion-mae 15.01 dB leaks less than row-alignment 16.22 dB; two blocks: "
        "inversion-mae 14.58 dB leaks less than depth-optimisation 15.09 dB"
    ]


def test_censor_has_a_rank_by_the_decoder_that_is_trained_on_its_releases() -> None:
    """Without a defense the decoder's counterpart runs, which is its positive control, and knows no defense."""
    own = [each for each in entries() if each.path.stem in {"gradients-censor", "gradients-learning-to-invert"}]
    (row,) = standings(own)
    assert (row.rank, row.known_by, row.unreliable) == (1, ("learning-to-invert",), ())
    assert row.verdict == "holds"
    assert "which leaks, as patch-gradient, without the defense" in row.why
    (alone,) = standings([each for each in own if each.card.kind == "defense"])
    assert (alone.rank, alone.verdict) == (None, "no evidence")


def test_lengths_of_all_gradients_break_censor_barely() -> None:
    stems = {"gradients-censor", "gradients-learning-to-invert", "gradients-norm-regression"}
    (row,) = standings([each for each in entries() if each.path.stem in stems])
    assert (row.rank, row.best_attack, row.verdict) == (1, "norm-regression", "broken")
    assert row.score == pytest.approx(13.23, abs=0.01)
    assert row.unreliable == ()


def test_ranks_go_to_those_that_leak_least_and_have_no_reason_against_them(tmp_path: Path, high: np.ndarray) -> None:
    low = result(tmp_path, "low", records((high - 5).tolist(), [5.0] * 64), utility=0.9)
    same = result(tmp_path, "same", records((high - 5).tolist(), [5.0] * 64), utility=0.2)
    leaky = result(tmp_path, "leaky", records(high.tolist(), [5.0] * 64), utility=0.9)
    few = result(tmp_path, "few", records(high.tolist()[:14], [5.0] * 14))
    alone = result(tmp_path, "alone", records(high.tolist(), high.tolist()).replace("patch-gradient-adaptive", "april"))
    found = {row.name: row for row in standings([few, leaky, alone, same, low])}
    assert {name: row.rank for name, row in found.items()} == {
        "low": 1, "same": 1, "leaky": 3, "few": None, "alone": None,
    }  # fmt: skip
    assert found["few"].unreliable[-1] == "few photographs: 14 of 64"
    assert any(reason.startswith("No adaptive attack") for reason in found["alone"].unreliable)
    assert {name for name, row in found.items() if row.dominated} == {
        "same",
        "leaky",
        "alone",
    }  # not by more photographs


@pytest.mark.parametrize(("elsewhere", "rank"), [(15.0, 1), (40.0, None)])
def test_an_attack_must_know_the_defense_in_the_case_that_leaks_most(
    tmp_path: Path, high: np.ndarray, elsewhere: float, rank: int | None
) -> None:
    deep = records([0.0] * 64, [elsewhere] * 64).query("attack != 'patch-gradient-adaptive'")
    deep = deep.assign(case=deep.case.str.replace("one step", "two blocks"))
    (row,) = standings([result(tmp_path, "one", pd.concat([records(high.tolist(), [5.0] * 64), deep]))])
    assert (row.rank, row.known_by) == (rank, ("patch-gradient-adaptive",) if rank else ())
    assert any(flag.startswith("No adaptive attack in another case") for flag in row.judged["flags"]) == (rank == 1)
    assert any(reason.startswith("No adaptive attack") for reason in row.unreliable) == (rank is None)


def test_an_attack_that_failed_on_every_photograph_knows_nothing(high: np.ndarray) -> None:
    found = records([np.nan] * 64, high.tolist())
    found.loc[found.attack == "patch-gradient-adaptive", "status"] = "failed"
    judged = judge(found, OF)
    assert judged["known_by"] == []
    assert any(flag.startswith("No adaptive attack:") for flag in judged["flags"])


@pytest.mark.slow
def test_the_commands_of_a_row_are_those_that_made_it(tmp_path: Path, high: np.ndarray) -> None:
    found = records(high.tolist(), [5.0] * 64)
    found = found.loc[found.image_sha256.isin([*photographs("bundled")])]
    own = result(tmp_path, "one", found)
    attack = entered(tmp_path, rows("their-attack", high.tolist(), external="theirs"))
    page = site_files([own, attack])["table.html"]
    folder = "privlab benchmark submit experiments/benchmark/cards"
    assert f"{folder}/one.toml\n" in page
    assert f"{folder}/attack.toml --images FOLDER\n" in page
    foreign = result(tmp_path, "one", found.assign(weights="file:x"))
    page = site_files([foreign])["table.html"]
    assert f"{folder}/one.toml --weights FILE\n" in page
    assert "verify experiments/benchmark/results/one.json --weights FILE\n" in page
    page = site_files([replace(own, path=tmp_path / "one; two.json")])["table.html"]
    assert "verify &#39;experiments/benchmark/results/one; two.json&#39;\n" in page


@pytest.mark.slow
def test_the_page_counts_different_defenses_and_those_that_an_attack_knows(tmp_path: Path, high: np.ndarray) -> None:
    known = records(high.tolist(), [5.0] * 64)
    own = result(tmp_path, "known", known)
    again = result(tmp_path, "again", known[known.image.isin(IMAGES[:14])])
    other = CARD.format(kind="defense", name="other").replace("gradient-pruning", "gradient-sign")
    other = other.replace("keep = 0.1", "")
    alone = result(tmp_path, "other", known.replace("patch-gradient-adaptive", "april"), card=other)
    page = site_files([own, again, alone])["table.html"]
    assert "2 different defenses have a measured result here, in 3 entries." in page
    assert "An attack that knows the defense was run on 1 of them" in page
    assert "(not on gradient-sign)" in page
    assert "Entries measured on all photographs of their track: 2; with a rank: 1." in page


def test_a_failed_check_of_admission_is_a_reason(tmp_path: Path, high: np.ndarray) -> None:
    check = {"name": "variance", "passed": False, "text": "measured over declared"}
    (row,) = standings([result(tmp_path, "one", records(high.tolist(), [5.0] * 64), admission=[check])])
    assert (row.rank, row.unreliable) == (None, ("admission: variance, measured over declared",))


@pytest.mark.slow
def test_an_entry_that_leaks_more_on_the_hidden_half_has_a_reason_against_it(tmp_path: Path, high: np.ndarray) -> None:
    hidden = [*photographs("hidden")]

    def found(listed: float, unlisted: float) -> pd.DataFrame:
        """Return the records of all photographs, with another level of leakage on those that are hidden."""
        scores = [*(high[: len(IMAGES)] + listed), *(high[: len(hidden)] + unlisted)]
        images = [*IMAGES, *hidden]
        kinds = [("patch-gradient-adaptive", "c", scores), ("control:mean", "c", [5.0] * len(images))]
        kinds += [("patch-gradient", "a", [90.0] * len(images)), ("control:mean", "a", [5.0] * len(images))]
        parts = [
            pd.concat([rows(attack, [0.0], setting)] * len(images), ignore_index=True).assign(
                image=images, image_sha256=images, psnr=scores_of
            )
            for attack, setting, scores_of in kinds
        ]
        return pd.concat(parts, ignore_index=True)

    (alike,) = standings([result(tmp_path, "alike", found(0, 0))])
    (less,) = standings([result(tmp_path, "less", found(10, 0))])
    (more,) = standings([result(tmp_path, "more", found(0, 10))])
    (without,) = standings([result(tmp_path, "without", records(high, high - 1))])
    assert not any(HIDDEN in reason for row in (alike, less, without) for reason in row.unreliable)
    assert alike.rank == 1
    assert more.rank is None
    (reason,) = more.unreliable
    assert reason.startswith(f"{HIDDEN}: {high[:50].mean() + 10:.1f} [")
    assert more.listed_half == pytest.approx(high.mean(), abs=1e-3)
    assert more.hidden_half == pytest.approx(high[:50].mean() + 10, abs=1e-3)
    assert more.worst_case == pytest.approx(high.mean(), abs=1e-3)  # the hidden half is no part of the score
    assert more.photographs == len(IMAGES)
    assert without.listed_half is None
    assert without.hidden_half is None


@given(st.lists(st.floats(30, 270), max_size=17), st.floats(0, 100))
def test_names_of_a_trade_off_do_not_cover_each_other(wanted: list[float], more: float) -> None:
    lowest = _TOP + _LINE * max(0, len(wanted) - 1) + more
    heights = _spread(sorted(wanted), lowest)
    assert all(below - above >= _LINE - 0.11 for above, below in pairwise(heights))  # heights are rounded to 0.1
    assert all(height <= lowest + 0.05 for height in heights)


def test_a_name_with_room_is_next_to_its_point() -> None:
    assert _spread([40.0, 41.0, 100.0], 200.0) == [40, 40 + _LINE, 100]


@pytest.mark.slow
def test_the_page_needs_nothing_else_and_holds_every_row(tmp_path: Path, high: np.ndarray) -> None:
    card = CARD.format(kind="defense", name="one").replace('paper = "', 'paper = "<b> & ')
    mine = result(tmp_path, "one", records(high.tolist(), [5.0] * 64), card=card)
    paths = write_site([mine], tmp_path / "site")
    page = (tmp_path / "site/index.html").read_text()
    assert "&lt;b&gt; &amp; " in page
    assert "<b> &" not in page
    assert "://" not in page
    assert "privlab benchmark verify" in page
    assert page.count("<style>") == page.count("<script>") == 1  # what its content security policy allows
    assert " style=" not in page
    assert json.loads((tmp_path / "site/feed.json").read_text())["entries"][0]["name"] == "one"
    assert len(paths) == 3
    assert site_files([mine]) == site_files([mine])


@pytest.mark.slow
def test_records_of_every_eval_ever_have_what_its_schema_requires(tmp_path: Path, high: np.ndarray) -> None:
    (row,) = standings([result(tmp_path, "one", records(high.tolist(), [5.0] * 64))])
    found = evaluation_record(row)
    assert found["schema_version"] == SCHEMA_VERSION
    needed = {"evaluation_id", "retrieved_timestamp", "source_metadata", "model_info", "eval_library"}
    needed |= {"schema_version", "evaluation_results"}
    assert needed <= found.keys() <= needed | {"evaluation_timestamp"}  # no other name may stand there
    assert found["source_metadata"]["source_type"] in ("documentation", "evaluation_run")
    assert found["source_metadata"]["evaluator_relationship"] in (
        "first_party",
        "third_party",
        "collaborative",
        "other",
    )
    assert {"name", "id", "additional_details"} <= found["model_info"].keys()
    (one,) = found["evaluation_results"]
    assert {"evaluation_name", "source_data", "metric_config", "score_details"} == one.keys()
    assert {"score_type", "min_score", "max_score", "lower_is_better"} <= one["metric_config"].keys()
    assert one["metric_config"]["lower_is_better"] is True
    assert one["score_details"]["score"] == pytest.approx(high.mean())
    assert one["source_data"]["source_type"] == "other"
    uncertainty = one["score_details"]["uncertainty"]
    assert isinstance(uncertainty["num_samples"], int)
    assert uncertainty["confidence_interval"].keys() == {"lower", "upper", "confidence_level", "method"}
    details = found["model_info"]["additional_details"]
    assert details["model_availability"] in ("open_weights", "closed_weights", "unknown")
    assert details["deployment_type"] in ("self_deployed", "externally_managed", "unknown")
    assert all(isinstance(value, str) for value in details.values())


@pytest.mark.slow
def test_a_record_of_one_photograph_has_no_interval(tmp_path: Path) -> None:
    (row,) = standings([result(tmp_path, "one", records([30.0], [5.0]))])
    (one,) = evaluation_record(row)["evaluation_results"]
    assert one["score_details"] == {"score": 30.0, "uncertainty": {"num_samples": 1}}


def test_the_epsilon_of_dp_sgd_is_stated_with_its_delta_and_what_changes() -> None:
    pytest.importorskip("opacus")
    (card,) = (each.card for each in entries() if each.card.name == "dp-sgd")
    (noise,) = instances(card)
    assert isinstance(noise, GradientNoise)
    replaced, present = (noise.epsilon(1e-5, replaced=each) for each in (True, False))
    assert card.epsilon == pytest.approx(replaced, abs=0.005)
    assert f"ε = {replaced:.2f} is at δ = 1e-5 with one photograph replaced by another, and {present:.2f}" in card.paper


def test_the_entries_of_the_package_can_be_read_and_each_has_a_card() -> None:
    found = entries()
    assert found
    for each in found:
        assert parse_card(each.data["card"], Path()).text == each.card.text
        assert each.path.parents[1].joinpath("cards", each.path.stem + ".toml").read_text() == each.data["card"]


def test_a_score_that_rests_on_an_attack_of_few_photographs_has_no_rank() -> None:
    given = [each for each in entries() if each.path.stem in ("features-blur", "features-deconvolution")]
    attack = given[1]
    few = attack.rows.loc[attack.rows.image_sha256.isin(photographs("bundled"))]
    fewer = replace(attack, data={**attack.data, "judged": conclude(attack.card, few), "rows": to_rows(few)})
    for used, rank, reasons in (
        (attack, 1, ()),
        (fewer, None, ("few photographs: 14 of 64 by an attack that knows the defense",)),
    ):
        rows = standings([used if each is attack else each for each in given])
        (blur,) = (row for row in rows if row.name == "blur")
        assert blur.known_by == ("deconvolution",)
        assert (blur.rank, blur.photographs, blur.unreliable) == (rank, 64, reasons)
