"""CONTRIBUTING.md is true: its attack runs and passes its own test, its tasks exist, its dependencies are locked."""

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch import Tensor

from privlab.attacks import ATTACKS
from privlab.base import parts_of
from privlab.victims import VictimModel

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ATTACK, TEST = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return what loads the attack as if its file were there, with one text replaced, and gives its module's names."""

    def loaded(text: str = "", replacement: str = "") -> dict[str, Any]:
        module = ModuleType("privlab.attacks.gradients.bias_ratio")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(ATTACK.replace(text, replacement) if text else ATTACK, vars(module))  # CONTRIBUTING's own code
        return vars(module)

    return loaded


def run_its_test(tiny_model: Callable[..., VictimModel], photographs: Callable[[int, int], Tensor]) -> None:
    """Run the test that CONTRIBUTING.md shows."""
    names: dict[str, Any] = {}
    exec(TEST, names)  # CONTRIBUTING's own code
    names["test_one_patch_is_exact_and_several_are_beyond_its_range"](tiny_model, photographs)


def test_the_attack_passes_its_own_test_and_its_fault_is_seen(
    load: Callable[..., dict[str, Any]],
    tiny_model: Callable[..., VictimModel],
    photographs: Callable[[int, int], Tensor],
) -> None:
    load()
    run_its_test(tiny_model, photographs)
    fault = "bias[image, channel - 1, None]"
    assert fault in TEXT
    load("bias[image, channel, None]", fault)
    with pytest.raises(AssertionError):
        run_its_test(tiny_model, photographs)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a copy of the tree with the attack: two files more, and one line."""
    only = shutil.ignore_patterns("__pycache__", "notes", "results", "generated", "_build", "mutants", "golden")
    for name in ("privlab", "attacks", "benchmarks", "defenses", "experiments", "tests", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=only)
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "attacks/gradients/bias_ratio.py").write_text(ATTACK, "utf-8")
    (tmp_path / "tests/attacks/test_bias_ratio.py").write_text(TEST, "utf-8")
    with (tmp_path / "CHANGELOG.md").open("a", encoding="utf-8") as file:
        file.write("- `bias-ratio` reads one patch from the gradients of the embedding.\n")
    return tmp_path


def python(clone: Path, *arguments: str) -> str:
    """Run Python on a copy of the tree, and return what it prints."""
    environment = os.environ | {"PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": "1"}
    command = (sys.executable, *arguments)
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_file_of_an_attack_is_found(clone: Path) -> None:
    found = {each.constants["name"]: each for each in parts_of("privlab.attacks", clone / "attacks")}
    assert found.keys() - ATTACKS.keys() >= {"bias-ratio"}
    assert found["bias-ratio"].place == "privlab.attacks.gradients.bias_ratio:BiasRatio"
    code = "import privlab.attacks, sys; print('bias-ratio' in privlab.attacks.ATTACKS, 'torch' in sys.modules)"
    assert python(clone, "-c", code) == "True False\n"


@pytest.mark.slow
def test_three_files_are_all_that_the_attack_needs(clone: Path) -> None:
    """It is listed, explained and run, and the tests that run over all attacks take it in."""
    run = "attack --model vit_ti --img-size 32 --weights random --limit 2 --metrics psnr --attack bias-ratio --json"
    commands = ["list attacks --json", "explain bias-ratio --json", f"{run} --out {clone / 'run'}"]
    listed, page, _ = map(json.loads, python(clone, "-c", RUN, *commands).split(END)[:-1])
    assert "bias-ratio" in {row["name"] for row in listed}
    assert {"The idea", "Algorithm", "Exact if", "Fails if", "Cost", "Source", "References"} <= set(page["sections"])
    assert len(page["flow"]) == 4
    records = pd.read_parquet(clone / "run/records")
    ours = records[records.attack == "bias-ratio"]
    assert set(ours.status) == {"ok"}
    assert set(ours.beyond_range) == {"N = 4 > 1"}
    chosen = f"({CHOSEN}) and not ceiling and not design_names"  # the copy has no pages
    said = python(clone, "-m", "pytest", "-q", "-p", "no:cacheprovider", *IN_ALL_ATTACKS, "-k", chosen)
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 12
    python(clone, ".ci/house.py", "stubs")
    assert "import BiasRatio as BiasRatio" in (clone / "attacks/__init__.pyi").read_text("utf-8")


END = "=== end ==="
RUN = f"import sys; from privlab.cli import _status; [(_status(each.split()), print('{END}')) for each in sys.argv[1:]]"
IN_ALL_ATTACKS = (
    *("tests/attacks/test_bias_ratio.py", "tests/cli/test_explain.py", "tests/guards/test_capabilities.py"),
    *("tests/guards/test_same_observation.py", "tests/devices/test_attacks.py", "tests/evaluation/test_names.py"),
    "tests/test_rooms.py",
)
CHOSEN = (
    "bias or everything_has or each_paper or tried or every_attack_but or keys_of or room or declare or contracts_hold"
)
"""Tests that run over all attacks, and those of them that a new one could break."""


def test_each_task_is_a_session_of_nox_and_there_is_no_other() -> None:
    body = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body
    sessions = {each.name for each in body if isinstance(each, ast.FunctionDef) and each.decorator_list}
    assert set(re.findall(r"`nox -s (\w+)", TEXT)) == sessions


def test_each_file_that_is_named_exists() -> None:
    named = set(re.findall(r"`((?:attacks|privlab|tests|experiments|\.ci)/[\w/]+(?:\.py)?)`", TEXT))
    example = {"attacks/gradients/bias_ratio.py", "tests/attacks/test_bias_ratio.py"}
    assert example < named
    assert [name for name in sorted(named - example) if not (ROOT / name).exists()] == []


def test_the_extra_for_tests_is_the_groups_for_tests_and_lint() -> None:
    groups = PROJECT["dependency-groups"]
    assert set(PROJECT["project"]["optional-dependencies"]["test"]) == {*groups["test"], *groups["lint"]}


def test_the_lock_file_has_a_version_and_hashes_for_every_dependency_and_names_no_host() -> None:
    """Run the command in its second line where this fails."""
    assert "://" not in LOCK
    locked: dict[str, list[str]] = {}
    for entry in re.sub(r"^#.*\n", "", LOCK, flags=re.MULTILINE).replace(" \\\n", " ").splitlines():
        text, *hashes = re.split(r"\s+--hash=", entry)
        assert hashes, entry
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes), entry
        pin = Requirement(text)
        ((version),) = [each.version for each in pin.specifier if each.operator == "=="]
        locked.setdefault(canonicalize_name(pin.name), []).append(version)
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    texts = itertools.chain(project["dependencies"], *project["optional-dependencies"].values(), *groups.values())
    wanted = [Requirement(text) for text in texts if isinstance(text, str) and not text.startswith("privlab[")]
    outside = [
        str(each)
        for each in wanted
        if not any(map(each.specifier.contains, locked.get(canonicalize_name(each.name), ())))
    ]
    assert (len(wanted) > 40, outside) == (True, [])
