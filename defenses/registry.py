"""The defenses by name. A name costs no import: a defense is imported when it is looked up."""

from pathlib import Path
from typing import TYPE_CHECKING

from privlab.base import Registry, with_plugins

if TYPE_CHECKING:
    from privlab.threat import DefenseClass

DEFENSES: Registry["DefenseClass"] = Registry.of_parts("privlab.defenses", Path(__file__).parent)
"""The defenses of this package by name: those of images, of features and of gradients, by their `order`."""


def defenses() -> "Registry[DefenseClass]":
    """Return every installed defense by name, those of other packages included (`privlab.defenses`)."""
    return with_plugins(DEFENSES, "privlab.defenses")
