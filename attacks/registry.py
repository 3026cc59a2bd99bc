"""The attacks by name. A name costs no import: an attack is imported when it is looked up."""

from pathlib import Path
from typing import TYPE_CHECKING

from privlab.base import Registry, with_plugins

if TYPE_CHECKING:
    from privlab.threat import AttackClass

ATTACKS: Registry["AttackClass"] = Registry.of_parts("privlab.attacks", Path(__file__).parent, without="weights")
"""Attacks on gradients, then on features, by their `order`. Those on weights, which no run is given, are left out."""


def attacks() -> "Registry[AttackClass]":
    """Return every installed attack by name, those of other packages included (`privlab.attacks`)."""
    return with_plugins(ATTACKS, "privlab.attacks")
