"""Verification measures every case and every draw again, and notices rows that were made up."""

import importlib
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pandas import DataFrame, Series, concat

from privlab.base import PrivlabError
from privlab.benchmark.measure import Measurement, Photographs, case_label
from privlab.benchmark.results import PACKAGE, Result, from_rows, read_result, to_rows, write_result
from privlab.benchmark.rule import conclude
from privlab.benchmark.tracks import TrackCase, photographs
from privlab.benchmark.verify import _beside, _check_alike, _means, _measured_again, _relaxed, verify
from privlab.evaluation import CONTROL

SIGN = PACKAGE / "results/gradients-sign.json"
MJP = PACKAGE / "results/gradients-mjp.json"
"""A defense that is drawn ten times."""
STAGED = PACKAGE / "results/gradients-staged-24-rounds.json"
"""A long search on a defense that draws nothing."""

LEAKIEST = "psnr of the leakiest attack"

Changing = Callable[[DataFrame], DataFrame]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Give back the rows of the package's own result where an entry is measured again; return what was asked for."""
    module, asked = importlib.import_module("privlab.benchmark.verify"), list[tuple[Any, ...]]()
    monkeypatch.setattr(module, "_check_stated", lambda *given: None)

    def again(own: Measurement, case: TrackCase, setting: str) -> DataFrame:
        asked.append((own.card.name, case_label(case, setting)))
        name = own.card.name.removeprefix("gradient-")
        rows = read_result(PACKAGE / f"results/{own.card.track}-{name}.json").rows
        return rows.loc[(rows.case == case_label(case, setting)) & rows.image_sha256.isin([*photographs("bundled")])]

    monkeypatch.setattr(Measurement, "records_of", again)
    return asked


def forged(path: Path, source: Path, change: Changing, **more: Any) -> Path:
    """Write a result whose rows were changed, and which concludes what these say, under a hash of its own."""
    result = read_result(source)
    rows = to_rows(change(result.rows.copy()))
    judged = conclude(result.card, from_rows(rows))
    write_result({**result.data, "rows": rows, "judged": judged} | more, path)
    return path


def test_all_cases_are_measured_and_the_share_of_the_rows_is_stated(measured: list[tuple[Any, ...]]) -> None:
    found = verify(SIGN, seed=1)
    assert [case for _, case in measured] == ["one step, undefended", "one step"]
    assert found.rows == len(read_result(SIGN).rows)
    assert found.confirmed == found.measured == 14 * (8 + 9)
    assert found.share == round(found.confirmed / found.rows, 4)
    assert found.signer is None


def test_admission_is_seeded_at_random(measured: list[tuple[Any, ...]]) -> None:
    assert len({verify(SIGN).seed for _ in range(3)}) == 3


def invented(rows: DataFrame) -> DataFrame:
    """Return rows of which those of two attacks on half of the photographs are made up."""
    rows.loc[rows.attack.isin(["april", "patch-gradient"]) & (rows.index % 2 == 0), "psnr"] = 11.0
    return rows


def weaker(rows: DataFrame) -> DataFrame:
    """Return rows in which nothing of the defense leaks more than 10 dB."""
    rows.loc[(rows.setting == "c") & ~rows.attack.str.startswith(CONTROL), "psnr"] = 10.0
    return rows


def stronger_controls(rows: DataFrame) -> DataFrame:
    rows.loc[rows.attack.str.startswith(CONTROL) & (rows.setting == "c"), "psnr"] = 40.0
    return rows


def without_the_best(rows: DataFrame) -> DataFrame:
    return rows.loc[rows.attack != rows.loc[rows.psnr.idxmax(), "attack"]].reset_index(drop=True)


def without_a_case(rows: DataFrame) -> DataFrame:
    return rows.loc[rows.setting == "c"].reset_index(drop=True)


def twice(rows: DataFrame) -> DataFrame:
    return concat([rows, rows.tail(3).assign(psnr=9.0)], ignore_index=True)


