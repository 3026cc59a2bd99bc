"""The page of an attack, a defense, a metric or a red flag: the terminal prints it, and the site is built from it."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from privlab.attacks import attacks
from privlab.base import unknown_name
from privlab.defenses import defenses
from privlab.inventory.facts import (
    ATTACK_FACTS,
    DEFENSE_FACTS,
    FLAG_MEANINGS,
    METRIC_MEANINGS,
    AttackFacts,
    DefenseFacts,
)
from privlab.inventory.ideas import ATTACK_IDEAS, DEFENSE_IDEAS, Box
from privlab.inventory.measured import describe
from privlab.inventory.references import CITED, cite
from privlab.metrics.names import LPIPS, metric_names

__all__ = ["KINDS", "Docstring", "Explanation", "check_explained", "explain", "known", "parse_docstring"]


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

    def as_markdown(self, drawing: str = "") -> str:
        """Return the page as Markdown, with the name as its head.

        Args:
            drawing: of `flow`, in Markdown; it stands below the first section, which is the idea.
        """
        parts = [f"# `{self.name}`", self.idea]
        for title, text in self.sections.items():
            parts += [f"## {title}", text, *([drawing] if drawing and title == next(iter(self.sections)) else [])]
        return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class Docstring:
    """A docstring in its parts: the first sentence, the text below it, the meaning of each argument, the source."""

    idea: str
    text: str
    arguments: Mapping[str, str]
    source: str


def known() -> dict[str, str]:
    """Return the kind of everything that has a page, by its name; no attack or defense is imported."""
    return {
        **dict.fromkeys(FLAG_MEANINGS, "flag"),
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
        raise unknown_name("attack, defense, metric or flag", name, names.values())
    return names[_plain(name)]


def explain(name: str) -> Explanation:
    """Return the page of an attack, a defense, a metric or a red flag.

    Args:
        name: as `check_explained` takes it.

    Raises:
        PrivlabError: if nothing has that name.
    """
    name = check_explained(name)
    return KINDS[known()[name]](name)


def parse_docstring(text: str) -> Docstring:
    """Return the parts of a docstring in Google's style; sections other than arguments and source are left out.

    Args:
        text: the docstring, as it stands in the code.
    """
    text = inspect.cleandoc(text)
    idea, _, rest = text.partition("\n\n")
    parts = re.split(r"^(Args|Raises|Returns|Warns|Source):[ ]?", rest, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    found = re.findall(r"^    (\w+): (.*(?:\n(?:        .*|))*)", sections.get("Args", ""), re.MULTILINE)
    return Docstring(
        _one_line(idea),
        parts[0].strip("\n"),
        {name: _one_line(meaning) for name, meaning in found},
        _one_line(sections.get("Source", "")),
    )


def _attack(name: str) -> Explanation:
    from privlab.inventory.flows import attack_flow
    from privlab.threat import Capability, attack_declarations

    kind = attacks()[name]
    declared, facts = attack_declarations(kind), ATTACK_FACTS.get(name, AttackFacts(""))
    docs = [parse_docstring(each) for each in _docstrings(kind)]
    runs = "if it is named" if declared.named_only else f"without being named, at effort {declared.effort} or more"
    needs = [f"- {each.meaning} (`{each.value}`)" for each in Capability if each in kind.requires]
    client = f" --client {declared.updates_of[0]}" if Capability.CLIENT_UPDATE in kind.requires else ""
    client += " --set client.clients=2" if declared.reads_means else ""
    granted = {Capability.FILTERED_IMAGES: " --defense blur", Capability.MIXED_IMAGES: " --defense cutmix"}
    needed = next((option for each, option in granted.items() if each in kind.requires), "")
    behind = _OWN_OPTIONS.get(name, client) or needed or _defended(declared.knows)
    few = " --limit 8" if Capability.RELEASED_FEATURES in kind.requires else ""
    few = " --limit 1" if declared.named_only or (declared.search and declared.effort == "full") else few
    example = f"privlab attack --model {_victim(name)} --attack {name}{behind}{few}"
    sections = {
        "The idea": ATTACK_IDEAS[name].text if name in ATTACK_IDEAS else "",
        "Algorithm": "\n\n".join(each.text for each in docs if each.text),
        "What it needs": "\n".join(needs),
        "What it reads": _reads(declared.parameters, declared.if_released),
        "What it knows": _knows(declared.knows),
        "Where it is exact": facts.exact,
        "Where it falls short": "\n\n".join(filter(None, (declared.obstacle, facts.fails))),
        "When it runs": f"It runs {runs}." + _once(declared.stands_in_for) + _at_full(declared.at_full),
        "Cost": facts.cost,
        "Options": _options(kind),
        "Source": _source(kind, docs),
        "Example": f"    {example}",
        "Measured": describe(name, example),
        "References": cite(CITED.get(name, ())),
    }
    flow = attack_flow(name, kind, declared)
    return Explanation("attack", name, docs[0].idea, _filled(sections), facts.studies, flow)


def _defense(name: str) -> Explanation:
    from privlab.inventory.flows import defense_flow
    from privlab.threat import DefenseDeclarations, Effects, acts_on, attack_declarations, defense_declarations

    kind = defenses()[name]
    docs = [parse_docstring(each) for each in _docstrings(kind)]
    declared = defense_declarations(kind()) if all(map(_has_default, fields(kind))) else DefenseDeclarations()
    acts_as = declared.acts_as
    effects = (
        [f"- {f.name}: {getattr(acts_as, f.name)}" for f in fields(acts_as) if getattr(acts_as, f.name) != f.default]
        if isinstance(acts_as, Effects)
        else []
    )
    against = tuple(
        attack for attack, each in attacks().items() if name in attack_declarations(each).knows and name != "none"
    )
    facts = DEFENSE_FACTS.get(name, DefenseFacts("", ""))
    few = " --limit 8" if acts_on(kind) == "features" else ""
    few = " --release features --limit 8" if acts_on(kind) == "images" and declared.mixes else few
    example = f"privlab attack --model {_victim(name)} --defense {name}{few}"
    sections = {
        "The idea": DEFENSE_IDEAS[name].text if name in DEFENSE_IDEAS else "",
        "Algorithm": "\n\n".join(each.text for each in docs if each.text),
        "What it acts on": f"It acts on {acts_on(kind)}.",
        "Effects that it declares": "\n".join(effects),
        "Attacks that know it": ", ".join(f"`{each}`" for each in against)
        or ("" if name == "none" else "No attack declares that it does."),
        "Where it falls short": facts.fails,
        "Cost": facts.cost,
        "Options": _options(kind),
        "Source": _source(kind, docs),
        "Example": f"    {example}",
        "Measured": describe(name, example),
        "References": cite(CITED.get(name, ())),
    }
    flow = defense_flow(name, kind, against)
    return Explanation("defense", name, docs[0].idea, _filled(sections), facts.studies, flow)


def _metric(name: str) -> Explanation:
    from privlab.metrics import METRICS, PLACEMENT
    from privlab.metrics.registry import Lpips

    if name == LPIPS:
        idea = "`lpips_alex` if its backbone can be had, else `lpips_squeeze`, which has other figures and a column."
        text = "A run that goes on keeps its network. A network that is named is never replaced by another one."
        return Explanation("metric", name, idea, {"How it is chosen": text, **_example_and_papers(name)})
    metric = {**METRICS, **PLACEMENT}[name]
    function = Lpips.__call__ if name.startswith("lpips_") else metric.function
    doc = parse_docstring((function and function.__doc__) or METRIC_MEANINGS.get(name) or metric.source)
    idea = doc.idea.removeprefix("Return ")
    worse = f"A {metric.direction.split()[0]} value is a worse leak ({metric.arrow})."
    sections = {
        "Formula and conventions": doc.text,
        "Range": f"[{metric.range[0]:g}, {metric.range[1]:g}], per image.",
        "Direction": worse if metric.arrow else "It says nothing of leakage.",
        "Source": doc.source or metric.source,
        **_example_and_papers(name),
    }
    return Explanation("metric", name, f"{idea[:1].upper()}{idea[1:]}", _filled(sections))


def _flag(name: str) -> Explanation:
    text = (
        "A red flag weakens the verdict of a table. It stands under the table, in `--json` and on the page, with the "
        "cases that raise it."
    )
    return Explanation("flag", name, FLAG_MEANINGS[name], {"What it does": text})


KINDS: Mapping[str, Callable[[str], Explanation]] = {
    "attack": _attack,
    "defense": _defense,
    "metric": _metric,
    "flag": _flag,
}
"""What makes the page of a name, by its kind."""


def _plain(name: str) -> str:
    return name.replace(" ", "-").casefold()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _filled(sections: Mapping[str, str]) -> dict[str, str]:
    return {title: text for title, text in sections.items() if text}


def _docstrings(kind: type) -> list[str]:
    """Return the docstring of a class, and those of its private bases: what they say is said of this class."""
    bases = [each for each in kind.__mro__[1:] if each.__name__.startswith("_") and each.__doc__]
    return [inspect.getdoc(kind) or "", *(each.__doc__ or "" for each in bases)]


def _options(kind: Any) -> str:  # noqa: ANN401
    """Return a line for each option: its name, its default and its meaning, which may stand in a base's docstring."""
    meanings: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        meanings |= parse_docstring(each.__doc__ or "").arguments
    return "\n".join(
        f"- `{f.name}`, by default {_default(f)}: {meanings.get(f.name, 'not described')}".rstrip(".") + "."
        for f in fields(kind)
        if f.init
    )


