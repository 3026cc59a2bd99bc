"""Check what concerns privlab in one piece: `contracts` (import-linter), or `types` (pyright) of files, or of all.

`size` counts the lines of the package and of its tests.

In the repository three of privlab's rooms lie beside it, where neither tool finds them. So both are given a copy of the
source as it is installed. It is run in the repository's root.
"""

import ast
import io
import shutil
import subprocess
import sys
import tempfile
import tokenize
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


def size(root: Path) -> int:
    """Print the lines of the package and of its tests: all, those of docstrings, and those with code."""
    for name, folders in (("package", ("privlab", *BESIDE)), ("tests", ("tests",))):
        texts = [file.read_text("utf-8") for folder in folders for file in sorted((root / folder).rglob("*.py"))]
        told, code = (sum(map(lines, texts)) for lines in (_docstring_lines, _code_lines))
        total = sum(text.count("\n") for text in texts)
        print(f"{name}: {len(texts)} files, {total} lines, of docstrings {told}, with code {code}")
    return 0


def _docstrings(text: str) -> set[int]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node.body[0] for node in ast.walk(ast.parse(text)) if isinstance(node, owners) and ast.get_docstring(node)]
    return {line for first in found for line in range(first.lineno, (first.end_lineno or first.lineno) + 1)}


def _docstring_lines(text: str) -> int:
    return len(_docstrings(text))


def _code_lines(text: str) -> int:
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = (token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in blank)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - _docstrings(text))


def main(task: str = "", *files: str) -> int:
    """Return the exit status of a task."""
    if task not in ("contracts", "types", "size"):
        sys.exit(f"The task must be contracts, types or size. Found '{task}'.")
    root = Path.cwd()
    if task == "size":
        return size(root)
    with tempfile.TemporaryDirectory() as folder:
        house = Path(folder).resolve()
        build(root, house)
        return types(house, root, files) if task == "types" else contracts(house)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
