"""The threat model as types: what an adversary sees, what it is granted, and what attacks and defenses are.

Public and private. Everything in an `Observation` is public to the adversary: the model with its weights,
the released gradients, and the knowledge that the threat model grants. The private image has no field, so no
attack can read it. A defense's algorithm and its hyper-parameters are public (Kerckhoffs); its draws stay in
the `Feed`, which only the client and the scorer hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from privlab.base.errors import PrivlabError
from privlab.patches.permutations import inverse, permute_features, restore_features
from privlab.victims.model import VictimModel

__all__ = [
    "Attack",
    "AttackClass",
    "Capability",
    "Defense",
    "DefenseClass",
    "Draws",
    "Effects",
    "FeatureAttack",
    "FeatureDefense",
    "FeatureObservation",
    "Feed",
    "GradientDefense",
    "Observation",
    "Rows",
    "Sent",
    "Stolen",
    "check_capabilities",
]


class Capability(str, Enum):
    """One thing the adversary is granted; observations grant them, attacks require them."""

    KNOWS_WEIGHTS = "knows_weights"
    BATCH_SIZE_ONE = "batch_size_one"
    LEARNABLE_PE_GRADIENT = "learnable_pe_gradient"
    PE_OF_EVERY_TOKEN = "pe_of_every_token"
    APRIL_BLOCK = "april_block"
    PLAIN_BLOCK = "plain_block"
    RELEASED_FEATURES = "released_features"
    POSITION_EMBEDDINGS = "position_embeddings"
    CLASS_TOKEN = "class_token"
    AUXILIARY_IMAGES = "auxiliary_images"
    OWN_ROWS = "own_rows"
    QUERIES = "queries"
    KNOWS_DEFENSE = "knows_defense"
    GRADIENT_DEFENSE = "gradient_defense"

    @property
    def meaning(self) -> str:
        """Return what the capability says, in one clause."""
        return _MEANING[self]


_MEANING = {
    Capability.KNOWS_WEIGHTS: "the weights of the model are known",
    Capability.BATCH_SIZE_ONE: "each released gradient belongs to one image",
    Capability.LEARNABLE_PE_GRADIENT: "the gradient of a learnable position embedding is released",
    Capability.PE_OF_EVERY_TOKEN: "the class token has a position embedding too",
    Capability.APRIL_BLOCK: "the first block has neither pre-norm nor skip (--block april)",
    Capability.PLAIN_BLOCK: "the first block is timm's own (--block stock), and its gradients are released",
    Capability.RELEASED_FEATURES: "the features that the client sends are seen, as in split learning",
    Capability.POSITION_EMBEDDINGS: "the features carry position embeddings, which are known",
    Capability.CLASS_TOKEN: "the row of the class token is among the features",
    Capability.AUXILIARY_IMAGES: "public images like the private ones are at hand",
    Capability.OWN_ROWS: "every row stays with its image (no batch-shuffle)",
    Capability.QUERIES: "the client's embedding can be run on images of the adversary's own",
    Capability.KNOWS_DEFENSE: "the defense's algorithm and its parameters are known, its draws are not",
    Capability.GRADIENT_DEFENSE: "a defense acts on the released gradient (noise, pruning, fewer bits)",
}

FORCEABLE = frozenset({Capability.APRIL_BLOCK, Capability.BATCH_SIZE_ONE})
"""What a forced run may lack: the formula can still be evaluated, it only does not hold."""


@dataclass(frozen=True, eq=False)
class Observation:
    """Everything that the adversary sees of r independent releases, and nothing else.

    `gradients` are ∂ℓ/∂θ by timm's parameter name (and `unk_embed`, MJP's E_unk), with a leading dimension r, as
    they were released; `defense` holds the algorithms at work with their public parameters, in their order.

    Each release is the gradient of the mean loss of `images_per_release` = B images, its defense acting on that mean.
    An attack returns r·B images, release by release, those of one release in any order: the evaluator assigns them.
    `batch_size_one` is granted for B = 1 alone. `photographs` names the bundled photographs that an image prior may
    learn from, where not all may be: of a private image, and other crops of its file, nothing is learned.
    """

    model: VictimModel
    gradients: Mapping[str, Float[Tensor, "r ..."]]
    grants: frozenset[Capability]
    defense: tuple["Defense | FeatureDefense | GradientDefense", ...] = ()
    images_per_release: int = 1
    photographs: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class Feed:
    """What a defending client feeds its model; known to the client and to the scorer, not to the adversary.

    `images` are x̃ in [0, 1]; slot i holds patch `order[i]` of the private image; `moved` marks the slots that
    the defense shuffles; `masked_pe` marks those whose position embedding is replaced by E_unk, or by zero.
    """

    images: Float[Tensor, "b c h w"]
    order: Int[Tensor, "b n"]
    moved: Bool[Tensor, "b n"]
    masked_pe: Bool[Tensor, "b n"] | None = None
    replacement: Literal["unknown", "zero"] = "unknown"

    @classmethod
    def undefended(cls, images: Float[Tensor, "b c h w"], patch: int) -> "Feed":
        """Return the feed of clients without a defense: every patch of the images in its own slot."""
        b, _, h, w = images.shape
        order = torch.arange((h // patch) * (w // patch), device=images.device).expand(b, -1)
        return cls(images=images, order=order, moved=torch.zeros_like(order, dtype=torch.bool))

    def take(self, rows: slice | Sequence[int]) -> "Feed":
        """Return what some of the clients feed."""
        masked = None if self.masked_pe is None else self.masked_pe[rows]
        return replace(self, images=self.images[rows], order=self.order[rows], moved=self.moved[rows], masked_pe=masked)


@dataclass(frozen=True, eq=False)
class Draws:
    """The client's secret generators: one for each image, one for the batch, one for the model's lifetime."""

    images: Sequence[Generator]
    batch: Generator
    model: Generator


@dataclass(frozen=True, eq=False)
class Sent:
    """What a client of split learning sends, and how it came about; the server sees `features` alone.

    Row (i, j) is row `source[i, j]` of the batch's b·t embedded tokens, counted image by image; its entry k is entry
    `columns[k]` of that token (None: the columns are where they were). The first `prefix` tokens of an image are its
    class and register tokens. `key_bits` is the size of what was drawn, in bits.
    """

    features: Float[Tensor, "b t d"]
    source: Int[Tensor, "b t"]
    prefix: int
    columns: Int[Tensor, " d"] | None = None
    key_bits: float = 0.0

    @classmethod
    def plain(cls, tokens: Float[Tensor, "b t d"], prefix: int) -> "Sent":
        """Return tokens sent as they are."""
        b, t, _ = tokens.shape
        return cls(tokens, torch.arange(b * t, device=tokens.device).view(b, t), prefix)

    def restored(self, outputs: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the server's outputs with rows and columns where the client had them (Eq. 2 and 5)."""
        if self.columns is not None:
            outputs = restore_features(outputs, columns=self.columns)
        return permute_features(outputs.flatten(0, 1), inverse(self.source.flatten())).view_as(outputs)


