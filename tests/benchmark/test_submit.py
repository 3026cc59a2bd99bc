"""Submissions: the templates enter as they are, and what may not enter is refused in one line."""

import importlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from pandas import DataFrame
from PIL import Image

from privlab.attacks import BlockKey, PatchGradientAdaptive
from privlab.base import PrivlabError
from privlab.benchmark import entries
from privlab.benchmark.cards import parse_card, write_template
from privlab.benchmark.measure import PUBLIC_LIMIT, Measurement, Photographs
from privlab.benchmark.results import defense_entries, write_result
from privlab.benchmark.tracks import TrackCase
from privlab.evaluation import Case
from privlab.images import open_images

ROOT = Path(__file__).parents[2]


def changed(path: Path, *pairs: tuple[str, str]) -> None:
    """Replace texts in a file, each of which must be there."""
    text = path.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return a folder with both templates, on a track that takes seconds."""
    for kind in ("defense", "attack"):
        write_template(kind, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_template_of_a_defense_enters_and_is_verified(mine: Path, cli: Callable[..., Any]) -> None:
    found = cli("benchmark", "submit", mine / "my_defense.toml", "--out", mine / "my.json", "--json").json
    assert found["judged"]["verdict"] == "no evidence"
    assert found["judged"]["known_by"] == ["patch-gradient-adaptive"]
    again = cli("benchmark", "verify", mine / "my.json", "--json").json
    assert again["measured"] >= 14 * 8
    assert again["confirmed"] == again["measured"]
    assert again["difference"] <= again["tolerance"]
    (row,) = [
        row
        for row in cli("benchmark", "list", "--track", "gradients", "--entries", mine, "--json").json
        if row["name"] == "my-defense"
    ]
    assert {"track", "name", "paper", "known_by", "worst_case", "reported", "verdict", "unreliable"} <= row.keys()
    assert row["rank"] is None
    assert any(reason.startswith("few photographs") for reason in row["unreliable"])


@pytest.mark.slow
def test_the_template_of_an_attack_enters_and_is_verified(mine: Path, cli: Callable[..., Any]) -> None:
    cli("benchmark", "submit", mine / "my_attack.toml", "--out", mine / "my.json", "--json")
    assert cli("benchmark", "verify", mine / "my.json", "--json").json["name"] == "my-attack"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (
            [
                ("from torch import Generator", "import torch\nfrom torch import Generator"),
                ("self.step * values", "(self.step + torch.rand(1) / 100) * values"),
            ],
            "gradients: rounded declared, noisy measured",
        ),
        ([("from typing", "import time\nfrom typing")], "may not use 'time'"),
        ([("from typing", "import socket\nfrom typing")], "may not use 'socket'"),
        ([('"my-rounding"', '"another"')], "has no class named 'my-rounding'. Found another"),
    ],
)
def test_a_plugin_that_may_not_enter_is_refused(
    mine: Path, cli: Callable[..., Any], pairs: list[tuple[str, str]], said: str
) -> None:
    changed(mine / "my_defense.py", *pairs)
    found = cli("benchmark", "submit", mine / "my_defense.toml", "--out", mine / "my.json")
    assert said in found.error
    assert not (mine / "my.json").exists()


def test_a_card_with_other_parameters_than_the_class_is_refused(mine: Path, cli: Callable[..., Any]) -> None:
    changed(mine / "my_defense.toml", ("step = 1e-2", "step = 1e-2\nkeep = 3"))
    said = cli("benchmark", "submit", mine / "my_defense.toml", "--out", mine / "my.json").error
    assert "states keep, which is not a parameter of 'my-rounding'. It has step" in said


def test_a_rounding_has_no_finite_epsilon(mine: Path, cli: Callable[..., Any]) -> None:
    changed(mine / "my_defense.toml", ('epsilon = "none"', "epsilon = 0.5"))
    said = cli("benchmark", "submit", mine / "my_defense.toml", "--out", mine / "my.json").error
    assert "epsilon says 0.5, and 'my-rounding' releases the same whatever it draws" in said


def test_a_number_in_quotes_is_refused(mine: Path, cli: Callable[..., Any]) -> None:
    changed(mine / "my_defense.toml", ("step = 1e-2", 'step = "0.01"'))
    said = cli("benchmark", "submit", mine / "my_defense.toml", "--out", mine / "my.json").error
    assert "says step = '0.01'. It must be a number, without quotes." in said


def test_what_a_class_works_with_is_compared_with_its_card(mine: Path, cli: Callable[..., Any]) -> None:
    lie = "step: float = 1e-2\n\n    def __post_init__(self) -> None:\n        self.step = 0.5"
    changed(mine / "my_defense.py", ("step: float = 1e-2", lie), ("(frozen=True)", ""))
    said = cli("benchmark", "submit", mine / "my_defense.toml", "--out", mine / "my.json").error
    assert "says step = 0.01, and 'my-rounding' works with 0.5" in said


def test_reconstructions_of_the_wrong_images_are_refused(mine: Path, cli: Callable[..., Any]) -> None:
    folder = mine / "made"
    folder.mkdir()
    for image in open_images("samples", limit=1):
        assert image.pixels
        image.pixels.resize((32, 32)).save(folder / "one.png")
    text = (mine / "my_attack.toml").read_text()
    text = text.replace('uses = "my-bias-ratio"', 'reconstructions = "made"').replace('plugin = "my_attack.py"', "")
    (mine / "card.toml").write_text(text[: text.index("[parameters]")].replace("# leave", "\n# leave"))
    (folder / "manifest.csv").write_text(f"name,sha256\none.png,{'0' * 64}\n")
    said = cli("benchmark", "submit", mine / "card.toml", "--out", mine / "my.json").error
    assert "belongs to a photograph with SHA-256 000000000000…, which is not one of the 14 bundled ones" in said
    sha256 = next(iter(open_images("samples"))).sha256
    (folder / "manifest.csv").write_text(f"name,sha256\none.png,{sha256}\n")
    assert (
        "lacks 13 of 14 photographs" in cli("benchmark", "submit", mine / "card.toml", "--out", mine / "my.json").error
    )


def test_the_hidden_half_needs_its_folder(mine: Path, cli: Callable[..., Any]) -> None:
    assert "--hidden needs --images" in cli("benchmark", "submit", mine / "my_defense.toml", "--hidden").error


def test_the_adversary_s_own_photographs_are_used_and_told(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for i in range(3):
        Image.effect_noise((40 + i, 40), 60.0).convert("RGB").save(own / f"{i}.png")
    how, card = Photographs(public=str(own)), defense_entries("features", ["blur"])[0]
    asked = Measurement(card, how).specification(card.of.cases[0], "c", ["least-squares"])
    assert (asked.adversary.public, asked.adversary.public_limit) == ((str(own),), PUBLIC_LIMIT)
    assert Measurement(card).specification(card.of.cases[0], "c", ["least-squares"]).adversary.public == ("samples",)
    names = [sha256((own / f"{i}.png").read_bytes()).hexdigest() for i in range(3)]
    assert how.public_sha256() == sha256("/".join(names).encode()).hexdigest()
    assert Photographs().public_sha256() is None


@pytest.mark.slow
def test_a_result_is_verified_with_the_photographs_that_the_adversary_had(
    mine: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = importlib.import_module("privlab.benchmark.verify")
    monkeypatch.setattr(verify, "checks_of", lambda card, weights, chance=None: ())  # they take seconds, and all pass
    (blur,) = (each for each in entries() if each.path.stem == "features-blur")
    path = tmp_path / "blur.json"
    write_result({**blur.data, "public_sha256": "ab" * 32}, path)
    said = cli("benchmark", "verify", path).error
    assert "public_sha256 is None now, and the file says abab" in said
    said = cli("benchmark", "verify", blur.path, "--public", one_photograph(mine)).error
    assert "the file says None. The adversary's own photographs are others" in said


def test_an_attack_is_left_out_of_the_cases_where_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(own: Measurement, case: TrackCase, spec: Case, *given: object) -> DataFrame:
        attack, setting = spec.words.attacks or (), spec.settings[0]
        return DataFrame({"attack": [*attack], "setting": setting, "geometry": "in_place", "draw": 0})

    monkeypatch.setattr(Measurement, "_run", ran)
    keyed, plain = (defense_entries("gradients", [name])[0] for name in ("block-scrambling", "jigsaw"))
    found = Measurement(keyed, attacks=[BlockKey()]).records()
    named = [getattr(each, "name", each) for each in found.attack]  # nothing is permuted where nothing is defended
    assert [*zip(named, found.setting, strict=True)] == [("patch-gradient", "a"), ("block-key", "c")]
    assert {*Measurement(plain, attacks=["april"]).records().setting} == {"a", "c"}
    (noisy,) = defense_entries("gradients", ["weak-noise"])
    found = Measurement(noisy, attacks=[PatchGradientAdaptive()]).records()
    ran_there = {
        (getattr(each, "name", each), setting) for each, setting in zip(found.attack, found.setting, strict=True)
    }
    assert ran_there == {("patch-gradient", "a"), ("patch-gradient-adaptive", "c")}
    text = (ROOT / "experiments/benchmark/cards/updates-exclude-vars.toml").read_text().replace("^head", "^pos_embed|")
    withheld = parse_card(text, tmp_path / "card")  # undefended, patch-gradient runs
    with pytest.raises(PrivlabError, match="learnable_pe_gradient"):
        Measurement(withheld, attacks=["patch-gradient"]).records()


def one_photograph(folder: Path) -> Path:
    """Return a folder with one photograph."""
    own = folder / "own"
    own.mkdir()
    Image.new("RGB", (40, 40), (9, 99, 199)).save(own / "one.png")
    return own


def test_an_unknown_track_is_told(cli: Callable[..., Any]) -> None:
    assert "Did you mean gradients" in cli("benchmark", "list", "--track", "gradient").error
