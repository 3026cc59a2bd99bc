"""Defenses: one file, one defense; each turns private images into what the client feeds its model."""

from privlab.defenses.jigsaw import Jigsaw
from privlab.defenses.mjp import Mjp
from privlab.defenses.undefended import Undefended
from privlab.registry import with_plugins
from privlab.threat import DefenseClass

__all__ = ["DEFENSES", "Jigsaw", "Mjp", "Undefended", "defenses"]

DEFENSES: dict[str, DefenseClass] = {
    "none": Undefended,
    "jigsaw": Jigsaw,
    "mjp": Mjp,
}


def defenses() -> dict[str, DefenseClass]:
    """Return every installed defense by name, those of other packages included (`privlab.defenses`)."""
    return with_plugins(DEFENSES, "privlab.defenses")
