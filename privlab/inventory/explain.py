"""The page of an attack, a defense, a metric or a red flag: the terminal prints it, and the site is built from it."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from privlab.attacks import attacks
from privlab.base import unknown_name
from privlab.defenses import defenses
from privlab.inventory.facts import ATTACK_FACTS, DEFENSE_STUDIES, FLAG_MEANINGS, METRIC_MEANINGS, AttackFacts
from privlab.metrics.names import LPIPS, metric_names

__all__ = ["KINDS", "Docstring", "Explanation", "check_explained", "explain", "known", "parse_docstring"]


@dataclass(frozen=True)
class Explanation:
    """A page: its kind and name, one sentence, and sections of Markdown by their titles, in order."""

    kind: str
    name: str
    idea: str
    sections: Mapping[str, str]
    studies: tuple[str, ...] = ()

    def as_markdown(self) -> str:
        """Return the page as Markdown, with the name as its head."""
        parts = [f"# `{self.name}`", self.idea]
        for title, text in self.sections.items():
            parts += [f"## {title}", text]
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
    from privlab.threat import Capability, attack_declarations

    kind = attacks()[name]
    declared, facts = attack_declarations(kind), ATTACK_FACTS.get(name, AttackFacts(""))
    docs = [parse_docstring(each) for each in _docstrings(kind)]
    runs = "if it is named" if declared.named_only else f"without being named, at effort {declared.effort} or more"
    needs = [f"- {each.meaning} (`{each.value}`)" for each in Capability if each in kind.requires]
    client = " --client sgd" if Capability.CLIENT_UPDATE in kind.requires else ""
    sections = {
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
        "Example": f"    privlab attack --model {_victim(name)} --attack {name}{client}{_defended(declared.knows)}",
    }
    return Explanation("attack", name, docs[0].idea, _filled(sections), facts.studies)


def _defense(name: str) -> Explanation:
    from privlab.threat import Effects, acts_on, attack_declarations, defense_declarations

    kind = defenses()[name]
    docs = [parse_docstring(each) for each in _docstrings(kind)]
    declared = defense_declarations(kind()).acts_as if all(map(_has_default, fields(kind))) else None
    effects = (
        [f"- {f.name}: {getattr(declared, f.name)}" for f in fields(declared) if getattr(declared, f.name) != f.default]
        if isinstance(declared, Effects)
        else []
    )
    against = [
        f"`{attack}`"
        for attack, each in attacks().items()
        if name in attack_declarations(each).knows and name != "none"
    ]
    sections = {
        "Algorithm": "\n\n".join(each.text for each in docs if each.text),
        "What it acts on": f"It acts on {acts_on(kind)}.",
        "Effects that it declares": "\n".join(effects),
        "Attacks that know it": ", ".join(against) or ("" if name == "none" else "No attack declares that it does."),
        "Options": _options(kind),
        "Source": _source(kind, docs),
        "Example": f"    privlab attack --model {_victim(name)} --defense {name}",
    }
    return Explanation("defense", name, docs[0].idea, _filled(sections), DEFENSE_STUDIES.get(name, ()))


def _metric(name: str) -> Explanation:
    from privlab.metrics import METRICS, PLACEMENT
    from privlab.metrics.registry import Lpips

    if name == LPIPS:
        idea = "`lpips_alex` if its backbone can be had, else `lpips_squeeze`, which has other figures and a column."
        text = "A run that goes on keeps its network. A network that is named is never replaced by another one."
        return Explanation("metric", name, idea, {"How it is chosen": text, "Example": _scored(name)})
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
        "Example": "" if name in PLACEMENT else _scored(name),
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
        return ""
    names = "all released gradients" if parameters == ("*",) else ", ".join(f"`{name}`" for name in parameters)
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


def _victim(name: str) -> str:
    """Return a small trained victim that comes with privlab, for an example with an attack or a defense."""
    return {"border-jigsaw": "cifar_vit_nope"}.get(name, "cifar_vit_mjp27" if "mjp" in name else "cifar_vit")


def _defended(knows: frozenset[str]) -> str:
    """Return the option of an example that puts a defense which the attack knows in its way."""
    shown = ("column-permutation", "row-permutation", "gradient-noise")
    return next((f" --defense {name}" for name in shown if name in knows), "")


def _scored(name: str) -> str:
    network = " --embedding timm:NAME@FILE" if name == "f_sim" else ""
    return f"    privlab attack --model cifar_vit --metrics {name}{network}"
