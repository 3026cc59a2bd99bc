"""Check what concerns privlab in one piece: `contracts` (import-linter), or `types` (pyright) of files, or of all.

In the repository three of privlab's rooms lie beside it, where neither tool finds them. So both are given a copy of the
source as it is installed. It is run in the repository's root.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BESIDE = ("attacks", "defenses", "experiments")
"""Packages of privlab that lie beside it in the repository."""


def build(root: Path, house: Path) -> None:
    """Copy the source into one piece."""
    only_source = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.png", "*.svg")
    shutil.copytree(root / "privlab", house / "privlab", ignore=only_source)
    for name in BESIDE:
        shutil.copytree(root / name, house / "privlab" / name, ignore=only_source)
    shutil.copy(root / "pyproject.toml", house)


def contracts(house: Path) -> int:
    """Return the exit status of import-linter."""
    command = (sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()")
    options = ("--config", "pyproject.toml", "--no-cache")
    return subprocess.run([*command, *options], cwd=house, check=False).returncode


def types(house: Path, root: Path, files: Sequence[str]) -> int:
    """Return the exit status of pyright, and name the files as they lie in the repository."""
    if any(Path(file).parts[0] == "tests" for file in files):
        shutil.copytree(root / "tests", house / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    inside = [str(Path("privlab", file) if Path(file).parts[0] in BESIDE else file) for file in files]
    command = (sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *(inside or ["privlab"]))
    done = subprocess.run(command, cwd=house, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    for name in BESIDE:
        said = said.replace(str(house / "privlab" / name), str(root / name))
    print(said.replace(str(house), str(root)), end="")
    return done.returncode


def main(task: str = "", *files: str) -> int:
    """Return the exit status of a task."""
    if task not in ("contracts", "types"):
        sys.exit(f"The task must be contracts or types. Found '{task}'.")
    root = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        house = Path(folder).resolve()
        build(root, house)
        return types(house, root, files) if task == "types" else contracts(house)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
