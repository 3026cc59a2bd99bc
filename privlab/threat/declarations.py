"""What attacks and defenses may declare beyond their protocols, with the defaults of what they do not declare.

Plug-ins are plain classes. A declaration that they leave out has the default given here; it is read nowhere else.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from torch import Tensor

from privlab.base import LAST
from privlab.threat.attack_protocols import Attack, AttackClass, FeatureAttack
from privlab.threat.defense_protocols import Defense, DefenseClass, FeatureDefense, GradientDefense
from privlab.victims import VictimModel


def _no_range(seen: object) -> str | None:
    """Return None: an attack that states no range is never reported to be outside of it."""


def _no_refusal(client: object) -> str | None:
    """Return None: an attack that refuses no client by its settings takes all of its optimisers."""


def _no_remark() -> str:
    return ""


def _nothing(names: Collection[str]) -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True)
class AttackDeclarations:
    """Class attributes and methods of an attack, on gradients or on features.

    Args:
        parameters: the gradients that the attack reads, "*" for all; attacks on features read none.
        if_released: further gradients that it reads if they are released.
        knows: the defenses that it takes into account, by their kinds or names.
        search: whether it searches, for seconds an image or longer; images are then attacked one at a time, so that
            each is on disk as soon as it is scored.
        effort: the least effort of a run in which it runs without being asked for: "quick" for a second or two an
            image, "standard", or "full".
        at_full: the options, by name, whose defaults are larger at full effort.
        short: the options, by name, with which it takes a second or two, and need not find anything: tests run it so.
        order: its place among the attacks of a run and in lists, which begin with the lowest.
        named_only: whether it runs only if it is asked for by name, at any effort.
        stands_in_for: names of attacks; without being named, it runs only if none of them does.
        places: whether it puts loose patches in order itself.
        one_key: whether it reads the releases of all images together, since one key serves them all; they are then
            attacked in one batch on any device, unless another size is asked for.
        undefended: the name of its counterpart without a defense, its positive control; "" for itself.
        obstacle: why it runs on no ViT, or "".
        activation: the class of the activation that the MLPs of its victim must have; "" for any.
        updates_of: the optimisers of the clients whose updates it may be given in the place of gradients; none for an
            attack that takes what is released for the gradient of one step.
        reads_means: whether it reads the mean of the updates of several clients, each of which took several steps; a
            mean of single steps of SGD is a gradient.
        refuses: returns why it does not read the updates of a client with these public settings, whose optimiser it
            reads, as the clause behind its name; or None.
        beyond: returns the condition of its exactness that an observation violates, or None.
    """

    parameters: tuple[str, ...] = ()
    if_released: tuple[str, ...] = ()
    knows: frozenset[str] = frozenset()
    search: bool = False
    effort: str = "standard"
    at_full: Mapping[str, Any] = field(default_factory=dict)
    short: Mapping[str, Any] = field(default_factory=dict)
    order: int = LAST
    named_only: bool = False
    stands_in_for: tuple[str, ...] = ()
    places: bool = False
    one_key: bool = False
    undefended: str = ""
    obstacle: str = ""
    activation: str = ""
    updates_of: tuple[str, ...] = ()
    reads_means: bool = False
    refuses: Callable[[Any], str | None] = _no_refusal
    beyond: Callable[[Any], str | None] = _no_range


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of a release, where one image is replaced by another; `by` names the options."""

    epsilon: float
    delta: float
    by: str


@dataclass(frozen=True)
class DefenseDeclarations:
    """Attributes and methods of a defense, of whichever kind.

    Args:
        order: its place in lists, which begin with the lowest.
        acts_as: its `Effects`, if it declares them; code that measures effects refuses a value of another type.
        std: the standard deviation of the noise that it adds to features, if it declares it.
        per: "batch" if one draw serves all images that are released together, "model" if one serves all of a client.
        mixes: whether one image's release depends on the other images.
        remark: returns a remark to print with its options, such as the ε that its noise gives.
        expected: returns the mean of its releases of given gradients; None if that is these gradients.
        at_bound: returns which entries of a release are at a bound, so that they tell the sign of what they were and
            that it was no smaller, but not how large it was; None if none is.
        guarantee: returns the differential privacy of its releases; None if none is known.
        secret_bits: returns log₂ of the number of keys that it draws from, at most, for a victim's model and the number
            of images that are released together; None if that is not known.
        withholds: returns those of the names of parameters whose gradients it leaves out of the release.
    """

    order: int = LAST
    acts_as: Any = None
    std: Any = None
    per: Literal["image", "batch", "model"] = "image"
    mixes: bool = False
    remark: Callable[[], str] = _no_remark
    expected: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    at_bound: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    guarantee: Callable[[], Guarantee] | None = None
    secret_bits: Callable[[VictimModel, int], float] | None = None
    withholds: Callable[[Collection[str]], frozenset[str]] = _nothing


D = TypeVar("D", AttackDeclarations, DefenseDeclarations)


def attack_declarations(attack: Attack | FeatureAttack | AttackClass) -> AttackDeclarations:
    """Return what an attack or its class declares, with defaults for the rest.

    Args:
        attack: an attack of this package or of another.
    """
    return _declarations(attack, AttackDeclarations)


def defense_declarations(defense: Defense | FeatureDefense | GradientDefense) -> DefenseDeclarations:
    """Return what a defense declares, with defaults for the rest.

    Args:
        defense: a defense of this package or of another; an instance, since declarations may depend on options.
    """
    return _declarations(defense, DefenseDeclarations)


def acts_on(kind: DefenseClass) -> Literal["images", "features", "gradients"]:
    """Return what the defenses of a class act on.

    Args:
        kind: the class. Its methods decide, since Python cannot check a class against a protocol with data members.
    """
    return "features" if hasattr(kind, "send") else "gradients" if hasattr(kind, "release") else "images"


def _declarations(part: object, kind: type[D]) -> D:
    found = {f.name: getattr(part, f.name, None) for f in fields(kind)}
    return kind(**{name: value for name, value in found.items() if value is not None})
