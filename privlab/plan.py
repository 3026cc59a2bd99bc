"""What is to be run: the specification of a run, and which attack runs on which block of a victim."""

import warnings
from dataclasses import dataclass, fields, replace

from privlab.attacks import attacks as installed_attacks
from privlab.defenses import Mjp, Undefended, defenses
from privlab.errors import PrivlabError, unknown_name
from privlab.gradients import granted
from privlab.metrics import METRICS
from privlab.threat import Attack, Defense, PrivlabWarning, check_capabilities
from privlab.victims import Victim

__all__ = ["SETTINGS", "Cell", "Specification", "defense_of", "plan"]

SETTINGS: dict[str, str] = {
    "a": "φ(∇M(x), x): the plain image is fed, and scored against",
    "b": "φ(∇M(x̃), x̃): the shuffled image is fed, and scored against",
    "c": "φ(∇M(x̃), x): the shuffled image is fed, the plain image is scored against",
}
"""The settings of MJP, section 5.4; x̃ is the shuffled x."""


@dataclass(frozen=True, kw_only=True)
class Specification:
    """Everything that defines the science of a run; what only changes speed is not here.

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
    split: str | None = None
    labels: str | None = None
    metrics: tuple[str, ...] = ("mse", "fft2d", "fft2d_mjp", "psnr", "ssim", "ssim_skimage", "lpips_alex")
    lpips_weights: str | None = None
    eight_bit: bool = False
    seed: int = 0
    force: bool = False

    def __post_init__(self) -> None:
        """Check every name against what is installed."""
        for kind, names, choices in (
            ("setting", self.settings, SETTINGS),
            ("attack", self.attacks or (), installed_attacks()),
            ("defense", (self.defense,), {"auto", *defenses()}),
            ("metric", self.metrics, METRICS),
            ("block", (self.block,), ("auto", "stock", "april")),
        ):
            for name in names:
                if name not in choices:
                    raise unknown_name(kind, name, choices)
        for kind in ("models", "settings", "attacks", "metrics", "images"):
            if getattr(self, kind) == ():
                raise PrivlabError(f"At least one of {kind} is needed. Found none.")
        if not 0 <= self.seed < 2**63:
            raise PrivlabError(f"seed must be in [0, 2^63 − 1]. Found {self.seed}.")
        Mjp(gamma=self.gamma, masked_pe=self.masked_pe)


@dataclass(frozen=True, eq=False)
class Cell:
    """The attacks that run on one block variant of a victim, from one observation."""

    victim: Victim
    attacks: tuple[Attack, ...]

    @property
    def parameters(self) -> list[str]:
        """Return the names of the gradients that the attacks read."""
        return list(dict.fromkeys(name for attack in self.attacks for name in attack.parameters))


def defense_of(spec: Specification, victim: Victim, setting: str) -> Defense:
    """Return the defense of a cell: none in setting a, where the plain image is fed.

    In settings b and c, "auto" is MJP for a victim with E_unk, else the jigsaw alone.

    Raises:
        PrivlabError: if MJP is to put E_unk into a model that has none.
    """
    if setting == "a":
        return Undefended()
    automatic = "mjp" if victim.has_mjp else "jigsaw"
    kind = defenses()[automatic if spec.defense == "auto" else spec.defense]
    options = {f.name for f in fields(kind)} & {"gamma", "masked_pe"}
    defense = kind(**{name: getattr(spec, name) for name in options})
    if isinstance(defense, Mjp) and defense.masked_pe == "unknown" and not victim.has_mjp:
        raise PrivlabError(
            f"Defense 'mjp' puts E_unk at the masked slots, and {victim.name} has none. "
            "Use a `_mjp` victim, --masked-pe none|slot, or --defense jigsaw."
        )
    return defense


def plan(spec: Specification, base: Victim) -> list[Cell]:
    """Return the cells of one victim: under --block auto every attack on the stock block, else on the april twin.

    Raises:
        PrivlabError: if an attack that was asked for lacks a capability on each allowed block, or none is left.

    Warns:
        PrivlabWarning: for each attack that was not asked for by name and cannot run.
    """
    cells: dict[str, Cell] = {}
    refusals: list[str] = []
    for name in spec.attacks if spec.attacks is not None else installed_attacks():
        attack = installed_attacks()[name]()
        try:
            home = _home(attack, spec, base, cells)
        except PrivlabError as refusal:
            if spec.attacks is not None:
                raise PrivlabError(f"{base.name}: {refusal}") from refusal
            refusals.append(f"{base.name}: {refusal}")
            continue
        cell = cells.get(home.block, Cell(home, ()))
        cells[home.block] = replace(cell, attacks=(*cell.attacks, attack))
    if not cells:
        raise PrivlabError(" ".join(refusals))
    for refusal in refusals:
        warnings.warn(f"Left out. {refusal}", PrivlabWarning, stacklevel=2)
    return list(cells.values())


def _home(attack: Attack, spec: Specification, base: Victim, cells: dict[str, Cell]) -> Victim:
    """Return the first allowed block variant on which an attack may run, one that is there already if it can be."""
    blocks = ("stock", "april") if spec.block == "auto" else (spec.block,)
    refusal: PrivlabError | None = None
    for block in blocks:
        try:
            variant = cells[block].victim if block in cells else base.with_block(block)
            check_capabilities(attack, granted(variant.model), force=spec.force and spec.block != "auto")
        except PrivlabError as error:
            refusal = error
        else:
            return variant
    assert refusal is not None
    raise refusal
