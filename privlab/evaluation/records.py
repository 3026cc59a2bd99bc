"""The rows of records, from which all tables, figures and pages are rebuilt: their columns, and the key of a cell."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

import privlab
from privlab.base import PrivlabError, sha256_of
from privlab.defenses import Jigsaw
from privlab.evaluation.applicable import AttackGroup
from privlab.evaluation.case import (
    Automatic,
    Case,
    defense_of,
    options_stated,
    shuffles,
)
from privlab.evaluation.names import GEOMETRIES, check_names
from privlab.images import NamedImage, as_text
from privlab.metrics import METRICS, MIRRORED, PLACEMENT
from privlab.reassembly import Borders, Predicted
from privlab.release import kinds_of
from privlab.threat import Attack, FeatureAttack, Stack
from privlab.victims import Victim

SCHEMA = 9
"""Version of the records' columns. Since 3, rows have a key. Since 4, they say whether an attack was beyond its range.
Since 5, they have scores that no gain or offset changes. Since 6, they state the effort. Since 7, they say how much of
an update a reconstruction explains. Since 8, they state the cut layer of released features. Since 9, they count the
grey levels that are wrong."""

CONTROL = "control:"
"""The start of a negative control's name in the column of attacks."""

CONTROLS = tuple(CONTROL + name for name in ("mean", "other", "shuffled", "flat"))
"""The negative controls: the mean of public photographs, one of them, the private image with all patches shuffled, and
one colour, the mean by which the victim normalises."""

Record = dict[str, Any]
"""One score of an attack on an image, by the names of `COLUMNS`."""

_ORDER = (
    "victim block weights weights_sha256 release cut_layer defense setting attack effort geometry image image_sha256 "
    "label label_origin member seed draw device dtype mse psnr ssim ssim_skimage fft2d fft2d_mjp "
    "psnr_affine correlation gms_affine psnr_affine_mirrored correlation_mirrored gms_affine_mirrored "
    f"lpips_alex lpips_vgg lpips_squeeze f_sim {' '.join(METRICS.added)} "
    "levels_wrong psnr_unmasked psnr_masked placement_accuracy neighbour_accuracy key_recovered key_bits "
    "tokens_found tokens_sure explained correct grad_norm "
    "seconds_observe seconds_attack seconds_score status reason beyond_range schema privlab_version "
    "defense_params attack_params victim_params conditions metrics cell batch batch_images external"
)
_NUMBERS = dict.fromkeys((*METRICS, *MIRRORED.values(), *PLACEMENT), pa.float64())
for _name in ("levels_wrong", "psnr_unmasked", "psnr_masked", "key_bits", "tokens_found", "tokens_sure", "explained"):
    _NUMBERS[_name] = pa.float64()
for _name in ("grad_norm", "seconds_observe", "seconds_attack", "seconds_score"):
    _NUMBERS[_name] = pa.float64()
for _name in ("cut_layer", "label", "seed", "draw", "schema", "batch_images"):
    _NUMBERS[_name] = pa.int64()
"""The columns that hold numbers; the others hold text."""

if twice := [name for name in METRICS.added if _ORDER.split().count(name) > 1]:
    raise PrivlabError(
        f"A metric of another package must not have the name of a column of records. Found '{twice[0]}'."
    )

COLUMNS = pa.schema([(name, _NUMBERS.get(name, pa.string())) for name in _ORDER.split()])
"""The columns of a record. What was not measured is null, never zero."""

IDENTITY = (
    *("victim_params", "weights_sha256", "block", "release", "defense", "defense_params", "setting"),
    *("attack", "attack_params", "seed", "draw", "dtype", "conditions", "external"),
)
"""The columns that say what a cell measures; device, versions and batch size are not among them."""


