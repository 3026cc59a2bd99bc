"""The way from the image to the adversary, as boxes of a drawing, made from what attacks and defenses declare."""

from privlab.inventory.ideas import ATTACK_IDEAS, DEFENSE_IDEAS, Box
from privlab.threat import AttackClass, AttackDeclarations, Capability, DefenseClass, acts_on

__all__ = ["attack_flow", "defense_flow"]


def attack_flow(name: str, kind: AttackClass, declared: AttackDeclarations) -> tuple[Box, ...]:
    """Return the boxes of an attack, or none if it is of another package and nobody described its steps.

    Args:
        name: of the attack.
        kind: its class.
        declared: what it declares.
    """
    if name not in ATTACK_IDEAS:
        return ()
    if Capability.EMBEDDED_ROWS in kind.requires:
        client, released = "embed the image: rows W x + b + e", "the rows of features"
    elif Capability.RELEASED_FEATURES in kind.requires:
        client, released = "embed the image, run the first blocks", "the rows of features"
    elif Capability.CLIENT_UPDATE in kind.requires:
        client, released = "train on the image for a round", f"the update of {_parameters(declared)}"
    else:
        client, released = "image, loss ℓ, gradient", f"the gradients of {_parameters(declared)}"
    steps = [Box("adversary", step) for step in ATTACK_IDEAS[name].steps]
    return (Box("client", client), Box("released", released), *steps)


def defense_flow(name: str, kind: DefenseClass, attacks: tuple[str, ...]) -> tuple[Box, ...]:
    """Return the boxes of a defense, or none if it is of another package and nobody described its steps.

    Args:
        name: of the defense.
        kind: its class.
        attacks: the names of the attacks that know it.
    """
    if name not in DEFENSE_IDEAS:
        return ()
    released = {
        "images": "gradients or features of that image",
        "features": "these rows of features",
        "gradients": "this gradient, or update",
    }[acts_on(kind)]
    steps = [Box("client", step) for step in DEFENSE_IDEAS[name].steps]
    more = f" and {len(attacks) - 2} more" if len(attacks) > 2 else ""
    known = f"attacks that know it: {', '.join(attacks[:2])}{more}" if attacks else "any attack"
    return (*steps, Box("released", released), Box("adversary", known))


def _parameters(declared: AttackDeclarations) -> str:
    """Return what an attack reads, as short as a box has room for."""
    if not (names := declared.parameters):
        return f"one of {len(declared.if_released)} parameters"
    if "*" in names:
        return "all parameters"
    return (
        " and ".join(name.replace("patch_embed.proj", "proj") for name in names)
        if len(names) < 3
        else (f"{len(names)} parameters")
    )
