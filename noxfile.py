#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox>=2025.10.14"]
# ///
"""The tasks of CONTRIBUTING.md, each in an environment of its own: `nox -s NAME`, and after `--` its arguments."""

import nox

nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "uv|virtualenv"

GROUPS = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session) -> None:
    """Install privlab as the README's test command does."""
    session.install("-e", ".[all,test]", "--config-settings", "editable_mode=strict")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests that are named, or all."""
    install(session)
    session.run("pytest", *(session.posargs or ("-n", "auto")))


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
    """Check that rooms import one way."""
    session.install(*nox.project.dependency_groups(GROUPS, "lint"))
    session.run("python", ".ci/house.py", "contracts")


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site, with its notebooks, links and warnings."""
    session.install("-e", ".[all,docs]", "--config-settings", "editable_mode=strict")
    session.run("sphinx-build", "-W", "-n", "-q", "-j", "auto", "docs", "docs/_build/html", *session.posargs)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Try the deliberate faults that are named, or a sample of them."""
    install(session)
    session.run("python", "tests/mutants/run.py", *(session.posargs or ("--sample", "6", "--seed", "1")))


if __name__ == "__main__":
    nox.main()
