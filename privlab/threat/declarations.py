"""What attacks and defenses may declare beyond their protocols, and what holds where they do not.

Plug-ins are plain classes: what they leave out has the default that stands here, and is read nowhere else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from torch import Tensor

from privlab.threat.attack_protocols import Attack, AttackClass, FeatureAttack
from privlab.threat.defense_protocols import Defense, DefenseClass, FeatureDefense, GradientDefense

__all__ = ["AttackDeclarations", "DefenseDeclarations", "acts_on", "declared_by_attack", "declared_by_defense"]


def _no_range(seen: object) -> str | None:
    """Return nothing: an attack that states no range is never said to be outside of it."""


def _no_remark() -> str:
    return ""


@dataclass(frozen=True)
class AttackDeclarations:
    """Class attributes and methods of an attack, on gradients or on features.

    Args:
        parameters: the gradients that it reads, "*" for all; attacks on features read none.
        if_released: further gradients that it reads where they are released.
        knows: the defenses that it takes into account, by their kinds or names.
        named_only: whether it runs only where it is asked for by name.
        stands_in_for: attacks; it runs unnamed only where none of them does.
        places: whether it puts loose patches in order itself.
        undefended: the attack that it is where nothing is defended, its positive control; "" for itself.
        obstacle: why it runs on no ViT, or "".
        beyond: says of an observation which condition of its exactness does not hold, or None.
    """

    parameters: tuple[str, ...] = ()
    if_released: tuple[str, ...] = ()
    knows: frozenset[str] = frozenset()
    named_only: bool = False
    stands_in_for: tuple[str, ...] = ()
    places: bool = False
    undefended: str = ""
    obstacle: str = ""
    beyond: Callable[[Any], str | None] = _no_range


@dataclass(frozen=True)
class DefenseDeclarations:
    """Attributes and methods of a defense, of whichever kind.

    Args:
        acts_as: its `Effects`, where it declares them; what is none is refused by whoever measures them.
        std: of the noise that it adds to features, where it says so.
        per: "batch" where one draw serves all images that are released together.
        mixes: whether one image's release depends on the others'.
        remark: returns what is to be said beside its options, such as the ε that its noise buys.
        expected: returns what it releases on average of given gradients; None where that is what it is given.
    """

    acts_as: Any = None
    std: Any = None
    per: Literal["image", "batch"] = "image"
    mixes: bool = False
    remark: Callable[[], str] = _no_remark
    expected: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None


D = TypeVar("D", AttackDeclarations, DefenseDeclarations)


def declared_by_attack(attack: Attack | FeatureAttack | AttackClass) -> AttackDeclarations:
    """Return what an attack or its class declares.

    Args:
        attack: of this package or of another.
    """
    return _declared(attack, AttackDeclarations)


def declared_by_defense(defense: Defense | FeatureDefense | GradientDefense) -> DefenseDeclarations:
    """Return what a defense declares.

    Args:
        defense: of this package or of another; made, as it may declare by its options.
    """
    return _declared(defense, DefenseDeclarations)


def acts_on(kind: DefenseClass) -> Literal["images", "features", "gradients"]:
    """Return what the defenses of a class act on.

    Args:
        kind: the class. Python cannot check it against a protocol with data members: its method says it.
    """
    return "features" if hasattr(kind, "send") else "gradients" if hasattr(kind, "release") else "images"


def _declared(part: object, kind: type[D]) -> D:
    found = {f.name: getattr(part, f.name, None) for f in fields(kind)}
    return kind(**{name: value for name, value in found.items() if value is not None})