Rows = Literal["kept", "shared", "own", "mixed"]
"""Where rows may have gone: nowhere, by one order for the batch, by one for each image, or to other images too."""


@dataclass(frozen=True)
class Effects:
    """What a defense does, whatever its name is: the adversary can run it on images of its own and see.

    A defense may declare it as `acts_as`, a class attribute, or a property where it depends on options; `privlab admit`
    holds the release against it. Where nothing is declared it is measured: `privlab.release.effects`.

    Args:
        rows: where the rows of what is sent may have gone.
        columns: whether the entries of the tokens that are sent are in another order.
        noise_std: the standard deviation of the noise on each of them.
        patches: of the image that is fed: "kept" in their slots, moved among slots that are "masked", whose position
            embeddings are replaced, or "shuffled" beyond these.
        pe: what stands for the position embeddings that are replaced: "unknown" (E_unk) or "zero"; "slot": none is.
        one_order: whether images that are released together share one order of their patches, and one mask.
        gradients: "kept", "noisy", "pruned" (zero or as they were), or "rounded".
        other: whether anything else changes, pixels or features: blur, a scale, a clip.
    """

    rows: Rows = "kept"
    columns: bool = False
    noise_std: float = 0.0
    patches: Literal["kept", "masked", "shuffled"] = "kept"
    pe: Literal["slot", "unknown", "zero"] = "slot"
    one_order: bool = False
    gradients: Literal["kept", "noisy", "pruned", "rounded"] = "kept"
    other: bool = False

    @property
    def kinds(self) -> frozenset[str]:
        """Return what is done, without how far: two defenses of the same kinds are met by the same attacks."""
        done = {
            "mixed": self.rows == "mixed",
            "rows": self.rows in ("shared", "own"),
            "columns": self.columns,
            "noise": self.noise_std > 0,
            "shuffled": self.patches == "shuffled",
            "masked": self.patches == "masked" or self.pe != "slot",
            self.gradients: self.gradients != "kept",
            "other": self.other,
        }
        return frozenset(name for name, does in done.items() if does)


