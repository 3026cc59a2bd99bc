"""What the source of a class says about it: its place, its constants and the sections of its docstring; no import."""

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

LAST = 1000
"""The `order` of a class that declares none."""

_NAMED = re.compile(r"^    name(: [^=\n]+)? = [\"']", re.MULTILINE)
"""What a file with a part holds; no other file is parsed."""

_SECTIONS = "Idea|Steps|Algorithm|Exact if|Fails if|Cost|Studies|Example|Args|Raises|Returns|Warns|Source"


@dataclass(frozen=True)
class Docstring:
    """A docstring in its parts.

    Args:
        summary: its first sentence.
        text: what follows, as it is written: paragraphs without a title, then the section "Algorithm".
        sections: the other sections by title, each as one line.
        arguments: the meaning of each argument, as one line.
    """

    summary: str
    text: str
    sections: Mapping[str, str]
    arguments: Mapping[str, str]

    @property
    def source(self) -> str:
        """Return the section "Source" without its citations."""
        return re.sub(r"\s*\[@[^]]*\]", "", self.sections.get("Source", ""))

    @property
    def papers(self) -> tuple[str, ...]:
        """Return the keys of references.bib that the section "Source" cites as [@key; @key]."""
        return tuple(re.findall(r"@(\w+)", self.sections.get("Source", "")))


@dataclass(frozen=True)
class ClassSource:
    """A class as its file has it.

    Args:
        place: "module:Class".
        constants: its class attributes of literal values, by name; the others are None.
        docstrings: its own, then those of its private bases in the same file.
    """

    place: str
    constants: Mapping[str, Any]
    docstrings: tuple[str, ...]


def parse_docstring(text: str) -> Docstring:
    """Return the parts of a docstring.

    Args:
        text: the docstring, as it is written in the code; a section begins with "Title:" at the start of a line.
    """
    summary, _, rest = inspect.cleandoc(text).partition("\n\n")
    first, *parts = re.split(rf"^({_SECTIONS}):[ ]?", rest, flags=re.MULTILINE)
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    body = "\n\n".join(part for part in (first.strip("\n"), found.pop("Algorithm", "").strip("\n")) if part)
    arguments = re.findall(r"^    (\w+): (.*(?:\n(?:        .*|))*)", found.pop("Args", ""), re.MULTILINE)
    return Docstring(
        _one_line(summary),
        body,
        {title: _one_line(part) for title, part in found.items()},
        {name: _one_line(meaning) for name, meaning in arguments},
    )


def classes_in(path: Path, module: str) -> list[ClassSource]:
    """Return the classes of a file, in their order.

    Args:
        path: the file.
        module: its dotted name.
    """
    nodes = {node.name: node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)}
    return [
        ClassSource(f"{module}:{name}", _constants(node), tuple(_docstrings(node, nodes)))
        for name, node in nodes.items()
    ]


@cache
def parts_of(package: str, folder: Path) -> tuple[ClassSource, ...]:
    """Return the parts of a package: the classes with a literal `name` and a `paper`, by their `order`, then by name.

    Args:
        package: "privlab.attacks" or "privlab.defenses".
        folder: where it is; each part is in a file of one of its rooms.
    """
    found = [
        each
        for path in sorted(folder.glob("*/*.py"))
        if _NAMED.search(path.read_text("utf-8"))
        for each in classes_in(path, f"{package}.{path.parent.name}.{path.stem}")
        if isinstance(each.constants.get("name"), str) and "paper" in each.constants
    ]
    return tuple(sorted(found, key=lambda each: (each.constants.get("order", LAST), each.constants["name"])))


def attach_parts(package: str, file: str, *more: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that offers its parts, and imports each of them on first use.

    Args:
        package: its `__name__`.
        file: its `__file__`.
        more: names of its module `registry` that it offers too.
    """

    @cache
    def homes() -> dict[str, str]:
        places = [each.place.split(":") for each in parts_of(package, Path(file).parent)]
        return {kind: module for module, kind in places} | dict.fromkeys(more, f"{package}.registry")

    def get(name: str) -> Any:  # noqa: ANN401
        if name == "__all__":
            return sorted(homes())
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(homes()[name]), name)

    return get, lambda: sorted(homes())


def _constants(node: ast.ClassDef) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value is not None:
            found[each.target.id] = each.value.value if isinstance(each.value, ast.Constant) else None
    return found


def _docstrings(node: ast.ClassDef, nodes: Mapping[str, ast.ClassDef]) -> list[str]:
    found = [ast.get_docstring(node) or ""]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id.startswith("_") and base.id in nodes:
            found += _docstrings(nodes[base.id], nodes)
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())