def _has_default(option: Field[Any]) -> bool:
    return option.default is not MISSING or option.default_factory is not MISSING


def _default(option: Field[Any]) -> str:
    value = option.default if option.default is not MISSING else None
    return f"`{value}`" if value not in ("", None, ()) else "none"


def _reads(parameters: tuple[str, ...], if_released: tuple[str, ...]) -> str:
    if not parameters:
        either = " or ".join(f"`{name}`" for name in if_released)
        return f"Of the gradients, by timm's names, the one that is released: {either}." if either else ""
    names = "all released gradients" if "*" in parameters else ", ".join(f"`{name}`" for name in parameters)
    more = f"; if they are released also {', '.join(f'`{name}`' for name in if_released)}" if if_released else ""
    return f"Gradients, by timm's names: {names}{more}."


def _knows(defended: frozenset[str]) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(defended))
    return f"It takes these defenses into account: {names}." if names else "It does not know any defense."


def _once(others: tuple[str, ...]) -> str:
    return f" Unnamed, it runs only where {', '.join(f'`{name}`' for name in others)} cannot." if others else ""


def _at_full(larger: Mapping[str, Any]) -> str:
    options = ", ".join(f"`{name}={value}`" for name, value in larger.items())
    return f" At full effort its defaults are {options}." if options else ""


