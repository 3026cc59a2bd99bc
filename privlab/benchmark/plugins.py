"""Entries that come as a file: what their source may use, and their installation for the length of a submission."""

import ast
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from pathlib import Path

from privlab.base import PrivlabError, first, one_line, read_text
from privlab.base.plugins import installed_plugins
from privlab.benchmark.cards import Card, file_name
from privlab.testing.plugin_child import MODULE
from privlab.testing.plugin_process import StandIn

_SOURCE = "source.txt"
"""The file with the source of a plug-in, next to the module that replaces it."""

_MODULE_TEXT = f"""from pathlib import Path

from privlab.testing.plugin_process import Plugin

plugin = Plugin(Path(__file__).with_name("{_SOURCE}").read_text("utf-8"))
globals().update(plugin.stand_ins())
"""
"""What is imported in place of a plug-in, here and in other processes: each starts a separate process for it."""

ALLOWED = frozenset(
    {
        *("__future__", "abc", "collections", "dataclasses", "enum", "functools", "itertools", "math", "operator"),
        *("typing", "types", "jaxtyping", "numpy", "scipy", "timm", "torch", "torchvision"),
        *(f"privlab.{room}" for room in ("threat", "patches", "release", "attacks", "defenses", "base")),
    }
)
"""The packages that an entry may import: none of them is needed for the clock, the network, files or processes."""

REFUSED_NAMES = frozenset(
    {"__import__", "compile", "eval", "exec", "globals", "getattr", "open", "input", "breakpoint", "vars", "locals"}
)
"""Builtins by which a source could reach what it does not import."""

_MOST_CHARACTERS = 2**19
"""The most characters of a source: Python's parser takes about a kilobyte of memory for each."""

REFUSED_PARTS = frozenset(
    {
        *("hub", "distributed", "multiprocessing", "datasets", "utils", "profiler", "Event", "urandom", "datetime64"),
        *("memmap", "fromfile", "load", "save", "loadtxt", "savetxt", "ctypes", "ctypeslib", "read_text", "files"),
        *("photographs", "open_images", "Registry", "installed_plugins"),
    }
)
"""Parts of allowed packages that read files, photographs, the network or the clock."""


def check_source(text: str, where: str) -> None:
    """Check that a source imports and names nothing that reads the clock, the network, files or other processes.

    This is a lint, which says early what an entry need not do: it is not a sandbox. An entry runs in a separate process
    (`privlab.testing.plugin_process`). `where` names the source in errors.
    """
    if len(text) > _MOST_CHARACTERS:
        raise PrivlabError(f"{where} has {len(text)} characters. At most {_MOST_CHARACTERS} of a plug-in are read.")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PrivlabError(f"{where}, line {error.lineno}: this is not valid Python: {error.msg}.") from None
    except (MemoryError, RecursionError, ValueError) as error:  # nested too deeply; half a character
        raise PrivlabError(f"{where} cannot be read as Python: {one_line(error, kind=True)}.") from None
    for node in ast.walk(tree):
        for name in _reached(node):
            raise PrivlabError(
                f"{where}, line {getattr(node, 'lineno', 1)}: an entry may not use '{name}': it must read no clock, "
                f"network, file or process. It may import {', '.join(sorted(ALLOWED))}."
            )


def _reached(node: ast.AST) -> Iterator[str]:
    """Yield the names in a node that an entry may not use."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names if not _may_import(each.name))
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module or ''}.{each.name}" for each in node.names]
        yield from (name for name in names if node.level or not _may_import(name))
    elif isinstance(node, ast.Name) and node.id in REFUSED_NAMES:
        yield node.id
    elif isinstance(node, ast.Attribute):
        hidden = node.attr.startswith("__") and node.attr not in ("__init__", "__class__", "__name__", "__post_init__")
        if hidden or node.attr in REFUSED_PARTS:
            yield node.attr


def _may_import(name: str) -> bool:
    parts = name.split(".")
    return bool({parts[0], ".".join(parts[:2])} & ALLOWED) and not REFUSED_PARTS & {*parts[1:]}


def source_of_plugin(card: Card) -> str | None:
    """Return the source of a card's plug-in, which was checked; None where the class is installed already."""
    if not card.plugin:
        return None
    text = read_text(card.folder / card.plugin, "plug-in")
    check_source(text, card.plugin)
    return text


@contextmanager
def installed(card: Card, source: str | None) -> Iterator[None]:
    """Install a class that replaces the one that a card uses, as an entry point would, and remove it afterwards.

    The source is that of a plug-in, which runs in a separate process; with None nothing is installed.
    """
    if source is None:
        yield
        return
    name = file_name(card.parts[0])  # with a line break in it, the metadata below would name other code as well
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / f"{MODULE}.py").write_text(_MODULE_TEXT, "utf-8")
        (path / _SOURCE).write_text(source, "utf-8")
        sys.path.insert(0, folder)
        invalidate_caches()
        try:
            point = f"[privlab.{card.kind}s]\n{name} = {MODULE}:{_class_name(card)}\n"
            metadata = path / f"{MODULE}-1.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1\n", "utf-8")
            (metadata / "entry_points.txt").write_text(point, "utf-8")
            installed_plugins.cache_clear()
            yield
        finally:
            sys.path.remove(folder)
            if (module := sys.modules.pop(MODULE, None)) is not None:
                module.plugin.close()
            invalidate_caches()
            installed_plugins.cache_clear()


def _class_name(card: Card) -> str:
    """Return the name of the plug-in's class whose attribute `name` is the one that the card uses."""
    try:
        module = import_module(MODULE)
    except PrivlabError as error:
        raise PrivlabError(f"The plug-in of '{card.name}' cannot be imported: {error}") from None
    classes = {key: each for key, each in vars(module).items() if isinstance(each, type) and issubclass(each, StandIn)}
    named = {key: getattr(each, "name", None) for key, each in classes.items()}
    kinds = {name: key for key, name in named.items() if isinstance(name, str)}
    if card.parts[0] not in kinds:
        raise PrivlabError(
            f"{card.plugin} has no class named '{card.parts[0]}'. Found {first(sorted(map(str, kinds))) or 'none'}: "
            "set its attribute name."
        )
    return kinds[card.parts[0]]
