"""The house plan: rooms depend one way, attacks and defenses do not know each other, and no room is too large."""

import ast
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from privlab.threat import AttackDeclarations, DefenseDeclarations

ROOT = Path(__file__).parents[1]
FOLDERS = ("attacks", "benchmarks", "defenses", "experiments")
"""Packages to which privlab/ has links; `rglob` follows none, so each file is met once."""


def modules(folder: Path) -> list[Path]:
    """Return the modules directly in a folder."""
    return [path for path in folder.glob("*.py") if path.name != "__init__.py"]


def rooms() -> list[Path]:
    """Return every folder that is a package."""
    tops = ("privlab", *FOLDERS)
    return sorted(path.parent for top in tops for path in (ROOT / top).rglob("__init__.py"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a repository with the source of this one."""
    only_source = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.png")
    for name in ("privlab", *FOLDERS):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=only_source)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def house(root: Path, *task: str) -> subprocess.CompletedProcess[str]:
    """Run a task of .ci/house.py on a repository."""
    command = (sys.executable, str(ROOT / ".ci/house.py"), *task)
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_the_contracts_hold() -> None:
    done = house(ROOT, "contracts")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("privlab/base/errors.py", "from privlab.images import decode"),
        ("attacks/gradients/april.py", "from privlab.defenses.images import mjp"),
        ("attacks/gradients/april.py", "from privlab.metrics import registry"),
        ("privlab/victims/model.py", "from privlab.evaluation import pipeline"),
    ],
)
def test_a_contract_that_is_broken_is_seen(copy: Path, module: str, line: str) -> None:
    with (copy / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    done = house(copy, "contracts")
    assert (done.returncode, "BROKEN" in done.stdout) == (1, True), done.stdout + done.stderr


def test_no_room_exceeds_its_ceiling() -> None:
    done = house(ROOT, "size")
    assert done.returncode == 0, done.stderr


BUDGETS = """[tool.privlab.lines]  # ceilings
base = { ceiling = 9, goal = 5 }
"images + data" = { ceiling = 20, goal = 4 }
api = { ceiling = 3, goal = 3 }
attacks = { ceiling = 8, goal = 8 }
"""


@pytest.fixture
def small_house(tmp_path: Path) -> Path:
    """Return a repository of which base and images are below their ceilings, and attacks is a link."""
    sizes = {"privlab/__init__.py": 1, "privlab/base/files.py": 3, "privlab/images/a.py": 5, "privlab/images/b/c.py": 6}
    for name, count in (sizes | {"attacks/april.py": 8, "experiments/study.py": 99}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n" * count, encoding="utf-8")
    (tmp_path / "privlab/attacks").symlink_to("../attacks")
    (tmp_path / "privlab/experiments").symlink_to("../experiments")
    (tmp_path / "pyproject.toml").write_text(BUDGETS, encoding="utf-8")
    return tmp_path


def test_ceilings_are_lowered_to_the_goal_at_most_and_never_raised(small_house: Path) -> None:
    checked = house(small_house, "size")
    assert checked.returncode == 0, checked.stderr
    assert "base: the ceiling can be lowered from 9 to 5" in checked.stdout
    assert "images + data: the ceiling can be lowered from 20 to 11" in checked.stdout
    assert (small_house / "pyproject.toml").read_text(encoding="utf-8") == BUDGETS
    (small_house / "attacks/april.py").write_text("pass\n" * 9, encoding="utf-8")
    lowered = house(small_house, "size", "--lower")
    assert (lowered.returncode, "lowered" in lowered.stdout) == (1, False), lowered.stderr
    expected = BUDGETS.replace("ceiling = 9,", "ceiling = 5,").replace("ceiling = 20,", "ceiling = 11,")
    assert (small_house / "pyproject.toml").read_text(encoding="utf-8") == expected


def test_a_room_above_its_ceiling_or_without_one_is_one_line(small_house: Path) -> None:
    (small_house / "attacks/april.py").write_text("pass\n" * 9, encoding="utf-8")
    (small_house / "privlab/keys").mkdir()
    (small_house / "privlab/keys/key.py").write_text("pass\n", encoding="utf-8")
    done = house(small_house, "size")
    assert done.returncode == 1
    above, without = done.stderr.splitlines()
    assert "attacks: 9 lines exceed the ceiling of 8" in above
    assert "keys: " in without


def test_no_module_lies_outside_a_room() -> None:
    """`__main__` may: Python looks for it there, and nowhere else, for `python -m privlab`."""
    assert [path.name for path in modules(ROOT / "privlab")] == ["__main__.py"]


def test_no_room_is_too_large() -> None:
    assert {room.name: len(modules(room)) for room in rooms() if len(modules(room)) > 14} == {}


def test_every_room_says_what_it_is_for() -> None:
    assert [room for room in rooms() if not (room / "__init__.py").read_text(encoding="utf-8").startswith('"""')] == []


def test_what_plugins_declare_is_read_in_one_place() -> None:
    names = {field.name for kind in (AttackDeclarations, DefenseDeclarations) for field in fields(kind)}
    read = re.compile(r"""(?:get|has)attr\([^,()]+(?:\([^()]*\))?, "(\w+)\"""")
    sources = [path for top in ("privlab", *FOLDERS) for path in (ROOT / top).rglob("*.py")]
    elsewhere = [path for path in sources if names & {*read.findall(path.read_text(encoding="utf-8"))}]
    assert elsewhere == []


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of a function's parameters."""
    given = function.args
    return [each.arg for each in given.posonlyargs + given.args + given.kwonlyargs if each.arg not in ("self", "cls")]


def functions(path: Path) -> list[ast.FunctionDef]:
    """Return public functions, and public methods of public classes, of a module, but for the commands of click."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    classes = [node for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    nodes = [*body, *(node for kind in classes for node in kind.body)]
    found = [node for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return [node for node in found if not any("command" in ast.unparse(each) for each in node.decorator_list)]


def test_every_public_function_of_three_parameters_documents_them() -> None:
    silent = []
    for room in rooms():
        for path in [] if room.parts[-1] == "cli" or "cli" in room.parts else modules(room):
            for function in functions(path):
                _, _, said = (ast.get_docstring(function) or "").partition("Args:")
                missing = [name for name in parameters(function) if not re.search(rf"^ *\*{{0,2}}{name}:", said, re.M)]
                if len(parameters(function)) > 2 and missing:
                    silent.append(f"{path.relative_to(ROOT)}: {function.name}: {', '.join(missing)}")
    assert silent == []


def test_every_file_that_the_design_names_is_there() -> None:
    """In the table of files to open, a name without a folder is in the folder of the path before it."""
    page = (ROOT / "docs/reference/house.md").read_text("utf-8").partition("## Which file to open")[2]
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        folder = Path()
        for name in re.findall(r"`([\w/.]+(?:\.\w+|/))`", row):
            path = Path(name) if "/" in name else folder / name
            folder = path if name.endswith("/") else path.parent
            assert (ROOT / path).exists(), path
