"""The pipeline: images → victim + defense → observation → attack → reconstruction → metrics → record.

Only this file holds both the private image and the reconstruction.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import warn
from privlab.evaluation.applicable import AttackGroup
from privlab.evaluation.batch import Batch, Seen, attacked_together, each_release, labelled
from privlab.evaluation.case import Case
from privlab.evaluation.check import Attempt, attempt, timed
from privlab.evaluation.controls import Controls
from privlab.evaluation.observing import Clients, Trial, unsound_release
from privlab.evaluation.records import CONTROLS, GEOMETRIES, Record, Rows
from privlab.evaluation.scoring import Scorer, explained_by, known_slots
from privlab.images import Chunk, NamedImage, Others
from privlab.metrics import Learned, as_sent, assign_images, crosses, match_images
from privlab.release import predictions
from privlab.threat import (
    Attack,
    Capability,
    FeatureAttack,
    Observation,
    Reconstruction,
    Sent,
    attack_declarations,
)
from privlab.victims import Victim

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Panel:
    """One image of a strip, with the lines that stand under it.

    `name` is the key of the attack's cell, with "-reassembled" behind it if its patches were put in order. A private,
    fed or sent image has the key of the first control's cell, with "-private", "-fed" or "-sent" behind it.
    """

    name: str
    image: Float[Tensor, "c h w"]
    caption: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Strip:
    """The strip of one private image on one victim: a row of panels for each setting."""

    image: str
    image_sha256: str
    victim: str
    rows: tuple[tuple[Panel, ...], ...]


@dataclass(frozen=True, eq=False)
class Scored:
    """The results of a chunk: its records, and a strip for each readable image.

    `reconstructions` holds those that are to be kept, by CELL/IMAGE: the key of the cell and the hash of the image.
    """

    records: list[Record]
    strips: list[Strip]
    reconstructions: dict[str, Reconstruction]


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Scores chunks of images on one victim: every setting, block variant, attack and geometry of a run.

    `metrics` are those that can be computed here; the others stay null in the records. `public` holds photographs by
    their hash: negative controls are made of them, and attacks may use them. Strips are returned only if
    `strips`, controls are scored only if `controls`, and reconstructions are returned only if `keep`. If `kept` holds
    the reconstructions of an earlier run, by CELL/IMAGE, these are scored and no attack runs.
    """

    spec: Case
    base: Victim
    groups: Sequence[AttackGroup]
    metrics: Sequence[str]
    learned: Mapping[str, Learned]
    public: Mapping[str, Tensor]
    strips: bool = True
    controls: bool = True
    keep: bool = False
    kept: Mapping[str, Reconstruction] | None = None
    _panels: dict[tuple[str, str], list[Panel]] = field(
        default_factory=lambda: defaultdict(list), init=False, repr=False
    )
    _reconstructions: dict[str, Reconstruction] = field(default_factory=dict, init=False, repr=False)
    _shared: dict[tuple[str, ...], tuple[Any, float]] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, chunk: Chunk) -> Scored:
        """Observe, attack and score one chunk: in each setting, the clients release, and each attack is scored."""
        client, predicted = self.spec.client, self.spec.data.labels == "predicted"
        multi_label = client is not None and client.takes_several_classes
        batch, unusable = labelled(chunk, self.base.model, predicted=predicted, multi_label=multi_label)
        records = [
            row | _failed(image.problem or "unreadable")
            for image in unusable
            for setting in self.spec.settings
            for group in self.groups
            for row in self.rows.of(image, setting, group)
        ]
        self._warn_of_copies(batch)
        for kept in (self._panels, self._reconstructions, self._shared):
            kept.clear()
        for setting in self.spec.settings if batch.named else ():
            trial = self._trial(setting, batch)
            records += self._controls(trial) if self.controls else []
            self._show_private(trial)
            for group in self.groups:
                records += self._run(group, trial)
        return Scored(records, self._strips(batch) if self.strips else [], dict(self._reconstructions))

    @cached_property
    def rows(self) -> Rows:
        """Return what all rows of this run state."""
        return Rows(self.spec, self.base, tuple(self.public))

    @cached_property
    def _scorer(self) -> Scorer:
        several = self.spec.together is not None
        return Scorer(self.base.model, self.metrics, self.learned, self.spec.adversary.reassembly, several)

    # Observe

    def _clients(self, setting: str) -> Clients:
        """Return the clients of a setting, which decides on their defense."""
        spec = self.spec
        key = self.base.weights.sha256
        return Clients(spec.release, self.rows.defenses[setting], spec.seed, spec.draw, key)

    def _trial(self, setting: str, batch: Batch) -> Trial:
        """Return what the clients feed and send, and the reference of the setting."""
        return self._clients(setting).trial(self.base.model, batch, setting)

    def _observe(self, group: AttackGroup, trial: Trial) -> Seen:
        """Return what the adversary sees of a batch."""
        clients, public = self._clients(trial.setting), self._public_to(trial.batch)
        return clients.observe(group.victim.model, trial, group.parameters, public)

    def _observed(self, group: AttackGroup, trial: Trial) -> tuple[Trial, list[bool]]:
        """Return the trial with what is seen of it, and for each image whether that is sound and can be attacked."""
        return self._gradients(group, trial) if trial.sent is None else self._features(group, trial, trial.sent)

    def _gradients(self, group: AttackGroup, trial: Trial) -> tuple[Trial, list[bool]]:
        """Observe released gradients, and note their size."""
        batch = trial.batch
        B = batch.images_per_release(self.spec.together)
        key = (trial.setting, group.victim.block, batch.together)
        seen, seconds = self._once(key, lambda: self._observe(group, trial))
        assert isinstance(seen, Observation)
        step = 1 if self.rows.shuffled(trial.setting) else len(batch.named)  # alone, as `Clients` observes them
        norm = torch.cat([_norms(seen.gradients, slice(i, i + step)) for i in range(0, len(batch.named) // B, step)])
        norm = norm.repeat_interleave(B)
        facts: list[Record] = [
            {"grad_norm": size if math.isfinite(size) else None, "seconds_observe": seconds / len(norm)}
            | batch.stated(self.spec.together)
            for size in norm.tolist()
        ]
        known = known_slots(seen) if "reassembled" in self.rows.geometries(trial.setting) else None
        return replace(trial, seen=seen, facts=facts, known=known), (norm.isfinite() & (norm > 0)).tolist()

    def _features(self, group: AttackGroup, trial: Trial, sent: Sent) -> tuple[Trial, list[bool]]:
        """Observe released features, and note what the defense costs the client: whether its prediction is right."""
        model, batch = self.base.model, trial.batch
        seen = self._observe(group, trial)
        logits, seconds = self._timed(lambda: predictions(model, sent, self.spec.cut_layer))
        classes = batch.labels if batch.labels.ndim == 1 else batch.labels.argmax(1)
        right = (logits.argmax(1) == classes).double().tolist()
        facts: list[Record] = [
            {
                **batch.stated(self.spec.together),
                "key_bits": sent.key_bits,
                "correct": None if image.label_origin == "predicted" or not model.classes else value,
                "seconds_observe": seconds / len(right),
            }
            for image, value in zip(batch.named, right, strict=True)
        ]
        return replace(trial, seen=seen, facts=facts), [bool(sent.features.isfinite().all())] * len(right)

    def _public_to(self, batch: Batch) -> Float[Tensor, "m c h w"]:
        """Return the adversary's images: the public ones without those of the batch and other crops of their files."""
        left = set(self._others.without([image.sha256 for image in batch.named], batch.images))
        if len(left) == len(self.public):
            return self._all_public
        return self._all_public[[i for i, key in enumerate(self.public) if key in left]]

    @cached_property
    def _others(self) -> Others:
        return Others(self.public)

    @cached_property
    def _made(self) -> Controls:
        return Controls(self._others, self.base.model.mean)

    def _warn_of_copies(self, batch: Batch) -> None:
        """Say how many public photographs are left out because they show a private image in another file."""
        found = self._others.copies([image.sha256 for image in batch.named], batch.images) if self.public else []
        if found:
            ones = "photograph shows a private image" if len(found) == 1 else "photographs show private images"
            warn(
                f"{len(found)} public {ones} in another file, such as resized, mirrored or recompressed: left out.",
            )

    @cached_property
    def _all_public(self) -> Float[Tensor, "m c h w"]:
        """Return the public images as one tensor, the same for all batches: attacks cache what they compute from it."""
        none = torch.empty(0, *self.base.model.image_shape)
        return (torch.stack([*self.public.values()]) if self.public else none).to(self.base.model.mean)

    # Attack

    def _run(self, group: AttackGroup, trial: Trial) -> list[Record]:
        """Observe one batch, run all attacks of the group on it, and return the records; panels are added to strips."""
        if self.kept is not None:
            return self._again(group, trial, self.kept)
        trial, sound = self._observed(group, trial)
        seen = trial.seen
        assert seen is not None
        filters = self.rows.defenses[trial.setting].on_gradients
        records = [
            row | fact | _failed(unsound_release(self.spec.release, filters))
            for image, fact, fine in zip(trial.batch.named, trial.facts, sound, strict=True)
            for row in ([] if fine else self.rows.of(image, trial.setting, group))
        ]
        usable = [i for i, fine in enumerate(sound) if fine]
        if not usable:
            return records
        if isinstance(seen, Observation) and len(usable) < len(sound):
            seen = seen.take(usable)
            trial = trial.take(usable, seen)
        groups = {
            one_key: attacked_together(seen, trial.batch, self.base.preprocessing, one_key=one_key)
            for one_key in {attack_declarations(attack).one_key for attack in group.attacks}
        }
        for attack in group.attacks:
            declared = attack_declarations(attack)
            alone, together = replace(group, attacks=(attack,)), groups[declared.one_key]
            if self.rows.shuffled(trial.setting) and declared.effort == "quick" and not declared.one_key:
                together = [part for places, own in together for part in each_release(places, own)]
            outcomes: dict[int, list[Record]] = {}
            for places, own in together:
                outcomes |= dict(zip(places, self._attack(alone, attack, trial.take(places, own)), strict=True))
            for i, (image, fact) in enumerate(zip(trial.batch.named, trial.facts, strict=True)):
                rows = self.rows.of(image, trial.setting, alone)
                records += [row | fact | of_row for row, of_row in zip(rows, outcomes[i], strict=True)]
        return records

    def _attack(self, group: AttackGroup, attack: Attack | FeatureAttack, trial: Trial) -> list[list[Record]]:
        """Return for each image what its rows say of an attack, one record for each geometry.

        An attack may fail in any way: its rows then say so, and the run goes on. If a batch of gradients fails, the
        attack runs again image by image, so that no image fails because of its neighbours.
        """
        seen, b = trial.seen, len(trial.batch.named)
        assert seen is not None
        B = seen.images_per_release if isinstance(seen, Observation) else 1
        names = self.rows.geometries(trial.setting)
        made = self._attempt(group, attack, trial, seen)
        if made.reconstruction is None:  # the error is gone by now, and with it the tensors that it held on a GPU
            if b > 1 and B == 1 and isinstance(seen, Observation):
                each = [trial.take(places, one) for places, one in each_release([*range(b)], seen)]
                alone = [self._attack(group, attack, one)[0] for one in each]
                if any(rows[0].get("status") != "failed" for rows in alone):
                    return alone
            return [[_failed(made.reason or "failed")] * len(names)] * b
        reconstruction = made.reconstruction
        of_releases = [explained_by(seen, images, i) for i, images in enumerate(reconstruction.images.split(B))]
        if self.spec.eight_bit:
            reconstruction = replace(reconstruction, images=(reconstruction.images * 255).round() / 255)
        placed = attack_declarations(attack).places
        (scores, laid), seconds_score = self._timed(
            lambda: self._scorer.laid(reconstruction, trial, names, placed=placed)
        )
        outcomes: list[list[Record]] = []
        for i in range(b):
            facts = {"explained": of_releases[i // B], "seconds_attack": made.seconds / b}
            facts |= {"seconds_score": seconds_score / b, "beyond_range": made.beyond[i * len(made.beyond) // b]}
            outcomes.append(
                [self._measured({name: values[i] for name, values in each.items()}) | facts for each in scores]
            )
        key = self.rows.cells(trial.setting, [group])[attack.name]
        if self.keep:
            shas = [image.sha256 for image in trial.batch.named]
            self._reconstructions.update((f"{key}/{sha}", reconstruction.take(i)) for i, sha in enumerate(shas))
        where = "features" if trial.sent else f"{group.victim.block} block"
        captions = [_caption(where, attack.name, outcome[0]) for outcome in outcomes]
        self._show(trial, key, reconstruction.images, captions)
        if laid is not None:
            captions = [_caption(where, f"{attack.name} (reassembled)", outcome[-1]) for outcome in outcomes]
            self._show(trial, f"{key}-reassembled", laid, captions)
        return outcomes

    def _attempt(self, group: AttackGroup, attack: Attack | FeatureAttack, trial: Trial, seen: Seen) -> Attempt:
        """Run an attack, and return its reconstructions in the order of the images.

        The single reconstruction of an attack for one image that was forced on the gradient of several is compared
        with each of them.
        """
        batch = trial.batch
        key = (trial.setting, group.victim.block, batch.together, attack.name)
        made = attempt(attack, seen, lambda work: self._once(key, work), force=self.spec.adversary.force)
        if made.reconstruction is None:
            return made
        found, several = made.reconstruction, isinstance(seen, Observation) and seen.images_per_release > 1
        if several and Capability.BATCH_SIZE_ONE in attack.requires:
            found = Reconstruction.join([found] * len(batch.named))
        return replace(made, reconstruction=self._assigned(found, trial, several=several))

    def _again(self, group: AttackGroup, trial: Trial, kept: Mapping[str, Reconstruction]) -> list[Record]:
        """Score the kept reconstructions of an earlier run."""
        batch = trial.batch
        records, own = [], batch.stated(self.spec.together)
        names = self.rows.geometries(trial.setting)
        if "reassembled" in names:
            trial, _ = self._gradients(group, trial)
        for attack in group.attacks:
            alone = replace(group, attacks=(attack,))
            rows = [self.rows.of(image, trial.setting, alone) for image in batch.named]
            found = [kept[f"{row[0]['cell']}/{row[0]['image_sha256']}"] for row in rows]
            placed = attack_declarations(attack).places
            scores, _ = self._scorer.laid(Reconstruction.join(found), trial, names, placed=placed)
            records += [
                row | own | self._measured({name: values[i] for name, values in of_geometry.items()})
                for i, of_image in enumerate(rows)
                for row, of_geometry in zip(of_image, scores, strict=True)
            ]
        return records

    def _assigned(self, reconstruction: Reconstruction, trial: Trial, *, several: bool) -> Reconstruction:
        """Return reconstructions in the order of the images that they are nearest to, if their own order says nothing.

        That is the case if `several` images made one gradient, or if rows were sent across images.
        """
        if several:
            return assign_images(reconstruction, trial.feed.images, self.base.model.patch)
        return reconstruction if trial.sent is None else match_images(trial.sent, reconstruction, trial.reference)

    # Score

    def _measured(self, scores: Record) -> Record:
        """Return scores with the names of the metrics that were measured, those without a value included."""
        return scores | {"metrics": " ".join(sorted(self.metrics))}

    def _controls(self, trial: Trial) -> list[Record]:
        """Score negative controls as reconstructions are scored: assigned, rounded, and under the oracle.

        Shuffled patches have no row under the oracle, which would turn them into the private image.
        """
        batch, several = trial.batch, trial.sent is None and self.spec.together is not None
        together = several or (trial.sent is not None and crosses(trial.sent))
        draws = batch.draws(self.spec.seed, "control", self.spec.draw)
        records, moved = [], self._scorer.moved(trial).any(1).tolist()
        for name, made in self._made.of(batch, self.base.model.patch, draws, together=together).items():
            images = self._assigned(Reconstruction(made), trial, several=several).images
            laid = {GEOMETRIES[0]: (images * 255).round() / 255 if self.spec.eight_bit else images}
            if name != CONTROLS[2] and (home := self._scorer.oracle(laid[GEOMETRIES[0]], trial)) is not None:
                laid[GEOMETRIES[1]] = home
            for geometry, shown in laid.items():
                scores = self._scorer.score(shown, trial.reference)
                for i, image in enumerate(batch.named):
                    if geometry == GEOMETRIES[0] or moved[i]:
                        row = self.rows.control(image, trial.setting, name) | {"geometry": geometry}
                        records.append(row | self._measured({metric: values[i] for metric, values in scores.items()}))
        return records

    def _once(self, name: tuple[str, ...], work: Callable[[], T]) -> tuple[T, float]:
        """Return a result and the seconds it took; settings b and c release the same, so they share their results.

        `name` is the setting, followed by what distinguishes the result from others of the same chunk.
        """
        if not {"b", "c"} <= set(self.spec.settings) or name[0] == "a":
            return self._timed(work)
        if name[1:] not in self._shared:
            self._shared[name[1:]] = self._timed(work)
        return self._shared[name[1:]]

    def _timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """Return a result and the seconds it took on the victim's device."""
        return timed(work, self.base.model.mean.device)

    # Show

    def _show(self, trial: Trial, name: str, images: Tensor, captions: Sequence[str]) -> None:
        """Add one image to the strip of each private image; the images leave the device together."""
        if self.strips:
            for private, image, caption in zip(trial.batch.named, images.cpu(), captions, strict=True):
                panels = self._panels[trial.setting, private.sha256]
                panels.append(Panel(name, image, tuple(caption.split("\n"))))

    def _show_private(self, trial: Trial) -> None:
        """Begin the row of each image's strip: the private image, what is fed, and what is sent."""
        b, setting = len(trial.batch.named), trial.setting
        own = self.rows.cells(setting, [])[CONTROLS[0]]
        self._show(trial, f"{own}-private", trial.batch.images, ["private image"] * b)
        told = f"fed to the model, setting {setting}" + ("\nthe reference of its scores" if setting == "b" else "")
        if self.spec.client is not None and self.rows.defenses[setting].changes_images:
            told = f"private, setting {setting}\nchanged anew in each step"
        self._show(trial, f"{own}-fed", trial.feed.images, [told] * b)
        if trial.sent is not None:
            rows_sent = as_sent(trial.sent, trial.feed.images, self.base.model.patch)
            self._show(trial, f"{own}-sent", rows_sent, ["rows in the order sent"] * b)

    def _strips(self, batch: Batch) -> list[Strip]:
        """Return the strip of each image, with a row of panels for each setting."""

        def rows(image: NamedImage) -> tuple[tuple[Panel, ...], ...]:
            return tuple(tuple(self._panels[setting, image.sha256]) for setting in self.spec.settings)

        return [Strip(image.name, image.sha256, self.base.name, rows(image)) for image in batch.named]


def _norms(gradients: Mapping[str, Tensor], releases: slice) -> Float[Tensor, " r"]:
    """Return ‖∂ℓ/∂θ‖ of each of some releases."""
    return torch.stack([g[releases].flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)


def _failed(reason: str) -> Record:
    return {"status": "failed", "reason": reason}


def _caption(where: str, attack: str, scores: Record) -> str:
    shown = [
        f"{name.upper()} {value:.{n}f}"
        for name, n in (("psnr", 2), ("ssim", 3))
        if (value := scores.get(name)) is not None
    ]
    return f"{attack} ({where})\n{'  '.join(shown)}"
