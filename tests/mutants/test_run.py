"""The runner of mutants: what survives, or cannot be tried, is an error; the working tree stays as it is."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"
SUM = '[[fault]]\nname = "{}"\nfile = "{}"\ntext = "{}"\nreplacement = "{}"\ntests = ["{}"]\n'
SEEN = SUM.format("difference", "rooms/room.py", "a + b", "a - b", "tests/test_sum.py")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository whose package `house.rooms` lies in another folder, with one test that tells + from −."""
    files = {
        "house/__init__.py": "HEIGHT = 3\n",
        "rooms/__init__.py": "",
        "rooms/room.py": "def add(a, b):\n    return a + b\n\n\ndef half(a):\n    return a / 2\n",
        "tests/test_sum.py": "from house.rooms.room import add\n\n\ndef test_sum():\n    assert add(1, 2) == 3\n",
        "tests/test_red.py": "def test_red():\n    assert False\n",
        "tests/mutants/faults.toml": SEEN,
        "pyproject.toml": '[tool.setuptools.package-dir]\nhouse = "house"\n"house.rooms" = "rooms"\n',
    }
    for name, text in files.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "repository"


def ran(repository: Path, *arguments: str, faults: str | None = None) -> tuple[int, str]:
    """Return the exit status of the runner and what it printed."""
    if faults is not None:
        (repository / "tests/mutants/faults.toml").write_text(faults, encoding="utf-8")
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    command = [sys.executable, str(RUN), "--root", str(repository), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()} == before
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_only_what_an_assertion_sees_is_killed(repository: Path) -> None:
    said_of = {
        ("a / 2", "a / 3"): "survived",
        ("a * b", "a / b"): "error: its text must stand once in rooms/room.py. Found it 0 times",
        ("return", "yield"): "error: its text must stand once in rooms/room.py. Found it 2 times",
        ("def add", "def sum"): "error: its tests fail, but not by an assertion: ImportError: cannot import name 'add'",
        ("a + b", "a + c"): "error: its tests fail, but not by an assertion: NameError: name 'c' is not defined",
        ("a + b", "a +"): "error: its tests fail, but not by an assertion: ",
    }
    others = [SUM.format(f"{a} to {b}", "rooms/room.py", a, b, "tests/test_sum.py") for a, b in said_of]
    nowhere = SUM.format("nowhere", "rooms/hall.py", "a", "b", "tests/test_sum.py")
    status, said = ran(repository, faults=SEEN + "".join(others) + nowhere)
    assert status == 1
    lines = [re.sub(r" +[0-9.]+ s", "", re.sub("  +", "  ", line)) for line in said.splitlines()]
    assert lines[:2] == ["without any fault  pass", "difference  killed"]
    for line, ((a, b), fate) in zip(lines[2:-1], said_of.items(), strict=True):
        assert line.startswith(f"{a} to {b}  {fate}")
    assert lines[-1] == "nowhere  error: there is no file rooms/hall.py"


@pytest.mark.slow
def test_where_each_fault_is_seen_all_is_well(repository: Path) -> None:
    status, said = ran(repository)
    assert status == 0
    assert [line.split()[-3] for line in said.splitlines()] == ["pass", "killed"]


def test_tests_must_pass_without_the_fault(repository: Path) -> None:
    status, said = ran(repository, faults=SEEN.replace("test_sum.py", "test_red.py"))
    assert status == 1
    assert "error: without any fault the tests must pass" in said
    assert "killed" not in said


def test_tests_that_take_too_long_without_a_fault_are_one_line(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("mutants_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants_run", run)
    spec.loader.exec_module(run)
    monkeypatch.setattr(run, "TIMEOUT", 0.0)
    assert not run.run(repository, run.read_faults(repository / "tests" / "mutants"))
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "error: without any fault the tests must pass: its tests ran for more than 0.0 s"


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (SEEN.replace("text", "texts"), "Check ['text', 'texts']."),
        (SEEN.replace("[[fault]]", "[[faults]]"), "a list of [[fault]] is wanted"),
        (SEEN.replace('["tests/test_sum.py"]', '"tests/test_sum.py"'), "tests must be a list"),
        (SEEN.replace('["tests/test_sum.py"]', "[]"), "name the tests that must fail"),
        (SEEN.replace("a - b", "a + b"), "it must change some text"),
        (SEEN * 2, "Found 'difference' twice"),
        ("fault = []", "There is no fault to try."),
    ],
)
def test_a_misstated_list_is_a_mistake(repository: Path, faults: str, reason: str) -> None:
    status, said = ran(repository, faults=faults)
    assert status == 2
    assert reason in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["sum"], "There is no fault 'sum'"),
        (["--sample", "0"], "--sample takes a positive number"),
        (["--sample", "1", "difference"], "no names beside it"),
    ],
)
def test_what_is_asked_for_must_be_there(repository: Path, arguments: list[str], reason: str) -> None:
    status, said = ran(repository, *arguments)
    assert status == 2
    assert reason in said


def test_a_sample_is_the_same_for_a_seed_and_leaves_out_slow_ones(repository: Path) -> None:
    names = [f"fault{i}" for i in range(20)]
    faults = "".join(
        SEEN.replace("difference", name) + ("slow = true\n" if i < 5 else "") for i, name in enumerate(names)
    )
    lists = [ran(repository, "--list", "--sample", "4", "--seed", seed, faults=faults)[1] for seed in ("0", "0", "1")]
    assert lists[0] == lists[1] != lists[2]
    drawn = {line.split(":")[0] for said in lists for line in said.splitlines()}
    assert drawn <= set(names[5:])
    assert len(lists[0].splitlines()) == 4
    assert len(ran(repository, "--list", "--sample", "99")[1].splitlines()) == 15
    assert "fault0 (slow): rooms/room.py" in ran(repository, "--list", "fault0")[1]


def test_every_fault_of_this_repository_can_be_put_in() -> None:
    """Text that was edited away would leave a fault untried until somebody runs them all."""
    done = subprocess.run([sys.executable, str(RUN), "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_room_may_be_called_as_a_folder_of_outputs(repository: Path) -> None:
    """`runs` at the root holds what commands wrote; `house/runs` is code."""
    for folder in (repository / "house" / "runs", repository / "runs"):
        folder.mkdir()
        (folder / "__init__.py").write_text("def add(a, b):\n    return a + b\n", encoding="utf-8")
    test = "from house.runs import add\n\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
    (repository / "tests/test_sum.py").write_text(test, encoding="utf-8")
    inside, outside = (
        SUM.format(name, f"{name}/__init__.py", "a + b", "a - b", "tests/test_sum.py")
        for name in ("house/runs", "runs")
    )
    status, said = ran(repository, faults=inside)
    assert (status, "killed" in said) == (0, True), said
    status, said = ran(repository, faults=outside)
    assert (status, "there is no file runs/__init__.py" in said) == (1, True), said
