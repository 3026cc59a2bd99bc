"""What the wheel and the sdist hold besides code: weights, tables, licences, each with the texts that it needs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from privlab.metrics.lpips_backbones import SHIPPED
from privlab.victims import PLACERS, ZOO

ROOT = Path(__file__).parents[1]
BACKBONES = Path("privlab/metrics/backbones")
LICENCES = {"LICENSE", "NOTICE", str(BACKBONES / "LICENSE.squeezenet")}

IN_CLONE = {"tiny_droppos.safetensors", "tiny_mp3.safetensors"}
"""Weights that a wheel leaves out: position predictors for a victim of which privlab has no weights either."""

LIST = """
import sys
from setuptools import Distribution
made = Distribution({"script_name": "setup.py"})
made.parse_config_files()
info = made.get_command_obj("egg_info")
info.egg_base = sys.argv[1]
made.run_command("egg_info")
build = made.get_command_obj("build_py")
build.ensure_finalized()
for _, folder, _, names in build.data_files:
    for name in names:
        print(f"{folder}/{name}")
"""
"""Writes the metadata into a folder, with the list of what an sdist holds, and prints the data files of a wheel."""


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str], str]:
    """Return the data files of a wheel, the files of an sdist, and the metadata, as setuptools finds them here."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("metadata")
    command = (sys.executable, "-c", LIST, str(folder))
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wheel = {line for line in printed.splitlines() if (ROOT / line).is_file()}
    (info,) = folder.glob("*.egg-info")
    return wheel, {*(info / "SOURCES.txt").read_text().splitlines()}, (info / "PKG-INFO").read_text()


def test_the_wheel_and_the_sdist_hold_the_weights_that_come_with_privlab(
    distribution: tuple[set[str], set[str], str],
) -> None:
    wheel, sdist, _ = distribution
    weights = {str(BACKBONES / name) for name, _ in SHIPPED.values()}
    weights |= {f"privlab/victims/zoo_weights/{name}.safetensors" for name in (*ZOO, *PLACERS)}
    assert {Path(name).name for name in weights - wheel} == IN_CLONE
    assert weights - sdist == weights - wheel


def test_the_licence_of_the_backbone_goes_where_it_goes(distribution: tuple[set[str], set[str], str]) -> None:
    wheel, sdist, metadata = distribution
    assert str(BACKBONES / "LICENSE.squeezenet") in wheel
    assert sdist >= LICENCES
    assert set(re.findall(r"^License-File: (.+)$", metadata, re.MULTILINE)) == LICENCES
    assert "License-Expression: MIT AND BSD-2-Clause AND BSD-3-Clause\n" in metadata
    text = (ROOT / BACKBONES / "LICENSE.squeezenet").read_text()
    for holder in ("Copyright (c) 2016 Forrest N. Iandola", "Copyright (c) Soumith Chintala 2016"):
        assert holder in text


def test_no_data_file_of_the_package_is_left_out(distribution: tuple[set[str], set[str], str]) -> None:
    wheel, _, _ = distribution
    files = (path.relative_to(ROOT) for path in (ROOT / "privlab").rglob("*") if path.is_file())
    there = {str(path) for path in files if path.suffix not in (".py", ".pyc") and path.name not in IN_CLONE}
    for linked in ("attacks", "defenses", "experiments"):
        there |= {f"privlab/{path.relative_to(ROOT)}" for path in (ROOT / linked).rglob("*.pyi")}
    assert there - wheel == set()


def test_the_sdist_holds_each_module_and_each_table_once(distribution: tuple[set[str], set[str], str]) -> None:
    """Those of attacks, defenses and experiments as parts of privlab, and not in their own folders too; no bench."""
    wheel, sdist, _ = distribution
    tops = {name.partition("/")[0] for name in sdist}
    assert not tops & {"attacks", "benchmarks", "defenses", "experiments"}
    assert not [name for name in wheel if name.startswith("privlab/benchmarks/")]
    for linked in ("attacks", "defenses", "experiments"):
        files = [*(ROOT / linked).rglob("*.py"), *(ROOT / linked).rglob("*.toml")]
        assert len(files) > 10
        assert {f"privlab/{path.relative_to(ROOT)}" for path in files} <= sdist
