"""Put deliberate faults into a copy of the code, one at a time: each must turn its tests red, or nothing guards it.

    python tests/mutants/run.py                     # every fault
    python tests/mutants/run.py --sample 6 --seed 3  # six of the quick ones, always the same six for a seed
    python tests/mutants/run.py "NAME" ...           # these; --list prints the names

The faults stand in the `*.toml` beside this file. The working tree is never written to.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]  # of Python 3.10

CACHES = shutil.ignore_patterns(".git", ".venv", ".nox", ".hypothesis", "__pycache__", ".*_cache", "*.egg-info")
OUTPUTS = {"build", "dist", "runs", "screenshots"}
"""Folders of the root that commands make; rooms may have these names."""
ASSERTED = re.compile(r"assert |AssertionError|Failed: DID NOT (RAISE|WARN)|privlab\.base\.warnings\.PrivlabWarning: ")
"""How the message of a failing assertion begins, or of one of our warnings, which are errors where none is expected.

All others say that the code broke, not that a test saw the fault.
"""
TIMEOUT = 900
"""Seconds after which the tests of a fault are given up."""


class FaultError(Exception):
    """A fault that cannot be tried, or tests that say nothing about it: one line."""


@dataclass(frozen=True)
class Fault:
    """One deliberate fault: `text`, which must stand once in `file`, gives way to `replacement`, and `tests` must fail.

    A `slow` one is left out of samples.
    """

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    slow: bool = False

    @classmethod
    def of(cls, entry: object, source: str) -> "Fault":
        """Return the fault that a table of a TOML file states.

        Raises:
            FaultError: if a key is missing, unknown or of the wrong type, or nothing would be changed or tested.
        """
        kinds = {"name": str, "file": str, "text": str, "replacement": str, "tests": list, "slow": bool}
        found = entry if isinstance(entry, dict) else {}
        where = f"{source}: {found.get('name', 'a fault without a name')}"
        if odd := (found.keys() ^ kinds.keys()) - {"slow"}:
            raise FaultError(f"{where}: a fault has name, file, text, replacement, tests, slow. Check {sorted(odd)}.")
        if wrong := [key for key, value in found.items() if not isinstance(value, kinds[key])]:
            raise FaultError(f"{where}: {wrong[0]} must be a {kinds[wrong[0]].__name__}. Found {found[wrong[0]]!r}.")
        if not found["text"] or found["text"] == found["replacement"] or not found["tests"]:
            raise FaultError(f"{where}: it must change some text, and name the tests that must fail.")
        return cls(**{**found, "tests": tuple(map(str, found["tests"]))})


@dataclass(frozen=True)
class Copy:
    """A copy of the repository in which its folders can be imported as the packages that they make."""

    repository: Path

    @classmethod
    def of(cls, root: Path, home: Path) -> "Copy":
        """Copy a repository; the folders of `tool.setuptools.package-dir` are linked to where Python looks for them."""
        copy = cls(home / root.name)

        def left_out(folder: str, names: list[str]) -> set[str]:
            return CACHES(folder, names) | ({*names} & OUTPUTS if Path(folder) == root else set())

        shutil.copytree(root, copy.repository, symlinks=True, ignore=left_out)
        if (shared := root.parent / "shared").exists():
            (home / "shared").symlink_to(shared)
        folders = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
        for package, folder in folders["package-dir"].items():
            if not (place := copy.repository.joinpath(*package.split("."))).exists():
                place.symlink_to(copy.repository / folder)
        return copy

    def test(self, tests: Sequence[str]) -> tuple[int, list[str], str]:
        """Run tests up to the first that fails.

        Returns:
            pytest's exit status, what failed (a message each; of an error outside a test none), and its output.
        """
        junit = self.repository.parent / "junit.xml"
        junit.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "",
            f"--junitxml={junit}",
            *tests,
        ]
        environment = os.environ | {"PYTHONPATH": str(self.repository)}  # comes before what is installed
        try:
            done = subprocess.run(
                command, cwd=self.repository, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            raise FaultError(f"its tests ran for more than {TIMEOUT} s") from None
        said = done.stdout + done.stderr
        failures = [] if not junit.exists() else ET.parse(junit).iter("failure")
        return done.returncode, [failure.get("message", "") for failure in failures], said


def read_faults(folder: Path) -> list[Fault]:
    """Return the faults of every TOML file of a folder, in the order of the files.

    Raises:
        FaultError: if a file is no TOML, or a fault is misstated or shares its name with another.
    """
    faults: list[Fault] = []
    for file in sorted(folder.glob("*.toml")):
        try:
            entries = tomllib.loads(file.read_text(encoding="utf-8"))["fault"]
        except (tomllib.TOMLDecodeError, KeyError) as error:
            raise FaultError(f"{file.name}: a list of [[fault]] is wanted. Found: {error}.") from None
        faults += [Fault.of(entry, file.name) for entry in entries]
    names = [fault.name for fault in faults]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FaultError(f"Two faults must not have one name. Found '{twice[0]}' twice.")
    return faults


def chosen(faults: Sequence[Fault], names: Sequence[str], sample: int | None, seed: int) -> list[Fault]:
    """Return the faults of these names, or of all a sample of the quick ones.

    Raises:
        FaultError: if there is no fault of a name.
    """
    by_name = {fault.name: fault for fault in faults}
    if unknown := [name for name in names if name not in by_name]:
        raise FaultError(f"There is no fault '{unknown[0]}'; --list prints the names.")
    if names:
        return [by_name[name] for name in names]
    if sample is None:
        return list(faults)
    quick = sorted((fault for fault in faults if not fault.slow), key=lambda fault: fault.name)
    return random.Random(seed).sample(quick, min(sample, len(quick)))


def mutated(fault: Fault, repository: Path) -> str:
    """Return the source with the fault in it.

    Raises:
        FaultError: if there is no such file, or its text does not stand in it exactly once.
    """
    file = repository / fault.file
    if not file.is_file():
        raise FaultError(f"there is no file {fault.file}")
    source = file.read_text(encoding="utf-8")
    if (count := source.count(fault.text)) != 1:
        raise FaultError(f"its text must stand once in {fault.file}. Found it {count} times")
    return source.replace(fault.text, fault.replacement)


def attempt(number: int, fault: Fault, copy: Copy) -> str:
    """Return "killed" or "survived"; the copy is as it was afterwards.

    Raises:
        FaultError: if the fault cannot be tried, or its tests fail for another reason than an assertion.
    """
    source, file = mutated(fault, copy.repository), copy.repository / fault.file
    before, times = file.read_text(encoding="utf-8"), file.stat()
    try:
        file.write_text(source, encoding="utf-8")
        later = times.st_mtime_ns + number * 10**9  # bytecode is told apart by the second, and by the size
        os.utime(file, ns=(later, later))
        status, failures, said = copy.test(fault.tests)
    finally:
        file.write_text(before, encoding="utf-8")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    if status == 0:
        return "survived"
    if status == 1 and any(ASSERTED.match(message) for message in failures):
        return "killed"
    last = failures[0] if failures else next((line[1:] for line in said.splitlines() if line.startswith("E  ")), said)
    raise FaultError(f"its tests fail, but not by an assertion: {' '.join(last.split())[:200]}")


def run(root: Path, faults: Sequence[Fault]) -> bool:
    """Try faults, say how each fared, and return whether every one was killed."""
    width, fine = max(len(fault.name) for fault in faults), True
    with tempfile.TemporaryDirectory(prefix="mutants-") as home:
        copy = Copy.of(root, Path(home))
        tests = sorted({test for fault in faults for test in fault.tests})
        start = time.perf_counter()
        try:
            status, _, said = copy.test(tests)
        except FaultError as error:
            say(f"error: without any fault the tests must pass: {error}")
            return False
        if status != 0:
            say(f"error: without any fault the tests must pass. They end with status {status}:\n{said[-3000:]}")
            return False
        say(f"{'without any fault':{width}}  pass      {time.perf_counter() - start:6.1f} s")
        for number, fault in enumerate(faults, 1):
            start, why = time.perf_counter(), ""
            try:
                fate = attempt(number, fault, copy)
            except FaultError as error:
                fate, why = "error", f": {error}"
            fine &= fate == "killed"
            say(f"{fault.name:{width}}  {fate:8}  {time.perf_counter() - start:6.1f} s{why}")
    return fine


def check(root: Path, faults: Sequence[Fault]) -> bool:
    """Return whether each fault can be put in and its tests are there; say which not."""
    fine = True
    for fault in faults:
        try:
            mutated(fault, root)
            if lacking := [test for test in fault.tests if not (root / test.partition("::")[0]).is_file()]:
                raise FaultError(f"there is no test {lacking[0]}")
        except FaultError as error:
            fine = False
            say(f"{fault.name}  error: {error}")
    return fine


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every fault was killed, 1 if not, 2 for a mistake in the list or on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to try; all without any")
    parser.add_argument("--sample", type=int, metavar="N", help="try N of the faults that are not slow")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--list", action="store_true", help="print the faults and their tests")
    parser.add_argument("--check", action="store_true", help="only check that each can be put in and has its tests")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the repository")
    given = parser.parse_args(argv)
    if given.sample is not None and (given.sample < 1 or given.names):
        parser.error("--sample takes a positive number, and no names beside it")
    try:
        faults = chosen(read_faults(given.root / "tests" / "mutants"), given.names, given.sample, given.seed)
        if not faults:
            raise FaultError("There is no fault to try.")
    except FaultError as error:
        parser.error(str(error))
    if given.list:
        for fault in faults:
            say(f"{fault.name}{' (slow)' if fault.slow else ''}: {fault.file}; {', '.join(fault.tests)}")
        return 0
    return 0 if (check if given.check else run)(given.root.resolve(), faults) else 1


if __name__ == "__main__":
    sys.exit(main())
