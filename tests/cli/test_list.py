"""`privlab list`, `doctor` and `--help`: everything that is installed, as a table and as JSON."""

import json
import re
from collections.abc import Callable, Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import click
import pytest

from privlab import __version__
from privlab.attacks import attacks
from privlab.cli import cli as command_line
from privlab.defenses import defenses
from privlab.metrics import METRICS, PLACEMENT, find_backbone
from privlab.victims import ZOO, victim_names

VERBS = (
    "Attack|Check|Classify|Copy|Count|Decrypt|Draw|Fetch|Fine-tune|Hold|List|Make|Measure|Permute|Print|Rank|Read|Recover|Run|"
    "Say|Set|Show|Solve|Take|Test|Train|Write"
)
LISTED = {
    "victims": ([*victim_names(), "timm:NAME"], {"name", "timm", "variant"}),
    "attacks": (list(attacks()), {"name", "released", "does", "paper", "needs", "reads", "runs"}),
    "defenses": (list(defenses()), {"name", "acts on", "paper", "options"}),
    "metrics": ([*METRICS, "lpips", *PLACEMENT], {"name", "leaks", "range", "source"}),
}


@pytest.mark.parametrize("what", LISTED)
def test_list_names_all_that_is_there(cli: Callable[..., Any], what: str) -> None:
    names, columns = LISTED[what]
    told = cli("list", what, "--json")
    assert (told.status, told.err) == (0, "")
    rows = json.loads(told.out)
    assert [row["name"] for row in rows] == names
    assert all(set(row) == columns for row in rows)
    shown = cli("list", what)
    assert (shown.status, shown.err) == (0, "")
    assert all(f" {name} " in shown.out for name in names)


def test_attacks_are_listed_with_paper_equation_and_capabilities(cli: Callable[..., Any]) -> None:
    rows = {row["name"]: row for row in json.loads(cli("list", "attacks", "--json").out)}
    assert "Lu et al. 2022" in rows["april"]["paper"]
    assert "Eq. 8" in rows["april"]["paper"]
    assert (
        rows["april"]["needs"] == "april_block, batch_size_one, knows_weights, learnable_pe_gradient, pe_of_every_token"
    )
    assert rows["patch-gradient"]["needs"] == "batch_size_one, learnable_pe_gradient"


def test_attacks_are_grouped_by_what_is_released(cli: Callable[..., Any]) -> None:
    rows = {row["name"]: row for row in json.loads(cli("list", "attacks", "--json").out)}
    groups = {"april": "gradients", "qkv-span": "update", "patch-update": "update", "pe-assignment": "features"}
    assert {name: rows[name]["released"] for name in groups} == groups
    assert all(re.match(r"[^ ].*[.)]$", row["does"]) for row in rows.values())
    shown = cli("list", "attacks").out
    heads = [shown.index(f"Attacks on the {what}") for what in ("gradient of", "update of", "features of")]
    assert heads == sorted(heads)
    assert shown.index("\n  april ") < heads[1] < shown.index("\n  qkv-span ") < heads[2]
    assert heads[2] < shown.index("\n  pe-assignment ")
    assert max(map(len, shown.splitlines())) <= 80
    assert "".join(rows["april"]["does"].split()) in "".join(shown.split())


def test_defenses_are_listed_with_their_options(cli: Callable[..., Any]) -> None:
    rows = {row["name"]: row for row in json.loads(cli("list", "defenses", "--json").out)}
    assert rows["mjp"]["options"] == "gamma=0.27, per='batch', masked_pe='unknown'"
    assert "Alg. 1 and 2" in rows["mjp"]["paper"]


def test_metrics_are_listed_with_the_leaky_direction(cli: Callable[..., Any]) -> None:
    rows = {row["name"]: row for row in json.loads(cli("list", "metrics", "--json").out)}
    assert rows["psnr"]["leaks"].startswith("↑")
    assert rows["mse"]["leaks"].startswith("↓")


def test_the_zoo_comes_with_privlab(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row["name"]: row for row in json.loads(cli("list", "victims", "--json").out)}
    for name, entry in ZOO.items():
        assert rows[name]["variant"] == f"trained, comes with privlab: {entry.about}"
        assert rows[name]["timm"] == entry.architecture
    assert "another package" not in cli("list", "victims").out
    told = {row["what"]: row for row in json.loads(cli("doctor", "--json").out)}
    assert (told["zoo victims"]["state"], told["zoo predictors"]["state"]) == ("ok", "ok")
    assert told["zoo victims"]["found"] == f"come with privlab: {', '.join(ZOO)}"
    assert not [name for name in told if name in ("weights cifar_vit", "weights tiny_vit")]
    monkeypatch.setattr(
        "privlab.inventory.doctor.shipped_file", lambda name: None if name == "tiny_mp3" else Path(name)
    )
    told = {row["what"]: row for row in json.loads(cli("doctor", "--json").out)}
    assert (told["zoo victims"]["state"], told["zoo predictors"]["state"]) == ("ok", "optional")
    assert told["zoo predictors"]["found"] == "only in a clone of privlab: tiny_mp3"