@dataclass(frozen=True, eq=False)
class FeatureObservation:
    """Everything that the server of split learning sees of a batch of b images, and nothing else.

    `model` is the public base: the embedding F₁ with its position embeddings, and the rest. `defense` holds the
    algorithms at work with their public parameters, in their order; `public` are images of the adversary's own.
    Capabilities say which of these an attack may use.
    """

    model: VictimModel
    features: Float[Tensor, "b t d"]
    defense: tuple["Defense | FeatureDefense | GradientDefense", ...]
    public: Float[Tensor, "m c h w"]
    grants: frozenset[Capability]


@dataclass(frozen=True, eq=False)
class Stolen:
    """What an attack brings home, with a row for each image of the batch.

    Of features: `rows[i, s]` names the row of the batch's b·t sent rows that the adversary puts into patch slot s of
    image i; None where images do not come row by row. `columns` is the recovered column key, as in `Sent`.
    Of gradients: `loose` marks the slots whose patches are in an order of the adversary's own choice; `tokens` is how
    many tokens were told apart, `tokens_sure` how many of them beyond doubt.
    """

    images: Float[Tensor, "b c h w"]
    rows: Int[Tensor, "b n"] | None = None
    columns: Int[Tensor, " d"] | None = None
    loose: Bool[Tensor, "b n"] | None = None
    tokens: Int[Tensor, " b"] | None = None
    tokens_sure: Int[Tensor, " b"] | None = None

    @classmethod
    def of(cls, result: "Float[Tensor, 'b c h w'] | Stolen") -> "Stolen":
        """Return what an attack brought home, which may be images alone."""
        return cls(result) if isinstance(result, Tensor) else result

    def take(self, i: int) -> "Stolen":
        """Return what belongs to image i alone; its rows still count those of the whole batch."""
        own = {name: value[i : i + 1] for name in _OF_IMAGES if (value := getattr(self, name)) is not None}
        return replace(self, **own)

    @classmethod
    def joined(cls, parts: Sequence["Stolen"]) -> "Stolen":
        """Return what was brought home of one batch, image by image, as one."""
        own = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in _OF_IMAGES
            if getattr(parts[0], name) is not None
        }
        return cls(**own, columns=parts[0].columns)


_OF_IMAGES = ("images", "rows", "loose", "tokens", "tokens_sure")
"""The fields of `Stolen` that have one row for each image."""


