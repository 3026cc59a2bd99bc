"""Cards: what an entry says of itself, in TOML, whether that is so, and templates to begin with."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import EntryPoint
from importlib.resources import files
from pathlib import Path
from typing import Any

from privlab.attacks import attacks
from privlab.base import PrivlabError, Registry, check_name, check_range, first, plain_data, read_text, write_whole
from privlab.benchmark.tracks import BUNDLED, TRACKS, VERSION, Track, photographs, track
from privlab.defenses import DEFENSES, Undefended, defenses
from privlab.grids.toml_file import TomlFile
from privlab.report.tables import DETERMINISTIC
from privlab.report.tables.knowledge import AGGREGATION
from privlab.threat import acts_on, defense_declarations

_OF_CHECKS = "privlab.runs.weight_checks"

CHECKS: Registry[Any] = Registry(
    {
        name: EntryPoint(name, f"{_OF_CHECKS}:{kind}", "")
        for name, kind in (("weights-audit", "AuditCheck"), ("d-snr", "SignalToNoise"))
    }
)
"""The checks of this package by name, which are imported when they are looked up."""

KINDS = ("defense", "attack")
"""The kinds of entries."""

TEMPLATES = (*KINDS, "check")
"""What there are templates of: a check of weights is an entry of the kind "defense"."""

CHECKED = "dishonest-server"
"""The track whose entries are checks of the weights that a server sent, or defenses of what is released then."""

FIXED_ATTACKS = (CHECKED, "weights")
"""The tracks that take no other attacks than their own."""

KEY = "model-key"
"""What a card of the track `weights` uses: `privlab.keys`, which is not a class of defense."""

AGGREGATES = "local-training"
"""The track that takes secure aggregation, which is a setting of clients that train and no class of defense."""

UNDEFENDED = "none"
"""What the card of a track's control uses: every track takes it."""

_RELEASES = {
    "gradients": {"gradients", "images"},
    "updates": {"gradients"},
    "local-training": {"images"},
    "features": {"features", "images"},
    CHECKED: {"weights", "gradients"},
}
"""What the defenses of a track may act on."""


@dataclass(frozen=True)
class Card:
    """An entry as its card states it.

    `uses` is the installed name of the class, or of a stack with "+", or what is not such a class: a key, or secure
    aggregation, whose parameter `clients` is that of the clients' settings. `plugin` is a file that holds the class.
    `reconstructions` is a folder, for an attack that is given by its images of the public half; `against` names the
    defenses that an attack was made for, by their entries. `releases` is a folder, for a defense that is given by what
    it released of the bundled photographs. `utility` says what the defense costs: the `measure`, its `value`,
    and `how` it was measured. `reported` says what the authors report: the `claim` in a sentence, and the `metric` with
    its `value` if it is one of the track's. `text` is the card itself, `folder` where it lay.
    """

    track: str
    version: str
    kind: str
    name: str
    paper: str
    uses: str = ""
    plugin: str = ""
    reconstructions: str = ""
    releases: str = ""
    victim: str = ""
    against: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    secret_bits: float | None = None
    epsilon: float | int | str | None = None
    utility: Mapping[str, Any] = field(default_factory=dict)
    reported: Mapping[str, Any] = field(default_factory=dict)
    text: str = field(default="", repr=False)
    folder: Path = field(default=Path(), repr=False)

    @property
    def of(self) -> Track:
        """Return the track of the entry."""
        return track(self.track)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the installed names of the stacked classes."""
        return tuple((self.uses or self.name).split("+"))

    @property
    def clients(self) -> int:
        """Return how many clients' updates are released as one mean: those that a card of secure aggregation states."""
        return int(self.parameters.get("clients", 1)) if self.parts == (AGGREGATION,) else 1

    @property
    def draws(self) -> int:
        """Return how often the defense is drawn: once where it draws nothing at random."""
        return 1 if {*self.parts} <= DETERMINISTIC or self.track == CHECKED else self.of.draws

    @property
    def stated_alone(self) -> frozenset[str]:
        """Return which of `secret_bits` and `epsilon` no code of this package derives: the card's word stands."""
        of_package = self.track == "weights" or self.clients > 1 or {*self.parts} <= {*DEFENSES, *CHECKS}
        own = not self.plugin and not self.releases and of_package
        kinds: Sequence[Any] = [DEFENSES[part] for part in self.parts if part in DEFENSES] if own else ()
        known = any(defense_declarations(kind).guarantee for kind in kinds) or not _is_number(self.epsilon)
        return frozenset(name for name, derived in (("secret_bits", own), ("epsilon", known)) if not derived)

    @property
    def victim_name(self) -> str:
        """Return the victim of the entry: the track's first one, unless the card names another."""
        return self.victim or self.of.victims[0].name


