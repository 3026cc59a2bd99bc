"""The specification of a run, and which attack runs on which block of a victim."""

import shlex
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from privlab.attacks import attacks as installed_attacks
from privlab.base import PrivlabError, PrivlabWarning, check_name, configure, read_options
from privlab.defenses import DEFENSES, Mjp, Undefended, defenses
from privlab.evaluation.names import WORST_CASE, check_names
from privlab.images import check_choice
from privlab.metrics import METRICS
from privlab.reassembly import REASSEMBLIES, Borders, Predicted, Reassembly
from privlab.release import feature_capabilities, gradient_capabilities, released_parameters
from privlab.release.gradients import obstacles
from privlab.threat import (
    Attack,
    AttackClass,
    Capability,
    Defense,
    FeatureAttack,
    FeatureDefense,
    GradientDefense,
    Stack,
    acts_on,
    attack_declarations,
    check_capabilities,
)
from privlab.victims import Victim

__all__ = [
    "AttackGroup",
    "Specification",
    "admissions",
    "applicable",
    "defense_of",
    "part_of",
    "plan",
    "reassembly_of",
    "stands_in",
]


@dataclass(frozen=True, kw_only=True)
class Specification:
    """Everything that decides the results of a run; options that only change its speed are not here.

    Raises:
        PrivlabError: for an unknown setting, attack, defense, metric or block, or a number out of range.
    """

    models: tuple[str, ...]
    settings: tuple[str, ...] = ("a",)
    attacks: tuple[str, ...] | None = None
    weights: str = "auto"
    block: str = "auto"
    img_size: int | None = None
    defense: str = "auto"
    gamma: float = 0.27
    masked_pe: str = "unknown"
    images: tuple[str, ...] = ("samples",)
    limit: int | None = None
    every: int | None = None
    offset: int | None = None
    manifest: str | None = None
    split: str | None = None
    labels: str | None = None
    metrics: tuple[str, ...] = (
        *("mse", "fft2d", "fft2d_mjp", "psnr", "psnr_affine", "correlation", "gms_affine", "ssim", "ssim_skimage"),
        "lpips_alex",
    )
    lpips_weights: str | None = None
    eight_bit: bool = False
    seed: int = 0
    draw: int = 0
    draws: int = 1
    force: bool = False
    release: str = "auto"
    options: tuple[str, ...] = ()
    public: tuple[str, ...] = ("samples",)
    public_limit: int = 200
    client_batch: int = 16
    embedding: str | None = None
    classes: int | None = None
    gradient_batch: int = 1
    reassembly: str = Borders.name

    def __post_init__(self) -> None:
        """Check every name against what is installed."""
        if self.attacks == (WORST_CASE,):
            object.__setattr__(self, "attacks", None)
        if WORST_CASE in (self.attacks or ()):
            raise PrivlabError(
                f"'{WORST_CASE}' is every attack that can run and need not be named, and stands alone. "
                f"Found {','.join(self.attacks or ())}."
            )
        for kind, names in (
            ("setting", self.settings),
            ("attack", self.attacks or ()),
            ("defense", self.parts),
            ("release", (self.release,)),
            ("block", (self.block,)),
        ):
            check_names(kind, names)
        check_name("reassembly", self.reassembly, REASSEMBLIES)
        for name in self.metrics:
            check_name("metric", name, METRICS)
        for kind in ("models", "settings", "attacks", "metrics", "images", "public"):
            if getattr(self, kind) == ():
                raise PrivlabError(f"At least one of {kind} is needed. Found none.")
        if self.force and self.block == "auto":
            raise PrivlabError("force runs attacks on a block that is named. Found block auto: give stock or april.")
        if not 0 <= self.seed < 2**63:
            raise PrivlabError(f"seed must be in [0, 2^63 − 1]. Found {self.seed}.")
        for name in ("client_batch", "gradient_batch", "public_limit", "draws"):
            if getattr(self, name) < 1:
                raise PrivlabError(f"{name} must be a positive number. Found {getattr(self, name)}.")
        check_choice(self.limit, self.every, self.offset, self.manifest)
        Mjp(gamma=self.gamma, masked_pe=self.masked_pe)
        self._check_options()
        self._check_release()

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the stacked defenses."""
        return tuple(self.defense.split("+"))

    @property
    def features_released(self) -> bool:
        """Return whether the adversary sees features: as `release` says, or else as a defense or an attack needs it."""
        if self.release != "auto":
            return self.release == "features"
        kinds = [installed_attacks()[name] for name in self.attacks or ()]
        return self._defends_features or any(Capability.RELEASED_FEATURES in kind.requires for kind in kinds)

    @property
    def together(self) -> int | None:
        """Return how many images are released as one, and attacked as one; None where each is released by itself."""
        if self.features_released:
            return self.client_batch
        return self.gradient_batch if self.gradient_batch > 1 else None

    @property
    def _acts_on(self) -> set[str]:
        return {acts_on(defenses()[name]) for name in self.parts if name in defenses()}

    @property
    def _defends_features(self) -> bool:
        return "features" in self._acts_on

    @property
    def defends_gradients(self) -> bool:
        """Return whether a defense acts on released gradients; in setting a no defense is at work."""
        acts = "gradients" in self._acts_on
        return acts and any(setting != "a" for setting in self.settings)

    def _check_options(self) -> None:
        """Check that every option of --set is one of an attack or a defense that this run may use."""
        parts = [defenses()[name] for name in self.parts if name != "auto"] or [Mjp]
        named = {name: installed_attacks()[name] for name in self.attacks or ()}
        read_options(self.reassembly_options, [REASSEMBLIES[self.reassembly]])
        others = [option for option in self.options if option not in self.reassembly_options]
        read_options(others, [*parts, *(named or _by_default()).values()])
        for kind in parts:  # also in setting a, which does not use them
            configure(kind, self.options)

    @property
    def reassembly_options(self) -> list[str]:
        """Return the options of the re-assembly: those that start with its name."""
        return [option for option in self.options if option.strip().startswith(f"{self.reassembly}.")]

    def _check_release(self) -> None:
        if self.features_released and self.block == "april":
            raise PrivlabError("Features leave the client before any block. Found --block april: leave it out.")
        if self.features_released and self.gradient_batch > 1:
            raise PrivlabError(
                f"gradient_batch is of released gradients. Found {self.gradient_batch}, and features released: "
                "use client_batch."
            )
        if not self.features_released and self._defends_features:
            raise PrivlabError(f"Defense '{self.defense}' acts on features. Found --release gradients: use features.")
        for name in self.parts if self.features_released else ():
            if name in defenses() and acts_on(defenses()[name]) == "gradients":
                raise PrivlabError(f"Defense '{name}' acts on gradients. Found features released: leave it out.")


@dataclass(frozen=True, eq=False)
class AttackGroup:
    """The attacks that run on one block variant of a victim, from one observation."""

    victim: Victim
    attacks: tuple[Attack | FeatureAttack, ...]

    @property
    def parameters(self) -> list[str]:
        """Return the names of the gradients that the attacks read; "*" stands for all that are released."""
        names = [name for attack in self.attacks if isinstance(attack, Attack) for name in attack.parameters]
        released = released_parameters(self.victim.model)
        if "*" in names:
            return sorted(released)
        more = (name for attack in self.attacks for name in attack_declarations(attack).if_released if name in released)
        return list(dict.fromkeys((*names, *more)))


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
    return Stack(tuple(_defense(automatic if name == "auto" else name, spec, victim) for name in spec.parts))


def part_of(name: str, spec: Specification) -> Defense | FeatureDefense | GradientDefense:
    """Return a defense with its options, by its name."""
    kind = defenses()[name]
    given = {f.name for f in fields(kind)} & {"gamma", "masked_pe"}
    return configure(kind, spec.options, {name: getattr(spec, name) for name in given})


def admissions(spec: Specification) -> list[str]:
    """Return the command that tests each defense from another package, with its options: `privlab admit NAME …`."""
    lines = []
    for name in spec.parts:
        if name == "auto" or name in DEFENSES:
            continue
        given = [
            (["--gamma", str(value)] if key == "gamma" else ["--set", f"{key}={'none' if value is None else value}"])
            for key, value in asdict(part_of(name, spec)).items()
        ]
        lines.append(shlex.join(["privlab", "admit", name, *(word for words in given for word in words)]))
    return lines


def _defense(name: str, spec: Specification, victim: Victim) -> Defense | FeatureDefense | GradientDefense:
    defense = part_of(name, spec)
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


def plan(spec: Specification, base: Victim) -> list[AttackGroup]:
    """Return the attacks of one victim in groups; --block auto is the stock block where attacks can run, else April's.

    Raises:
        PrivlabError: if an attack that was asked for lacks a capability on each allowed block, or no attack is left.

    Warns:
        PrivlabWarning: for each attack that was not asked for by name and cannot run.
    """
    groups, refused = applicable(spec, base)
    refusals = [f"{base.name}: {refusal}" for refusal in refused.values()]
    if refusals and (spec.attacks is not None or not groups):
        raise PrivlabError(refusals[0] if spec.attacks is not None else f"{base.name}: {_none_runs(refused)}")
    for refusal in refusals:
        warnings.warn(f"Left out. {refusal}", PrivlabWarning, stacklevel=2)
    return groups


def _none_runs(refused: Mapping[str, str]) -> str:
    """Return one short line on why no attack can run: the commonest reason, with the first attack that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, refusal in refused.items():
        by_reason.setdefault(refusal.removeprefix(f"Attack '{name}' "), []).append(f"'{name}'")
    reason, names = max(by_reason.items(), key=lambda item: len(item[1]))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    rest = len(refused) - len(names)
    others = f" {rest} {'has' if rest == 1 else 'have'} other reasons; --attack NAME says which." if rest else ""
    return f"No attack can run. {names[0]}{more}: {reason}{others}"


