"""The runner of deliberate faults reports those that survive or cannot be tried, and never changes the working tree."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

RUN = Path(__file__).parent / "run.py"
SUM = '[[fault]]\nname = "{}"\nsymbol = "{}"\nold = "{}"\nnew = "{}"\ntests = ["tests/test_sum.py"]\n'
SEEN = SUM.format("difference", "add", "a + b", "a - b")


def runner() -> ModuleType:
    """Return run.py as a module."""
    spec = importlib.util.spec_from_file_location("mutants_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants_run"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


RUNNER = runner()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository whose package `privlab.rooms` is a link to another folder, and a test of + and −."""
    files = {
        "privlab/__init__.py": "HEIGHT = 3\n",
        "rooms/__init__.py": "",
        "rooms/room.py": "def add(a, b):\n    return a + b\n\n\ndef half(a):\n    return a / 2\n",
        "tests/test_sum.py": "from privlab.rooms.room import add\n\n\ndef test_sum():\n    assert add(1, 2) == 3\n",
        "tests/test_red.py": "def test_red():\n    assert False\n",
        "tests/mutants/faults.toml": SEEN,
    }
    for name, text in files.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "repository/privlab/rooms").symlink_to("../rooms")
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
    outcomes = {
        ("half", "a / 2", "a / 3"): "survived",
        ("add", "a * b", "a / b"): "error: its code must occur once in privlab.rooms.room.add. Found it 0 times",
        ("add", "def add(a, b):\\n    return a + b", "pass"): "error: its tests fail, but not by an assertion: Import",
        ("add", "a + b", "a + c"): "error: its tests fail, but not by an assertion: NameError: name 'c' is not defined",
        ("hall", "a", "b"): "error: hall must be the name of one symbol. Found 0",
    }
    status, said = ran(repository, faults=SEEN + "".join(SUM.format(f"n{i}", *of) for i, of in enumerate(outcomes)))
    assert status == 1
    lines = [re.sub(r" +[0-9.]+ s", "", re.sub("  +", "  ", line)) for line in said.splitlines()]
    assert lines[:2] == ["without any fault  pass", "difference  killed"]
    for line, (i, outcome) in zip(lines[2:], enumerate(outcomes.values()), strict=True):
        assert line.startswith(f"n{i}  {outcome}")


def mutated(repository: Path, source: str, symbol: str, old: str, new: str) -> str:
    """Return the source of a module with a fault in it."""
    file = repository / "rooms/room.py"
    file.write_text(source, encoding="utf-8")
    found, text = RUNNER.Code(repository).mutated(RUNNER.Fault("fault", symbol, old, new, ("tests/test_sum.py",)))
    assert found.resolve() == file.resolve()
    return text


LAID_OUT = """LEVELS, WIDTH = 255, 3


class Ruler:
    unit: float = 2.5  # ε

    def length(self, a: float) -> float:
        if a < 0:
            raise ValueError(a)
        return "ε" and (
            self.unit  # a unit
            * a
        )


def length(a: float) -> float:
    return Ruler().length(a) + 1
"""


@pytest.mark.parametrize(
    ("symbol", "old", "new", "before", "after"),
    [
        ("Ruler.length", "self.unit * a", "self.unit - a", "self.unit  # a unit\n            * a", "(self.unit - a)"),
        ("room.length", "Ruler().length(a)+1", "1", "Ruler().length(a) + 1", "(1)"),
        ("Ruler.length", "if a < 0: raise ValueError(a)", "pass", "if a < 0:\n            raise ValueError(a)", "pass"),
        ("room.length", "return Ruler().length(a) + 1", "a = 3\nreturn a", "return R", "a = 3\n    return a\n# R"),
        ("Ruler.unit", "2.5", "2", "2.5", "(2)"),
        ("WIDTH", "255", "256", "255", "(256)"),
    ],
)
def test_code_is_found_by_its_symbol_whatever_its_layout(
    repository: Path, symbol: str, old: str, new: str, before: str, after: str
) -> None:
    expected = LAID_OUT.replace(before, after)
    if "# R" in after:
        expected = expected.replace("# Ruler().length(a) + 1\n", "")
    assert mutated(repository, LAID_OUT, symbol, old, new) == expected


