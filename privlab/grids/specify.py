"""From names to objects: the one way from the command line, from TOML, from cards and from Python."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from privlab.attacks import attacks
from privlab.base import PrivlabError, configure, options_of, read_options, unknown_name
from privlab.defenses import Jigsaw, Mjp, defenses
from privlab.evaluation import Adversary, Automatic, Case, Choice, Victims, Words, completed, default_attacks
from privlab.evaluation.names import WORST_CASE, check_names, check_stated, client_of, client_options
from privlab.evaluation.own import complete_class, source_sha256
from privlab.images import Data
from privlab.reassembly import REASSEMBLIES, Borders
from privlab.release import AnyDefense
from privlab.threat import Capability, Client, Features, Gradient, Release, Update, acts_on

Part = Any
"""An attack or a defense: its name, or an instance of its class."""

OPTIONS: dict[str, Field[Any]] = {f.name: f for kind in (Case, Adversary, Choice, Victims, Words) for f in fields(kind)}
"""The fields that names can set, by the names of the options. The attacks and what is made of words are not options."""
for _name in ("victim", "data", "adversary", "words", "attacks", "models", "own_loss"):
    del OPTIONS[_name]


def specify(
    model: str | Sequence[str],
    setting: str | Sequence[str] | None = None,
    *,
    attack: Part | Sequence[Part] | None = None,
    images: str | Path | Sequence[str | Path] | Data = "samples",
    metrics: str | Sequence[str] | None = None,
    **options: Any,  # noqa: ANN401
) -> Case:
    """Return a case from names; each argument is one name, several with commas, or a sequence of names.

    An attack or defense may also be an instance of a dataclass, whose class need not be installed.

    Args:
        model: names of victims.
        setting: "a", "b" or "c", or several; by default c where a defense is named or a victim is one of MJP's, else a.
        attack: the attacks; by default all that can run and need not be named.
        images: "samples", a folder, files, "torchvision:NAME" or "hf:NAME", or an open source.
        metrics: names of `METRICS`, or "lpips"; by default those of `Case`.
        options: the other fields of `Words`, `Victims`, `Choice`, `Adversary` and `Case`; `defense` may be one defense
            or several, which are stacked, and `release` and `client` may be objects.

    Raises:
        PrivlabError: for an unknown name or option, something else than a name or an instance, or words that contradict
            each other.
    """
    for name in options:
        if name not in OPTIONS or name in ("settings", "images", "metrics"):
            arguments = ("settings", "attacks", "images", "metrics", "device", "batch_size", "out", "overwrite")
            raise unknown_name("option", name, [*OPTIONS, *arguments])
    given: dict[str, Any] = _in_words(options) | {"images": _several(images)}
    given |= {} if metrics is None else {"metrics": _names(metrics)}
    words, parts = _words(given, attack)
    kinds = [defenses()[part] if isinstance(part, str) else type(part) for part in parts if part != "auto"]
    victim = Victims(_names(model), **_of(Victims, given))
    given["settings"] = _names(setting or _usual_setting(victim, words, kinds))
    reassembly = given.pop("reassembly", Borders.name)
    check_names("reassembly", [reassembly])
    adversary = Adversary(**_of(Adversary, given), reassembly=_reassembly(reassembly, given.get("options", ())))
    seed = given.get("seed", Case.seed)
    check_stated(vars(adversary) | vars(words) | {"block": victim.block, "settings": given["settings"], "seed": seed})
    _check_options(words, adversary, parts, reassembly)
    if words.attacks is not None:
        made = (adversary.made(attacks()[name]) if isinstance(name, str) else name for name in words.attacks)
        adversary = replace(adversary, attacks=tuple(made))
    given |= {"release": _release(words, adversary, kinds), "defense": _defenses(words, adversary, parts)}
    data = Choice(**_of(Choice, given))
    return Case(victim=victim, data=data, adversary=adversary, words=words, **_of(Case, given))


def check_shuffled(cases: Sequence[Case]) -> None:
    """Refuse γ or `masked_pe` where none of the cases reads it: the results of all its values would be the same.

    Raises:
        PrivlabError: with the name and what was found.
    """
    for name in ("gamma", "masked_pe"):
        stating = [case for case in cases if getattr(case.words, name) is not None]
        if stating and not any(_reads(case, name) for case in stating):
            first = stating[0]
            raise PrivlabError(
                f"{name} applies only to defenses that shuffle patches, in settings b and c. Found {name}="
                f"{getattr(first.words, name)}, setting {','.join(first.settings)} and defense {first.defense_name}."
            )


def _reads(case: Case, name: str) -> bool:
    """Return whether patches may be shuffled in this case, by a defense whose option of this name the words state."""
    words = case.words.defense
    parts = words.split("+") if isinstance(words, str) else words
    kinds = [Mjp if part == "auto" else defenses()[part] for part in parts if isinstance(part, str)]
    return not {"b", "c"}.isdisjoint(case.settings) and any(name in {f.name for f in fields(kind)} for kind in kinds)


def case_of(stated: Mapping[str, Any], released: str) -> Case:
    """Return a case from what `run.json` states; instances, whose classes may not be here, are left out."""
    given = {name: value for name, value in stated.items() if name != "own_loss"}  # a function is not on disk
    if not isinstance(given["defense"], str):
        given |= {"defense": "auto", "release": released}
    named = [attack for attack in given.pop("attacks") or () if isinstance(attack, str)]
    return specify(given.pop("models"), given.pop("settings"), attack=named or None, **given)


def released_by(case: Case, client: Client, options: Sequence[str]) -> Case:
    """Return a case with the update of another client.

    Args:
        case: the case of an update.
        client: the settings of the other client.
        options: all options of the case, those that state this client included.
    """
    return replace(case, release=Update(client), adversary=replace(case.adversary, options=tuple(options)))


def _in_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the words of a release and a client that are given as objects."""
    found: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    match found.get("release", "auto"):
        case Gradient(batch):
            found |= {"release": "gradients", "gradient_batch": batch}
        case Features(cut_layer, batch):
            found |= {"release": "features", "cut_layer": cut_layer, "client_batch": batch}
        case Update(client):
            found |= {"release": "auto", "client": client}
        case None:
            del found["release"]
    if "public" in found:
        found["public"] = _several(found["public"])
    options = found.get("options", ())
    options = [options] if isinstance(options, str) else [str(option) for option in options]
    if isinstance(client := found.get("client"), Client):
        found["client"] = client.optimiser
        if not isinstance(client.loss, str):
            found["own_loss"] = (client.loss, source_sha256(client.loss))
            client = client.with_loss("cross-entropy")  # no option can state a function
        options += options_of(client)
    return found | {"options": tuple(options)}


