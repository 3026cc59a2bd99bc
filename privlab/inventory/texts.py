"""What pages are made of: docstrings, read without torch, the papers of `references.bib`, measured examples."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Any

from privlab.attacks import attacks
from privlab.base import Docstring, Registry, classes_in, parse_docstring
from privlab.defenses import defenses
from privlab.metrics.names import LPIPS, METRIC_MEANINGS


@cache
def docstrings(name: str) -> tuple[Docstring, ...]:
    """Return the docstring of an attack, a defense or a metric, with sections of its private bases, and then theirs.

    The class of an attack or a defense is imported only if the file of its entry point does not define it.

    Args:
        name: of the attack, the defense or the metric.
    """
    kinds: Registry[Any] = attacks() if name in attacks() else defenses()
    if name not in kinds:
        return (parse_docstring(_of_metric(name)),)
    module = kinds.place(name).partition(":")[0]
    spec = find_spec(module) if module else None
    if spec is not None and spec.origin is not None:
        for each in classes_in(Path(spec.origin), module):
            if each.place == kinds.place(name):
                own, *bases = map(parse_docstring, each.docstrings)
                for base in bases:
                    own = replace(own, sections={**base.sections, **own.sections})
                return own, *bases
    return (parse_docstring(inspect.getdoc(kinds[name]) or ""),)


def _of_metric(name: str) -> str:
    from privlab.metrics import METRICS, PLACEMENT
    from privlab.metrics.registry import Lpips

    if name == LPIPS or name.startswith("lpips_"):
        return Lpips.__call__.__doc__ or ""
    metric = PLACEMENT.get(name) or METRICS[name]
    return (metric.function and metric.function.__doc__) or METRIC_MEANINGS.get(name) or metric.source


@dataclass(frozen=True)
class Reference:
    """An entry of the bibliography: its key, its fields without BibTeX's braces, and the entry as it stands."""

    key: str
    fields: Mapping[str, str]
    bibtex: str

    def __str__(self) -> str:
        """Return the entry as a line of a list of references."""
        names = [name.split(", ") for name in self.fields["author"].split(" and ")]
        people = ["et al." if name == ["others"] else " ".join(reversed(name)) for name in names]
        venue = next(self.fields[kind] for kind in ("booktitle", "journal", "howpublished") if kind in self.fields)
        title = self.fields["title"].replace(" -- ", " – ")
        stop = "" if title.endswith("?") else "."
        authors = ", ".join(people).replace(", et al.", " et al").removesuffix(".")
        return f"{authors}. {title}{stop} {venue}, {self.fields['year']}."


@cache
def references() -> Mapping[str, Reference]:
    """Return the entries of `references.bib`, by key."""
    text = files("privlab.inventory").joinpath("references.bib").read_text("utf-8")
    return {entry.key: entry for entry in map(_entry, text.strip().split("\n\n"))}


def cite(keys: Sequence[str]) -> str:
    """Return a list of references, and their BibTeX.

    Args:
        keys: of entries, in the order in which they are printed; those of other bibliographies are left out.
    """
    found = [references()[key] for key in keys if key in references()]
    lines = [f"- {entry}" for entry in found]
    return "\n".join([*lines, "", *(indent(entry.bibtex, "    ") for entry in found)]) if found else ""


def _entry(bibtex: str) -> Reference:
    """Return an entry that is written as all of ours: the key in the first line, then a field in each line."""
    key = re.match(r"@\w+\{(\w+),\n", bibtex)
    found = re.findall(r"^  (\w+) = \{(.*)\},$", bibtex, re.MULTILINE)
    if key is None or len(found) != bibtex.count("\n") - 1:
        raise ValueError(f"An entry of references.bib is not written as the others: {bibtex.splitlines()[0]}")
    return Reference(key[1], {name: re.sub("[{}]", "", value) for name, value in found}, bibtex)


@cache
def measured() -> Mapping[str, Mapping[str, Any]]:
    """Return what `.ci/measure_examples.py` measured, by the name of the attack or the defense."""
    return json.loads(files("privlab.inventory").joinpath("measured.json").read_text("utf-8"))


def describe(name: str, command: str) -> str:
    """Return a sentence with what the example of a page measured, or "" if nothing was.

    Args:
        name: of an attack or a defense.
        command: its example. Figures of another command are not shown.
    """
    found = measured().get(name)
    if found is None or found["command"] != command:
        return ""
    mean, *interval = found["psnr"]  # one image has no interval
    within = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    count = f"{found['images']} photograph{'s' * (found['images'] > 1)}"
    who = "The attack" if found["attack"] == name else f"The leakiest attack is `{found['attack']}`: it"
    side = arguments_of(command).get("img_size", "32")
    return (
        f"The example attacks {count} of scikit-image at {side}×{side} pixels. {who} has a PSNR of {mean:.2f} "
        f"dB{within}, and gives {found['exact']} back exactly; the leakiest control, `{found['control']}`, has "
        f"{found['control_psnr']:.2f} dB. The attack took {found['seconds']:g} s an image on one shared core. "
        "These photographs are few and small: figures to quote are those of the studies."
    )


def arguments_of(command: str) -> dict[str, Any]:
    """Return what the example of a page gives to `privlab attack`: texts by option, those of --set as "options".

    Args:
        command: the example.
    """
    words = command.split()[2:]
    given: dict[str, Any] = {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        name = option.removeprefix("--").replace("-", "_")
        if name == "set":
            given["options"] = (*given.get("options", ()), value)
        else:
            given[name] = value
    return given