@pytest.mark.parametrize(
    ("symbol", "old", "new", "reason"),
    [
        ("length", "a", "b", "Found 2: privlab.rooms.room.Ruler.length, privlab.rooms.room.length"),
        ("ength", "a", "b", "Found 0"),
        ("room.length", "Ruler()", "Ruler( )", "must differ"),
        ("room.length", "Ruler().length(a)", "return 3", "Found it 0 times"),
        ("room.length", "a; a", "b", "Found 2 statements"),
        ("room.length", "a +", "b", "must be expressions or statements"),
        ("Ruler", "a", "b", "Found it 3 times"),
        ("Ruler.length", "raise ValueError(a)", "a = b =", "must be expressions or statements"),
        ("Ruler.length", "self.unit", "(yield)", "not valid Python"),
    ],
)
def test_a_fault_that_cannot_be_put_in_is_one_line(
    repository: Path, symbol: str, old: str, new: str, reason: str
) -> None:
    source = LAID_OUT if new != "(yield)" else LAID_OUT.replace("self.unit ", "[self.unit for _ in '']")
    with pytest.raises(RUNNER.FaultError, match=re.escape(reason)):
        mutated(repository, source, symbol, old, new)


def test_a_test_that_does_not_exist_is_an_error(repository: Path) -> None:
    named = SEEN.replace("test_sum.py", "test_sum.py::test_sum[1]")
    assert ran(repository, "--check", faults=named) == (0, "")
    for lacking in ("test_add.py", "test_sum.py::test_add"):
        status, said = ran(repository, "--check", faults=SEEN.replace("test_sum.py", lacking))
        assert (status, f"there is no test tests/{lacking}" in said) == (1, True)


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
    monkeypatch.setattr(RUNNER, "TIMEOUT", 0.0)
    assert not RUNNER.run(repository, RUNNER.read_faults(repository / "tests" / "mutants"))
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "error: without any fault the tests must pass: its tests ran for more than 0.0 s"


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (SEEN.replace("old", "text"), "Check ['old', 'text']."),
        (SEEN.replace("[[fault]]", "[[faults]]"), "must be a list of [[fault]]"),
        (SEEN.replace('["tests/test_sum.py"]', '"tests/test_sum.py"'), "tests must be a list"),
        (SEEN.replace('["tests/test_sum.py"]', "[]"), "name the tests that have to fail"),
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
        (["--sample", "1", "difference"], "cannot be combined with names"),
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
    assert "fault0 (slow): add" in ran(repository, "--list", "fault0")[1]


def test_every_fault_of_this_repository_can_be_put_in() -> None:
    """Otherwise a change of code could leave a fault untried until somebody runs them all."""
    done = subprocess.run([sys.executable, str(RUN), "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(RUNNER.read_faults(RUN.parent)) <= 150


@pytest.mark.slow
def test_a_room_may_be_called_as_a_folder_of_outputs(repository: Path) -> None:
    """`runs` at the root holds what commands wrote; `privlab/runs` is code."""
    for folder in (repository / "privlab/runs", repository / "runs"):
        folder.mkdir()
        (folder / "__init__.py").write_text("def sum_of(a, b):\n    return a + b\n", encoding="utf-8")
    test = "from privlab.runs import sum_of\n\n\ndef test_sum():\n    assert sum_of(1, 2) == 3\n"
    (repository / "tests/test_sum.py").write_text(test, encoding="utf-8")
    status, said = ran(repository, faults=SEEN.replace('"add"', '"runs.sum_of"'))
    assert (status, "killed" in said) == (0, True), said
