"""Check the package in place: contracts between rooms, types of files, and the lines of each room.

`contracts` runs import-linter. `types` runs pyright on the named files, or on all. `size` compares the lines of Python
of each room with its ceiling in pyproject.toml; `size --lower` first lowers ceilings to what the rooms have reached.
`stubs` writes `attacks/__init__.pyi` and `defenses/__init__.pyi`, from which pyright knows the attacks and defenses.
It is run in the repository's root.
"""

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

LINKED = ("attacks", "benchmarks", "defenses", "experiments")
"""Packages of privlab to which privlab/ has links: tools that do not follow links find them at the root."""
WITHOUT_CEILING = {"benchmarks", "experiments"}

PARTS = ("attacks", "defenses")
"""Packages whose classes are found in their files (`privlab.base.parts_of`)."""


def contracts() -> int:
    """Return the exit status of import-linter."""
    command = "from importlinter.cli import lint_imports_command as run; run()"
    return subprocess.run([sys.executable, "-c", command, "--no-cache"], check=False).returncode


def types(files: Sequence[str]) -> int:
    """Return the exit status of pyright, which takes a file by its name in the package: by two it has two classes."""
    inside = [str(Path("privlab", file) if Path(file).parts[0] in LINKED else file) for file in files]
    command = (sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *(inside or ["privlab"]))
    return subprocess.run(command, check=False).returncode


def size(root: Path, lower: bool) -> int:
    """Print the lines of Python of each room with its ceiling and goal, and return 1 if a ceiling is exceeded.

    The table [tool.privlab.lines] of pyproject.toml has one entry for each room, or for rooms joined by " + ". A room
    that has not yet reached its goal must not grow: its ceiling is the least size that it has reached.

    Args:
        root: the repository.
        lower: whether to rewrite the ceilings of pyproject.toml first, never upwards.
    """
    settings = root / "pyproject.toml"
    budgets = tomllib.loads(settings.read_text("utf-8"))["tool"]["privlab"]["lines"]
    lines = lines_of_rooms(root)
    complaints = []
    totals = [0, 0, 0]
    for name, budget in budgets.items():
        count = sum(lines.pop(room, 0) for room in name.split(" + "))
        ceiling, goal = budget["ceiling"], budget["goal"]
        reached = max(count, goal)
        if reached < ceiling and lower:
            replace_ceiling(settings, name, ceiling, reached)
            ceiling = reached
        elif reached < ceiling:
            print(f"{name}: the ceiling can be lowered from {ceiling} to {reached} (size --lower)")
        if count > ceiling:
            complaints.append(f"{name}: {count} lines exceed the ceiling of {ceiling}.")
        print(f"{name:46}{count:7} lines, ceiling {ceiling:6}, goal {goal:6}")
        totals = [total + value for total, value in zip(totals, (count, ceiling, goal), strict=True)]
    print("{:46}{:7} lines, ceiling {:6}, goal {:6}".format("sum", *totals))
    complaints += [f"{room}: pyproject.toml states no ceiling for this room." for room in lines]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


def stubs(root: Path) -> int:
    """Write the stub of each package whose parts are found in its files; pre-commit sees whether one changed."""
    spec = importlib.util.spec_from_file_location("privlab_sources", root / "privlab/base/sources.py")
    if spec is None or spec.loader is None:
        sys.exit("privlab/base/sources.py must be a module. Found none.")
    sources = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = sources
    spec.loader.exec_module(sources)
    for package in PARTS:
        names = [("registry", package.upper()), ("registry", package)]
        for part in sources.parts_of(package, root / package):
            module, _, kind = part.place.removeprefix(f"{package}.").partition(":")
            names.append((module, kind))
        text = "".join(f"from .{module} import {kind} as {kind}\n" for module, kind in sorted(names))
        stub = root / package / "__init__.pyi"
        if not stub.exists() or stub.read_text("utf-8") != text:
            stub.write_text(text, "utf-8")
    return 0


def lines_of_rooms(root: Path) -> dict[str, int]:
    """Return the lines of Python of each room; those directly in privlab/ count as the room `api`."""
    package = root / "privlab"
    rooms = {folder.name: folder.rglob("*.py") for folder in package.iterdir() if folder.is_dir()}
    rooms = {room: files for room, files in sorted(rooms.items()) if room not in {"__pycache__", *WITHOUT_CEILING}}
    lines = {room: sum(file.read_text("utf-8").count("\n") for file in files) for room, files in rooms.items()}
    lines["api"] = lines.get("api", 0) + sum(file.read_text("utf-8").count("\n") for file in package.glob("*.py"))
    return {room: count for room, count in lines.items() if count}


def replace_ceiling(settings: Path, name: str, ceiling: int, reached: int) -> None:
    """Write another ceiling into the line of pyproject.toml that has the budget of `name`."""
    entry = re.compile(rf'^("?{re.escape(name)}"? = {{ ceiling = ){ceiling}\b', re.MULTILINE)
    text, count = entry.subn(rf"\g<1>{reached}", settings.read_text("utf-8"))
    if count != 1:
        sys.exit(f"The budget of '{name}' must be one line of pyproject.toml. Found {count}.")
    settings.write_text(text, encoding="utf-8")


def main(task: str = "", *arguments: str) -> int:
    """Return the exit status of a task."""
    if task == "size" and arguments in ((), ("--lower",)):
        return size(Path.cwd(), lower=bool(arguments))
    if task == "types":
        return types(arguments)
    if task == "contracts" and not arguments:
        return contracts()
    if task == "stubs" and not arguments:
        return stubs(Path.cwd())
    found = " ".join((task, *arguments))
    sys.exit(f"The task must be contracts, stubs, types [FILE ...] or size [--lower]. Found '{found}'.")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