_TEXTS = ("track", "version", "kind", "name", "paper", "uses", "plugin", "reconstructions", "releases", "victim")
_RIGHT: Mapping[str, Mapping[str, str]] = {
    "": {
        **dict.fromkeys(_TEXTS, "a text"),
        **dict.fromkeys(("parameters", "utility", "reported"), "a table"),
        "against": "a list of names",
        "secret_bits": "a finite number",
        "epsilon": 'a finite number or "none"',
    },
    "utility": {"measure": "a text", "how": "a text", "value": "a finite number"},
    "reported": {"claim": "a text", "metric": "a text", "value": "a finite number"},
}
"""What the values of a card, and of its tables, must be."""

_NEEDED: Mapping[str, Sequence[str]] = {
    "attack": ("track", "version", "kind", "name", "paper"),
    "defense": ("track", "version", "kind", "name", "paper", "secret_bits", "epsilon", "utility"),
    "utility": ("measure", "how"),
    "reported": ("claim",),
}
"""The keys that must be stated, by the kind of the card, or in one of its tables."""

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9+-]{0,63}")
"""What a name may be that becomes a part of a path; "+" joins the names of stacked defenses."""


def file_name(name: str) -> str:
    """Return a name that becomes a part of a path, which may be nothing but a name.

    Raises:
        PrivlabError: if it holds another character, or is longer than 64 of them.
    """
    if _FILE_NAME.fullmatch(name) is None:
        raise PrivlabError(
            f"A name must have 1 to 64 of the characters a to z, 0 to 9, - and +, and begin with a letter or digit. "
            f"Found {name[:60]!r}."
        )
    return name


def read_card(path: Path) -> Card:
    """Read and check a card; nothing is loaded or run.

    Raises:
        PrivlabError: for a key that is missing, unknown or of another type, an unknown track, another version, or
            secure aggregation without the number of its clients.
    """
    return parse_card(read_text(path, "card"), path)


def parse_card(text: str, path: Path) -> Card:
    """Return the card that a text in TOML states, checked as `read_card` does; `path` is the file that holds it."""
    file = TomlFile.parse(path, text, _RIGHT)
    given = file.data
    _check_stated(file, "", given, _NEEDED["defense" if given.get("kind") == "defense" else "attack"])
    for table in ("utility", "reported"):
        if table in given:
            file.check(given[table], table)
            _check_stated(file, table, given[table], _NEEDED[table])
    track, kind = given["track"], given["kind"]
    with file.at("", 0, "name"):
        file_name(given["name"])
    for name, known in (("track", TRACKS), ("kind", KINDS)):
        with file.at("", 0, name):
            check_name(name, given[name], known)
    if given["version"] != VERSION:
        raise PrivlabError(
            f"{path} is an entry of version '{given['version']}', and this package has the tracks of '{VERSION}': "
            f"install the privlab that has them, or state version = '{VERSION}' and submit again."
        )
    if kind == "attack" and given.get("reconstructions") and len(given.get("against", ())) != 1:
        raise PrivlabError(f'{path}: reconstructions must be of one defense. Name its entry by against = ["NAME"].')
    if given.get("releases") and (kind, track) != ("defense", "gradients"):
        raise PrivlabError(
            f"{path}: recorded releases are only supported for a defense on the track 'gradients'. Found an entry "
            f"of kind '{kind}' on the track '{track}'."
        )
    if kind == "attack" and "+" in (uses := given.get("uses") or given["name"]):
        raise PrivlabError(f"{path}: an entry has one attack. Found {uses}: enter each of them separately.")
    if kind == "attack" and track in FIXED_ATTACKS:
        raise PrivlabError(f"{path}: the track '{track}' has a fixed list of attacks and takes no other one.")
    if "secret_bits" in given:
        given["secret_bits"] = float(given["secret_bits"])
    card = Card(**given, text=text, folder=path.parent)
    card.of.victim(card.victim_name)
    if card.kind == "defense" and card.parts == (AGGREGATION,):
        _check_clients(card)
    return card


