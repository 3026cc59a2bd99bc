"""Secure aggregation as an entry: every release has K clients, and an attack that separates images knows it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pandas import DataFrame

from privlab.base import PrivlabError
from privlab.benchmark import measure
from privlab.benchmark.cards import Card, instances, parse_card, read_card
from privlab.benchmark.measure import Measurement, Photographs
from privlab.benchmark.results import PACKAGE, defense_entries
from privlab.benchmark.rule import judge
from privlab.benchmark.submit import worth_of
from privlab.benchmark.tracks import photographs, track
from privlab.evaluation import Case
from privlab.images import Data
from privlab.report.tables.knowledge import AGGREGATION, declared_defenses

CARD = (PACKAGE / "cards/local-training-secure-aggregation.toml").read_text("utf-8")
OF = track("local-training")


def card(*pairs: tuple[str, str]) -> Card:
    """Return the package's card of four clients, with texts replaced, each of which must be there."""
    text = CARD
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return parse_card(text, Path("my.toml"))


def asked(of: Card, setting: str) -> Case:
    return Measurement(of).specification(OF.cases[1], setting, ["client-unrolling"])


def test_the_card_sets_how_many_clients_there_are_and_nothing_else() -> None:
    plain, mean = (asked(card(), setting).client for setting in ("a", "c"))
    assert plain is not None
    assert mean is not None
    assert (plain.clients, mean.clients) == (1, 4)
    assert (mean.images, mean.batch_size, mean.total_steps, mean.lr, mean.momentum) == (1, 1, 5, 0.1, 0.9)
    assert [part.name for part in instances(card())] == ["none"]
    assert asked(card(), "c").defense_name == "none"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("clients = 4", "clients = 1"), r"clients must be a whole number in \[2, 14\].* Found 1"),
        (("clients = 4", "clients = 15"), r"clients must be a whole number in \[2, 14\].* Found 15"),
        (("clients = 4", "clients = 4.0"), r"Found 4\.0"),
        (("clients = 4", "clients = true"), "Found True"),
        (("clients = 4", 'clients = "4"'), "Found '4'"),
        (
            ("clients = 4", "clients = 4\nseed = 3"),
            "states clients, seed. 'secure-aggregation' has only the parameter clients",
        ),
        (("clients = 4", ""), "states no parameter. 'secure-aggregation' has only the parameter"),
        (
            ('"local-training"', '"gradients"'),
            "which the track 'gradients' does not have. Enter it on the track 'local",
        ),
    ],
)
def test_a_card_with_other_clients_is_refused(change: tuple[str, str], said: str) -> None:
    with pytest.raises(PrivlabError, match=said):
        card(change)


@given(st.integers(min_value=2, max_value=14), st.integers(min_value=14, max_value=64))
def test_every_release_is_of_all_clients_and_every_photograph_counts_once(K: int, count: int) -> None:
    names = [str(i) for i in range(count)]
    with patch.object(measure, "photographs", lambda part: dict.fromkeys(names, "")):
        runs = measure._runs(asked(card(("clients = 4", f"clients = {K}")), "c"), "public")
    assert [name for _, counted in runs.values() for name in counted] == names
    for attacked, counted in runs.values():
        assert len(attacked) % K == 0
        assert {*counted} <= {*attacked}
        assert len({*attacked}) == len(attacked)


def test_without_secure_aggregation_a_part_is_one_run() -> None:
    assert [*measure._runs(asked(card(), "a"), "bundled")] == ["bundled"]
    assert [*measure._runs(asked(card(), "c"), "bundled")] == ["bundled", "bundled-left"]


def ran(spec: Case, *given: object, **how: object) -> Any:
    """Return what a run would record, and write nothing: a row for each of its photographs."""
    assert isinstance(spec.data.images, Data)
    hashes = [image.sha256 for image in spec.data.images.without_pixels()]
    rows = {"attack": "client-unrolling", "setting": spec.settings[0], "geometry": "in_place", "draw": 0}
    found = DataFrame(rows | {"image_sha256": hashes, "image": "", "defense": "none", "defense_params": "{}"})
    return type("Outcome", (), {"records": found})


