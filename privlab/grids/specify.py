"""From names to objects: the one way from the command line, from TOML, from cards and from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from privlab.attacks import attacks
from privlab.base import PrivlabError, options_of, unknown_name
from privlab.defenses import defenses
from privlab.evaluation import Specification, completed, defense_kind, name_of
from privlab.evaluation.own import source_sha256
from privlab.images import Data
from privlab.threat import Client, acts_on

Part = Any
"""An attack or a defense: its name, or an instance of its class."""


def specify(
    model: str | Sequence[str],
    setting: str | Sequence[str] | None = None,
    *,
    attack: Part | Sequence[Part] | None = None,
    images: str | Path | Sequence[str | Path] | Data = "samples",
    metrics: str | Sequence[str] | None = None,
    **options: Any,  # noqa: ANN401
) -> Specification:
    """Return a specification from names; each argument is one name, several with commas, or a sequence of names.

    An attack or defense may also be an instance of a dataclass, whose class need not be installed.

    Args:
        model: names of victims.
        setting: "a", "b" or "c", or several; by default c where a defense is named or a victim is one of MJP's, else a.
        attack: the attacks; by default all that can run and need not be named.
        images: "samples", a folder, files, "torchvision:NAME" or "hf:NAME", or an open source.
        metrics: names of `METRICS`, or "lpips"; by default those of `Specification`.
        options: the other fields of `Specification`; `defense` may be one defense or several, which are stacked.

    Raises:
        PrivlabError: for an unknown name or option, or something else than a name or an instance.
    """
    if attack is not None:
        attack = _parts(attack, "attack", attacks())
    named = _parts(options.get("defense", "auto"), "defense", defenses())
    parts = tuple(each for part in named for each in (part.split("+") if isinstance(part, str) else [part]))
    options["defense"] = "+".join(parts) if all(isinstance(part, str) for part in parts) else parts
    if isinstance(client := options.get("client"), Client):
        options["client"] = client.optimiser
        if not isinstance(client.loss, str):
            options["own_loss"] = (client.loss, source_sha256(client.loss))
            client = client.with_loss("cross-entropy")  # no option can state a function
        given = options.get("options", ())
        options["options"] = [*([given] if isinstance(given, str) else given), *options_of(client)]
    models = _names(model)
    defended = parts not in (("auto",), ("none",))
    if options.get("client") is None:
        defended |= any(name.endswith("_mjp") for name in models)
    else:  # an update refuses a defense of images by its name
        known = [part for part in parts if not isinstance(part, str) or part in defenses()]
        defended &= all(acts_on(defense_kind(part)) == "gradients" for part in known)
    known = set(Specification.__dataclass_fields__) - {"models", "settings", "attacks", "images", "metrics"}
    for name in options:
        if name not in known:
            arguments = ("settings", "attacks", "images", "metrics", "device", "batch_size", "out", "overwrite")
            raise unknown_name("option", name, [*known, *arguments])
    given: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    for name in ("options", "public"):
        if name in given:
            several = [given[name]] if name == "public" and isinstance(given[name], str) else given[name]
            given[name] = tuple(str(value) for value in several)
    given |= {"models": models, "settings": _names(setting or ("c" if defended else "a"))}
    given |= {} if attack is None else {"attacks": attack}
    given |= {} if metrics is None else {"metrics": _names(metrics)}
    if not isinstance(images, Data):
        images = tuple(str(source) for source in ([images] if isinstance(images, str | Path) else images))
    return Specification(**given, images=images)


def specification_of(stated: Mapping[str, Any], released: str) -> Specification:
    """Return a specification from what `run.json` states; instances, whose classes may not be here, are left out."""
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in stated.items()}
    if not isinstance(given["defense"], str):
        given |= {"defense": "auto", "release": released}
    named = [attack for attack in given["attacks"] or () if isinstance(attack, str)]
    given |= {"attacks": tuple(named) or None, "own_loss": None}
    return Specification(**given)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Split names at commas, each kept once, in their order."""
    given = names.split(",") if isinstance(names, str) else names
    return tuple(dict.fromkeys(name.strip() for name in given if name.strip()))


def _parts(given: Part | Sequence[Part], kind: str, installed: Mapping[str, type[Any]]) -> tuple[Part, ...]:
    """Return attacks or defenses, each by its name or as an instance with all that its protocol asks for."""
    found: list[Part] = []
    for part in given if isinstance(given, list | tuple) else (given,):
        found += _names(part) if isinstance(part, str) else [completed(part, kind)]
    found, names = [*dict.fromkeys(found)], [name_of(part) for part in found]
    for part in (part for part in found if not isinstance(part, str)):
        if names.count(part.name) > 1:
            raise PrivlabError(f"'{part.name}' was given twice: one run has one set of options for it.")
        if part.name in installed and installed[part.name] is not type(part):
            raise PrivlabError(f"'{part.name}' is the name of an installed {kind}. Give your class another `name`.")
    return tuple(found)
