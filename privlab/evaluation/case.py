"""The case of a run: everything that decides its results, as objects that check themselves once."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from privlab.attacks import attacks as installed_attacks
from privlab.base import PrivlabError, check_name, check_range, configure
from privlab.defenses import DEFENSES, Jigsaw, Mjp, Undefended, defenses
from privlab.evaluation.names import EFFORTS, check_names, check_seed
from privlab.evaluation.own import source_sha256
from privlab.images import Data, check_bit_depth, check_choice
from privlab.metrics.names import LPIPS
from privlab.reassembly import Borders, Reassembly
from privlab.release import AnyDefense, contradictions, effects_of
from privlab.threat import (
    Attack,
    AttackClass,
    Capability,
    Client,
    FeatureAttack,
    Features,
    Gradient,
    Release,
    Stack,
    Update,
    acts_on,
    attack_declarations,
    defense_declarations,
)
from privlab.victims import Victim, VictimModel

AnyAttack = Attack | FeatureAttack


@dataclass(frozen=True)
class Words:
    """The names and numbers by which a case was asked for, as `run.json` states them.

    The case holds the objects that they name. An attack or a defense may be given as an instance, which is stated by
    its class, its options and its source. `own_loss` is a client's function, with the hash of its source.
    """

    attacks: tuple[str | AnyAttack, ...] | None = None
    defense: str | tuple[str | AnyDefense, ...] = "auto"
    gamma: float | None = None
    masked_pe: str | None = None
    release: str = "auto"
    client: str | None = None
    own_loss: tuple[Callable[..., Any], str] | None = None
    client_batch: int = 16
    cut_layer: int = 0
    gradient_batch: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check(self, positive=("client_batch", "gradient_batch"))


@dataclass(frozen=True)
class Victims:
    """The names of the victims of a case, and how each is made."""

    models: tuple[str, ...]
    weights: str = "auto"
    block: str = "auto"
    img_size: int | None = None
    classes: int | None = None
    normalisation: str | None = None

    def __post_init__(self) -> None:
        """Check the names; those of victims are checked when they are made."""
        _check(self, some=("models",))
        check_names("block", [self.block])

    def options(self, seed: int) -> dict[str, Any]:
        """Return what `victim` takes besides a name and a block; `seed` makes random weights."""
        return {name: value for name, value in vars(self).items() if name not in ("models", "block")} | {"seed": seed}


@dataclass(frozen=True)
class Choice:
    """The images of a case: where they are, which of them are used, and their labels."""

    images: tuple[str, ...] | Data = ("samples",)
    limit: int | None = None
    every: int | None = None
    offset: int | None = None
    manifest: str | None = None
    split: str | None = None
    labels: str | None = None
    bit_depth: int | None = None

    def __post_init__(self) -> None:
        """Check that the choice is one, before any image is looked for."""
        _check(self, some=("images",))
        check_choice(self.limit, self.every, self.offset, self.manifest)
        check_bit_depth(self.bit_depth)


@dataclass(frozen=True)
class Automatic:
    """The defenses of "auto": MJP for a victim with E_unk; else none for features, and the jigsaw for gradients."""

    mjp: Mjp
    jigsaw: Jigsaw

    def of(self, model: VictimModel, *, features: bool) -> AnyDefense:
        """Return the defense of a victim."""
        if model.unk_embed is not None:
            return self.mjp
        return Undefended() if features else self.jigsaw


@dataclass(frozen=True)
class Adversary:
    """Who attacks: the attacks, the effort, public images, and how shuffled patches are put in order.

    Without `attacks`, all that can run and need not be named are made with those of the `options` that are meant for
    them; others are meant for named attacks, defenses and the client. `force` grants what can be forced, on a block
    that is named.
    """

    attacks: tuple[AnyAttack, ...] | None = None
    effort: str = "standard"
    force: bool = False
    options: tuple[str, ...] = ()
    public: tuple[str, ...] | Data = ("samples",)
    public_limit: int = 200
    reassembly: Reassembly = field(default_factory=Borders)

    def __post_init__(self) -> None:
        """Check the names and numbers."""
        check_names("effort", [self.effort])
        _check(self, some=("attacks", "public"), positive=("public_limit",))

    def made(self, kind: AttackClass) -> AnyAttack:
        """Return an attack with the options that are meant for it; at full effort its larger defaults hold.

        Raises:
            PrivlabError: if an option does not fit the attack.
        """
        return configure(kind, self.options, attack_declarations(kind).at_full if self.effort == "full" else {})


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that decides the results of a run; options that only change its speed are not here.

    `privlab.grids.specify` makes it from names. `words` says how it was asked for.

    Raises:
        PrivlabError: for an unknown setting or metric, a number out of range, or objects that contradict each other.
    """

    victim: Victims
    data: Choice
    release: Release
    defense: tuple[AnyDefense, ...] | Automatic
    adversary: Adversary
    words: Words
    settings: tuple[str, ...] = ("a",)
    metrics: tuple[str, ...] = (
        *("mse", "fft2d", "fft2d_mjp", "psnr", "psnr_affine", "correlation", "gms_affine", "ssim", "ssim_skimage"),
        LPIPS,
    )
    lpips_weights: str | None = None
    embedding: str | None = None
    eight_bit: bool = False
    seed: int = 0
    draw: int = 0
    draws: int = 1

    def __post_init__(self) -> None:
        """Check the names and numbers, and that defenses act on what is released."""
        _check(self, some=("settings", "metrics"), positive=("draws",))
        check_names("setting", self.settings)
        check_names("metric", self.metrics)
        check_seed(self.seed)
        self._check_server()
        self._check_release()

    @property
    def parts(self) -> tuple[AnyDefense, ...]:
        """Return the stacked defenses; none where they are decided automatically."""
        return () if isinstance(self.defense, Automatic) else self.defense

    @property
    def defense_name(self) -> str:
        """Return the names of the stacked defenses, joined by +."""
        return "+".join(part.name for part in self.parts) or "auto"

    def stated(self) -> dict[str, Any]:
        """Return what `run.json` states: plain data by name, an instance by its class, its options and source."""
        plain: dict[str, Any] = {}
        for part in (self, self.victim, self.data, self.adversary, self.words):
            plain |= vars(part)
        match self.release:
            case Gradient(batch):
                plain["gradient_batch"] = batch
            case Features(cut_layer, batch):
                plain |= {"cut_layer": cut_layer, "client_batch": batch}
        plain["reassembly"] = self.adversary.reassembly.name
        for name in ("attacks", "defense"):
            if isinstance(plain[name], tuple):
                plain[name] = tuple(map(_stated, plain[name]))
        for name in ("images", "public"):
            if isinstance(plain[name], Data):
                plain[name] = (plain[name].description,)
        stated = {name: plain[name] for name in _STATED}
        if (own := self.words.own_loss) is not None:
            stated["own_loss"] = {"name": own[0].__name__, "source_sha256": own[1]}
        return stated

    @property
    def features_released(self) -> bool:
        """Return whether the adversary sees features."""
        return isinstance(self.release, Features)

    @property
    def cut_layer(self) -> int:
        """Return the number of blocks before the features that are released; 0 where none are."""
        return self.release.cut_layer if isinstance(self.release, Features) else 0

    @property
    def released(self) -> str:
        """Return what the adversary sees: "gradients", "features" or "update"."""
        return {Gradient: "gradients", Features: "features", Update: "update"}[type(self.release)]

    @property
    def client(self) -> Client | None:
        """Return the public settings of the client whose update is released; None where no update is."""
        return self.release.client if isinstance(self.release, Update) else None

    @property
    def together(self) -> int | None:
        """Return how many images are released as one, and attacked as one; None where each is released alone."""
        return self.release.images if self.features_released or self.release.images > 1 else None

    @property
    def chooses_weights(self) -> bool:
        """Return whether the server chose the weights: then all attacks are those of such a server."""
        return any(map(_is_dishonest, self.adversary.attacks or ()))

    @property
    def defends_gradients(self) -> bool:
        """Return whether a defense acts on released gradients; in setting a no defense is at work."""
        return bool(self._acting_on("gradients")) and any(setting != "a" for setting in self.settings)

    def _acting_on(self, what: str) -> list[str]:
        """Return the names of the defenses that act on "images", "features" or "gradients"."""
        return [part.name for part in self.parts if acts_on(type(part)) == what]

    def _check_server(self) -> None:
        """Refuse attacks of two threat models: one verdict would be on both."""
        named = self.adversary.attacks or ()
        if self.chooses_weights and (honest := [attack.name for attack in named if not _is_dishonest(attack)]):
            cheats = next(attack.name for attack in named if _is_dishonest(attack))
            raise PrivlabError(
                f"Attack '{cheats}' is of a server that chooses the weights, and needs a separate run. "
                f"Found it with '{honest[0]}', of a server that follows the protocol."
            )

    def _check_release(self) -> None:
        gradients = self._acting_on("gradients")
        if self.features_released and self.victim.block == "april":
            raise PrivlabError("Features leave the client before any block. Found --block april: leave it out.")
        if self.features_released and gradients:
            raise PrivlabError(f"Defense '{gradients[0]}' acts on gradients. Found features released: leave it out.")
        if not self.features_released and self._acting_on("features"):
            right = ". Found --release gradients: use features."
            if self.client is not None:
                right = (
                    ", which a client that trains does not send. Leave it out, or take one of images, which acts in "
                    "each step, or of gradients, which acts on the update."
                )
            raise PrivlabError(f"Defense '{self.defense_name}' acts on features{right}")
        if self.client is None:
            return
        self.client.check_filters(gradients)
        for part in self.parts:
            if defense_declarations(part).per == "model":
                raise PrivlabError(
                    f"Defense '{part.name}' has one key for all images of a client, and is not defined for updates. "
                    "Leave it out, or release gradients."
                )


