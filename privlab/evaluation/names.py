"""The names that a specification may give, which cost no import of torch: settings, attacks, defenses and the like."""

from collections.abc import Sequence

from privlab.attacks import attacks
from privlab.base import check_name
from privlab.defenses import defenses
from privlab.metrics.names import LPIPS, metric_names
from privlab.threat.federated import CLIENT_PRESETS, OPTIMISERS

__all__ = ["EFFORTS", "RELEASE_KINDS", "SETTINGS", "WORST_CASE", "check_names", "known_names"]

WORST_CASE = "worst-case"
"""The name for all attacks that can run and need not be named; they run if no attack is named."""

SETTINGS: dict[str, str] = {
    "a": "φ(∇M(x), x): the plain image is fed, and scored against",
    "b": "φ(∇M(x̃), x̃): the shuffled image is fed, and scored against",
    "c": "φ(∇M(x̃), x): the shuffled image is fed, the plain image is scored against",
}
"""The settings of MJP, section 5.4; x̃ is the shuffled x."""

EFFORTS: dict[str, str] = {
    "quick": "attacks that take a second or two an image: the closed forms and mjp-subspace",
    "standard": "every attack that need not be asked for, searches for tokens included",
    "full": "larger budgets, gradient matching and trained decoders as well",
}
"""How much is tried against a release, in steps and never in seconds; the least first."""

RELEASE_KINDS: dict[str, str] = {
    "gradients": "the gradient of each image's loss, as in federated learning",
    "features": "the embedded tokens, or those after --cut-layer blocks, as in split learning",
    "update": "the difference of weights after a round of local training (--client), as federations send it",
}
"""What a client releases, and the adversary sees."""


def known_names(kind: str) -> list[str]:
    """Return what may be named alone, of one kind.

    Args:
        kind: "setting", "attack", "defense", "release", "metric", "block", "effort" or "client".
    """
    return {
        "setting": lambda: [*SETTINGS],
        "attack": lambda: [*attacks(), WORST_CASE],
        "defense": lambda: [*defenses(), "auto"],
        "release": lambda: [*RELEASE_KINDS, "auto"],
        "metric": lambda: [*metric_names(), LPIPS],
        "block": lambda: ["auto", "stock", "april"],
        "effort": lambda: [*EFFORTS],
        "client": lambda: [*OPTIMISERS, *CLIENT_PRESETS],
    }[kind]()


def check_names(kind: str, names: Sequence[str]) -> None:
    """Refuse names of a kind that `known_names` does not know; "auto" is no part of a stack of defenses.

    Raises:
        PrivlabError: for an unknown name, with the nearest ones.
    """
    known = known_names(kind)
    if kind == "defense" and len(names) > 1:
        known.remove("auto")
    for name in names:
        check_name(kind, name, known)
