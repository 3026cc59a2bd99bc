"""Examples of public classes on the pages of the API: those of `examples.txt`, and those of attacks and defenses.

All share the first lines of `examples.txt`, which make a victim and images. An attack's follows from its declarations:
the release and the defense of the command on its page, and the few steps with which tests run a search.
"""

import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path

from privlab.attacks import attacks
from privlab.defenses import defenses
from privlab.inventory.explain import explain
from privlab.threat import Capability
from privlab.threat.declarations import attack_declarations

FILE = Path(__file__).with_name("examples.txt")

NOT_CALLED = {"adapter-separation", "qkv-completion", "orthogonal-matching", "staged-likelihood", "spear"}
"""Attacks whose call takes some seconds or needs an MLP with ReLU. No test runs these, nor those of breaching."""


def shared() -> str:
    """Return the lines that all examples share."""
    return _sections()[""]


@cache
def examples() -> dict[str, str]:
    """Return each example by the dotted name of its class, without the lines that all share."""
    written = {name: text for name, text in _sections().items() if name}
    of_attacks = {f"privlab.attacks.{cls.__name__}": of_attack(name) for name, cls in attacks().items()}
    of_defenses = {f"privlab.defenses.{cls.__name__}": of_defense(name) for name, cls in defenses().items()}
    return of_attacks | of_defenses | written


def of_attack(name: str) -> str:
    """Return the example of an attack: its observation, and a call.

    Args:
        name: of the attack.
    """
    attack = attacks()[name]
    words = shlex.split(explain(name).sections["Example"])
    options = dict(pairwise(words))
    settings = [value.removeprefix("client.") for word, value in pairwise(words) if word == "--set"]
    several = any(setting.startswith(("clients=", "images=")) for setting in settings)
    on_features = Capability.RELEASED_FEATURES in attack.requires
    lines = [f"from privlab.attacks import {attack.__name__}"]
    given = ["victim", *(("images", "labels") if on_features or several else ("images[:1]", "labels[:1]"))]
    if defense := options.get("--defense"):
        classes = [defenses()[part].__name__ for part in defense.split("+")]
        lines.append(f"from privlab.defenses import {', '.join(classes)}")
        given.append(f"defense={', '.join(f'{each}()' for each in classes)}")
    if client := options.get("--client"):
        values = (setting.partition("=") for setting in settings if "." not in setting)
        stated = [f"{key}={value if value.isdigit() else repr(value)}" for key, _, value in values]
        given.append(f"release=privlab.Update(privlab.Client({', '.join([f'optimiser={client!r}', *stated])}))")
    if Capability.CHOOSES_WEIGHTS in attack.requires:
        given.append(f"server={attack.__name__}()")
    if on_features:
        given.append("release=privlab.Features()")
    if on_features or Capability.AUXILIARY_IMAGES in attack.requires:
        given.append("public=public")
    short = ", ".join(f"{key}={value!r}" for key, value in attack_declarations(attack).short.items())
    skipped = "  # doctest: +SKIP" if name in NOT_CALLED or ":" in name else ""
    lines += [f"seen = privlab.observe({', '.join(given)})", f"found = {attack.__name__}({short})(seen){skipped}"]
    return "\n".join(f">>> {line}" for line in lines)


def of_defense(name: str) -> str:
    """Return the example of a defense: what the adversary sees of clients that use it."""
    defense = defenses()[name]
    release = ", release=privlab.Features()" if hasattr(defense, "send") else ""
    return "\n".join(
        (
            f">>> from privlab.defenses import {defense.__name__}",
            f">>> seen = privlab.observe(victim, images, labels, defense={defense.__name__}(){release})",
        )
    )


def _sections() -> dict[str, str]:
    """Return the parts of the file by the name in their first line; "" for what is above all names."""
    found, name = {"": ""}, ""
    for line in FILE.read_text("utf-8").splitlines():
        if line.startswith("# "):
            name = line[2:]
            found[name] = ""
        elif line:
            found[name] += f"{line}\n"
    return {name: text.rstrip() for name, text in found.items()}