def test_doctor_says_what_is_missing_for_which_feature(cli: Callable[..., Any]) -> None:
    told = cli("doctor", "--json")
    assert told.status == 0
    rows = {row["what"]: row for row in json.loads(told.out)}
    assert all(set(row) == {"what", "state", "found", "needed for"} for row in rows.values())
    assert rows["privlab"] == {"what": "privlab", "state": "ok", "found": __version__, "needed for": "everything"}
    assert rows["torch"]["state"] == "ok"
    assert {"gpu", "threads", "disk"} <= set(rows)
    assert rows["weights deit_s"]["state"] == "optional"  # the tests have empty caches
    assert "not in the cache" in rows["weights deit_s"]["found"]
    assert "--weights pretrained with deit_s, deit_s_mjp" in rows["weights deit_s"]["needed for"]
    assert rows["lpips alex"]["state"] == "optional"
    assert "--lpips-weights PATH" in rows["lpips alex"]["found"]
    assert rows["lpips alex"]["needed for"] == "the metric lpips_alex; without it lpips is by squeeze"
    assert rows["lpips squeeze"]["state"] == "ok"
    assert rows["lpips squeeze"]["found"] == f"comes with privlab: {find_backbone('squeeze')}"
    shown = cli("doctor")
    assert shown.status == 0
    assert shown.out.startswith("privlab can run here. Optional, and not here: ")
    assert "missing" not in shown.out
    assert all(f" {what} " in shown.out for what in rows)


def test_doctor_begins_with_what_is_missing(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privlab.inventory.doctor.versions", lambda: {"privlab": "1", "torch": None, "lpips": None})
    shown = cli("doctor")
    assert shown.out.startswith("privlab cannot run here without torch. Optional, and not here: lpips")
    rows = {row["what"]: row["state"] for row in json.loads(cli("doctor", "--json").out)}
    assert (rows["torch"], rows["lpips"]) == ("missing", "optional")


def test_doctor_has_a_line_for_each_extra(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(package: str) -> str | None:
        return None if package in ("filelock", "cryptography") else "7.0"

    monkeypatch.setattr("privlab.inventory.doctor.version_of", lacking)
    rows = {row["what"]: row for row in json.loads(cli("doctor", "--json").out)}
    extras = {name.removeprefix("extra ") for name in rows if name.startswith("extra ")}
    assert extras == set(metadata("privlab").get_all("Provides-Extra") or ()) - {"all"}
    assert rows["extra datasets"] == {
        **{"what": "extra datasets", "state": "ok"},
        **{"found": "datasets 7.0", "needed for": "--images hf:NAME"},
    }
    assert rows["extra split"]["state"] == "optional"
    assert rows["extra split"]["found"] == "no cryptography, filelock: pip install 'privlab[split]'"


def test_doctor_finds_backbones_in_a_folder(cli: Callable[..., Any], tmp_path: Any) -> None:
    (tmp_path / "vgg16.pth").touch()
    rows = {row["what"]: row for row in json.loads(cli("doctor", "--json", "--lpips-weights", tmp_path).out)}
    assert rows["lpips vgg"]["found"] == str(tmp_path / "vgg16.pth")
    assert rows["lpips squeeze"]["found"].startswith("comes with privlab: ")
    assert rows["lpips alex"]["state"] == "optional"


def test_doctor_sees_no_gpu_where_none_is(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    rows = {row["what"]: row for row in json.loads(cli("doctor", "--json").out)}
    assert (rows["gpu"]["state"], rows["gpu"]["found"]) == ("optional", "torch sees no CUDA device")


@pytest.mark.parametrize("command", [(), ("attack",), ("list",), ("doctor",), ("bench",)])
def test_every_command_has_help(cli: Callable[..., Any], command: tuple[str, ...]) -> None:
    for option in ("-h", "--help"):
        done = cli(*command, option)
        assert (done.status, done.err) == (0, "")
        assert f"Usage: privlab {' '.join(command)}" in done.out
    assert "--debug" in done.out
    assert not command or "--json" in done.out


def commands(group: click.Group = command_line, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command and every group of them."""
    yield above
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*above, name))
        else:
            yield (*above, name)


@pytest.mark.parametrize("words", [*commands()], ids=" ".join)
def test_help_has_whole_sentences(cli: Callable[..., Any], words: tuple[str, ...]) -> None:
    """What a command does is one sentence, which begins with its verb, here and in the list of its group."""
    command: click.Command = command_line
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    first = " ".join((command.help or "").split("\n\n")[0].split())
    assert re.findall(r"\.(?=\s|$)", first) == ["."]
    assert first.endswith(".")
    assert len(first) <= 120
    assert re.match(rf"({VERBS})[ ,]", first)
    for shown in [words, words[:-1]] if words else [words]:
        assert "".join(first.split()) in "".join(cli(*shown, "--help").out.split())


def test_the_help_of_privlab_fits_a_small_terminal(cli: Callable[..., Any]) -> None:
    lines = cli("--help").out.splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80


def test_privlab_alone_shows_what_to_start_with(cli: Callable[..., Any]) -> None:
    told = cli()
    assert (told.status, told.err) == (0, "")
    started = re.findall(r"^  privlab (\w+)", told.out, re.MULTILINE)
    assert started == ["attack", "audit", "table", "list", "explain"]
    assert max(map(len, told.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "titles"),
    [
        ("attack", "Victim, Data, Release and client, Defense, Adversary, Scores, Output, Execution"),
        ("table", "Experiment, Victim, Data, Adversary, Scores, Output, Execution"),
        ("audit update", "Victim, Release and client, Defense, Adversary, Scores, Output, Execution"),
        ("audit gradients", "Victim, Defense, Adversary, Scores, Output, Execution"),
        ("audit features", "Victim, Data, Defense, Adversary, Output, Execution"),
        ("audit weights", "Victim, Data, Output, Execution"),
    ],
)
def test_options_are_shown_in_titled_groups(cli: Callable[..., Any], words: str, titles: str) -> None:
    shown = cli(*words.split(), "--help").out.partition("\nExamples:")[0]
    found = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
    assert [title for title in found if title != "Positional arguments"] == [*titles.split(", "), "Other options"]
    assert ("--reference IMAGE" in shown) == (words in ("audit update", "audit gradients"))
    assert max(map(len, shown.splitlines())) <= 80


def test_version(cli: Callable[..., Any]) -> None:
    assert cli("--version").out == f"{__version__}\n"