def _words(given: Mapping[str, Any], attack: Part | Sequence[Part] | None) -> tuple[Words, tuple[Part, ...]]:
    """Return the checked words of options, and the parts of the defense: names and instances."""
    names = None if attack is None else _parts(attack, "attack", attacks())
    parts = _parts(given.get("defense", "auto"), "defense", defenses())
    parts = tuple(each for part in parts for each in (part.split("+") if isinstance(part, str) else [part]))
    check_names("attack", [name for name in names or () if isinstance(name, str)])
    check_names("defense", [part for part in parts if isinstance(part, str)])
    defense = "+".join(parts) if all(isinstance(part, str) for part in parts) else parts
    names = None if names == (WORST_CASE,) else names
    words = Words(**_of(Words, {**given, "attacks": names, "defense": defense}))
    check_names("release", [words.release])
    check_names("client", [] if words.client is None else [words.client])
    return words, parts


def _usual_setting(victim: Victims, words: Words, kinds: Sequence[type[Any]]) -> str:
    """Return setting c where a defense is at work, else a; an update refuses a defense of features by its name."""
    defended = words.defense not in ("auto", "none")
    if words.client is not None:
        defended &= all(acts_on(kind) == "gradients" for kind in kinds)
    elif any(name.endswith("_mjp") for name in victim.models):
        defended = True
    return "c" if defended else "a"


