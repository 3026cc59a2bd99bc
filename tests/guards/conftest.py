"""A whole pipeline on a small victim, watched from outside: what attacks are called with, and what comes of them."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from privlab.attacks import ATTACKS
from privlab.evaluation import (
    AttackGroup,
    Batch,
    Clients,
    Evaluator,
    Record,
    Scorer,
    applicable,
    check,
    default_attacks,
    observing,
)
from privlab.grids import specify
from privlab.images import NamedImage, Others, Preprocessing
from privlab.threat import FeatureObservation, Observation, Reconstruction, attack_declarations
from privlab.victims import Victim, VictimModel, Weights

CUT = Preprocessing(size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic")


@dataclass
class Watched:
    """What a run of the pipeline showed.

    `called` are attacks with their observations; `images` what came of them, as scored, by setting, attack and
    geometry, an entry for each call; `controls` are the images of the negative controls of each setting, in place.
    """

    called: list[tuple[Any, Observation | FeatureObservation]] = field(default_factory=list)
    images: dict[tuple[str, str, str], list[Tensor]] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    controls: list[list[Tensor]] = field(default_factory=list)
    observed: list[Any] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    reconstructions: dict[str, Reconstruction] = field(default_factory=dict)


Run = Callable[..., Watched]


def digest(image: Tensor) -> str:
    return hashlib.sha256(image.numpy().tobytes()).hexdigest()


def by_digest(images: Tensor) -> dict[str, Tensor]:
    """Return images as an evaluator is given public ones."""
    return {digest(image): image for image in images}


def batch_of_images(images: Tensor, *, first_label: int = 0) -> Batch:
    """Return images as the pipeline is given them, of every other class from the first."""
    pictures = [
        NamedImage(f"private-name-{digest(image)[:8]}.png", digest(image), None, first_label + 2 * i, "file")
        for i, image in enumerate(images)
    ]
    return Batch(pictures, images)


@pytest.fixture
def small(tiny_model: Callable[..., VictimModel]) -> Callable[..., Victim]:
    """Return a maker of small victims: 16 patches of 4 × 4 pixels, 7 classes, with E_unk unless told otherwise."""

    def make(**options: Any) -> Victim:
        return Victim("tiny", "tiny", tiny_model(**options), CUT, Weights("given", "0" * 64, "random"))

    return make


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, small: Callable[..., Victim], crops: Tensor) -> Run:
    """Return a run of the pipeline on two crops of photographs.

    Args of the run:
        images: the private ones.
        public: those of the adversary and of the controls.
        victim: the model under attack.
        first_label: of the private images.
        replay: an earlier run: its observations are seen again, whatever the private side is now.
        kept: what attacks brought home in an earlier run.
        given: fields of the specification.
    """

    def go(
        *,
        images: Tensor = crops[:260:130],
        public: Mapping[str, Tensor] | None = None,
        victim: Victim | None = None,
        first_label: int = 0,
        replay: Watched | None = None,
        kept: Mapping[str, Reconstruction] | None = None,
        **given: Any,
    ) -> Watched:
        base = small() if victim is None else victim
        named = given.get("attack") or default_attacks("full")
        short = {f"{name}.{key}={n}" for name in named for key, n in attack_declarations(ATTACKS[name]).short.items()}
        given["options"] = (*given.get("options", ()), *sorted(short))
        specification = specify(
            **({"model": ("tiny",), "metrics": ("psnr",), "setting": ("c",), "effort": "full"} | given)
        )
        groups, _ = applicable(specification, base, stand_ins=True)
        others = by_digest(crops[7:380:29]) if public is None else public
        watched = Watched()
        evaluator = Evaluator(
            specification,
            base,
            groups,
            specification.metrics,
            {},
            Others(others),
            strips=False,
            keep=kept is None,
            kept=kept,
        )
        with monkeypatch.context() as patch:
            _watch(patch, watched, None if replay is None else iter(replay.observed))
            watched.records, _, watched.reconstructions = evaluator(batch_of_images(images, first_label=first_label))
        return watched

    return go


def _watch(patch: pytest.MonkeyPatch, watched: Watched, replay: Iterator[Any] | None) -> None:
    """Note what passes between the parts of the pipeline."""
    brought, feed, again, controls = check.attack_batch, Clients.feed, Evaluator._again, Evaluator._controls
    laid_by, score = Scorer.laid, Scorer.score
    scored: list[Tensor] = []
    names_of: list[str] = []

    def observed(observe: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            made = observe(*args, **options) if replay is None else next(replay)
            watched.observed.append(made)
            return made

        return call

    def feeding(self: Clients, model: VictimModel, batch: Batch, setting: str) -> Batch:
        watched.batches.append(feed(self, model, batch, setting))
        return watched.batches[-1]

    def called(attack: Any, observation: Any) -> Reconstruction:
        watched.called.append((attack, observation))
        names_of[:] = [attack.name]
        return brought(attack, observation)

    def scored_again(self: Evaluator, group: AttackGroup, *args: Any) -> list[Record]:
        names_of[:] = [attack.name for attack in group.attacks]
        return again(self, group, *args)

    def scoring(self: Scorer, images: Tensor, *args: Any) -> Any:
        scored.append(images.clone())
        return score(self, images, *args)

    def laid_out(
        self: Scorer, reconstruction: Reconstruction, batch: Batch, names: Sequence[str], *, placed: bool
    ) -> Any:
        scored.clear()
        found = laid_by(self, reconstruction, batch, names, placed=placed)
        images = {"in_place": scored[0], "oracle": scored[1] if len(scored) > 1 else scored[0]}
        if "reassembled" in names:
            images["reassembled"] = scored[0] if placed and reconstruction.loose is not None else scored[-1]
        for geometry, laid in images.items():
            watched.images.setdefault((batch.setting, names_of[0], geometry), []).append(laid)
        del names_of[: len(names_of) > 1]
        return found

    def controlled(self: Evaluator, batch: Batch) -> Any:
        scored.clear()
        found = controls(self, batch)
        watched.controls.append(scored[::2] if len(scored) > 3 else [*scored])  # the oracle's stand between them
        return found

    for name in ("observe", "observe_updates", "observe_features"):
        patch.setattr(observing, name, observed(getattr(observing, name)))
    patch.setattr(check, "attack_batch", called)
    patch.setattr(Clients, "feed", feeding)
    patch.setattr(Evaluator, "_again", scored_again)
    patch.setattr(Evaluator, "_controls", controlled)
    patch.setattr(Scorer, "laid", laid_out)
    patch.setattr(Scorer, "score", scoring)
