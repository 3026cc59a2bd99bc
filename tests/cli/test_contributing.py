"""CONTRIBUTING.md is true: its attack runs and passes its own test, its tasks exist, its dependencies are locked."""

import ast
import itertools
import re
import sys
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
from privlab.cli import _status
from privlab.victims import VictimModel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]  # of Python 3.10

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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_its_name_is_all_that_the_attack_needs(
    load: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(ATTACKS, "bias-ratio", load()["BiasRatio"])
    run = tmp_path / "run"
    arguments = "attack --model vit_ti --img-size 32 --weights random --limit 2 --metrics psnr --attack bias-ratio"
    assert _status([*arguments.split(), "--out", str(run)]) == 0
    records = pd.read_parquet(run / "records")
    ours = records[records.attack == "bias-ratio"]
    assert set(ours.status) == {"ok"}
    assert set(ours.beyond_range) == {"N = 4 > 1"}
    capsys.readouterr()
    assert _status(["list", "attacks"]) == 0
    assert "bias-ratio" in capsys.readouterr().out


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


def test_the_lock_file_has_a_version_for_every_dependency_and_names_no_host() -> None:
    """Run the command in its second line where this fails."""
    assert "://" not in LOCK
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    locked = {}
    for pin in map(Requirement, lines):
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