def another_attack(rows: DataFrame) -> DataFrame:
    return concat([rows, rows.loc[rows.attack == "april"].assign(attack="my-own")], ignore_index=True)


def another_geometry(rows: DataFrame) -> DataFrame:
    """Return rows of a geometry that nobody measured, on the photographs that only --images measures again."""
    there = (rows.attack == "april") & ~rows.image_sha256.isin([*photographs("bundled")])
    return concat([rows, rows.loc[there].assign(geometry="reassembled", psnr=45.0)], ignore_index=True)


def copies(rows: DataFrame) -> DataFrame:
    """Return rows of which some count more often, as the rows of other entries."""
    return concat([rows.assign(entry="x"), rows.head(100).assign(entry="y")], ignore_index=True)


def certified(rows: DataFrame) -> DataFrame:
    """Return rows with a column that the rule would read, and no run wrote."""
    return rows.assign(explained=1.0)


def failed(rows: DataFrame) -> DataFrame:
    return rows.assign(status=rows.status.mask(rows.attack == "patch-gradient-adaptive", "failed"))


def failed_without_scores(rows: DataFrame) -> DataFrame:
    scores = ["psnr", "ssim", *(name for name in rows if name.startswith(("psnr_", "correlation", "gms_")))]
    rows = failed(rows)
    rows[scores] = rows[scores].mask(rows.status == "failed")
    return rows


def nothing_released(rows: DataFrame) -> DataFrame:
    return rows.assign(reason="what is released is zero or not finite")


def random_weights(rows: DataFrame) -> DataFrame:
    return rows.assign(weights="random")


def below_every_image(rows: DataFrame) -> DataFrame:
    """Return rows of which one sets the mean: of ten draws, one would decide a score."""
    rows.loc[5, "psnr"] = -400.0
    return rows


def without_some_scores(rows: DataFrame) -> DataFrame:
    there = (rows.attack == "april") & rows.image_sha256.isin([*photographs("bundled")][:3])
    rows["ssim"] = rows.ssim.mask(there)
    return rows


def leakiest_photographs(rows: DataFrame) -> DataFrame:
    leakiest = rows.groupby("image_sha256").psnr.max().nlargest(32).index
    return rows.loc[rows.image_sha256.isin({*leakiest, *photographs("bundled")})].reset_index(drop=True)


def with_options(rows: DataFrame) -> DataFrame:
    rows["attack_params"] = rows.attack_params.mask(rows.attack == "april", '{"rounds": 999}')
    return rows


def more_photographs(rows: DataFrame) -> DataFrame:
    """Return rows with those of 64 photographs that no track has, of which nothing leaks: the mean fell by 6 dB."""
    one = rows.loc[(rows.image_sha256 == rows.image_sha256.iloc[0]) & ~rows.attack.str.startswith(CONTROL)]
    made = [one.assign(image_sha256=f"{number:064x}", psnr=1.0) for number in range(64)]
    return concat([rows, *made], ignore_index=True)


def another_control(rows: DataFrame) -> DataFrame:
    """Return rows with a control that leaks more than every attack: nothing leaks beyond it."""
    made = rows.loc[rows.attack == f"{CONTROL}flat"].assign(attack=f"{CONTROL}mine", psnr=99.0)
    return concat([rows, made], ignore_index=True)


def controls_of_other_draws(rows: DataFrame) -> DataFrame:
    made = rows.loc[rows.attack.str.startswith(CONTROL)].assign(draw=1.0, psnr=99.0)
    return concat([rows, made], ignore_index=True)


def no_structure(rows: DataFrame) -> DataFrame:
    """Return rows in which the attacks show no structure, from which a verdict follows as well."""
    names = ["ssim", "psnr_affine", "correlation", "gms_affine"]
    rows.loc[~rows.attack.str.startswith(CONTROL), names] = 0.0
    return rows