def _of(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a class that are given."""
    return {f.name: given[f.name] for f in fields(kind) if f.name in given}


def _reassembly(name: str, options: Sequence[str]) -> Any:  # noqa: ANN401
    """Return the re-assembly of a name, with its options: those that start with its name."""
    options = [option for option in options if option.strip().startswith(f"{name}.")]
    read_options(options, [REASSEMBLIES[name]])
    return configure(REASSEMBLIES[name], options)


def _check_options(words: Words, adversary: Adversary, parts: Sequence[Part], reassembly: str) -> None:
    """Check that every option of --set is one of an attack or a defense that this run may use."""
    own = set(client_options(adversary.options)) if words.client is not None else set[str]()
    others = [each for each in adversary.options if each not in own and not each.strip().startswith(f"{reassembly}.")]
    of_defenses = [defenses()[part] for part in parts if isinstance(part, str) and part != "auto"] or [Mjp]
    if words.attacks is None:
        of_attacks = default_attacks(adversary.effort)
    else:
        of_attacks = {name: attacks()[name] for name in words.attacks if isinstance(name, str)}
    read_options(others, [*of_defenses, *of_attacks.values()])


def _defenses(
    words: Words, adversary: Adversary, parts: Sequence[str | AnyDefense]
) -> tuple[AnyDefense, ...] | Automatic:
    """Return the stacked defenses with their options; γ and `masked_pe` are those of the run where it states them."""

    def made(kind: type[Any]) -> Any:  # noqa: ANN401
        stated = {"gamma": words.gamma, "masked_pe": words.masked_pe}
        given = {f.name: stated[f.name] for f in fields(kind) if stated.get(f.name) is not None}
        return configure(kind, adversary.options, given)

    automatic = Automatic(made(Mjp), made(Jigsaw))  # it checks the words, also where other defenses are named
    if words.defense == "auto":
        return automatic
    return tuple(made(defenses()[part]) if isinstance(part, str) else part for part in parts)


def _release(words: Words, adversary: Adversary, kinds: Sequence[type[Any]]) -> Release:
    """Return what is released: as the words say, or as blocks, a defense or an attack need it.

    Raises:
        PrivlabError: if the words contradict it.
    """
    if words.cut_layer < 0:
        raise PrivlabError(f"cut_layer must be a number of blocks, at least 0. Found {words.cut_layer}.")
    features = words.release == "features"
    if words.release == "auto" and words.client is None:
        needed = any(Capability.RELEASED_FEATURES in attack.requires for attack in adversary.attacks or ())
        features = needed or words.cut_layer > 0 or any(acts_on(kind) == "features" for kind in kinds)
    if features and words.gradient_batch > 1:
        raise PrivlabError(
            f"gradient_batch is of released gradients. Found {words.gradient_batch}, and features released: use "
            "client_batch."
        )
    if words.cut_layer and not features:
        raise PrivlabError(
            f"A cut layer is of released features. Found cut_layer {words.cut_layer}, and "
            f"{'gradients' if words.client is None else 'update'} released: leave one of them out."
        )
    if features:
        return Features(words.cut_layer, words.client_batch)
    if words.client is None:
        return Gradient(words.gradient_batch)
    client = client_of(words.client, adversary.options)
    return Update(client if words.own_loss is None else client.with_loss(words.own_loss[0]))


def _several(sources: str | Path | Sequence[str | Path] | Data) -> tuple[str, ...] | Data:
    """Return sources of images as texts."""
    if isinstance(sources, Data):
        return sources
    return tuple(str(source) for source in ([sources] if isinstance(sources, str | Path) else sources))


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Split names at commas, each kept once, in their order."""
    given = names.split(",") if isinstance(names, str) else names
    return tuple(dict.fromkeys(name.strip() for name in given if name.strip()))


def _parts(given: Part | Sequence[Part], kind: str, installed: Mapping[str, type[Any]]) -> tuple[Part, ...]:
    """Return attacks or defenses, each by its name or as an instance with all that its protocol asks for."""
    found: list[Part] = []
    for part in given if isinstance(given, list | tuple) else (given,):
        found += _names(part) if isinstance(part, str) else [completed(part, kind)]
    names = [part if isinstance(part, str) else part.name for part in found]
    for part in (part for part in found if not isinstance(part, str)):
        if names.count(part.name) > 1:
            raise PrivlabError(f"'{part.name}' was given twice: one run has one set of options for it.")
        if (known := installed.get(part.name)) and type(part) not in (known, complete_class(known, kind)):
            raise PrivlabError(f"'{part.name}' is the name of an installed {kind}. Give your class another `name`.")
    return tuple(dict.fromkeys(found))
