"""`privlab bench startup`: processor time of processes, as the ratios that it says; none that fails early counts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privlab.base import PrivlabError
from privlab.benchmarks import startup
from privlab.benchmarks.common import Process
from privlab.victims import weights

SPIN = "import time\nwhile time.process_time() < 0.4: pass"


@pytest.mark.slow
def test_the_time_is_the_processors_and_that_of_this_process_alone(tmp_path: Path) -> None:
    assert Process(SPIN).seconds(tmp_path) >= 0.4
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}], check=True)"
    assert Process(below).seconds(tmp_path) >= 0.4
    assert Process("import time; time.sleep(1.5)").seconds(tmp_path) < 1.5


def test_it_runs_away_from_the_folder_that_it_is_called_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout in the working directory would be measured in place of what is installed."""
    (tmp_path / "called").mkdir()
    monkeypatch.chdir(tmp_path / "called")
    Process("import os; print(os.listdir())", said="['called']").seconds(tmp_path)


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (Process("raise ImportError('no torch')"), "must end with status 0. Found 1: ImportError: no torch"),
        (Process("print('hello')", status=2), "'print('hello')' must end with status 2. Found 0: nothing said"),
        (Process("print('hello')", said="goodbye"), "must end with status 0. Found 0: nothing said"),
        (
            Process("raise SystemExit(3)", ("attack",)),
            "'privlab attack' must end with status 0. Found 3: nothing said",
        ),
    ],
)
def test_a_process_that_ends_otherwise_is_not_measured(tmp_path: Path, process: Process, message: str) -> None:
    with pytest.raises(PrivlabError) as refused:
        process.seconds(tmp_path)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", [startup._HELP, startup._WRONG])
def test_the_commands_end_as_they_must(tmp_path: Path, name: str) -> None:
    assert startup._processes(tmp_path / "empty.safetensors")[name].seconds(tmp_path) > 0


def test_the_start_of_an_attack_ends_where_its_victim_is_built(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checks of the specification are behind it, and nothing is run or written."""
    monkeypatch.chdir(tmp_path)
    empty = tmp_path / "empty.safetensors"
    empty.touch()
    built: list[Path] = []
    read = weights.read_state
    monkeypatch.setattr(weights, "read_state", lambda path: (built.append(path), read(path))[1])
    process = startup._processes(empty)[startup._START]
    assert process.said in cli(*process.arguments).error
    assert built == [empty]
    assert [*tmp_path.iterdir()] == [empty]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what tells the processes apart, in the order in which they are measured, each for a time of its own."""
    ran: list[str] = []
    seconds = {"import torch": 2.0, "import torch, timm": 5.0, "--help": 0.1, "nope": 0.3, "deit_s_mjp": 6.0}
    rounds = (number for number in (9, 1, 2, 3) for _ in seconds)  # the first one warms up

    def measure(process: Process, folder: Path) -> float:
        assert (folder / "empty.safetensors").read_bytes() == b""
        ran.append(next(name for name in (*process.arguments[:5][::-1], process.code) if name in seconds))
        return next(rounds) * seconds[ran[-1]]

    monkeypatch.setattr(Process, "seconds", measure)
    return ran


def test_json_holds_the_ratios_of_the_medians_of_rounds_that_count(cli: Callable[..., Any], timed: list[str]) -> None:
    result = json.loads(cli("bench", "startup", "--repeats", 3, "--json").out)
    assert timed == ["import torch", "import torch, timm", "--help", "nope", "deit_s_mjp"] * 4
    ratios = {
        "help_over_import_torch": 0.1 / 2,
        "wrong_name_over_import_torch": 0.3 / 2,
        "attack_start_over_import_torch_timm": 6 / 5,
    }
    assert {name: result[name] for name in ratios} == pytest.approx(ratios)
    assert result["targets"] == dict(zip(ratios, ("≤ 0.15", "≤ 0.2", "≤ 1.3"), strict=True))
    assert [*result["seconds_per_start"].values()] == pytest.approx([4, 10, 0.2, 0.6, 12])
    assert [*result["starts_per_second"].values()] == pytest.approx([1 / 4, 1 / 10, 5, 1 / 0.6, 1 / 12])
    assert result["setup"]["repeats"] == 3
    assert result["setup"]["hardware"]["device"] == "cpu"


def test_the_table_shows_them(cli: Callable[..., Any], timed: list[str]) -> None:
    told = cli("bench", "startup", "--repeats", 1)
    for word in ("help_over_import_torch", "0.05 ", "≤ 0.15", "ms per start", "starts per second", "100.00"):
        assert word in told.out


@pytest.mark.parametrize("option", ["--device", "--model", "--images"])
def test_it_takes_no_options_of_other_benches(cli: Callable[..., Any], option: str) -> None:
    error = cli("bench", "startup", option, "cpu").error
    assert error.startswith("No such option")
    assert option in error
