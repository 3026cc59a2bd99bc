#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox>=2025.10.14"]
# ///
"""The tasks of CONTRIBUTING.md, each in an environment of its own: `nox -s NAME`, and after `--` its arguments."""

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "uv|virtualenv"

GROUPS = nox.project.load_toml("pyproject.toml")

LOWEST = (
    "tests/attacks/test_breaching_attacks.py",
    "tests/benchmark/test_rule.py",
    "tests/callbacks",
    "tests/cli/test_attack.py",
    "tests/experiments/test_position_predictors.py",
    "tests/flower",
    "tests/grids/test_engines.py",
    "tests/grids/test_store.py",
    "tests/grids/test_table_cli.py",
    "tests/experiments/test_cache.py",
    "tests/images",
    "tests/keys/test_text.py",
    "tests/metrics",
    "tests/nvflare",
    "tests/release/test_adapters.py",
    "tests/release/test_gradients.py",
    "tests/report/test_figures.py",
    "tests/report/test_page.py",
    "tests/runs/test_notebook.py",
    "tests/split/test_security.py",
    "tests/split/test_tls.py",
    "tests/training/test_loop.py",
    "tests/experiments/test_robustness.py",
    "tests/victims",
)
"""Quick tests that between them use every dependency."""

SHAPES = "--jaxtyping-packages=privlab,beartype.beartype"
"""Checks the shapes of arguments, which is what beartype is for."""


def install(session: nox.Session) -> None:
    """Install privlab as the README's test command does."""
    session.install("-e", ".[all,test]")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests that are named, or all."""
    install(session)
    session.run("pytest", *(session.posargs or ("-n", "auto")))


@nox.session(default=False)
def lowest(session: nox.Session) -> None:
    """Run tests with the lowest allowed version of each dependency: those that are named, or a selection."""
    session.run_install("uv", "pip", "install", "--resolution", "lowest-direct", "-e", ".[all,test]", external=True)
    session.run("pytest", *(session.posargs or ("-n", "auto", SHAPES, *LOWEST)))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and layout of the files that are named, or of all."""
    session.install(*nox.project.dependency_groups(GROUPS, "lint"))
    files = session.posargs or (".",)
    session.run("ruff", "check", *files)
    session.run("ruff", "format", "--check", *files)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the files that are named, or of the package."""
    install(session)
    session.run("python", ".ci/house.py", "types", *session.posargs)


@nox.session
def contracts(session: nox.Session) -> None:
    """Check that rooms import one way, and that none exceeds its ceiling in lines."""
    session.install(*nox.project.dependency_groups(GROUPS, "lint"))
    session.run("python", ".ci/house.py", "contracts")
    session.run("python", ".ci/house.py", "size")


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site, with its notebooks, links and warnings."""
    session.install("-e", ".[all,docs]")
    session.run("sphinx-build", "-W", "-n", "-q", "-j", "auto", "docs", "docs/_build/html", *session.posargs)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Try the deliberate faults that are named, or a sample of them."""
    install(session)
    session.run("python", "tests/mutants/run.py", *(session.posargs or ("--sample", "6", "--seed", "1")))


@nox.session(default=False)
def mutmut(session: nox.Session) -> None:
    """Mutate the named files of the package in every way that mutmut knows, and run the named tests on each mutant."""
    tests = [name for name in session.posargs if name.startswith("tests")]
    files = [f"privlab/{name.removeprefix('privlab/')}" for name in session.posargs if name not in tests]
    if not files or not tests:
        session.error("Name files of the package, and the tests that should see their mutants.")
    install(session)
    session.install("mutmut>=3.8")
    copy = Path(session.create_tmp()) / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    for folder in ("privlab", "tests"):  # mutmut follows no links, so the copy has folders in their place
        shutil.copytree(folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    settings = Path("pyproject.toml").read_text(encoding="utf-8")
    settings += f'\n[tool.mutmut]\nsource_paths = ["privlab"]\nonly_mutate = {files}\n'
    settings += f"pytest_add_cli_args_test_selection = {tests}\n"
    (copy / "pyproject.toml").write_text(settings, encoding="utf-8")
    session.chdir(copy)
    session.run("mutmut", "run")
    session.run("mutmut", "results")


if __name__ == "__main__":
    nox.main()