def applicable(
    spec: Specification, base: Victim, *, stand_ins: bool = False
) -> tuple[list[AttackGroup], dict[str, str]]:
    """Return the groups of the attacks that can run on a victim, and for each other attack the reason why it cannot.

    Attacks that are not named come cheapest first, in the order of the registry; the group of the dearest one is last.

    Args:
        spec: names the attacks (None: those of its release and defense that need not be named), their options, the
            block and the defense.
        base: the victim; a group has it with the block on which its attacks run.
        stand_ins: whether to keep attacks that only replace others where those cannot run. Named ones are always kept.

    Raises:
        PrivlabError: if an option does not fit an attack.
    """
    groups: dict[str, AttackGroup] = {}
    refused: dict[str, str] = {}
    defense = defense_of(spec, base, "c").parts if any(setting != "a" for setting in spec.settings) else ()
    for name, kind in _candidates(spec).items():
        running = {attack.name for group in groups.values() for attack in group.attacks}
        if spec.attacks is None and not stand_ins and stands_in(kind, running):
            continue
        attack = configure(kind, spec.options)
        try:
            home = _home(attack, spec, base, defense, groups)
        except PrivlabError as refusal:
            refused[name] = str(refusal)
            continue
        group = groups.pop(home.block, AttackGroup(home, ()))
        groups[home.block] = replace(group, attacks=(*group.attacks, attack))
    return list(groups.values()), refused