_STATED = (
    *("models", "settings", "attacks", "effort", "weights", "block", "img_size", "defense", "gamma", "masked_pe"),
    *("images", "limit", "every", "offset", "manifest", "split", "labels", "bit_depth", "metrics", "lpips_weights"),
    *("eight_bit", "seed", "draw", "draws", "force", "release", "client", "options", "public", "public_limit"),
    *("client_batch", "cut_layer", "embedding", "classes", "normalisation", "gradient_batch", "reassembly"),
)
"""What `run.json` states of a case, in its order."""


def _check(part: object, some: Sequence[str] = (), positive: Sequence[str] = ()) -> None:
    """Check that some fields of a part are not empty, and that others are positive numbers."""
    for name in some:
        if getattr(part, name) == ():
            raise PrivlabError(f"At least one of {name} is needed. Found none.")
    for name in positive:
        check_range(getattr(part, name) >= 1, name, "a positive number", getattr(part, name))


def _stated(part: str | AnyAttack | AnyDefense) -> object:
    if isinstance(part, str):
        return part
    kind = type(part)
    return {"name": part.name, "class": f"{kind.__module__}:{kind.__qualname__}", "options": options_stated(part)}


def options_stated(part: AnyAttack | AnyDefense) -> dict[str, Any]:
    """Return the options of an attack or a defense, with the hash of its source if its class is not installed."""
    installed = (kinds[part.name] for kinds in (installed_attacks(), defenses()) if part.name in kinds)
    own = {} if type(part) in installed else {"source_sha256": source_sha256(type(part))}
    try:
        json.dumps(stated := asdict(part) | own)
    except TypeError as error:
        right = "must be a number, a text or a list of them"
        raise PrivlabError(f"Each field of '{part.name}' {right}: {error}.") from None
    return stated


