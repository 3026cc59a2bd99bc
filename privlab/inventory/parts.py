"""The pages of attacks and defenses, from their docstrings and from what they declare."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from inspect import signature
from typing import Any

from privlab.attacks import attacks
from privlab.base import Docstring, parse_docstring
from privlab.defenses import defenses
from privlab.inventory.explain import Box, Explanation
from privlab.inventory.texts import cite, describe, docstrings
from privlab.threat import (
    AttackClass,
    AttackDeclarations,
    Capability,
    DefenseClass,
    DefenseDeclarations,
    Effects,
    acts_on,
    attack_declarations,
    defense_declarations,
)


def attack_page(name: str) -> Explanation:
    """Return the page of an attack."""
    kind, docs = attacks()[name], docstrings(name)
    declared, said = attack_declarations(kind), docs[0].sections
    known = _names(sorted(declared.knows))
    knows = f"It takes these defenses into account: {known}." if known else "It does not know any defense."
    needs = [f"- {each.meaning} (`{each.value}`)" for each in Capability if each in kind.requires]
    example = said.get("Example") or _attack_example(name, kind, declared)
    sections = {
        **_first_sections(docs),
        "What it needs": "\n".join(needs),
        "What it reads": _reads(declared),
        "What it knows": knows,
        "Exact if": said.get("Exact if", ""),
        "Fails if": "\n\n".join(filter(None, (declared.obstacle, said.get("Fails if", "")))),
        "When it runs": _runs(declared),
        **_last_sections(name, kind, docs, example),
    }
    steps = [Box("adversary", step) for step in _list(said, "Steps", " → ")]
    flow = (*_attacked(kind, declared), *steps) if steps else ()
    return Explanation("attack", name, docs[0].summary, sections, _list(said, "Studies", ", "), flow)


def defense_page(name: str) -> Explanation:
    """Return the page of a defense."""
    kind, docs = defenses()[name], docstrings(name)
    options = signature(kind).parameters.values()
    unset = any(option.default is option.empty for option in options)
    declared = DefenseDeclarations() if unset else defense_declarations(kind())
    acts_as, said = declared.acts_as, docs[0].sections
    effects = [
        f"- {each.name}: {getattr(acts_as, each.name)}"
        for each in (fields(Effects) if isinstance(acts_as, Effects) else ())
        if getattr(acts_as, each.name) != each.default
    ]
    against = [attack for attack, each in attacks().items() if name in attack_declarations(each).knows]
    few = " --limit 8" if acts_on(kind) == "features" else ""
    few = " --release features --limit 8" if acts_on(kind) == "images" and declared.mixes else few
    example = said.get("Example") or f"privlab attack --model cifar_vit --defense {name}{few}"
    known_by = ", ".join(f"`{each}`" for each in against) or "No attack declares that it does."
    sections = {
        **_first_sections(docs),
        "What it acts on": f"It acts on {acts_on(kind)}.",
        "Effects that it declares": "\n".join(effects),
        "Attacks that know it": "" if name == "none" else known_by,
        "Fails if": said.get("Fails if", ""),
        **_last_sections(name, kind, docs, example),
    }
    steps = [Box("client", step) for step in _list(said, "Steps", " → ")]
    flow = (*steps, *_defended_release(kind, against)) if steps else ()
    return Explanation("defense", name, docs[0].summary, sections, _list(said, "Studies", ", "), flow)


def _first_sections(docs: tuple[Docstring, ...]) -> dict[str, str]:
    """Return what the pages of an attack and of a defense begin with."""
    algorithm = "\n\n".join(each.text for each in docs if each.text)
    return {"The idea": docs[0].sections.get("Idea", ""), "Algorithm": algorithm}


def _last_sections(name: str, kind: Any, docs: tuple[Docstring, ...], example: str) -> dict[str, str]:  # noqa: ANN401
    """Return what the pages of an attack and of a defense end with."""
    source = docs[0].source or f"{kind.paper}."
    return {
        "Cost": docs[0].sections.get("Cost", ""),
        "Options": _options(kind),
        "Source": f"{source[:1].upper()}{source[1:]}",
        "Example": f"    {example}",
        "Measured": describe(name, example),
        "References": cite(docs[0].papers),
    }


def _list(sections: Mapping[str, str], title: str, separator: str) -> tuple[str, ...]:
    return tuple(filter(None, sections.get(title, "").split(separator)))


def _options(kind: Any) -> str:  # noqa: ANN401
    """Return a line for each option: its name, its default and its meaning, which may be in a base's docstring."""
    meanings: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        meanings |= parse_docstring(each.__doc__ or "").arguments
    lines = []
    for name, option in signature(kind).parameters.items():
        default = "none" if option.default in (option.empty, "", None, ()) else f"`{option.default}`"
        lines.append(f"- `{name}`, by default {default}: {meanings.get(name, 'not described').rstrip('.')}.")
    return "\n".join(lines)