def without_what_shows_a_leak(rows: DataFrame) -> DataFrame:
    """Return rows in which an attack that knows the defense shows no structure of what is undefended: a gap."""
    rows.loc[(rows.attack == "patch-gradient") & (rows.setting == "a"), "correlation"] = 0.0
    return rows


def as_of_an_old_version(rows: DataFrame) -> DataFrame:
    return rows.assign(schema=3)


def without_a_score(rows: DataFrame) -> DataFrame:
    """Return rows of which one, that only --images measures again, has no score: its attack has fewer photographs."""
    there = (rows.attack == "april") & ~rows.image_sha256.isin([*photographs("bundled")])
    return rows.assign(psnr=rows.psnr.mask(there))


def in_range_once(rows: DataFrame) -> DataFrame:
    """Return rows of which all but one, that only --images measures again, are out of range: no flag says so."""
    there = ~rows.image_sha256.isin([*photographs("bundled")])
    return rows.assign(beyond_range=rows.beyond_range.mask(there & (rows.attack == "april"), "too many patches"))


def of_another_client(rows: DataFrame) -> DataFrame:
    return rows.assign(conditions=rows.conditions.where(rows.setting == "a", '{"eight_bit": true}'))


def elsewhere(rows: DataFrame) -> DataFrame:
    """Return rows in which a quarter of the photographs has another attack, which is scored on too few to count."""
    leakiest = rows.groupby("image_sha256").psnr.max().nlargest(16).index
    rows["external"] = rows.image_sha256.where(rows.image_sha256.isin(leakiest), None)
    return rows


def undefended_rows(rows: DataFrame) -> DataFrame:
    return rows.assign(defense="none")


def with_effort(rows: DataFrame) -> DataFrame:
    return rows.assign(effort="thorough")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (more_photographs, "64 photographs that are not the track's"),
        (another_control, "others"),
        (controls_of_other_draws, "others"),
        (another_geometry, "others"),
        (copies, "rows with entry"),
        (certified, "rows with explained"),
        (failed, "failed rows"),
        (failed_without_scores, "agree|status is"),
        (nothing_released, "a reason"),
        (random_weights, "random weights"),
        (below_every_image, "a psnr beyond"),
        (without_some_scores, "ssim is"),
        (leakiest_photographs, "lacks [1-9]"),
        (with_options, "attack_params is"),
        (no_structure, "mean (ssim|psnr_affine|correlation|gms_affine) of"),
        (without_what_shows_a_leak, "mean correlation of patch-gradient"),
        (as_of_an_old_version, "old version"),
        (without_a_score, "without a score"),
        (in_range_once, "several values of beyond_range"),
        (of_another_client, "conditions is"),
        (elsewhere, "external is"),
        (undefended_rows, "defense is"),
        (with_effort, "effort is"),
        (invented, "rows measured again agree"),
        (weaker, "agree|mean worst case"),
        (stronger_controls, "agree|mean worst case"),
        (without_the_best, "lacks [1-9]"),
        (without_a_case, "the cases of the entry"),
        (twice, "It has"),
        (another_attack, "others"),
    ],
)
def test_rows_that_were_made_up_are_refused(
    tmp_path: Path, measured: list[tuple[Any, ...]], change: Changing, said: str
) -> None:
    with pytest.raises(PrivlabError, match=said):
        verify(forged(tmp_path / "r.json", SIGN, change), seed=0)


def test_a_weak_attack_that_knows_the_defense_is_compared_alone(
    tmp_path: Path, measured: list[tuple[Any, ...]], cli: Callable[..., Any]
) -> None:
    """Another one leaks more. If the one that knows the defense leaks as much, the entry has a rank."""

    def april_raised(rows: DataFrame) -> DataFrame:
        rows.loc[(rows.attack == "april") & (rows.geometry == "reassembled") & (rows.setting == "c"), "psnr"] += 8.0
        return rows

    path = forged(tmp_path / "r.json", PACKAGE / "results/gradients-jigsaw.json", april_raised)
    assert "mean psnr of april" in cli("benchmark", "verify", path, "--seed", 0).error