def _is_dishonest(attack: AnyAttack | AttackClass) -> bool:
    return Capability.CHOOSES_WEIGHTS in attack.requires


def defense_of(spec: Case, victim: Victim, setting: str) -> Stack:
    """Return the defenses that are at work in a setting: none in setting a, where the plain image is fed.

    Args:
        spec: the case, with its stacked defenses.
        victim: the one that is fed; it may have an E_unk.
        setting: "a", "b" or "c", of MJP, section 5.4.

    Raises:
        PrivlabError: if MJP is to put E_unk into a model that has none.
    """
    if setting == "a":
        return Stack((Undefended(),))
    if isinstance(spec.defense, Automatic):
        return Stack((_checked(spec.defense.of(victim.model, features=spec.features_released), victim),))
    return Stack(tuple(_checked(part, victim) for part in spec.defense))


def shuffles(release: Release, model: VictimModel, defense: Stack) -> bool:
    """Return whether gradients of shuffled patches with borders are released.

    Patches of less than 3 × 3 pixels have no borders by which they could be put in order.

    Args:
        release: what the clients release.
        model: the victim's model.
        defense: the defenses at work.
    """
    moved = effects_of(model, defense.parts).patches != "kept"
    return moved and not isinstance(release, Features) and model.patch >= 3


def admissions(spec: Case) -> list[str]:
    """Return the command that tests each defense from another package, with its options: `privlab admit NAME …`."""
    lines = []
    for part in spec.parts:
        if part.name in DEFENSES or type(part) is not defenses().get(part.name):
            continue
        given = [
            (["--gamma", str(value)] if key == "gamma" else ["--set", f"{key}={'none' if value is None else value}"])
            for key, value in asdict(part).items()
        ]
        lines.append(shlex.join(["privlab", "admit", part.name, *(word for words in given for word in words)]))
    return lines


def _checked(defense: AnyDefense, victim: Victim) -> AnyDefense:
    """Return a defense that does on this victim what it declares."""
    name = defense.name
    declared = name not in DEFENSES and defense_declarations(defense).acts_as is not None
    if declared and (wrong := contradictions(victim.model, defense)):
        raise PrivlabError(
            f"Defense '{name}' declares effects that its releases contradict ({'; '.join(wrong)}). Correct its "
            "acts_as, or leave it out: what the defense does is then measured."
        )
    if isinstance(defense, Mjp) and defense.masked_pe == "unknown" and not victim.has_mjp:
        raise PrivlabError(
            f"Defense 'mjp' puts E_unk at the masked slots, and {victim.name} has none. "
            "Use a `_mjp` victim, --masked-pe none|slot, or --defense jigsaw."
        )
    return defense


def default_attacks(effort: str = "standard") -> dict[str, AttackClass]:
    """Return the attacks that run without being named; breaching's searches, which take hours, must be named.

    Raises:
        PrivlabError: if an attack declares an effort that there is not.
    """
    found, within = {}, [*EFFORTS][: [*EFFORTS].index(effort) + 1]
    for name, kind in installed_attacks().items():
        declared = attack_declarations(kind)
        check_name(f"effort of {name}:", declared.effort, EFFORTS)
        if _is_dishonest(kind):
            continue
        if not declared.named_only and declared.effort in within:
            found[name] = kind
    return found
