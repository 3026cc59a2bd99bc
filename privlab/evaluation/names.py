"""The names that a case may give, which cost no import of torch: settings, attacks, defenses and the like."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from privlab.attacks import attacks
from privlab.base import PrivlabError, check_name, check_range, configure, read_options
from privlab.defenses import defenses
from privlab.metrics.names import LPIPS, metric_names
from privlab.threat.client import CLIENT_PRESETS, OPTIMISERS, Client

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

ALWAYS_RECORDED = "levels_wrong"
"""What records and `--json` have of each image that is scored, whatever the metrics."""

GEOMETRIES = ("in_place", "oracle", "reassembled")
"""The layouts of a reconstruction: as it is; with the moved patches put in order by the evaluator; and, in setting c of
released gradients, with the patches that a defense shuffled put in order by the adversary."""

RELEASE_KINDS: dict[str, str] = {
    "gradients": "the gradient of each image's loss, as in federated learning",
    "features": "the embedded tokens, or those after --cut-layer blocks, as in split learning",
    "update": "the difference of weights after a round of local training (--client), as federations send it",
}
"""What a client releases, and the adversary sees."""


def known_names(kind: str) -> list[str]:
    """Return what may be named alone, of one kind.

    Args:
        kind: "setting", "attack", "defense", "release", "metric", "block", "effort", "client", "geometry",
            "reassembly" or "masked_pe".
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
        "geometry": lambda: [*GEOMETRIES],
        "reassembly": lambda: ["border", "mp3", "droppos"],
        "masked_pe": lambda: ["unknown", "none", "slot"],
    }[kind]()


def check_names(kind: str, names: Sequence[str]) -> None:
    """Refuse names of a kind that `known_names` does not know; "auto" is not part of a stack of defenses.

    Raises:
        PrivlabError: for an unknown name, with the nearest ones; for a score that is always recorded.
    """
    known = known_names(kind)
    if kind == "attack" and {*names} > {WORST_CASE}:
        raise PrivlabError(
            f"'{WORST_CASE}' already includes every attack that runs without being named. It cannot be combined with "
            f"other attacks. Found {','.join(names)}."
        )
    if kind == "defense" and len(names) > 1:
        known.remove("auto")
    if kind == "metric" and ALWAYS_RECORDED in names:
        raise PrivlabError(f"'{ALWAYS_RECORDED}' is always recorded. Found it among the metrics: leave it out.")
    for name in names:
        check_name(kind, name, known)


def client_options(options: Sequence[str]) -> list[str]:
    """Return the options of the client: those that start with "client."."""
    return [option for option in options if option.strip().startswith("client.")]


def client_of(name: str, options: Sequence[str]) -> Client:
    """Return the client of a name, an optimiser or a preset, with the options that are meant for it.

    An option for `steps` takes the place of a preset's `epochs`, and one for `epochs` that of its `steps`.

    Raises:
        PrivlabError: if an option is unknown, of another type, or of a value that is private or out of range.
    """
    own = client_options(options)
    for option in own:
        key, _, value = (part.strip() for part in option.partition("="))
        if value in ("unknown", "private"):
            raise PrivlabError(
                f"What a client sets is public here: an attack knows it. Found {key}={value}: state the likeliest "
                "value. `privlab audit update` of one image and SGD fits a decay that is left out and a rate."
            )
    read_options(own, [Client])
    given = asdict(CLIENT_PRESETS.get(name) or Client(optimiser=name))
    keys = {option.partition("=")[0].strip().removeprefix("client.") for option in own}
    lengths = {"steps", "epochs"}
    if keys & lengths:
        given = {key: value for key, value in given.items() if key not in lengths}
    return configure(Client, own, given)


def check_seed(seed: int) -> None:
    """Refuse a seed that generators do not take."""
    check_range(0 <= seed < 2**63, "seed", "in [0, 2^63 − 1]", seed)


def check_stated(stated: Mapping[str, Any]) -> None:
    """Refuse words that are out of range or contradict each other, as far as no class is needed to see it.

    Args:
        stated: what is asked for by name: block, force, seed, gamma, settings, release, client, gradient_batch and
            options.

    Raises:
        PrivlabError: for the first such value.
    """
    for option in stated["options"]:
        if not all(part.strip() for part in option.partition("=")[:2]):
            raise PrivlabError(f"--set takes KEY=VALUE or NAME.KEY=VALUE. Found '{option}'.")
    if stated["force"] and stated["block"] == "auto":
        raise PrivlabError("force runs attacks on a block that is named. Found block auto: give stock or april.")
    check_seed(stated["seed"])
    if (gamma := stated["gamma"]) is not None:
        check_range(0 <= gamma <= 1, "gamma (γ)", "in [0, 1]", gamma)
    if stated["client"] is None:
        options = client_options(stated["options"])
        if stated["release"] == "update" or options:
            found = options[0].strip() if options else "release 'update'"
            raise PrivlabError(f"An update is released by a client. Found {found} and no client: give --client sgd.")
        return
    if stated["release"] not in ("auto", "update"):
        raise PrivlabError(f"A client releases its update. Found --release {stated['release']}: leave it out.")
    if (images := stated["gradient_batch"]) > 1:
        raise PrivlabError(
            f"gradient_batch applies only to released gradients. Found {images}, and a client: use --set "
            f"client.images={images}."
        )
    if "b" in stated["settings"]:
        raise PrivlabError(
            f"Setting b compares with the image that is fed, and a defense feeds another one in each step of a "
            f"client. Found setting {','.join(stated['settings'])} and an update: take a or c."
        )
    client_of(stated["client"], stated["options"])