def _names(names: Iterable[str], link: str = ", ") -> str:
    return link.join(f"`{name}`" for name in names)


def _reads(declared: AttackDeclarations) -> str:
    read, if_released = declared.parameters, declared.if_released
    if not read:
        one = f"Of the gradients, by timm's names, the one that is released: {_names(if_released, ' or ')}."
        return one if if_released else ""
    more = f"; if they are released also {_names(if_released)}" if if_released else ""
    return f"Gradients, by timm's names: {'all released gradients' if '*' in read else _names(read)}{more}."


def _runs(declared: AttackDeclarations) -> str:
    text = f"It runs without being named, at effort {declared.effort} or more."
    text = "It runs if it is named." if declared.named_only else text
    if declared.stands_in_for:
        text += f" Unnamed, it runs only where {_names(declared.stands_in_for)} cannot."
    if declared.at_full:
        text += f" At full effort its defaults are {_names(f'{name}={n}' for name, n in declared.at_full.items())}."
    return text


def _attack_example(name: str, kind: Any, declared: Any) -> str:  # noqa: ANN401
    """Return a command that runs an attack against what it was made for, as it declares that."""
    client = f" --client {declared.updates_of[0]}" if Capability.CLIENT_UPDATE in kind.requires else ""
    client += " --set client.clients=2" if declared.reads_means else ""
    granted = {Capability.FILTERED_IMAGES: " --defense blur", Capability.MIXED_IMAGES: " --defense cutmix"}
    needed = next((option for each, option in granted.items() if each in kind.requires), "")
    few = " --limit 8" if Capability.RELEASED_FEATURES in kind.requires else ""
    few = " --limit 1" if declared.named_only or (declared.search and declared.effort == "full") else few
    return f"privlab attack --model cifar_vit --attack {name}{client or needed or _defended(declared.knows)}{few}"


def _defended(knows: frozenset[str]) -> str:
    """Return the option of an example with a defense that the attack knows."""
    rows = ("column-permutation", "row-permutation")
    gradients = ("gradient-pruning", "block-scrambling", "censor", "percentile-privacy")
    undefended = " --setting c" if "mjp" in knows else ""
    return next((f" --defense {name}" for name in (*rows, *gradients) if name in knows), undefended)


def _attacked(kind: AttackClass, declared: AttackDeclarations) -> tuple[Box, Box]:
    """Return the boxes before the steps of an attack: what the client does, and what it releases."""
    if Capability.EMBEDDED_ROWS in kind.requires:
        client, released = "embed the image: rows W x + b + e", "the rows of features"
    elif Capability.RELEASED_FEATURES in kind.requires:
        client, released = "embed the image, run the first blocks", "the rows of features"
    elif Capability.CLIENT_UPDATE in kind.requires:
        client, released = "train on the image for a round", f"the update of {_parameters(declared)}"
    else:
        client, released = "image, loss ℓ, gradient", f"the gradients of {_parameters(declared)}"
    return Box("client", client), Box("released", released)


def _defended_release(kind: DefenseClass, attacks: Sequence[str]) -> tuple[Box, Box]:
    """Return the boxes behind the steps of a defense: what is released, and the attacks that know it."""
    released = {
        "images": "gradients or features of that image",
        "features": "these rows of features",
        "gradients": "this gradient, or update",
    }[acts_on(kind)]
    more = f" and {len(attacks) - 2} more" if len(attacks) > 2 else ""
    known = f"attacks that know it: {', '.join(attacks[:2])}{more}" if attacks else "any attack"
    return Box("released", released), Box("adversary", known)


def _parameters(declared: AttackDeclarations) -> str:
    """Return what an attack reads, as short as a box has room for."""
    if not (names := declared.parameters):
        return f"one of {len(declared.if_released)} parameters"
    if "*" in names:
        return "all parameters"
    if len(names) > 2:
        return f"{len(names)} parameters"
    return " and ".join(name.replace("patch_embed.proj", "proj") for name in names)