def test_the_rows_name_what_is_a_setting_of_the_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "execute", ran)
    monkeypatch.setattr(Measurement, "attacks_on", lambda *given: ["client-unrolling"])
    found = Measurement(card(), out=tmp_path).records()
    assert {*found.loc[found.setting == "c"].defense} == {AGGREGATION}
    assert {*found.loc[found.setting == "c"].defense_params} == {'{"clients": 4}'}
    assert {*found.loc[found.setting == "a"].defense} == {"none"}
    assert found.groupby("case").image_sha256.nunique().tolist() == [14] * 4
    assert len(found) == 4 * 14
    hashes = list(photographs("bundled"))
    again = Measurement(card()).records_of(OF.cases[0], "c")
    assert again.defense.tolist() == [AGGREGATION] * 14
    assert again.image_sha256.tolist() == hashes


def test_a_picture_is_looked_for_in_the_run_that_has_its_photograph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "execute", ran)
    monkeypatch.setattr(Measurement, "attacks_on", lambda *given: ["client-unrolling"])
    row = {"case": "five epochs", "setting": "c", "attack": "client-unrolling", "draw": 0}
    first, last, left = (
        Measurement(card(), out=tmp_path).run_with_pictures(row | {"image_sha256": list(photographs("bundled"))[i]})
        for i in (0, 11, 12)
    )
    assert first == last != left


def test_the_same_is_released_whatever_is_drawn_and_the_mean_is_what_it_was() -> None:
    assert card().draws == 1
    assert worth_of(card(), Photographs()) == 1.0
    assert not card().stated_alone


def test_who_tells_images_apart_knows_it() -> None:
    assert AGGREGATION in declared_defenses("client-unrolling")
    assert AGGREGATION in declared_defenses("token-separation")  # a mean of single steps is a gradient of a batch
    for name in ("patch-gradient", "mjp-full", "least-squares", "no-such-attack"):
        assert AGGREGATION not in declared_defenses(name)


@pytest.mark.parametrize(("attack", "known"), [("client-unrolling", ["client-unrolling"]), ("patch-update", [])])
def test_the_rule_asks_who_knows_it(attack: str, known: list[str]) -> None:
    lead = {"psnr": 60.0, "ssim": 0.9, "psnr_affine": 60.0, "correlation": 1.0, "gms_affine": 0.0}
    names = list(photographs("bundled"))
    rows = [
        {"case": "one epoch", "setting": "c", "defense": AGGREGATION, "defense_params": '{"clients": 4}'}
        | {"attack": by, "geometry": "in_place", "image": sha, "image_sha256": sha, "draw": 0, "seed": 0}
        | {"status": "ok", "schema": 12, "release": "update", "effort": "standard", "victim": "vit_ti"}
        | {name: value - 50 * (by != attack) * (name == "psnr") + i for name, value in lead.items()}
        for by in (attack, "control:flat")
        for i, sha in enumerate(names)
    ]
    found = judge(DataFrame(rows).reindex(columns=[*measure.KEPT, *OF.metrics]), OF)
    assert found["known_by"] == known
    assert (found["verdict"], found["images"]) == ("no evidence", 14)  # of which none is exact
    assert any(flag.startswith("No adaptive attack") for flag in found["flags"]) == (not known)
    assert not any(flag.startswith("One draw") for flag in found["flags"])


@pytest.mark.parametrize("name", ["jigsaw", "blur"])
def test_the_track_takes_defenses_of_images(name: str) -> None:
    (other,) = defense_entries("gradients" if name == "jigsaw" else "features", [name])
    text = other.text.replace(f'track = "{other.track}"', 'track = "local-training"')
    assert [part.name for part in instances(parse_card(text, Path("my.toml")))] == [name]


def test_the_track_takes_no_filter_of_updates() -> None:
    text = (PACKAGE / "cards/updates-pruning.toml").read_text("utf-8").replace('"updates"', '"local-training"')
    with pytest.raises(PrivlabError, match="'local-training'"):
        instances(parse_card(text, Path("my.toml")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mjp", "secure-aggregation"])
def test_the_package_s_result_is_measured_again(
    name: str, cli: Callable[..., Any], shared: Callable[[str], Path]
) -> None:
    of = read_card(PACKAGE / f"cards/local-training-{name}.toml")
    given = ("--weights", shared("weights/vit_tiny_patch16_224.safetensors")) if of.victim_name == "vit_ti" else ()
    result = PACKAGE / f"results/local-training-{name}.json"
    found = cli("benchmark", "verify", result, "--seed", 5, "--json", *given).json
    assert found["difference"] <= found["tolerance"]
