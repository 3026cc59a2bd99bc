"""Which defenses an attack knows: by their names, or because they have the same kinds of effects as known ones."""

from collections.abc import Iterable, Mapping
from functools import cache

import pandas as pd

from privlab.attacks import attacks as installed
from privlab.base import PrivlabError, parse_object
from privlab.defenses import DEFENSES, defenses
from privlab.release import kinds_of
from privlab.threat import Capability, attack_declarations

AGGREGATION = "secure-aggregation"
"""The name of secure aggregation where it is judged as a defense: a setting of the clients (`Client.clients`), and no
class."""

Kinds = Mapping[str, frozenset[str]]
"""Kinds of effects by the name of a defense, only for defenses that are not privlab's own."""


def declared_defenses(attack: str) -> frozenset[str]:
    """Return the defenses that an attack declares to know; for an attack that is not installed there are none.

    One that takes releases of several images separates the images of several clients: it knows secure aggregation.
    """
    kind = installed().get(attack)
    if kind is None:
        return frozenset()
    alone = {Capability.BATCH_SIZE_ONE, Capability.RELEASED_FEATURES} & kind.requires
    return frozenset(attack_declarations(kind).knows) | (frozenset() if alone else {AGGREGATION})


def undefended_attack(attack: str) -> str:
    """Return which attack an attack declares to be where nothing is defended: another one, or by default itself."""
    kind = installed().get(attack)
    return attack if kind is None else attack_declarations(kind).undefended or attack


def undone(attack: str, rows: pd.DataFrame, geometry: str) -> frozenset[str]:
    """Return the defenses that are undone in what is scored: those that the attack declares to know, and the jigsaw.

    The jigsaw counts where the geometry puts patches in order, or where the attack has rows of geometry "reassembled".

    Args:
        attack: the attack's name.
        rows: the records of one case, of all attacks and geometries.
        geometry: the one in which the case is scored.
    """
    scored = rows.geometry[rows.attack == attack]
    return declared_defenses(attack) | (
        {"jigsaw"} if geometry != "in_place" or (scored == "reassembled").any() else frozenset()
    )


def knows(known: frozenset[str], parts: Iterable[str], kinds: Kinds) -> bool:
    """Return whether all parts of a defense are known: by name, or as defenses whose kinds of effects are known.

    Args:
        known: the names of the defenses that an attack knows.
        parts: the names of the stacked defenses of a case.
        kinds: the kinds of effects of those parts that are not privlab's own, as `kinds_in` returns them.
    """
    others = frozenset[str]().union(*(kinds_of(DEFENSES[name]()) for name in known & DEFENSES.keys()))
    return all(part in known or (bool(kinds.get(part)) and kinds[part] <= others) for part in parts)


def kinds_in(rows: pd.DataFrame, parts: frozenset[str]) -> Kinds:
    """Return the kinds of effects of the parts of a defense that are not privlab's own, with the recorded options."""
    stated = rows.reindex(columns=["defense_params"]).defense_params
    params = stated.iloc[0] if len(stated) else None
    return {part: _kinds(part, params, alone=len(parts) == 1) for part in parts - DEFENSES.keys()}


@cache
def _kinds(part: str, params: str | None, *, alone: bool) -> frozenset[str]:
    kind = defenses().get(part)
    if kind is None or not isinstance(params, str):
        return frozenset()
    given = parse_object(params, "defense_params of a record")
    options = given if alone else given.get(part, {})
    try:
        return kinds_of(kind(**options))
    except (PrivlabError, TypeError):  # this version of it has other options
        return frozenset()
