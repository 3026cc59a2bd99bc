"""Attacks: one file, one attack; each turns an observation into images."""

from privlab.attacks.april import April
from privlab.attacks.patch_gradient import PatchGradient
from privlab.registry import with_plugins
from privlab.threat import AttackClass

__all__ = ["ATTACKS", "April", "PatchGradient", "attacks"]

ATTACKS: dict[str, AttackClass] = {
    "april": April,
    "patch-gradient": PatchGradient,
}


def attacks() -> dict[str, AttackClass]:
    """Return every installed attack by name, those of other packages included (`privlab.attacks`)."""
    return with_plugins(ATTACKS, "privlab.attacks")