def exact_db(values: int) -> float:
    """Return the PSNR in dB above which every grey level of an image of so many values is right: 10 log₁₀(510² values).

    An error of 1/510 in one value, half a grey level, gives a mean squared error of 1/(510² values). So above
    that PSNR, rounding to 8 bits gives the private image. Below it, rounding may give the private image too, but the
    PSNR alone cannot tell.
    """
    return 10 * math.log10(510**2 * values)


def cell_key(row: Mapping[str, object]) -> str:
    """Return the key of the cell that a row belongs to: the first 128 bits of SHA-256 over `IDENTITY`, in hex."""
    text = json.dumps([row.get(name) for name in IDENTITY], ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]


def check_geometry(geometry: str, spec: Case) -> None:
    """Check that some row of a run has this geometry.

    Raises:
        PrivlabError: if the geometry is unknown, or there is nothing to re-assemble.
    """
    check_names("geometry", [geometry])
    shuffled = isinstance(spec.defense, Automatic) or any(
        kinds_of(part) & {"shuffled", "masked"} for part in spec.parts
    )
    if geometry == GEOMETRIES[2] and ("c" not in spec.settings or spec.features_released or not shuffled):
        release = "features" if spec.features_released else "gradients"
        raise PrivlabError(
            "Geometry 'reassembled' is for setting c, released gradients and a defense that shuffles patches. "
            f"Found setting {','.join(spec.settings)}, {release} and defense {spec.defense_name}."
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """Makes the rows of a run on one victim, with everything that they state except scores.

    `public` are the hashes of the public photographs: controls are made of them, and attacks may use them.
    """

    spec: Case
    base: Victim
    public: Sequence[str]
    _known: dict[tuple[str, str, str | None, str | None], Record] = field(default_factory=dict, init=False, repr=False)

    def of(self, image: NamedImage, setting: str, group: AttackGroup) -> list[Record]:
        """Return the rows of one image and one group, without scores: one row for each attack and geometry.

        The setting decides the defense that the rows state, and the geometries.

        Args:
            image: the image, whose name, hash, label and membership the rows state.
            setting: "a", "b" or "c"; it decides the defense that the rows state, and the geometries.
            group: the attacks, and the block of the victim on which they run.
        """
        return [
            self._of_attack(setting, attack, group) | self._image(image) | {"geometry": geometry}
            for attack in group.attacks
            for geometry in self.geometries(setting)
        ]

    def geometries(self, setting: str) -> tuple[str, ...]:
        """Return the geometries in which reconstructions are scored.

        "reassembled" is left out where features are released or no patches were shuffled, and in setting b, whose
        reference is itself shuffled. Patches of less than 3 × 3 pixels have no borders by which they could be put in
        order.
        """
        return GEOMETRIES if setting == "c" and self.shuffled(setting) else GEOMETRIES[:2]

    def shuffled(self, setting: str) -> bool:
        """Return whether gradients of shuffled patches with borders are released."""
        return shuffles(self.spec.release, self.base.model, self.defenses[setting])

    def control(self, image: NamedImage, setting: str, name: str) -> Record:
        """Return the row of one image under a negative control, one of `CONTROLS`, in place and without scores.

        Args:
            image: the image, whose name, hash, label and membership the row states.
            setting: "a", "b" or "c"; it decides the defense that the row states.
            name: the control, one of `CONTROLS`; it is in the column of attacks.
        """
        return self._stated(setting, name) | self._image(image) | {"geometry": GEOMETRIES[0]}

    def cells(self, setting: str, groups: Iterable[AttackGroup]) -> dict[str, str]:
        """Return the key of each attack's cell, and of each control's."""
        rows = [self._of_attack(setting, attack, group) for group in groups for attack in group.attacks]
        rows += [self._stated(setting, name) for name in CONTROLS]
        return {row["attack"]: row["cell"] for row in rows}

    @cached_property
    def defenses(self) -> dict[str, Stack]:
        """Return the defenses of each setting; they are cached, as looking them up for every row would be slow."""
        return {setting: defense_of(self.spec, self.base, setting) for setting in self.spec.settings}

    def _image(self, image: NamedImage) -> Record:
        stated = {name: getattr(image, name) for name in ("label", "label_origin", "member")}
        return {"image": as_text(image.name), "image_sha256": image.sha256} | stated

    def _stated(self, setting: str, attack: str, block: str | None = None, params: str | None = None) -> Record:
        """Return what the rows of a cell state; a control has neither block nor parameters."""
        key = (setting, attack, block, params)
        if key not in self._known:
            row = self._common | {
                "defense": self.defenses[setting].name,
                "defense_params": json.dumps(self._params(setting)),
                "setting": setting,
                "attack": attack,
                "block": block,
                "attack_params": params,
            }
            self._known[key] = row | {"cell": cell_key(row)}
        return self._known[key]

    def _of_attack(self, setting: str, attack: Attack | FeatureAttack, group: AttackGroup) -> Record:
        block = None if self.spec.features_released else group.victim.block
        return self._stated(setting, attack.name, block, json.dumps(options_stated(attack)))

    def _params(self, setting: str) -> dict[str, Any]:
        """Return the options of the defenses; where each gradient has one image, the jigsaw's `per` is left out.

        It has no effect there, and these cells keep the keys that they had before there was a choice.
        """
        stack = self.defenses[setting]
        each = {part.name: options_stated(part) for part in stack.parts}
        params = each[stack.name] if len(stack.parts) == 1 else each
        for part in stack.parts if self.spec.together is None else ():
            if isinstance(part, Jigsaw):
                own: Any = params if len(stack.parts) == 1 else params[part.name]
                own.pop("per", None)
        return params

    @cached_property
    def _common(self) -> Record:
        mean = self.base.model.mean
        return {
            "victim": self.base.name,
            "victim_params": json.dumps(self.base.params()),
            "weights": self.base.weights.origin,
            "weights_sha256": self.base.weights.sha256,
            "release": self.spec.released,
            "cut_layer": self.spec.cut_layer if self.spec.features_released else None,
            "effort": self.spec.adversary.effort,
            "seed": self.spec.seed,
            "draw": self.spec.draw,
            "device": str(mean.device),
            "dtype": str(mean.dtype).removeprefix("torch."),
            "conditions": json.dumps(self._conditions()),
            "status": "ok",
            "schema": SCHEMA,
            "privlab_version": privlab.__version__,
        }

    def _conditions(self) -> dict[str, object]:
        """Return what else a score depends on: labels, rounding, public images, the client, and re-assembly."""
        spec, labels = self.spec, self.spec.data.labels
        given: dict[str, object] = {
            "labels": labels if labels in (None, "predicted") else sha256_of(Path(labels))[:16],
            "eight_bit": spec.eight_bit,
            "public": hashlib.sha256("/".join(self.public).encode()).hexdigest()[:16],
        }
        if spec.features_released:
            given["client_batch"] = spec.release.images
            given |= {"cut_layer": spec.cut_layer} if spec.cut_layer else {}  # 0 has the keys of before there was one
        elif spec.client is not None:
            settings = asdict(spec.client).items()
            client = {key: value for key, value in settings if key not in _LATER or value != _LATER[key]}
            client |= {} if spec.words.own_loss is None else {"loss": spec.words.own_loss[1]}
            given["client"] = client
        elif spec.together:
            given["gradient_batch"] = spec.release.images
        if (by := spec.adversary.reassembly) != Borders():
            patches = (self.base.model.grid, self.base.model.patch)
            own = {"weights": sha256_of(by.file(*patches))[:16]} if isinstance(by, Predicted) else {}
            given["reassembly"] = {by.name: asdict(by) | own}
        if spec.chooses_weights:
            given["chooses_weights"] = True
        return given | ({"force": True} if spec.adversary.force else {})


_LATER = {"clients": 1, "class_weights": None, "pos_weight": None, "gamma": 2.0, "alpha": None}
"""Settings of clients that came after others, with the values for which records have the keys of before."""
