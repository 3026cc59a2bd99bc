"""`privlab admit`: one line for each check, exit status 1 where one fails, and mistakes in one line."""

import json
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from privlab.base import plugins as registry

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "plugins.md").read_text(encoding="utf-8")
COMMON = ["contents", "gradients", "effect", "same-draw", "neighbours", "random-state", "untouched", "control"]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Install the docs' defense, changed as it is told, as another package would."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class PixelNoise" in code]

    def install(module: str, *changes: str) -> None:
        changed = code
        for before, after in zip(changes[::2], changes[1::2], strict=True):
            assert before in changed
            changed = changed.replace(before, after)
        (tmp_path / f"{module}.py").write_text(changed, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        point = EntryPoint("pixel-noise", f"{module}:PixelNoise", "privlab.defenses")
        monkeypatch.setattr(registry, "installed_plugins", lambda group: [point] if group == point.group else [])

    return install


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        (("mjp", "--gamma", "0.5", "--set", "masked_pe=none"), {"acts-as", "order"}),
        (("row-permutation",), {"acts-as", "rows"}),
        (("gradient-noise", "--set", "multiplier=1e-4"), {"acts-as", "variance", "overstated"}),
    ],
)
def test_every_check_has_a_line(cli: Callable[..., Any], arguments: tuple[str, ...], own: set[str]) -> None:
    told = cli("admit", *arguments, "--depth", "1", "--json")
    assert (told.status, told.err) == (0, "")
    checks = {check["name"]: check for check in json.loads(told.out)}
    assert set(checks) == own | set(COMMON)
    for check in checks.values():
        assert set(check) == {"name", "passed", "value", "limit", "text", "bound"}
        assert check["passed"] is True
    assert checks["control"]["bound"] == "≥"


def test_the_defense_of_the_docs_is_admitted(cli: Callable[..., Any], package: Callable[..., None]) -> None:
    package("honest")
    told = cli("admit", "pixel-noise", "--set", "std=0.05", "--depth", "1")
    assert (told.status, told.err) == (0, "")
    assert all(f" {name} " in told.out for name in [*COMMON, "order"])
    assert "pass" in told.out
    assert "FAIL" not in told.out


@pytest.mark.slow
def test_a_check_that_fails_is_shown_and_is_the_exit_status(
    cli: Callable[..., Any], package: Callable[..., None]
) -> None:
    package("global_noise", ", generator=draw", "")
    told = cli("admit", "pixel-noise", "--depth", "1")
    assert (told.status, told.err) == (1, "")
    lines = [line for line in told.out.splitlines() if "FAIL" in line]
    assert any("random-state" in line and "torch" in line for line in lines)
    told = cli("admit", "pixel-noise", "--depth", "1", "--json")
    assert told.status == 1
    failed = {check["name"] for check in json.loads(told.out) if not check["passed"]}
    assert failed == {"random-state", "same-draw", "neighbours"}


def test_what_mixes_says_so(cli: Callable[..., Any]) -> None:
    told = cli("admit", "cutmix", "--depth", "1", "--json")
    (check,) = [check for check in json.loads(told.out) if check["name"] == "neighbours"]
    assert (told.status, check["limit"]) == (0, "Infinity")
    assert check["value"] > 0.1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mpj",), "Unknown defense, attack or metric 'mpj'. Did you mean mjp"),
        (("mjp+blur",), "one at a time. Found 'mjp+blur'"),
        ((), "Missing argument 'NAME'"),
        (("blur", "--set", "sigmo=1"), "Did you mean sigma"),
        (("blur", "--set", "sigma=wide"), "must be of type float. Found 'wide'"),
        (("jigsaw", "--gamma", "2"), "must be in [0, 1]. Found 2.0"),
        (("none", "--model", "vit_tiny"), "Unknown model 'vit_tiny'. Did you mean"),
        (("none", "--img-size", "50"), "50"),
        (("mjp", "--model", "vit_ti"), "Use a `_mjp` victim"),
    ],
)
def test_mistakes(cli: Callable[..., Any], arguments: tuple[str, ...], said: str) -> None:
    assert said in cli("admit", *arguments).error


def test_a_defense_that_breaks_is_told_in_one_line(cli: Callable[..., Any], package: Callable[..., None]) -> None:
    package("broken", "self.std * noise", "self.deviation * noise")
    assert cli("admit", "pixel-noise").error.startswith("Defense 'pixel-noise' does not run: AttributeError: ")


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_an_attack_on_a_defense_of_ones_own_ends_with_the_line_that_admits_it(
    cli: Callable[..., Any], package: Callable[..., None], tmp_path: Path, as_json: bool
) -> None:
    package(f"own_{as_json}")
    tiny = ("--model", "vit_ti", "--weights", "random", "--img-size", "32", "--no-strips", "--limit", "1")
    run = ("--metrics", "psnr", "--attack", "patch-gradient", "--out", tmp_path / "run", "--overwrite")
    told = cli("attack", *tiny, *run, "--defense", "pixel-noise", "--set", "std=0.05", *["--json"] * as_json)
    assert told.status == 0
    line = "privlab admit pixel-noise --set std=0.05"
    if as_json:
        assert json.loads(told.out)["admit"] == [line]
    else:
        assert told.out.splitlines()[-1].endswith(line)
    assert cli(*line.split()[1:], "--depth", "1").status == 0
    ours = cli("attack", *tiny, *run, "--defense", "jigsaw")
    assert "privlab admit" not in ours.out
