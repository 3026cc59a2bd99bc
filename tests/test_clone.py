"""privlab is whole in the root of a clone, however Python is started there and however privlab was installed."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("privlab", "attacks", "defenses", "experiments")
FILES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
IMPORT = "import privlab.attacks, privlab.defenses, privlab.experiments"
NOTEBOOK = """
import nbformat, sys
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(sys.argv[1])]
(cell,) = NotebookClient(nbformat.v4.new_notebook(cells=cells), kernel_name="python3").execute().cells
print(cell.outputs[0].text)
"""
CODE = f"{IMPORT}\nprint('AT', privlab.attacks.__file__)"


def output(command: list[str], folder: Path) -> str:
    """Run a command in a folder, where nothing but the installation and the way of starting says what is imported."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def place(said: str) -> Path:
    """Return where `privlab.attacks` came from."""
    (line,) = [line for line in said.splitlines() if line.startswith("AT ")]
    return Path(line.removeprefix("AT ")).parent


def by_pytest(python: str, folder: Path, where: Path) -> Path:
    """Import privlab in a test that `python -m pytest` runs in a folder."""
    test = where / "test_import.py"
    test.write_text(f"def test_import():\n    {CODE.replace(chr(10), chr(10) + '    ')}\n", encoding="utf-8")
    options = ["-q", "-s", "-p", "no:cacheprovider", "-c", "/dev/null", "--noconftest", "--import-mode=importlib"]
    return place(output([python, "-m", "pytest", *options, str(test)], folder))


def starts(python: str, clone: Path, where: Path) -> dict[str, Path]:
    """Return where privlab comes from in the root of a clone, by the way in which Python is started."""
    (clone / "script.py").write_text(CODE, encoding="utf-8")
    found = {
        "python -c": place(output([python, "-c", CODE], clone)),
        "python -m pytest": by_pytest(python, clone, where),
        "a script": place(output([python, "script.py"], clone)),
    }
    if importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel"):
        found["a notebook"] = place(output([python, "-c", NOTEBOOK, CODE], clone))
    else:  # its kernel puts '' first on the path, as this does
        found["a notebook"] = place(output([python, "-c", f"import sys; assert sys.path[0] == ''\n{CODE}"], clone))
    return found


def test_privlab_is_whole_in_the_root() -> None:
    assert place(output([sys.executable, "-c", CODE], ROOT)) == ROOT / "privlab" / "attacks"


def test_links_that_are_text_files_are_one_clear_line(tmp_path: Path) -> None:
    """As git writes them on Windows unless it is told to make links."""
    (tmp_path / "privlab").mkdir()
    shutil.copy(ROOT / "privlab" / "__init__.py", tmp_path / "privlab")
    (tmp_path / "privlab" / "attacks").write_text("../attacks", encoding="utf-8")
    command = [sys.executable, "-c", "import privlab.attacks"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "core.symlinks=true" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, True], ids=["pip install .", "pip install -e ."])
def test_every_way_of_starting_python_finds_it_after_an_installation(editable: bool, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("pip")
    clone = tmp_path / "clone"
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "notes")
        shutil.copytree(ROOT / folder, clone / folder, symlinks=True, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, clone)
    venv.create(tmp_path / "venv", with_pip=False)
    python, (site,) = str(tmp_path / "venv/bin/python"), (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")  # torch, but not this privlab
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    output([*pip, *(["-e"] if editable else []), str(clone)], tmp_path)
    assert {*starts(python, clone, tmp_path).values()} == {clone / "privlab" / "attacks"}
    home = clone / "privlab" if editable else site / "privlab"
    assert place(output([python, "-c", CODE], tmp_path)) == home / "attacks"
    assert (home / "experiments/tables/quick.toml").is_file()
