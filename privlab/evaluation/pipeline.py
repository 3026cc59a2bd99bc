"""The pipeline: images → victim + defense → observation → attack → reconstruction → metrics → record.

Only this file holds both the private image and the reconstruction.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import draw_for, warn
from privlab.evaluation.applicable import AttackGroup
from privlab.evaluation.batch import Batch, Seen, Trial, attacked_together, each_release, labelled, taken
from privlab.evaluation.check import as_read, attack_batch, beyond_range, reason_of
from privlab.evaluation.client_updates import explained_by, observe_clients, share_out, unsound_release
from privlab.evaluation.controls import Controls
from privlab.evaluation.records import CONTROLS, GEOMETRIES, Record, Rows
from privlab.evaluation.scoring import Scorer, known_slots
from privlab.evaluation.specification import Specification, reassembly_of
from privlab.images import Chunk, Others
from privlab.metrics import Learned, as_sent, assign_images, crosses, match_images
from privlab.release import observe, observe_features, predictions, send
from privlab.threat import (
    Attack,
    Capability,
    Draws,
    FeatureAttack,
    FeatureObservation,
    Feed,
    Observation,
    Reconstruction,
    Sent,
    attack_declarations,
    check_capabilities,
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

    spec: Specification
    base: Victim
    groups: Sequence[AttackGroup]
    metrics: Sequence[str]
    learned: Mapping[str, Learned]
    public: Mapping[str, Tensor]
    strips: bool = True
    controls: bool = True
    keep: bool = False
    kept: Mapping[str, Reconstruction] | None = None
    _reconstructions: dict[str, Reconstruction] = field(default_factory=dict, init=False, repr=False)
    _shared: dict[tuple[str, ...], tuple[Any, float]] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, chunk: Chunk) -> Scored:
        """Run the pipeline on one chunk."""
        client, predicted = self.spec.local_training, self.spec.labels == "predicted"
        multi_label = client is not None and client.loss == "binary"
        batch, unusable = labelled(chunk, self.base.model, predicted=predicted, multi_label=multi_label)
        records = [
            row | _failed(image.problem or "unreadable")
            for image in unusable
            for setting in self.spec.settings
            for group in self.groups
            for row in self.rows.of(image, setting, group)
        ]
        self._warn_of_copies(batch)
        self._reconstructions.clear()
        self._shared.clear()
        rows: list[list[tuple[Panel, ...]]] = [[] for _ in batch.named]
        for setting in self.spec.settings if batch.named else ():
            trial = self._trial(setting, batch)
            records += self._controls(trial, batch) if self.controls else []
            panels = self._private_panels(trial, batch)
            for group in self.groups:
                records += self._run(group, trial, batch, panels)
            for row, of_image in zip(rows, panels, strict=True):
                row.append(tuple(of_image))
        strips = [Strip(p.name, p.sha256, self.base.name, tuple(row)) for p, row in zip(batch.named, rows, strict=True)]
        return Scored(records, strips if self.strips else [], dict(self._reconstructions))

    def _private_panels(self, trial: Trial, batch: Batch) -> list[list[Panel]]:
        """Begin the row of each image's strip: the private image, what is fed, and what is sent."""
        panels: list[list[Panel]] = [[] for _ in batch.named]
        own, setting = self.rows.cells(trial.setting, [])[CONTROLS[0]], trial.setting
        self._show(panels, f"{own}-private", batch.images, ["private image"] * len(panels))
        told = f"fed to the model, setting {setting}" + ("\nthe reference of its scores" if setting == "b" else "")
        if self.spec.local_training is not None and self.rows.defenses[setting].changes_images:
            told = f"private, setting {setting}\nchanged anew in each step"
        self._show(panels, f"{own}-fed", trial.feed.images, [told] * len(panels))
        if trial.sent is not None:
            rows_sent = as_sent(trial.sent, trial.feed.images, self.base.model.patch)
            self._show(panels, f"{own}-sent", rows_sent, ["rows in the order sent"] * len(panels))
        return panels

    def _show(self, panels: Sequence[list[Panel]], name: str, images: Tensor, captions: Sequence[str]) -> None:
        """Add one image to each strip; the images leave the device together."""
        if self.strips:
            for panel, image, caption in zip(panels, images.cpu(), captions, strict=True):
                panel.append(Panel(name, image, tuple(caption.split("\n"))))

    @cached_property
    def rows(self) -> Rows:
        """Return what all rows of this run state."""
        return Rows(self.spec, self.base, tuple(self.public))

    @cached_property
    def _scorer(self) -> Scorer:
        several = self.spec.together is not None
        return Scorer(self.base.model, self.metrics, self.learned, reassembly_of(self.spec, self.base), several)

    def _trial(self, setting: str, batch: Batch) -> Trial:
        """Return what the clients feed, and the reference of the setting (MJP, section 5.4)."""
        stack, draws = self.rows.defenses[setting], self._draws(batch)
        B = 1 if self.spec.together is None else len(batch.named)
        if self.spec.local_training is None:
            feed = stack.feed(batch.images, self.base.model.patch, draws.images, B, draws.model)
        else:  # the client feeds what the defense draws anew in each step
            feed = Feed.undefended(batch.images, self.base.model.patch)
        released = self.spec.features_released
        sent = send(self.base.model, feed, stack, draws, self.spec.cut_layer) if released else None
        return Trial(setting, feed, feed.images if setting == "b" else batch.images, sent)

    def _draws(self, batch: Batch) -> Draws:
        """Return the client's generators: one for each image, one for the batch, and one for the model."""
        seed, together = self.spec.seed, batch.together
        return Draws(
            images=batch.draws(seed, "defense", self.spec.draw),
            batch=draw_for(seed, together, "batch", self.spec.draw),
            model=draw_for(seed, self.base.weights.sha256, "key", self.spec.draw),
        )

    def _run(self, group: AttackGroup, trial: Trial, batch: Batch, panels: Sequence[list[Panel]]) -> list[Record]:
        """Observe one batch, run all attacks of the group on it, and return the records; panels are added to strips."""
        if self.kept is not None:
            return self._again(group, trial, batch, self.kept)
        if trial.sent is None:
            seen, facts, sound = self._gradients(group, trial, batch)
            if "reassembled" in self.rows.geometries(trial.setting):
                trial = replace(trial, known=known_slots(seen))
        else:
            seen, facts, sound = self._features(trial.sent, trial, batch)
        filters = self.rows.defenses[trial.setting].on_gradients
        records = [
            row | facts[i] | _failed(unsound_release(self.spec.local_training, filters))
            for i, fine in enumerate(sound)
            for row in ([] if fine else self.rows.of(batch.named[i], trial.setting, group))
        ]
        kept = [i for i, fine in enumerate(sound) if fine]
        if not kept:
            return records
        if isinstance(seen, Observation) and len(kept) < len(sound):
            batch, trial, facts = batch.take(kept), trial.take(kept), [facts[i] for i in kept]
            seen, panels = taken(seen, kept), [panels[i] for i in kept]
        groups = {
            one_key: attacked_together(seen, batch, self.base.preprocessing, one_key=one_key)
            for one_key in {attack_declarations(attack).one_key for attack in group.attacks}
        }
        for attack in group.attacks:
            declared = attack_declarations(attack)
            alone, together = replace(group, attacks=(attack,)), groups[declared.one_key]
            if self.rows.shuffled(trial.setting) and declared.effort == "quick" and not declared.one_key:
                together = [release for part in together for release in each_release(*part)]
            outcomes: list[list[Record]] = [[]] * len(batch.named)
            for rows, own in together:
                part = trial if len(together) == 1 else trial.take(rows)
                found = self._attack(alone, attack, own, part, batch.take(rows), [panels[i] for i in rows])
                for i, outcome in zip(rows, found, strict=True):
                    outcomes[i] = outcome
            for image, fact, outcome in zip(batch.named, facts, outcomes, strict=True):
                rows = self.rows.of(image, trial.setting, alone)
                records += [row | fact | of_row for row, of_row in zip(rows, outcome, strict=True)]
        return records

    def _again(
        self, group: AttackGroup, trial: Trial, batch: Batch, kept: Mapping[str, Reconstruction]
    ) -> list[Record]:
        """Score the kept reconstructions of an earlier run."""
        records, own = [], batch.stated(self.spec.together)
        names = self.rows.geometries(trial.setting)
        if "reassembled" in names:
            trial = replace(trial, known=known_slots(self._gradients(group, trial, batch)[0]))
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

    def _gradients(
        self, group: AttackGroup, trial: Trial, batch: Batch
    ) -> tuple[Observation, list[Record], list[bool]]:
        """Observe released gradients; return the observation, facts for each image's rows, and the usable images."""
        model, parts = group.victim.model, self.rows.defenses[trial.setting].parts
        B = batch.images_per_release(self.spec.together)
        client = self.spec.local_training and share_out(self.spec.local_training, B)
        draws = batch.release_draws(self.spec.seed, self.spec.draw, client.images if client else B)

        def observed() -> Observation:
            if client is None:
                return self._observe(group, trial, batch, draws, B)
            return observe_clients(model, client, trial, batch, group.parameters, draws, parts)

        seen, seconds = self._once((trial.setting, group.victim.block, batch.together), observed)
        step = 1 if self.rows.shuffled(trial.setting) else len(batch.named)  # alone, as `_observe` explains
        norm = torch.cat([_norms(seen.gradients, slice(i, i + step)) for i in range(0, len(batch.named) // B, step)])
        norm = norm.repeat_interleave(B)
        facts: list[Record] = [
            {"grad_norm": size if math.isfinite(size) else None, "seconds_observe": seconds / len(norm)}
            | batch.stated(self.spec.together)
            for size in norm.tolist()
        ]
        return seen, facts, (norm.isfinite() & (norm > 0)).tolist()

    def _observe(
        self, group: AttackGroup, trial: Trial, batch: Batch, draws: Sequence[Generator], B: int
    ) -> Observation:
        """Observe gradients of B images each; one by one where patches were shuffled.

        A product over a batch rounds otherwise than that of one image, and closed forms enlarge the difference: re-
        assembly may then put the same image in another order in the company of other images.
        """
        model, parts, public = group.victim.model, self.rows.defenses[trial.setting].parts, self._public_to(batch)
        b = len(batch.named)
        size = B if self.rows.shuffled(trial.setting) else b
        seen = [
            observe(
                model,
                trial.feed.take(slice(i, i + size)),
                batch.labels[i : i + size],
                group.parameters,
                parts,
                draws[i // B : (i + size) // B],
                B,
                public,
            )
            for i in range(0, b, size)
        ]
        gradients = {name: torch.cat([one.gradients[name] for one in seen]) for name in seen[0].gradients}
        return replace(seen[0], gradients=gradients)

    def _features(self, sent: Sent, trial: Trial, batch: Batch) -> tuple[FeatureObservation, list[Record], list[bool]]:
        """Observe released features, and note what the defense costs the client: whether its prediction is right."""
        model, stack = self.base.model, self.rows.defenses[trial.setting]
        seen = observe_features(model, sent, stack, self._public_to(batch), self.spec.cut_layer)
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
        return seen, facts, [bool(sent.features.isfinite().all())] * len(right)

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

    def _attack(
        self,
        group: AttackGroup,
        attack: Attack | FeatureAttack,
        seen: Seen,
        trial: Trial,
        batch: Batch,
        panels: Sequence[list[Panel]],
    ) -> list[list[Record]]:
        """Return for each image what its rows say of an attack, one record for each geometry.

        An attack may fail in any way: its rows then say so, and the run goes on. If a batch of gradients fails, the
        attack runs again image by image, so that no image fails because of its neighbours. The single reconstruction of
        an attack for one image that was forced on the gradient of several is compared with each of them.
        """
        b, several = len(trial.reference), isinstance(seen, Observation) and seen.images_per_release > 1
        names, placed = self.rows.geometries(trial.setting), attack_declarations(attack).places
        made = self._reconstructed(group, attack, seen, trial, batch, several=several)
        if isinstance(made, str):  # the error is gone by now, and with it the tensors that its traceback held on a GPU
            if b > 1 and isinstance(seen, Observation) and not several:
                one_by_one = ([i] for i in range(b))
                return [
                    self._attack(group, attack, taken(seen, i), trial.take(i), batch.take(i), [panels[i[0]]])[0]
                    for i in one_by_one
                ]
            return [[_failed(made)] * len(names)] * b
        reconstruction, seconds, beyond = made
        B = seen.images_per_release if isinstance(seen, Observation) else 1
        of_releases = [explained_by(seen, images, i) for i, images in enumerate(reconstruction.images.split(B))]
        shares = [share for share in of_releases for _ in range(B)]
        if self.spec.eight_bit:
            reconstruction = replace(reconstruction, images=(reconstruction.images * 255).round() / 255)
        (scores, laid), seconds_score = self._timed(
            lambda: self._scorer.laid(reconstruction, trial, names, placed=placed)
        )
        cost = {"seconds_attack": seconds / b, "seconds_score": seconds_score / b}
        outcomes = [
            [
                self._measured({name: values[i] for name, values in of_geometry.items()})
                | {"explained": shares[i]}
                | cost
                | beyond[i]
                for of_geometry in scores
            ]
            for i in range(b)
        ]
        key = self.rows.cells(trial.setting, [group])[attack.name]
        if self.keep:
            shas = [image.sha256 for image in batch.named]
            self._reconstructions.update((f"{key}/{sha}", reconstruction.take(i)) for i, sha in enumerate(shas))
        where = "features" if trial.sent else f"{group.victim.block} block"
        self._show(
            panels, key, reconstruction.images, [_caption(where, attack.name, outcome[0]) for outcome in outcomes]
        )
        if laid is not None:
            captions = [_caption(where, f"{attack.name} (reassembled)", outcome[-1]) for outcome in outcomes]
            self._show(panels, f"{key}-reassembled", laid, captions)
        return outcomes

    def _reconstructed(
        self,
        group: AttackGroup,
        attack: Attack | FeatureAttack,
        seen: Seen,
        trial: Trial,
        batch: Batch,
        *,
        several: bool,
    ) -> tuple[Reconstruction, float, list[Record]] | str:
        """Return the reconstructions, the seconds they took and what lies beyond the attack's range, or why it failed.

        An error is not passed on: its traceback would hold the tensors of the batch.
        """
        b = len(trial.reference)
        try:
            if Capability.AUXILIARY_IMAGES in attack.requires:  # all may be in this batch, and there are none then
                check_capabilities(attack, seen.grants, force=self.spec.force)
            read = as_read(attack, seen)
            B = read.images_per_release if isinstance(read, Observation) else b
            releases = [taken(read, [r]) for r in range(b // B)] if isinstance(read, Observation) else [read]
            reasons = [beyond_range(attack, release) for release in releases]
            beyond: list[Record] = [{"beyond_range": reason} for reason in reasons for _ in range(B)]
            own = (trial.setting, group.victim.block, batch.together, attack.name)
            reconstruction, seconds = self._once(own, lambda: attack_batch(attack, read))
            if several and Capability.BATCH_SIZE_ONE in attack.requires:
                reconstruction = Reconstruction.join([reconstruction] * b)
            return self._assigned(reconstruction, trial, several=several), seconds, beyond
        except Exception as error:
            return reason_of(attack, error)

    def _assigned(self, reconstruction: Reconstruction, trial: Trial, *, several: bool) -> Reconstruction:
        """Return reconstructions in the order of the images that they are nearest to, if their own order says nothing.

        That is the case if `several` images made one gradient, or if rows were sent across images.
        """
        if several:
            return assign_images(reconstruction, trial.feed.images, self.base.model.patch)
        return reconstruction if trial.sent is None else match_images(trial.sent, reconstruction, trial.reference)

    def _measured(self, scores: Record) -> Record:
        """Return scores with the names of the metrics that were measured, those without a value included."""
        return scores | {"metrics": " ".join(sorted(self.metrics))}

    def _controls(self, trial: Trial, batch: Batch) -> list[Record]:
        """Score negative controls as reconstructions are scored: assigned, rounded, and under the oracle.

        Shuffled patches have no row under the oracle, which would turn them into the private image.
        """
        several = trial.sent is None and self.spec.together is not None
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
        """Return a result and the seconds it took, with the device's queue finished before and after."""
        device = self.base.model.mean.device
        wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
        wait()
        start = time.perf_counter()
        result = work()
        wait()
        return result, time.perf_counter() - start


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
