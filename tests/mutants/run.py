"""Put deliberate faults into a copy of the code, one at a time, and check that the tests of each fault then fail.

    python tests/mutants/run.py                     # every fault
    python tests/mutants/run.py --sample 6 --seed 3  # six of the quick ones, always the same six for a seed
    python tests/mutants/run.py "NAME" ...           # these; --list prints the names

The faults are listed in the `*.toml` files of this folder. Each names a symbol of the package, some code within it, and
the code that takes its place. Code is compared by its syntax tree, so that neither its layout nor its module matters.
The working tree is never written to.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "privlab"
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
    """A fault cannot be tried, or its tests fail for another reason: one line."""


@dataclass(frozen=True)
class Fault:
    """One deliberate fault: within `symbol`, the code `old` is replaced by `new`, and `tests` must then fail.

    `symbol` is the end of the dotted name of a function, a method, a class, or of a variable of a module or a class. It
    is as long as it must be to match only one: `psnr`, `Mjp.__call__` or `formulas.psnr`. `old` is an expression or a
    statement that occurs exactly once within the symbol; several statements may take the place of one. Samples leave
    out faults that are `slow`.
    """

    name: str
    symbol: str
    old: str
    new: str
    tests: tuple[str, ...]
    slow: bool = False

    @classmethod
    def of(cls, entry: object, source: str) -> "Fault":
        """Return the fault that a table of a TOML file describes.

        Raises:
            FaultError: if a key is missing, unknown or of the wrong type, or nothing would be changed or tested.
        """
        kinds = {"name": str, "symbol": str, "old": str, "new": str, "tests": list, "slow": bool}
        found = entry if isinstance(entry, dict) else {}
        where = f"{source}: {found.get('name', 'a fault without a name')}"
        if odd := (found.keys() ^ kinds.keys()) - {"slow"}:
            raise FaultError(f"{where}: a fault has name, symbol, old, new, tests, slow. Check {sorted(odd)}.")
        if wrong := [key for key, value in found.items() if not isinstance(value, kinds[key])]:
            raise FaultError(f"{where}: {wrong[0]} must be a {kinds[wrong[0]].__name__}. Found {found[wrong[0]]!r}.")
        if not found["tests"]:
            raise FaultError(f"{where}: tests must name the tests that have to fail. Found none.")
        return cls(**{**found, "tests": tuple(map(str, found["tests"]))})


@dataclass(frozen=True)
class Symbol:
    """A function, class or variable: its dotted name, its file and its syntax tree."""

    name: str
    file: Path
    node: ast.stmt


@dataclass(frozen=True)
class Code:
    """The modules of the package of a repository."""

    repository: Path

    @cached_property
    def symbols(self) -> list[Symbol]:
        """Every symbol of the package, including what is defined within functions."""
        found: list[Symbol] = []
        for folder, _, names in os.walk(self.repository / PACKAGE, followlinks=True):
            for file in (Path(folder, name) for name in names if name.endswith(".py")):
                module = file.relative_to(self.repository).with_suffix("")
                parts = module.parts[:-1] if module.name == "__init__" else module.parts
                found += symbols_of(ast.parse(file.read_bytes()), ".".join(parts), file)
        return found

    def find(self, name: str) -> Symbol:
        """Return the only symbol whose dotted name ends in `name`.

        Raises:
            FaultError: if there is none, or more than one.
        """
        found = [symbol for symbol in self.symbols if f".{symbol.name}".endswith(f".{name}")]
        if len(found) != 1:
            places = ", ".join(symbol.name for symbol in found[:3])
            raise FaultError(f"{name} must be the name of one symbol. Found {len(found)}{places and f': {places}'}")
        return found[0]

    def mutated(self, fault: Fault) -> tuple[Path, str]:
        """Return the file that a fault changes, and its source with the fault in it.

        Raises:
            FaultError: if the symbol or the code within it is not found exactly once, or the result is not Python.
        """
        symbol = self.find(fault.symbol)
        old, new = parsed(fault.old), parsed(fault.new)
        if len(old) > 1:
            raise FaultError(f"old must be one expression or one statement. Found {len(old)} statements")
        if [ast.dump(node) for node in old] == [ast.dump(node) for node in new]:
            raise FaultError(f"old and new must differ. Found {fault.new!r} for both")
        both_are_expressions = isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr)
        wanted = old[0].value if both_are_expressions else old[0]
        matches = [node for node in within(symbol.node) if ast.dump(node) == ast.dump(wanted)]
        if len(matches) != 1:
            raise FaultError(f"its code must occur once in {symbol.name}. Found it {len(matches)} times")
        source = replaced(symbol.file.read_text(encoding="utf-8"), matches[0], fault.new)
        try:
            compile(source, symbol.file.name, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise FaultError(f"with the fault, {symbol.file.name} is not valid Python: {error}") from None
        return symbol.file, source


def symbols_of(parent: ast.AST, prefix: str, file: Path) -> Iterator[Symbol]:
    """Yield what is defined in a module, a class or a function; of variables, those of modules and classes."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Symbol(f"{prefix}.{node.name}", file, node)
            yield from symbols_of(node, f"{prefix}.{node.name}", file)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(parent, ast.Module | ast.ClassDef):
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
            yield from (Symbol(f"{prefix}.{each.id}", file, node) for each in names)
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield from symbols_of(node, prefix, file)


