"""The public names of each room, and the docstring of each, in the module that defines it."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer


@dataclass(frozen=True)
class Name:
    """A public name: the module that defines it, its docstring, and whether it is a value, no class and no function."""

    name: str
    module: str
    doc: str
    is_value: bool


def public_names(room: str) -> Iterator[Name]:
    """Yield the public names of a package; modules are not among them.

    Args:
        room: the package's dotted name.
    """
    package = importlib.import_module(room)
    homes = {alias: module for source in sources(package.__file__ or "") for alias, module in imports(source, room)}
    for name in getattr(package, "__all__", None) or dir(package):
        module = homes.get(name, room)
        imported = not module.startswith("privlab")
        if imported or name.startswith("_") or inspect.ismodule(found := getattr(package, name)):
            continue
        is_value = not (
            inspect.isfunction(inspect.unwrap(found)) or (inspect.isclass(found) and found.__name__ == name)
        )
        doc = of_value(module, name) if is_value else found.__doc__
        yield Name(name, module, doc or "", is_value)


def sources(init: str) -> list[Path]:
    """Return the files that say where a package has its names from."""
    return [path for path in (Path(init), Path(init).with_suffix(".pyi")) if path.exists()]


def imports(source: Path, room: str) -> Iterator[tuple[str, str]]:
    """Yield each name that a package's file imports from one of its own modules, and that module."""
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = f"{room}.{node.module}" if node.level else node.module
            yield from ((alias.asname or alias.name, module) for alias in node.names)


def of_value(module: str, name: str) -> str:
    """Return the docstring behind the assignment of a value; "" if it has none."""
    if not module.startswith("privlab"):
        return ""
    return "\n".join(ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name), ()))
