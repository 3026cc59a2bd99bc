"""Attacks: one file, one attack; each turns an observation into images."""

from privlab.attacks.april import April
from privlab.attacks.border_jigsaw import BorderJigsaw
from privlab.attacks.class_token_key import ClassTokenKey
from privlab.attacks.patch_gradient import PatchGradient
from privlab.attacks.pe_assignment import PEAssignment
from privlab.registry import with_plugins
from privlab.threat import AttackClass

__all__ = ["ATTACKS", "April", "BorderJigsaw", "ClassTokenKey", "PEAssignment", "PatchGradient", "attacks"]

ATTACKS: dict[str, AttackClass] = {
    "april": April,
    "patch-gradient": PatchGradient,
    "pe-assignment": PEAssignment,
    "class-token-key": ClassTokenKey,
    "border-jigsaw": BorderJigsaw,
}


def attacks() -> dict[str, AttackClass]:
    """Return every installed attack by name, those of other packages included (`privlab.attacks`)."""
    return with_plugins(ATTACKS, "privlab.attacks")