def _source(kind: Any, docs: list[Docstring]) -> str:  # noqa: ANN401
    told = next((each.source for each in docs if each.source), "")
    told = told or f"{kind.paper}."
    return f"{told[:1].upper()}{told[1:]}"


_OWN_OPTIONS = {
    "qkv-span": " --img-size 16 --client sgd --set client.trains=lora --set client.rank=64 --limit 8",
    "adapter-separation": " --img-size 16 --client sgd --set client.trains=adapters --set client.rank=64 --limit 1",
    "map-inversion": " --defense gaussian-noise",
    "map-unet": " --defense gaussian-noise",
}
"""The options of an example that what an attack declares does not tell."""


def _victim(name: str) -> str:
    """Return a small trained victim that comes with privlab, for an example with an attack or a defense."""
    return {"border-jigsaw": "cifar_vit_nope"}.get(name, "cifar_vit_mjp27" if "mjp" in name else "cifar_vit")


def _defended(knows: frozenset[str]) -> str:
    """Return the option of an example that puts a defense which the attack knows in its way."""
    shown = (
        "column-permutation",
        "row-permutation",
        "gradient-pruning",
        "block-scrambling",
        "censor",
        "percentile-privacy",
    )
    undefended = " --setting c" if "mjp" in knows else ""
    return next((f" --defense {name}" for name in shown if name in knows), undefended)


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
        "References": cite(CITED.get(metric, ())),
    }