def stands_in(attack: Attack | FeatureAttack | AttackClass, running: Container[str]) -> bool:
    """Return whether an attack only replaces certain others where these cannot run, and one of them is `running`."""
    return any(name in running for name in attack_declarations(attack).stands_in_for)


def _candidates(spec: Specification) -> dict[str, AttackClass]:
    """Return the attacks that are named, or else those of this release and defense that train nothing first."""
    if spec.attacks is not None:
        return {name: installed_attacks()[name] for name in spec.attacks}
    return {
        name: kind
        for name, kind in _by_default().items()
        if (Capability.RELEASED_FEATURES in kind.requires) == spec.features_released
        and Capability.QUERIES not in kind.requires
        and (Capability.GRADIENT_DEFENSE not in kind.requires or spec.defends_gradients)
    }


def _by_default() -> dict[str, AttackClass]:
    """Return the attacks that need not be named to run; breaching's searches, which take hours, must be named."""
    return {name: kind for name, kind in installed_attacks().items() if not attack_declarations(kind).named_only}


def _home(
    attack: Attack | FeatureAttack,
    spec: Specification,
    base: Victim,
    defense: Sequence[Defense | FeatureDefense | GradientDefense],
    groups: dict[str, AttackGroup],
) -> Victim:
    """Return the first allowed block variant on which an attack may run; a variant that `groups` has is used again."""
    if spec.features_released:
        check_capabilities(attack, feature_capabilities(base.model, spec.public_limit, defense))
        return base
    blocks = ("stock", "april") if spec.block == "auto" else (spec.block,)
    force = spec.force and spec.block != "auto"
    refusal: PrivlabError | None = None
    anywhere: frozenset[Capability] = frozenset()
    for block in blocks:
        try:
            variant = groups[block].victim if block in groups else base.with_block(block)
            grants = gradient_capabilities(variant.model, defense, spec.gradient_batch)
            anywhere |= grants
            check_capabilities(attack, grants, force=force, because=obstacles(base.model))
            _check_released(attack, variant)
        except PrivlabError as error:
            refusal = error
        else:
            return variant
    assert refusal is not None
    # The error names only what no block grants.
    check_capabilities(attack, anywhere, force=force, because=obstacles(base.model))
    raise refusal


def _check_released(attack: Attack | FeatureAttack, victim: Victim) -> None:
    """Refuse an attack that reads the gradient of a parameter that the client freezes."""
    frozen = [name for name in attack_declarations(attack).parameters if name in victim.model.frozen]
    if frozen:
        raise PrivlabError(f"Attack '{attack.name}' reads gradients of frozen parameters: {', '.join(frozen)}.")