def _check_stated(file: TomlFile, table: str, given: Mapping[str, Any], needed: Sequence[str]) -> None:
    if lacking := [name for name in needed if given.get(name) in (None, "")]:
        where = f"[{table}]" if table else "the card"
        raise file.refuse(f"{where} does not state {lacking[0]}. Give {', '.join(needed)}.", table)


def _check_clients(card: Card) -> None:
    """Raise PrivlabError if a card of secure aggregation names another track, or fewer than two clients."""
    if card.track != AGGREGATES:
        raise PrivlabError(
            f"'{AGGREGATION}' needs clients that train, which the track '{card.track}' does not have. Enter it on the "
            f"track '{AGGREGATES}'."
        )
    if {*card.parameters} != {"clients"}:
        raise PrivlabError(
            f"The card of '{card.name}' states {', '.join(card.parameters) or 'no parameter'}. '{AGGREGATION}' has "
            "only the parameter clients."
        )
    K, most = card.parameters["clients"], len(photographs(BUNDLED))
    fine = isinstance(K, int) and not isinstance(K, bool) and 2 <= K <= most
    check_range(fine, "clients", f"a whole number in [2, {most}], the bundled photographs", repr(K))


def instances(card: Card) -> list[Any]:
    """Return the defenses or the attack of a card, made with its parameters.

    Raises:
        PrivlabError: if a class is not installed or acts on something else, or if its parameters are not the card's.
    """
    if card.kind == "defense" and card.parts == (AGGREGATION,):
        return [Undefended()]  # each update is as it is without a defense: their mean alone is released
    known: Mapping[str, Any] = Registry({**CHECKS.data, **defenses().data}) if card.kind == "defense" else attacks()
    found = []
    for name in card.parts:
        check_name(card.kind, name, known)
        kind: Any = known[name]
        acts = "weights" if hasattr(kind, "suspicion") else acts_on(kind) if card.kind == "defense" else ""
        if card.kind == "defense" and name != UNDEFENDED and acts not in _RELEASES.get(card.track, set()):
            raise PrivlabError(f"Defense '{name}' acts on {acts}, which the track '{card.track}' does not take.")
        own = card.parameters if len(card.parts) == 1 else card.parameters.get(name, {})
        found.append(_made(card, name, kind, own))
    return found


def _made(card: Card, name: str, kind: type[Any], own: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return an instance whose fields have exactly the values that the card states."""
    where, defaults = f"The card of '{card.name}'", {each.name: each.default for each in fields(kind)}
    for key, value in own.items():
        if key not in defaults:
            raise PrivlabError(f"{where} states {key}, which is not a parameter of '{name}'. It has {first(defaults)}.")
        if _is_number(defaults[key]) and not _is_number(value):
            raise PrivlabError(f"{where} says {key} = {value!r}. It must be a number, without quotes.")
    made = kind(**own)
    for key, actual in asdict(made).items():
        if key not in own:
            raise PrivlabError(f"{where} leaves out {key} of '{name}', which is {actual!r}. State it.")
        if plain_data(actual) != own[key]:
            raise PrivlabError(
                f"{where} says {key} = {own[key]!r}, and '{name}' works with {actual!r}. State what it works with."
            )
    return made


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def write_template(kind: str, folder: Path) -> list[Path]:
    """Write the template of an entry, one of `TEMPLATES`, into a folder, its card first, and return the paths.

    Raises:
        PrivlabError: for another kind, or if a file is there already.
    """
    check_name("template", kind, TEMPLATES)
    written = []
    for name in (f"my_{kind}.toml", f"my_{kind}.py"):
        text, path = (files("privlab.benchmark") / "templates" / f"{name}.txt").read_text("utf-8"), folder / name
        if path.exists():
            raise PrivlabError(f"'{path}' already exists. Give another folder.")
        write_whole(path, lambda draft, text=text: draft.write_text(text, "utf-8"))
        written.append(path)
    return written
