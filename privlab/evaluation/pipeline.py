"""The pipeline: a batch → what clients feed → an observation → an attack → a reconstruction → scores → records.

`Evaluator.__call__` is the whole way; the sections below follow its order. An attack gets an observation alone.
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

from privlab.evaluation.applicable import AttackGroup
from privlab.evaluation.batch import Batch, Seen, attacked_together, each_release, labelled
from privlab.evaluation.case import Case
from privlab.evaluation.check import Attempt, attempt, timed
from privlab.evaluation.controls import Public
from privlab.evaluation.observing import Clients, unsound_release
from privlab.evaluation.records import CONTROLS, GEOMETRIES, Record, Rows
from privlab.evaluation.scoring import Scorer, Scores, explained_by, known_slots
from privlab.images import Others
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


Panel = tuple[str, Float[Tensor, "c h w"], str]
"""One image of a strip: its name, its pixels, and the lines under it.

The name is the key of the attack's cell, with "-reassembled" after it if its patches were put in order. A private, fed
or sent image has the key of the first control's cell, with "-private", "-fed" or "-sent" after it.
"""

Strip = Sequence[Sequence[Panel]]
"""The strip of one private image on one victim: a row of panels for each setting."""


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Scores batches of images on one victim: every setting, block variant, attack and geometry of a run.

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

    def __call__(self, batch: Batch) -> tuple[list[Record], dict[str, Strip], dict[str, Reconstruction]]:
        """Observe, attack and score one batch: in each setting, the clients release, and each attack is scored.

        Returned are the records, the strip of each image by its hash, and the reconstructions that are to be kept by
        CELL/IMAGE: the key of the cell and the hash of the image.
        """
        client, predicted = self.spec.client, self.spec.data.labels == "predicted"
        multi_label = client is not None and client.takes_several_classes
        batch = labelled(batch, self.base.model, predicted=predicted, multi_label=multi_label)
        records = [
            row | _failed(image.problem or "unreadable")
            for image in batch.failed
            for setting in self.spec.settings
            for group in self.groups
            for row in self.rows.of(image, setting, group)
        ]
        self._public.warn_of_copies(batch)
        for kept in (self._panels, self._reconstructions, self._shared):
            kept.clear()
        for setting in self.spec.settings if batch.named else ():
            fed = self._clients(setting).feed(self.base.model, batch, setting)
            records += self._controls(fed) if self.controls else []
            self._show_private(fed)
            for group in self.groups:
                records += self._run(group, fed) if self.kept is None else self._again(group, fed, self.kept)
        strips: dict[str, Strip] = {}
        for image in batch.named if self.strips else ():
            strips[image.sha256] = [self._panels[name, image.sha256] for name in self.spec.settings]
        return records, strips, dict(self._reconstructions)

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

    def _observe(self, group: AttackGroup, batch: Batch) -> Seen:
        """Return what the adversary sees of a batch."""
        clients, public = replace(self._clients(batch.setting), server=group.server), self._public.to_attacks(batch)
        return clients.observe(group.victim.model, batch, group.parameters, public)

    def _gradients(self, group: AttackGroup, batch: Batch) -> tuple[Observation, Batch, list[Record]]:
        """Return released gradients, the batch with the slots that they reveal, and what the rows of each image state.

        They state a failure where the release is not sound: it is not attacked.
        """
        b, B = len(batch.named), batch.images_per_release(self.spec.together)
        key = (batch.setting, *group.key, batch.together)
        seen, seconds = self._once(key, lambda: self._observe(group, batch))
        assert isinstance(seen, Observation)
        step = 1 if self.rows.shuffled(batch.setting) else b  # one by one, as `Clients` observes them
        norms = torch.cat([_norms(seen.gradients, slice(i, i + step)) for i in range(0, b // B, step)])
        facts: list[Record] = []
        for norm in norms.repeat_interleave(B).tolist():
            size = norm if math.isfinite(norm) else None
            fact: Record = {"grad_norm": size, "seconds_observe": seconds / b} | batch.stated(self.spec.together)
            facts.append(fact if size else fact | self._unsound(batch))
        known = known_slots(seen) if "reassembled" in self.rows.geometries(batch.setting) else None
        return seen, replace(batch, known=known), facts

    def _features(self, group: AttackGroup, batch: Batch, sent: Sent) -> tuple[Seen, Batch, list[Record]]:
        """Return released features, the batch, and what the rows state: whether the client's prediction is right."""
        model, b = self.base.model, len(batch.named)
        seen = self._observe(group, batch)
        logits, seconds = self._timed(lambda: predictions(model, sent, self.spec.cut_layer))
        classes = batch.labels if batch.labels.ndim == 1 else batch.labels.argmax(1)
        right = (logits.argmax(1) == classes).double().tolist()
        common: Record = {**batch.stated(self.spec.together), "key_bits": sent.key_bits, "seconds_observe": seconds / b}
        common |= {} if bool(sent.features.isfinite().all()) else self._unsound(batch)
        facts: list[Record] = []
        for image, value in zip(batch.named, right, strict=True):
            unknown = image.label_origin == "predicted" or not model.classes
            facts.append(common | {"correct": None if unknown else value})
        return seen, batch, facts

    def _unsound(self, batch: Batch) -> Record:
        """Return what the rows say of a release that is zero or not finite."""
        return _failed(unsound_release(self.spec.release, self.rows.defenses[batch.setting].on_gradients))

    @cached_property
    def _public(self) -> Public:
        return Public(Others(self.public), self.base.model.mean)

    # Attack

    def _run(self, group: AttackGroup, batch: Batch) -> list[Record]:
        """Observe one batch, run all attacks of the group on it, and return the records; panels are added to strips."""
        observed = self._gradients(group, batch) if batch.sent is None else self._features(group, batch, batch.sent)
        seen, batch, facts = observed
        usable = [i for i, fact in enumerate(facts) if "status" not in fact]
        records = [
            row | fact
            for image, fact in zip(batch.named, facts, strict=True)
            for row in (self.rows.of(image, batch.setting, group) if "status" in fact else ())
        ]
        if not usable:
            return records
        if isinstance(seen, Observation) and len(usable) < len(facts):
            seen, batch, facts = seen.take(usable), batch.take(usable), [facts[i] for i in usable]
        groups = {
            one_key: attacked_together(seen, batch, self.base.preprocessing, one_key=one_key)
            for one_key in {attack_declarations(attack).one_key for attack in group.attacks}
        }
        for attack in group.attacks:
            declared = attack_declarations(attack)
            alone, together = replace(group, attacks=(attack,)), groups[declared.one_key]
            if self.rows.shuffled(batch.setting) and declared.effort == "quick" and not declared.one_key:
                together = [part for places, part_seen in together for part in each_release(places, part_seen)]
            outcomes: dict[int, list[Record]] = {}
            for places, part_seen in together:
                outcomes |= dict(zip(places, self._attack(alone, batch.take(places), part_seen), strict=True))
            for i, (image, fact) in enumerate(zip(batch.named, facts, strict=True)):
                rows = self.rows.of(image, batch.setting, alone)
                records += [row | fact | of_row for row, of_row in zip(rows, outcomes[i], strict=True)]
        return records

    def _attack(self, group: AttackGroup, batch: Batch, seen: Seen) -> list[list[Record]]:
        """Return for each image what its rows say of the one attack of a group, one record for each geometry.

        An attack may fail in any way: its rows then say so, and the run goes on. If a batch of gradients fails, the
        attack runs again image by image, so that no image fails because of its neighbours.
        """
        (attack,), b = group.attacks, len(batch.named)
        B = seen.images_per_release if isinstance(seen, Observation) else 1
        names = self.rows.geometries(batch.setting)
        found, how = self._attempt(group, batch, seen)
        if found is None:  # the error is gone by now, and with it the tensors that it held on a GPU
            if b > 1 and B == 1 and isinstance(seen, Observation):
                each = each_release([*range(b)], seen)
                alone = [self._attack(group, batch.take(places), one)[0] for places, one in each]
                if any(rows[0].get("status") != "failed" for rows in alone):
                    return alone
            return [[_failed(how.reason or "failed")] * len(names)] * b
        explained = [explained_by(seen, images, i) for i, images in enumerate(found.images.split(B))]
        if self.spec.eight_bit:
            found = replace(found, images=(found.images * 255).round() / 255)
        scored, seconds = self._timed(lambda: self._laid(attack, found, batch))
        scores, ordered = scored
        outcomes: list[list[Record]] = []
        for i in range(b):
            facts = {"explained": explained[i // B], "seconds_attack": how.seconds / b}
            facts |= {"seconds_score": seconds / b, "beyond_range": how.beyond[i * len(how.beyond) // b]}
            outcomes.append([self._measured(of_geometry, i) | facts for of_geometry in scores])
        key = self.rows.cells(batch.setting, [group])[attack.name]
        if self.keep:
            for i, image in enumerate(batch.named):
                self._reconstructions[f"{key}/{image.sha256}"] = found.take(i)
        where = "features" if batch.sent else f"{group.victim.block} block"
        captions = [_caption(where, attack.name, outcome[0]) for outcome in outcomes]
        self._show(batch, key, found.images, captions)
        if ordered is not None:
            captions = [_caption(where, f"{attack.name} (reassembled)", outcome[-1]) for outcome in outcomes]
            self._show(batch, f"{key}-reassembled", ordered, captions)
        return outcomes

    def _attempt(self, group: AttackGroup, batch: Batch, seen: Seen) -> tuple[Reconstruction | None, Attempt]:
        """Run an attack, and return its reconstructions in the order of the images.

        The single reconstruction of an attack for one image that was forced on the gradient of several is compared
        with each of them.
        """
        (attack,) = group.attacks
        key = (batch.setting, group.victim.block, batch.together, attack.name)
        found, how = attempt(attack, seen, lambda work: self._once(key, work), force=self.spec.adversary.force)
        if found is None:
            return None, how
        several = isinstance(seen, Observation) and seen.images_per_release > 1
        if several and Capability.BATCH_SIZE_ONE in attack.requires:
            found = Reconstruction.join([found] * len(batch.named))
        return self._assigned(found, batch, several=several), how

    def _again(self, group: AttackGroup, batch: Batch, kept: Mapping[str, Reconstruction]) -> list[Record]:
        """Score the kept reconstructions of an earlier run."""
        stated, records = batch.stated(self.spec.together), []
        if "reassembled" in self.rows.geometries(batch.setting):
            _, batch, _ = self._gradients(group, batch)
        for attack in group.attacks:
            alone = replace(group, attacks=(attack,))
            rows = [self.rows.of(image, batch.setting, alone) for image in batch.named]
            found = [kept[f"{row[0]['cell']}/{row[0]['image_sha256']}"] for row in rows]
            scores, _ = self._laid(attack, Reconstruction.join(found), batch)
            for i, of_image in enumerate(rows):
                for row, of_geometry in zip(of_image, scores, strict=True):
                    records.append(row | stated | self._measured(of_geometry, i))
        return records

    def _laid(
        self, attack: Attack | FeatureAttack, found: Reconstruction, batch: Batch
    ) -> tuple[list[Scores], Float[Tensor, "b c h w"] | None]:
        """Return the scores of each geometry, and the images with their patches in the adversary's order."""
        names, placed = self.rows.geometries(batch.setting), attack_declarations(attack).places
        return self._scorer.laid(found, batch, names, placed=placed)

    def _assigned(self, found: Reconstruction, batch: Batch, *, several: bool) -> Reconstruction:
        """Return reconstructions in the order of the images that they are nearest to, if their own order says nothing.

        That is the case if `several` images made one gradient, or if rows were sent across images.
        """
        if several:
            return assign_images(found, batch.fed.images, self.base.model.patch)
        return found if batch.sent is None else match_images(batch.sent, found, batch.reference)

    # Score

    def _measured(self, scores: Scores, i: int) -> Record:
        """Return the scores of image i, and the names of the metrics that were measured, also without a value."""
        return {name: values[i] for name, values in scores.items()} | {"metrics": " ".join(sorted(self.metrics))}

    def _controls(self, batch: Batch) -> list[Record]:
        """Score negative controls as reconstructions are scored: assigned, rounded, and under the oracle.

        Shuffled patches have no row under the oracle, which would turn them into the private image.
        """
        several = batch.sent is None and self.spec.together is not None
        together = several or (batch.sent is not None and crosses(batch.sent))
        draws = batch.draws(self.spec.seed, "control", self.spec.draw)
        records, moved = [], self._scorer.moved(batch).any(1).tolist()
        for name, made in self._public.controls(batch, self.base.model.patch, draws, together=together).items():
            images = self._assigned(Reconstruction(made), batch, several=several).images
            laid = {GEOMETRIES[0]: (images * 255).round() / 255 if self.spec.eight_bit else images}
            if name != CONTROLS[2] and (home := self._scorer.oracle(laid[GEOMETRIES[0]], batch)) is not None:
                laid[GEOMETRIES[1]] = home
            for geometry, shown in laid.items():
                scores = self._scorer.score(shown, batch.reference)
                for i, image in enumerate(batch.named):
                    if geometry == GEOMETRIES[0] or moved[i]:
                        row = self.rows.control(image, batch.setting, name) | {"geometry": geometry}
                        records.append(row | self._measured(scores, i))
        return records

    def _once(self, name: tuple[str, ...], work: Callable[[], T]) -> tuple[T, float]:
        """Return a result and the seconds it took; settings b and c release the same, so they share their results.

        `name` is the setting, followed by what distinguishes the result from others of the same batch.
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

    def _show(self, batch: Batch, name: str, images: Float[Tensor, "b c h w"], captions: Sequence[str]) -> None:
        """Add one image to the strip of each private image; the images leave the device together."""
        if self.strips:
            for private, image, caption in zip(batch.named, images.cpu(), captions, strict=True):
                self._panels[batch.setting, private.sha256].append((name, image, caption))

    def _show_private(self, batch: Batch) -> None:
        """Begin the row of each image's strip: the private image, what is fed, and what is sent."""
        b, setting = len(batch.named), batch.setting
        cell = self.rows.cells(setting, [])[CONTROLS[0]]
        self._show(batch, f"{cell}-private", batch.images, ["private image"] * b)
        caption = f"fed to the model, setting {setting}" + ("\nthe reference of its scores" if setting == "b" else "")
        if self.spec.client is not None and self.rows.defenses[setting].changes_images:
            caption = f"private, setting {setting}\nchanged anew in each step"
        self._show(batch, f"{cell}-fed", batch.fed.images, [caption] * b)
        if batch.sent is not None:
            rows_sent = as_sent(batch.sent, batch.fed.images, self.base.model.patch)
            self._show(batch, f"{cell}-sent", rows_sent, ["rows in the order sent"] * b)


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