def parsed(code: str) -> list[ast.stmt]:
    """Return the syntax trees of statements, at least one; an expression is a statement, too.

    Raises:
        FaultError: if the code has none, or is not valid Python.
    """
    try:
        body = ast.parse(textwrap.dedent(code).strip()).body
    except SyntaxError:
        body = []
    if not body:
        raise FaultError(f"old and new must be expressions or statements. Found {code!r}")
    return body


def within(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the expressions and statements of a tree, but for those in f-strings, which Python 3.11 does not locate."""
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from within(child)


def replaced(source: str, node: ast.expr | ast.stmt, new: str) -> str:
    """Return the source with other code in the place of a node; all else keeps its bytes."""
    lines = source.encode().splitlines(keepends=True)  # ast counts columns in bytes
    last = (node.end_lineno or node.lineno) - 1
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[last][node.end_col_offset :] + b"".join(lines[last + 1 :])
    new = textwrap.dedent(new).strip()
    indented = textwrap.indent(new, " " * node.col_offset).lstrip()
    new = f"({new})" if isinstance(node, ast.expr) else indented
    return (before + new.encode() + after).decode()


@dataclass(frozen=True)
class Copy:
    """A copy of the repository, with its links."""

    repository: Path

    @cached_property
    def code(self) -> Code:
        """The package without a fault."""
        return Code(self.repository)

    @classmethod
    def of(cls, root: Path, home: Path) -> "Copy":
        """Copy a repository."""
        copy = cls(home / root.name)

        def left_out(folder: str, names: list[str]) -> set[str]:
            return CACHES(folder, names) | ({*names} & OUTPUTS if Path(folder) == root else set())

        shutil.copytree(root, copy.repository, symlinks=True, ignore=left_out)
        if (shared := root.parent / "shared").exists():
            (home / "shared").symlink_to(shared)
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
        FaultError: if a file is not valid TOML, a fault is misstated, or two faults have the same name.
    """
    faults: list[Fault] = []
    for file in sorted(folder.glob("*.toml")):
        try:
            entries = tomllib.loads(file.read_text(encoding="utf-8"))["fault"]
        except (tomllib.TOMLDecodeError, KeyError) as error:
            raise FaultError(f"{file.name}: the file must be a list of [[fault]]. Found: {error}.") from None
        faults += [Fault.of(entry, file.name) for entry in entries]
    names = [fault.name for fault in faults]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FaultError(f"Names of faults must differ. Found '{twice[0]}' twice.")
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


def attempt(number: int, fault: Fault, copy: Copy) -> str:
    """Return "killed" or "survived"; the copy is as it was afterwards.

    Raises:
        FaultError: if the fault cannot be tried, or its tests fail for another reason than an assertion.
    """
    file, source = copy.code.mutated(fault)
    before, times = file.read_text(encoding="utf-8"), file.stat()
    try:
        file.write_text(source, encoding="utf-8")
        later = times.st_mtime_ns + number * 10**9  # Python recognises old bytecode by the second and the size
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
    """Try faults, print the outcome of each, and return whether every one was killed."""
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
    """Return whether each fault can be put in and its tests exist; print which cannot."""
    fine, code = True, Code(root)
    for fault in faults:
        try:
            code.mutated(fault)
            if missing := [test for test in fault.tests if not exists(root, test)]:
                raise FaultError(f"there is no test {missing[0]}")
        except FaultError as error:
            fine = False
            say(f"{fault.name}  error: {error}")
    return fine


def exists(root: Path, test: str) -> bool:
    """Return whether the file of a test exists and defines each name behind `::`; parameters are not checked."""
    file, *names = test.partition("[")[0].split("::")
    if not (root / file).is_file():
        return False
    defined = {symbol.name for symbol in symbols_of(ast.parse((root / file).read_bytes()), "", root / file)}
    return not names or "." + ".".join(names) in defined


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every fault was killed, 1 if not, and 2 for a mistake in the list or on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to try; all without any")
    parser.add_argument("--sample", type=int, metavar="N", help="try N of the faults that are not slow")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--list", action="store_true", help="print the faults and their tests")
    parser.add_argument("--check", action="store_true", help="only check that each can be put in and its tests exist")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the repository")
    given = parser.parse_args(argv)
    if given.sample is not None and (given.sample < 1 or given.names):
        parser.error("--sample takes a positive number, and cannot be combined with names")
    try:
        faults = chosen(read_faults(given.root / "tests" / "mutants"), given.names, given.sample, given.seed)
        if not faults:
            raise FaultError("There is no fault to try.")
    except FaultError as error:
        parser.error(str(error))
    if given.list:
        for fault in faults:
            say(f"{fault.name}{' (slow)' if fault.slow else ''}: {fault.symbol}; {', '.join(fault.tests)}")
        return 0
    return 0 if (check if given.check else run)(given.root.resolve(), faults) else 1


if __name__ == "__main__":
    sys.exit(main())