def test_the_score_is_that_of_an_attack_and_not_of_the_worst_case() -> None:
    """Where another attack leaks as much of a photograph, the worst case stays; the score is one attack's mean."""

    def shared(weaker: float) -> DataFrame:
        """Return rows in which each photograph leaks 20 dB to one of two attacks, and less to the other."""
        rows = read_result(SIGN).rows.copy()
        attacks = [name for name in dict.fromkeys(rows.attack) if not name.startswith(CONTROL)][:2]
        for place, image in enumerate(photographs("bundled")):
            there = (rows.image_sha256 == image) & (rows.setting == "c")
            rows.loc[there & (rows.attack == attacks[place % 2]), "psnr"] = 20.0
            rows.loc[there & (rows.attack == attacks[1 - place % 2]), "psnr"] = weaker
        return rows

    card = read_result(SIGN).card
    both = _beside(shared(19.0), shared(5.0), card)
    means = _means(both, card)
    excess = (means.difference - means.allowed).loc["one step", False]
    assert excess["worst case"] < 0 < excess[LEAKIEST]


def test_the_halves_of_the_photographs_are_compared_separately() -> None:
    """One that leaks more in the file and another that leaks less do not make up for each other."""
    rows = read_result(SIGN).rows
    bundled = [*photographs("bundled")]
    hidden = dict(zip(bundled[:7], photographs("hidden"), strict=False))
    rows = rows.loc[rows.image_sha256.isin(bundled)].reset_index(drop=True)
    rows = rows.assign(image_sha256=rows.image_sha256.replace(hidden))
    shifted = rows.assign(psnr=rows.psnr + rows.image_sha256.isin([*hidden.values()]) * 2.0 - 1.0)
    means = _means(_beside(rows, shifted, read_result(SIGN).card), read_result(SIGN).card)
    assert means.difference["one step", False, LEAKIEST] == pytest.approx(1, abs=0.3)
    assert means.difference["one step, hidden half", False, LEAKIEST] == pytest.approx(1, abs=0.3)


def test_a_hidden_half_that_leaks_more_is_compared() -> None:
    """It takes a rank, and the rule does not conclude it from the listed photographs."""
    result = read_result(SIGN)
    hidden = dict(zip(photographs("public"), photographs("hidden"), strict=True))
    rows = result.rows.assign(image_sha256=result.rows.image_sha256.replace(hidden))
    attacked = rows.image_sha256.isin([*hidden.values()]) & ~rows.attack.str.startswith(CONTROL)
    more = rows.assign(psnr=rows.psnr + 5.0 * attacked)
    file = replace(result, data={**result.data, "rows": to_rows(rows)})
    _check_alike(file, rows)
    with pytest.raises(PrivlabError, match="hidden half leaks more"):
        _check_alike(file, more)


def test_photographs_that_the_file_does_not_name_are_measured_again(tmp_path: Path) -> None:
    """A file whose rows have the public half may name the bundled ones alone."""
    named = forged(tmp_path / "r.json", SIGN, lambda rows: rows, photographs=["bundled"])
    assert read_result(named).parts == ("bundled", "public")
    unknown = forged(tmp_path / "x.json", SIGN, lambda rows: rows, photographs=["../../x"])
    with pytest.raises(PrivlabError, match="photographs"):
        read_result(unknown)


def test_a_draw_that_is_left_out_is_refused(tmp_path: Path, measured: list[tuple[Any, ...]]) -> None:
    kept = forged(tmp_path / "r.json", MJP, lambda rows: rows.loc[rows.draw != 3].reset_index(drop=True))
    with pytest.raises(PrivlabError, match="lacks"):
        verify(kept)


