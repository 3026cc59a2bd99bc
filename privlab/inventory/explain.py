"""The page of an attack, a defense, a metric or a red flag: the terminal prints it, and the site is built from it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from privlab.attacks import attacks
from privlab.base import PrivlabError, unknown_name
from privlab.defenses import defenses
from privlab.inventory.texts import cite, docstrings
from privlab.metrics.names import LPIPS, METRIC_MEANINGS, metric_names
from privlab.report.flag_meanings import FLAG_MEANINGS


@dataclass(frozen=True)
class Box:
    """A box of a drawing: whose it is, and what happens in it; what is released is on its way to the other party."""

    party: Literal["client", "released", "adversary"]
    text: str


@dataclass(frozen=True)
class Explanation:
    """A page: its kind and name, one sentence, and sections of Markdown by their titles, in order.

    Args:
        kind: attack, defense, metric or flag.
        name: of what it explains.
        idea: the first sentence of its docstring.
        sections: text by title; none is empty.
        studies: the stems of the pages in docs/studies that hold its measured figures.
        flow: the boxes of its drawing; none for metrics and flags.
    """

    kind: str
    name: str
    idea: str
    sections: Mapping[str, str]
    studies: tuple[str, ...] = ()
    flow: tuple[Box, ...] = ()


def known() -> dict[str, str]:
    """Return the kind of everything that has a page, by its name; no attack or defense is imported."""
    return {
        **dict.fromkeys(("flags", *FLAG_MEANINGS), "flag"),
        **dict.fromkeys([*metric_names(), LPIPS, *METRIC_MEANINGS], "metric"),
        **dict.fromkeys(defenses(), "defense"),
        **dict.fromkeys(attacks(), "attack"),
    }


def check_explained(name: str) -> str:
    """Return the name as it is written here: case does not matter, and hyphens may stand for spaces.

    Args:
        name: of an attack, a defense, a metric or a flag, as the user gave it.

    Raises:
        PrivlabError: if nothing has that name.
    """
    names = {_plain(each): each for each in known()}
    if _plain(name) not in names:
        error = unknown_name("attack, defense, metric or flag", name, names.values())
        raise PrivlabError(f"{error} Other terms are in the glossary, docs/concepts/glossary.md.")
    return names[_plain(name)]


def explain(name: str) -> Explanation:
    """Return the page of an attack, a defense, a metric or a red flag.

    Args:
        name: as `check_explained` takes it.

    Raises:
        PrivlabError: if nothing has that name.
    """
    from privlab.inventory.parts import attack_page, defense_page

    pages = {"attack": attack_page, "defense": defense_page, "metric": _metric, "flag": _flag}
    name = check_explained(name)
    page = pages[known()[name]](name)
    return replace(page, sections={title: text for title, text in page.sections.items() if text})


def _metric(name: str) -> Explanation:
    from privlab.metrics import METRICS, PLACEMENT

    if name == LPIPS:
        idea = "`lpips_alex` if its backbone can be had, else `lpips_squeeze`, which cannot be compared with it."
        text = "`--metrics lpips_alex` says why it cannot be had. A network that is named is never replaced."
        return Explanation("metric", name, idea, {"How it is chosen": text, **_example_and_papers(name)})
    metric, (doc,) = (PLACEMENT.get(name) or METRICS[name]), docstrings(name)
    idea = doc.summary.removeprefix("Return ")
    worse = f"A {metric.direction.split()[0]} value is a worse leak ({metric.arrow})."
    sections = {
        "Formula and conventions": doc.text,
        "Range": f"[{metric.range[0]:g}, {metric.range[1]:g}], per image.",
        "Direction": worse if metric.arrow else "It says nothing of leakage.",
        "Source": doc.source or metric.source,
        **_example_and_papers(name),
    }
    return Explanation("metric", name, f"{idea[:1].upper()}{idea[1:]}", sections)


def _flag(name: str) -> Explanation:
    text = "A red flag weakens a verdict. Tables, `--json` and the page name it, with the cases that raise it."
    sections = FLAG_MEANINGS if name == "flags" else {"What it does": text}
    return Explanation("flag", name, FLAG_MEANINGS.get(name, text), sections)


def _plain(name: str) -> str:
    return name.replace(" ", "-").casefold()


def _example_and_papers(metric: str) -> dict[str, str]:
    """Return the last sections of a metric's page."""
    from privlab.metrics import PLACEMENT

    network = " --embedding timm:NAME@FILE" if metric == "f_sim" else ""
    defense = {"key_recovered": " --defense column-permutation", "correct": " --defense gaussian-noise"}
    scored = f"--metrics {metric}{network}"
    if metric in PLACEMENT:
        scored = f"--metrics psnr{defense.get(metric, ' --defense row-permutation')} --limit 8"
    return {
        "Example": f"    privlab attack --model cifar_vit {scored}",
        "References": cite(docstrings(metric)[0].papers),
    }