@runtime_checkable
class Attack(Protocol):
    """A frozen dataclass of hyper-parameters; calling it turns an observation into images in [0, 1].

    `parameters` names the gradients that it reads ("*": all that are released), `requires` what it must be granted,
    `paper` its source. One with `named_only` set runs only where it is asked for by name, and one with `stands_in_for`,
    unless it is, only where none of the attacks named there runs. It may read further gradients, `if_released`. `knows`
    names the defenses that it takes into account; with `places` set it puts loose patches in order itself. One that
    needs a defense may name the attack that it is without one, `undefended`: that is its positive control.

    A method `beyond(seen)` says of an observation, from what is public, which condition of its exactness does not hold,
    in a few words, or None. Records keep it. Without the method it has no stated range: nothing is said to be exact.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]
    requires: ClassVar[frozenset[Capability]]
    parameters: ClassVar[tuple[str, ...]]

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"] | Stolen:
        """Reconstruct the images that the clients fed, in [0, 1]; `Stolen` where there is more to say."""
        ...


@runtime_checkable
class Defense(Protocol):
    """A frozen dataclass of hyper-parameters; calling it turns private images into what the client feeds.

    What it does may be declared, `acts_as: Effects`; without it, attacks go by what is measured. So for all defenses.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Transform b images by one draw each; one with `per` = "batch" is given a draw for each release of b / r."""
        ...


@runtime_checkable
class FeatureAttack(Protocol):
    """A frozen dataclass of hyper-parameters; calling it turns released features into images in [0, 1]."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]
    requires: ClassVar[frozenset[Capability]]

    def __call__(self, seen: FeatureObservation) -> Stolen:
        """Reconstruct the images that the client embedded, in [0, 1]."""
        ...


@runtime_checkable
class FeatureDefense(Protocol):
    """A frozen dataclass of hyper-parameters; it changes the embedded tokens before they are sent."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Return what is sent instead of `sent`."""
        ...


@runtime_checkable
class GradientDefense(Protocol):
    """A frozen dataclass of hyper-parameters; it changes the gradients of all released parameters before they leave.

    One with a method `expected` says what it releases on average of given gradients, such as what clipping leaves.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    def release(
        self, gradients: Mapping[str, Float[Tensor, "b ..."]], draws: Sequence[Generator]
    ) -> Mapping[str, Float[Tensor, "b ..."]]:
        """Return what is released instead of `gradients`, each image's by itself and with its own draw."""
        ...

    def variance(self, released: Mapping[str, Float[Tensor, "b ..."]]) -> Mapping[str, Float[Tensor, "b ..."]]:
        """Return the variance of what this adds to each entry, as an adversary knows it from some of the release.

        An entry that was released as zero, and may be something else, is taken to be evenly spread around zero.
        """
        ...


if TYPE_CHECKING:
    AttackClass: TypeAlias = type[Attack] | type[FeatureAttack]
    DefenseClass: TypeAlias = type[Defense] | type[FeatureDefense] | type[GradientDefense]
else:  # Python cannot check classes against a protocol that has data members
    AttackClass = DefenseClass = type


def check_capabilities(
    attack: Attack | FeatureAttack,
    grants: Iterable[Capability],
    *,
    force: bool = False,
    because: Mapping[Capability, str] | None = None,
) -> None:
    """Refuse an attack that requires more than is granted; `because` says of a capability why it is not.

    Raises:
        PrivlabError: with the name and the meaning of each missing capability.
    """
    grants = frozenset(grants)
    reads, released = (Capability.RELEASED_FEATURES in what for what in (attack.requires, grants))
    if reads != released:
        kinds = ("gradients", "features")
        raise PrivlabError(
            f"Attack '{attack.name}' reads {kinds[reads]}, and this run releases {kinds[released]} "
            f"(--release {kinds[reads]}, without a defense that acts on {kinds[released]}, or another attack)."
        )
    missing = attack.requires - grants - (FORCEABLE if force else frozenset())
    if missing:
        names = "; ".join(f"{c.value} ({(because or {}).get(c, c.meaning)})" for c in sorted(missing))
        raise PrivlabError(f"Attack '{attack.name}' needs what this observation does not grant: {names}.")