def test_one_draw_of_ten_that_was_made_up_is_refused(tmp_path: Path, measured: list[tuple[Any, ...]]) -> None:
    """With one draw at the floor, a broken defense would hold."""

    def at_the_floor(rows: DataFrame) -> DataFrame:
        there = (rows.draw == 9) & ~rows.attack.str.startswith(CONTROL)
        rows.loc[there, ["psnr", "psnr_affine"]] = 0.0
        rows.loc[there, ["ssim", "correlation", "gms_affine"]] = -1.0
        return rows

    source = PACKAGE / "results/gradients-binary-weights.json"
    path = forged(tmp_path / "r.json", source, at_the_floor)
    verdicts = [read_result(each).judged["binary-weights"]["verdict"] for each in (source, path)]
    assert verdicts == ["broken", "holds"]
    with pytest.raises(PrivlabError, match=r"agree|the mean"):
        verify(path)


def test_a_made_up_draw_does_not_decide_in_which_case_most_leaks(
    tmp_path: Path, measured: list[tuple[Any, ...]]
) -> None:
    """The score is the highest one. In one draw of five epochs, one of three attacks finds each photograph."""

    def found_in_one_draw(rows: DataFrame) -> DataFrame:
        attacks = ["mjp-subspace", "patch-gradient", "patch-update"]
        images = {image: place for place, image in enumerate(dict.fromkeys(rows.image_sha256))}
        by = [attacks[images[image] % 3] for image in rows.image_sha256]
        there = (rows.case == "five epochs") & (rows.draw == 7) & (rows.geometry == "in_place") & (rows.attack == by)
        rows.loc[there, "psnr"] = 100.0
        return rows

    path = forged(tmp_path / "r.json", PACKAGE / "results/local-training-mjp.json", found_in_one_draw)
    judged = read_result(path).judged["mjp"]
    assert judged["worst"]["five epochs"]["mean"] == 100 > (judged["worst"]["one epoch"]["mean"] or 0)
    assert judged["leakiest"] == "one epoch"
    with pytest.raises(PrivlabError, match="mean"):
        verify(path)


def test_the_worst_case_over_draws_is_compared(tmp_path: Path, measured: list[tuple[Any, ...]]) -> None:
    """It is the highest of ten draws, and the means of these hardly fall with the three highest ones."""

    def without_the_highest_draws(rows: DataFrame) -> DataFrame:
        attacked = rows.loc[(rows.setting == "c") & ~rows.attack.str.startswith(CONTROL)]
        highest = attacked.groupby(["image_sha256", "draw"]).psnr.max().groupby("image_sha256").nlargest(4)
        fourth = highest.groupby(level=0).min()
        rows.loc[attacked.index, "psnr"] = attacked.psnr.clip(upper=attacked.image_sha256.map(fourth))
        return rows

    source = PACKAGE / "results/gradients-binary-weights-10-releases.json"
    with pytest.raises(PrivlabError, match="mean worst case"):
        verify(forged(tmp_path / "r.json", source, without_the_highest_draws))


def test_draws_of_a_photograph_are_no_photographs() -> None:
    """The standard error of differences that are the same in all draws is that of one draw."""
    result = read_result(SIGN)
    rows = result.rows.loc[(result.rows.setting == "c") & ~result.rows.attack.str.startswith(CONTROL)]
    shift = dict(zip(dict.fromkeys(rows.image_sha256), range(64), strict=True))
    draws = concat([rows.assign(draw=draw) for draw in range(10)], ignore_index=True)
    once, often = (
        _means(_beside(each, each.assign(psnr=each.psnr + each.image_sha256.map(shift) / 64), result.card), result.card)
        for each in (rows, draws)
    )
    assert (once.error > 0.03).any()
    assert once.error.tolist() == pytest.approx(often.error.tolist(), nan_ok=True)


