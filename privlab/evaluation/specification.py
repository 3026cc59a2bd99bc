"""The specification of a run, and the defenses that it names."""

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, cast

from privlab.attacks import attacks as installed_attacks
from privlab.base import PrivlabError, check_name, configure, read_options
from privlab.defenses import DEFENSES, Mjp, Undefended, defenses
from privlab.evaluation.names import EFFORTS, WORST_CASE, check_names, check_stated, client_options
from privlab.evaluation.own import source_sha256
from privlab.images import Data, check_bit_depth, check_choice
from privlab.metrics.names import LPIPS
from privlab.reassembly import REASSEMBLIES, Borders, Predicted, Reassembly
from privlab.release import AnyDefense, contradictions, effects_of
from privlab.threat import (
    CLIENT_PRESETS,
    Attack,
    AttackClass,
    Capability,
    Client,
    DefenseClass,
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


@dataclass(frozen=True, kw_only=True)
class Specification:
    """Everything that decides the results of a run; options that only change its speed are not here.

    An attack or a defense is named, or it is an instance: then its class need not be installed, and `options` do not
    apply to it. `own_loss` is a client's loss that is a function, with the hash of its source.

    Raises:
        PrivlabError: for an unknown setting, attack, defense, metric or block, or a number out of range.
    """

    models: tuple[str, ...]
    settings: tuple[str, ...] = ("a",)
    attacks: tuple[str | Attack | FeatureAttack, ...] | None = None
    effort: str = "standard"
    weights: str = "auto"
    block: str = "auto"
    img_size: int | None = None
    defense: str | tuple[str | AnyDefense, ...] = "auto"
    gamma: float | None = None
    masked_pe: str | None = None
    images: tuple[str, ...] | Data = ("samples",)
    limit: int | None = None
    every: int | None = None
    offset: int | None = None
    manifest: str | None = None
    split: str | None = None
    labels: str | None = None
    bit_depth: int | None = None
    metrics: tuple[str, ...] = (
        *("mse", "fft2d", "fft2d_mjp", "psnr", "psnr_affine", "correlation", "gms_affine", "ssim", "ssim_skimage"),
        LPIPS,
    )
    lpips_weights: str | None = None
    eight_bit: bool = False
    seed: int = 0
    draw: int = 0
    draws: int = 1
    force: bool = False
    release: str = "auto"
    client: str | None = None
    own_loss: tuple[Callable[..., Any], str] | None = None
    options: tuple[str, ...] = ()
    public: tuple[str, ...] | Data = ("samples",)
    public_limit: int = 200
    client_batch: int = 16
    cut_layer: int = 0
    embedding: str | None = None
    classes: int | None = None
    normalisation: str | None = None
    gradient_batch: int = 1
    reassembly: str = Borders.name

    def __post_init__(self) -> None:
        """Check every name against what is installed."""
        if self.attacks == (WORST_CASE,):
            object.__setattr__(self, "attacks", None)
        for kind, names in (
            ("setting", self.settings),
            ("attack", [each for each in self.attacks or () if isinstance(each, str)]),
            ("effort", (self.effort,)),
            ("defense", [each for each in self.parts if isinstance(each, str)]),
            ("release", (self.release,)),
            ("block", (self.block,)),
            ("client", () if self.client is None else (self.client,)),
            ("reassembly", (self.reassembly,)),
            ("metric", self.metrics),
        ):
            check_names(kind, names)
        for kind in ("models", "settings", "attacks", "metrics", "images", "public"):
            if getattr(self, kind) == ():
                raise PrivlabError(f"At least one of {kind} is needed. Found none.")
        check_stated(vars(self))
        for name in ("client_batch", "gradient_batch", "public_limit", "draws"):
            if getattr(self, name) < 1:
                raise PrivlabError(f"{name} must be a positive number. Found {getattr(self, name)}.")
        check_choice(self.limit, self.every, self.offset, self.manifest)
        check_bit_depth(self.bit_depth)
        Mjp(**_jigsaw_options(self, Mjp))
        self._check_client()
        self._check_options()
        self._check_release()

    @property
    def parts(self) -> tuple[str | AnyDefense, ...]:
        """Return the stacked defenses, each by its name or as an instance."""
        return tuple(self.defense.split("+")) if isinstance(self.defense, str) else self.defense

    @property
    def defense_name(self) -> str:
        """Return the names of the stacked defenses, joined by +."""
        return "+".join(map(name_of, self.parts))

    def stated(self) -> dict[str, Any]:
        """Return what `run.json` states: the fields as plain data, an instance by its class, its options and source."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("attacks", "defense"):
            if isinstance(plain[name], tuple):
                plain[name] = tuple(map(_stated, plain[name]))
        for name in ("images", "public"):
            if isinstance(plain[name], Data):
                plain[name] = (plain[name].description,)
        if (own := plain.pop("own_loss")) is not None:
            plain["own_loss"] = {"name": own[0].__name__, "source_sha256": own[1]}
        return plain

    @property
    def features_released(self) -> bool:
        """Return whether the adversary sees features: as `release` says, or as blocks, defense or attack need it."""
        if self.release != "auto" or self.client is not None:
            return self.release == "features"
        if self.cut_layer:
            return True
        kinds = map(attack_kind, self.attacks or ())
        return "features" in self._acts_on or any(Capability.RELEASED_FEATURES in kind.requires for kind in kinds)

    @property
    def released(self) -> str:
        """Return what the adversary sees: "gradients", "features" or "update"."""
        return "update" if self.client is not None else "features" if self.features_released else "gradients"

    @cached_property
    def local_training(self) -> Client | None:
        """Return the public settings of the client whose update is released; None where no update is.

        An option for `steps` takes the place of a preset's `epochs`, and one for `epochs` that of its `steps`.

        Raises:
            PrivlabError: if an option is of another type, or a setting out of range.
        """
        if self.client is None:
            return None
        given = asdict(CLIENT_PRESETS[self.client]) if self.client in CLIENT_PRESETS else {"optimiser": self.client}
        keys = {option.partition("=")[0].strip().removeprefix("client.") for option in client_options(self.options)}
        given = {key: value for key, value in given.items() if key not in _LENGTHS or not keys & _LENGTHS}
        client = configure(Client, client_options(self.options), given)
        return client if self.own_loss is None else client.with_loss(self.own_loss[0])

    @property
    def client_release(self) -> Release:
        """Return what the clients release."""
        if self.features_released:
            return Features(self.cut_layer, self.client_batch)
        return Gradient(self.gradient_batch) if self.local_training is None else Update(self.local_training)

    @property
    def together(self) -> int | None:
        """Return how many images are released as one, and attacked as one; None where each is released by itself."""
        release = self.client_release
        return release.images if isinstance(release, Features) or release.images > 1 else None

    @property
    def _acts_on(self) -> dict[str, str]:
        """Return the first defense that acts on images, on features and on gradients, where one does."""
        named = {name_of(part): defense_kind(part) for part in reversed(self.parts) if part != "auto"}
        return {acts_on(kind): name for name, kind in named.items()}

    @property
    def defends_gradients(self) -> bool:
        """Return whether a defense acts on released gradients; in setting a no defense is at work."""
        return "gradients" in self._acts_on and any(setting != "a" for setting in self.settings)

    def _check_options(self) -> None:
        """Check that every option of --set is one of an attack or a defense that this run may use."""
        parts = [defenses()[part] for part in self.parts if isinstance(part, str) and part != "auto"] or [Mjp]
        named = {each: installed_attacks()[each] for each in self.attacks or () if isinstance(each, str)}
        read_options(self.reassembly_options, [REASSEMBLIES[self.reassembly]])
        own = {*self.reassembly_options, *(client_options(self.options) if self.client is not None else ())}
        others = [option for option in self.options if option not in own]
        read_options(others, [*parts, *(default_attacks(self.effort) if self.attacks is None else named).values()])
        for kind in parts:  # also in setting a, which does not use them
            configure(kind, self.options)

    @property
    def reassembly_options(self) -> list[str]:
        """Return the options of the re-assembly: those that start with its name."""
        return [option for option in self.options if option.strip().startswith(f"{self.reassembly}.")]

    def _check_client(self) -> None:
        """Check that what a client sets is public, and that its defenses act on its update."""
        if self.client is None:
            return
        for option in client_options(self.options):
            name, _, value = (part.strip() for part in option.partition("="))
            if value in ("unknown", "private"):
                raise PrivlabError(
                    f"What a client sets is public here: an attack knows it. Found {name}={value}: state the likeliest "
                    "value. `privlab audit update` of one image and SGD fits a decay that is left out and a rate."
                )
        if "features" in self._acts_on:
            raise PrivlabError(
                f"Defense '{self.defense_name}' acts on features, which a client that trains does not send. Leave it "
                "out, or take one of images, which acts in each step, or of gradients, which acts on the update."
            )
        named = [part for part in self.parts if part != "auto"]
        filters = [name_of(part) for part in named if acts_on(defense_kind(part)) == "gradients"]
        cast(Client, self.local_training).check_filters(filters)
        for part in named:
            if defense_declarations(part_of(part, self)).per == "model":
                raise PrivlabError(
                    f"Defense '{name_of(part)}' has one key for all images of a client, and is not defined for "
                    "updates. Leave it out, or release gradients."
                )

    def _check_release(self) -> None:
        if self.cut_layer < 0:
            raise PrivlabError(f"cut_layer must be a number of blocks, at least 0. Found {self.cut_layer}.")
        if self.cut_layer and not self.features_released:
            raise PrivlabError(
                f"A cut layer is of released features. Found cut_layer {self.cut_layer}, and {self.released} released: "
                "leave one of them out."
            )
        if self.features_released and self.block == "april":
            raise PrivlabError("Features leave the client before any block. Found --block april: leave it out.")
        if self.features_released and self.gradient_batch > 1:
            raise PrivlabError(
                f"gradient_batch is of released gradients. Found {self.gradient_batch}, and features released: "
                "use client_batch."
            )
        if not self.features_released and "features" in self._acts_on:
            raise PrivlabError(
                f"Defense '{self.defense_name}' acts on features. Found --release gradients: use features."
            )
        if self.features_released and (name := self._acts_on.get("gradients")) is not None:
            raise PrivlabError(f"Defense '{name}' acts on gradients. Found features released: leave it out.")


def name_of(part: str | Attack | FeatureAttack | AnyDefense) -> str:
    """Return the name of an attack or a defense that is named, or given as an instance."""
    return part if isinstance(part, str) else part.name


def attack_kind(attack: str | Attack | FeatureAttack) -> AttackClass:
    """Return the class of an attack that is named, or given as an instance."""
    return installed_attacks()[attack] if isinstance(attack, str) else type(attack)


def defense_kind(defense: str | AnyDefense) -> DefenseClass:
    """Return the class of a defense that is named, or given as an instance."""
    return defenses()[defense] if isinstance(defense, str) else type(defense)


def _stated(part: str | Attack | FeatureAttack | AnyDefense) -> object:
    if isinstance(part, str):
        return part
    kind = type(part)
    return {"name": part.name, "class": f"{kind.__module__}:{kind.__qualname__}", "options": options_stated(part)}


def options_stated(part: Attack | FeatureAttack | AnyDefense) -> dict[str, Any]:
    """Return the options of an attack or a defense, with the hash of its source if its class is not installed."""
    installed = (kinds[part.name] for kinds in (installed_attacks(), defenses()) if part.name in kinds)
    own = {} if type(part) in installed else {"source_sha256": source_sha256(type(part))}
    try:
        json.dumps(stated := asdict(part) | own)
    except TypeError as error:
        right = "must be a number, a text or a list of them"
        raise PrivlabError(f"Each field of '{part.name}' {right}: {error}.") from None
    return stated


_LENGTHS = {"steps", "epochs"}  # the settings of a client that say how long a round is, each in its own unit


def defense_of(spec: Specification, victim: Victim, setting: str) -> Stack:
    """Return the defenses that are at work in a setting: none in setting a, where the plain image is fed.

    In settings b and c "auto" is MJP for a victim with E_unk. For another victim it is no defense where features are
    released, and the jigsaw alone where gradients are.

    Args:
        spec: names the stacked defenses, and their options.
        victim: the one that is fed; it may have an E_unk.
        setting: "a", "b" or "c", of MJP, section 5.4.

    Raises:
        PrivlabError: if MJP is to put E_unk into a model that has none.
    """
    if setting == "a":
        return Stack((Undefended(),))
    automatic = "mjp" if victim.has_mjp else "none" if spec.features_released else "jigsaw"
    return Stack(tuple(_defense(automatic if part == "auto" else part, spec, victim) for part in spec.parts))


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


def part_of(part: str | AnyDefense, spec: Specification) -> AnyDefense:
    """Return a defense with its options, by its name; an instance is returned as it is."""
    if not isinstance(part, str):
        return part
    kind = defenses()[part]
    return configure(kind, spec.options, _jigsaw_options(spec, kind))


def _jigsaw_options(spec: Specification, kind: type) -> dict[str, Any]:
    """Return γ and `masked_pe` where the run states them and the defense has them; else its own defaults hold."""
    given = {"gamma": spec.gamma, "masked_pe": spec.masked_pe}
    return {f.name: given[f.name] for f in fields(kind) if given.get(f.name) is not None}


def admissions(spec: Specification) -> list[str]:
    """Return the command that tests each defense from another package, with its options: `privlab admit NAME …`."""
    lines = []
    for name in spec.parts:
        if name == "auto" or not isinstance(name, str) or name in DEFENSES:
            continue
        given = [
            (["--gamma", str(value)] if key == "gamma" else ["--set", f"{key}={'none' if value is None else value}"])
            for key, value in asdict(part_of(name, spec)).items()
        ]
        lines.append(shlex.join(["privlab", "admit", name, *(word for words in given for word in words)]))
    return lines


def _defense(part: str | AnyDefense, spec: Specification, victim: Victim) -> AnyDefense:
    defense = part_of(part, spec)
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


def reassembly_of(spec: Specification, base: Victim) -> Reassembly:
    """Return the method that puts shuffled patches in order.

    Raises:
        PrivlabError: if it needs a predictor that is missing, or one that is for patches other than the victim's.
    """
    made = configure(REASSEMBLIES[spec.reassembly], spec.reassembly_options)
    if isinstance(made, Predicted):
        made.predictor(base.model.grid, base.model.patch)
    return made


def default_attacks(effort: str = "standard") -> dict[str, AttackClass]:
    """Return the attacks that run without being named; breaching's searches, which take hours, must be named.

    Raises:
        PrivlabError: if an attack declares an effort that there is not.
    """
    found, within = {}, [*EFFORTS][: [*EFFORTS].index(effort) + 1]
    for name, kind in installed_attacks().items():
        declared = attack_declarations(kind)
        check_name(f"effort of {name}:", declared.effort, EFFORTS)
        if not declared.named_only and declared.effort in within:
            found[name] = kind
    return found


def attack_of(attack: str | Attack | FeatureAttack, spec: Specification) -> Attack | FeatureAttack:
    """Return an attack with its options, by its name; at full effort its larger defaults hold.

    An instance is returned as it is.

    Raises:
        PrivlabError: if an option does not fit the attack.
    """
    if not isinstance(attack, str):
        return attack
    kind = installed_attacks()[attack]
    return configure(kind, spec.options, attack_declarations(kind).at_full if spec.effort == "full" else {})