@pytest.mark.parametrize("elsewhere", [1, 3])
def test_a_search_may_end_elsewhere_on_one_photograph_of_one_draw(
    tmp_path: Path, measured: list[tuple[Any, ...]], cli: Callable[..., Any], elsewhere: int
) -> None:
    """That it ends elsewhere by rounding does not refuse a result of ten draws."""

    def weaker_in_one_draw(rows: DataFrame) -> DataFrame:
        images = [*photographs("bundled")][:elsewhere]
        there = (rows.draw == 3) & (rows.attack == "mjp-full") & rows.image_sha256.isin(images)
        assert (rows.loc[there, "psnr"] > 60).all()  # more than 60 dB counts as 60, and others have 20
        rows.loc[there, "psnr"] = 20.0
        return rows

    found = cli("benchmark", "verify", forged(tmp_path / "r.json", MJP, weaker_in_one_draw))
    if elsewhere == 1:  # 40 / 14 / 10 dB
        assert "were measured again" in found.out
    else:
        assert "the mean psnr of" in found.error


def test_only_attacks_that_do_not_leak_most_may_be_off_by_more() -> None:
    """Their searches may end elsewhere; with the hidden half nothing is relaxed."""
    result = read_result(PACKAGE / "results/gradients-jigsaw.json")
    rows = result.rows.loc[result.rows.image_sha256.isin([*photographs("bundled")])]
    means = _means(_beside(rows, rows, result.card), result.card, frozenset({"april"}))
    listed = _relaxed(means.copy(), rows, result.card).allowed["one step", False]
    hidden = rows.assign(image_sha256=next(iter(photographs("hidden"))))
    assert listed["psnr of april"] > 3
    assert listed["worst case"] == listed[LEAKIEST] == 0.5
    assert _relaxed(means.copy(), hidden, result.card).allowed["one step", False]["psnr of april"] == 0.5


def spread(values: Series, least: float, most: float) -> Series:
    """Return values of which each is one of two, with the same mean."""
    high = round((values.mean() - least) / (most - least) * len(values))
    found = Series(least, values.index).mask(Series(range(len(values)), values.index) < high, most)
    return found + (values.mean() - found.mean())


def test_intervals_are_compared_where_means_are_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak is shown by an interval: with other scores of single photographs, a broken defense would hold."""
    path = PACKAGE / "results/gradients-pruning.json"

    def wider(rows: DataFrame) -> DataFrame:
        for _, each in rows.loc[(rows.setting == "c") & ~rows.attack.str.startswith(CONTROL)].groupby("attack"):
            for name in ("ssim", "correlation", "gms_affine"):
                rows.loc[each.index, name] = spread(each[name], -0.9, 0.9)
        return rows

    monkeypatch.setattr(importlib.import_module("privlab.benchmark.verify"), "_check_stated", lambda *given: None)

    def again(own: Measurement, case: TrackCase, setting: str) -> DataFrame:
        return (rows := read_result(path).rows).loc[rows.case == case_label(case, setting)]

    monkeypatch.setattr(Measurement, "records_of", again)
    with pytest.raises(PrivlabError, match="two standard errors"):
        verify(forged(tmp_path / "r.json", path, wider))


@pytest.mark.parametrize(
    ("off", "spread", "said"),
    [
        (0.7, 3.0, "differ by at most 0.7; 1 is allowed"),
        (0.6, 1.2, "0.6656 is allowed"),
        (0.7, 0.1, "by 0.5"),
        (1.1, 3.0, "by 1,"),
    ],
)
def test_a_mean_may_be_off_by_two_standard_errors_and_twice_the_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any], off: float, spread: float, said: str
) -> None:
    """Two standard errors of differences of ± the spread are 2 · 1.04 · spread / √14."""
    monkeypatch.setattr(importlib.import_module("privlab.benchmark.verify"), "_check_stated", lambda *given: None)

    def again(own: Measurement, case: TrackCase, setting: str) -> DataFrame:
        rows = read_result(STAGED).rows.drop(columns="entry")
        there = (rows.case == case_label(case, setting)) & rows.image_sha256.isin([*photographs("bundled")])
        return rows.loc[there]

    def elsewhere(rows: DataFrame) -> DataFrame:
        """Return rows of a search that ended elsewhere, better and worse in turn."""
        for turn, image in enumerate(photographs("bundled")):
            there = (rows.attack == "staged-likelihood") & (rows.image_sha256 == image)
            rows.loc[there, "psnr"] += off + (spread if turn % 2 else -spread)
        return rows

    monkeypatch.setattr(Measurement, "records_of", again)
    found = cli("benchmark", "verify", forged(tmp_path / "r.json", STAGED, elsewhere))
    if said.startswith("by"):
        assert f"They may differ {said}" in found.error
    else:
        assert said in found.out


@pytest.mark.parametrize("seed", [1, 2])  # by which admission is tried after the measurement, and before it
def test_admission_of_a_plugin_is_tried_again_on_every_track(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    module, calls = importlib.import_module("privlab.benchmark.verify"), list[str]()
    path = PACKAGE / "results/dishonest-server-pruning.json"
    own = read_result(path)

    def measured(*_: object) -> tuple[DataFrame, float, list[str]]:
        calls.append("measured")
        return own.rows, own.data["utility"], own.data["refused"]

    monkeypatch.setattr(module, "installed", lambda *given: nullcontext())
    monkeypatch.setattr(module, "measure_checks", measured)
    monkeypatch.setattr(module, "_check_stated", lambda *given: calls.append("admission"))
    verify(forged(tmp_path / "r.json", path, lambda rows: rows, plugin="class Mine: ..."), seed=seed)
    assert calls == (["measured", "admission"] if seed == 1 else ["admission", "measured"])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("utility", 0.995, "utility is 0.98 now"),  # within the tolerance, and enough for a rank
        ("refused", [], "refused is ['random 0'] now"),
        ("draws", 10, "draws is 1 now"),
    ],
)
def test_what_a_check_costs_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, said: str
) -> None:
    path = PACKAGE / "results/dishonest-server-pruning.json"
    own = read_result(path)
    measured = own.rows.loc[own.rows.image_sha256.isin([*photographs("bundled")])]
    module = importlib.import_module("privlab.benchmark.verify")
    monkeypatch.setattr(module, "measure_checks", lambda *given: (measured, 0.98, ["random 0"]))
    changed = {"utility": 0.98, "refused": ["random 0"], name: value}
    stated = forged(tmp_path / "r.json", path, lambda rows: measured.reset_index(drop=True), **changed)
    with pytest.raises(PrivlabError, match=re.escape(said)):
        verify(stated)
    forged(stated, path, lambda rows: measured.reset_index(drop=True), utility=0.98, refused=["random 0"])
    assert verify(stated).confirmed == len(measured)


@pytest.mark.parametrize(("name", "value"), [("utility", 0.9), ("draws", 3)])
def test_what_a_key_costs_is_compared(tmp_path: Path, name: str, value: float) -> None:
    path = forged(tmp_path / "r.json", PACKAGE / "results/weights-key-paper.json", lambda rows: rows, **{name: value})
    with pytest.raises(PrivlabError, match=f"{name} is"):
        verify(path)


def test_the_runs_of_all_defenses_of_an_attack_are_in_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is there already is not made again, so that what is undefended is measured once."""
    folders = list[Path | None]()

    def drawn(_: Result, own: Measurement, before: DataFrame) -> list[DataFrame]:
        folders.append(own.out)
        return [before]

    monkeypatch.setattr(importlib.import_module("privlab.benchmark.verify"), "_all_draws", drawn)
    result = read_result(PACKAGE / "results/features-deconvolution.json")
    rows = [*_measured_again(result, result.card, Photographs())]
    assert len(rows) == 2
    assert len({*folders}) == 1
    assert folders[0] is not None


def test_a_public_key_without_a_signature_is_not_mentioned(tmp_path: Path) -> None:
    data = json.loads(SIGN.read_text("utf-8"))
    data["signature"]["public_key"] = "aa" * 32
    assert Result(data, tmp_path).signer is None
