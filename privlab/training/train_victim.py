"""`privlab train`: from a victim's name, an objective and images to trained weights with their card.

A training's folder holds `model.safetensors`, the victim's weights, from which any other recipe can start
(`--weights`), and `card.json`. For a position predictor it also holds `predictor.safetensors`, the ViT with what stands
on it, as `privlab.reassembly.predictors` reads it. For a probe it holds `probe.safetensors`, its linear layer, and the
victim's weights only where that layer can be their head.
"""

import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from privlab import __version__
from privlab.base import (
    PrivlabError,
    PrivlabWarning,
    check_name,
    collected,
    configured,
    hardware,
    read_options,
    versions,
    write_whole,
)
from privlab.images import open_images
from privlab.reassembly import PositionPredictor, save_predictor
from privlab.training import Augmentation, Compute, Examples, Listener, Plan, read_examples, train
from privlab.training.objectives import OBJECTIVES, Lesson, Objective, Probe
from privlab.training.objectives.probe import Head, probe_accuracy
from privlab.training.position_accuracy import position_accuracy
from privlab.utility import worth
from privlab.victims import Pupil, Victim, classifier, victim
from privlab.victims import weights as stored

__all__ = ["PRESETS", "Course", "Preset", "teach"]

CARD, WEIGHTS, PREDICTOR, PROBE = "card.json", "model.safetensors", "predictor.safetensors", "probe.safetensors"


@dataclass(frozen=True)
class Preset:
    """Hyper-parameters of a recipe; its epochs and the number of images give the steps, in place of `plan.steps`."""

    epochs: float
    warmup: float
    plan: Plan
    augmentation: Augmentation
    options: tuple[str, ...] = ()


_DEIT = Preset(
    epochs=300.0,
    warmup=20.0,
    plan=Plan(steps=1, batch_size=1024, learning_rate=1e-3, weight_decay=0.05),
    augmentation=Augmentation(shift=0, zoom=0.08, randaugment=9, erasing=0.25),
    options=("mixup=0.8", "cutmix=1.0"),
)
_SMALL = Preset(
    epochs=20.0, warmup=1.0, plan=Plan(steps=1, batch_size=128, precision="bf16-mixed"), augmentation=Augmentation()
)
_MP3 = Preset(
    epochs=100.0,
    warmup=5.0,
    plan=Plan(steps=1, batch_size=2048, learning_rate=2e-3, weight_decay=0.05),
    augmentation=Augmentation(shift=0, zoom=0.08, randaugment=9),
)
_DROPPOS = Preset(
    epochs=200.0,
    warmup=10.0,
    plan=Plan(steps=1, batch_size=4096, learning_rate=2.4e-3, weight_decay=0.05, clip=0.0),
    augmentation=Augmentation(shift=0, zoom=0.2),
)
_FINETUNE = Preset(  # DropPos, Supplement A.1; MP3's is classify's with drop_path=0.1: 150 epochs, no layer decay
    epochs=100.0,
    warmup=5.0,
    plan=Plan(steps=1, batch_size=1024, learning_rate=4e-3, weight_decay=0.05, layer_decay=0.8, clip=0.0),
    augmentation=Augmentation(shift=0, zoom=0.08, randaugment=9),
    options=("mixup=0.8", "cutmix=1.0", "drop_path=0.1"),
)
_PROBE = Preset(  # MAE, Appendix A.1; DropPos does not state its own
    epochs=90.0,
    warmup=10.0,
    plan=Plan(steps=1, batch_size=16384, optimiser="lars", learning_rate=6.4, weight_decay=0.0, clip=0.0),
    augmentation=Augmentation(shift=0, zoom=0.08),
)
_PLACES = replace(_SMALL, augmentation=Augmentation(shift=0))  # a shift's black rim would give places away

PRESETS: dict[str, dict[str, Preset]] = {
    "classify": {"published": _DEIT, "small": _SMALL},
    "mjp": {"published": _DEIT, "small": _SMALL},
    "mp3": {"published": _MP3, "small": replace(_PLACES, options=("eta=0.5", "drop_path=0"))},
    "droppos": {
        "published": _DROPPOS,
        "small": replace(
            _PLACES, options=("sigma=0", "temperature=inf", "decoder_width=128", "decoder_heads=4", "gamma=0.5")
        ),
    },
    "finetune": {
        "published": _FINETUNE,
        "small": replace(_SMALL, epochs=10.0, plan=replace(_SMALL.plan, layer_decay=0.8)),
    },
    "probe": {
        "published": _PROBE,
        "small": replace(
            _PLACES,
            epochs=5.0,
            plan=Plan(steps=1, batch_size=256, learning_rate=3e-3, weight_decay=0.0, clip=0.0),
        ),
    },
}
"""Presets by recipe: "published" is that of the papers (MJP, Table 7; MP3, Section 4, on ImageNet-1K, with DeiT's
learning rate and warm-up; DropPos, Supplement A; MAE's linear probe), "small" a scaled one for 32 × 32 pixels and a few
epochs. The small ones of `mp3` and `droppos` are for predictors: what the papers add for fine-tuning costs a predictor
accuracy (DropPos, Tables 3 and 4).
"""


_ANY_BACKBONE = ("classify", "mjp")
"""The recipes that do not need a plain ViT."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """A training that a user asks for; what is None is the preset's.

    Args:
        recipe: one of `OBJECTIVES`.
        model: a victim's name.
        weights: where it starts: "random", "auto", "pretrained", or a file; by default "auto" to fine-tune or probe,
            else "random".
        data: what `open_images` opens; the model learns from `split` of it, and is judged on `test`.
        options: KEY=VALUE of the objective or of the augmentation.
        keep: the steps whose weights stay.
        half: whether the result is rounded to half precision, and judged as such: half the bytes.
        cache: a folder for the resized images, as in `read_examples`.
    """

    recipe: str
    model: str
    data: str
    weights: str = ""
    preset: str = "published"
    split: str | None = "train"
    test: str | None = "test"
    img_size: int | None = None
    limit: int | None = None
    epochs: float | None = None
    warmup: float | None = None
    batch_size: int | None = None
    accumulate: int | None = None
    optimiser: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    layer_decay: float | None = None
    schedule: str | None = None
    clip: float | None = None
    ema: float | None = None
    precision: str | None = None
    seed: int = 0
    options: tuple[str, ...] = ()
    keep: tuple[int, ...] = ()
    half: bool = False
    save_every: int = 500
    cache: Path | None = None

    def __post_init__(self) -> None:
        """Raise PrivlabError for an unknown name, or an option that neither objective nor augmentation has."""
        check_name("recipe", self.recipe, OBJECTIVES)
        check_name("preset", self.preset, PRESETS[self.recipe])
        start = self.weights or ("auto" if self.recipe in ("finetune", "probe") else "random")
        object.__setattr__(self, "weights", start)
        read_options(self.options, (OBJECTIVES[self.recipe], Augmentation))


def teach(
    course: Course, out: Path, *, device: str = "cpu", command: str = "", progress: Listener | None = None
) -> dict[str, Any] | None:
    """Train, judge on the test split, write the weights and `card.json` to `out`, and return the card.

    An unfinished training of the same course in `out` goes on; a finished one is returned as it is. Of several
    processes that torchrun started, the first judges and writes; the others return None.

    Args:
        course: what is trained, on what, and how.
        out: folder of the training, with its checkpoints and `log.csv`.
        device: a device of torch, such as "cpu" or "cuda:0".
        command: the command line, which the card states.
        progress: called with each report; None for the listener of `listening`, if there is one.

    Raises:
        PrivlabError: as `privlab.training.train`, `read_examples` and `victim` do; if `out` holds another course.
    """
    if (done := _finished(course, out)) is not None:
        return done
    notes: list[str] = []
    with collected(notes):
        pupil = _pupil(course).to(device)
    data = _examples(course, pupil, course.split)
    if _objective(course).labelled:
        with collected(notes):
            _take_head(pupil, data.classes, course)
        _check_classes(pupil, data, course)
    for note in notes:
        warnings.warn(note, PrivlabWarning, stacklevel=2)
    objective, augmentation, plan = _set_up(course, len(data))
    lesson = Lesson(pupil.model, data, objective, augmentation)
    compute = Compute(device=device, save_every=course.save_every, keep=course.keep)
    train(lesson, plan, compute=compute, out=out, progress=progress)
    if os.environ.get("RANK", "0") != "0":
        return None
    return _written(course, out, pupil, plan, lesson, command, notes)


def _pupil(course: Course) -> Victim | Pupil:
    """Return the victim that is trained.

    Raises:
        PrivlabError: as `victim` does; for random weights to fine-tune.
    """
    tuned = course.recipe == "finetune"
    if course.recipe in _ANY_BACKBONE or (tuned and course.model.endswith("_relpos")):
        made = classifier(course.model, weights=course.weights, img_size=course.img_size, seed=course.seed)
    else:
        made = victim(course.model, weights=course.weights, img_size=course.img_size, seed=course.seed, start=tuned)
    if tuned and made.weights.is_random:
        raise PrivlabError(f"finetune starts from trained weights, and {course.model} has random ones: --weights FILE.")
    return made


def _take_head(pupil: Victim | Pupil, classes: int, course: Course) -> None:
    """Give the victim a head for as many classes as the data have, where it is to learn a new one.

    Warns:
        PrivlabWarning: if the head of the weights has another number of classes, and is left behind.
    """
    if course.recipe in _ANY_BACKBONE or pupil.model.classes == classes:
        return
    vit = pupil.model.vit if isinstance(pupil, Victim) else pupil.model.net
    message = f"{course.model}: the weights' head is for {pupil.model.classes} classes, the data have {classes}"
    warnings.warn(f"{message}: a new one begins, UNTRAINED.", PrivlabWarning, stacklevel=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(course.seed)
        vit.reset_classifier(classes)
    vit.to(pupil.model.mean.device)


def _objective(course: Course) -> Any:  # noqa: ANN401
    """Return the objective with the preset's options, and the user's in their place."""
    preset = PRESETS[course.recipe][course.preset]
    return configured(OBJECTIVES[course.recipe], (*preset.options, *course.options))


def _set_up(course: Course, examples: int) -> tuple[Any, Augmentation, Plan]:
    """Return objective, augmentation and plan of the preset, with the user's options in their place."""
    preset = PRESETS[course.recipe][course.preset]
    augmentation = configured(Augmentation, course.options, asdict(preset.augmentation))
    said = {
        name: value
        for name in Plan.__dataclass_fields__.keys() - {"steps", "warmup", "seed"}
        if (value := getattr(course, name)) is not None
    }
    plan = replace(preset.plan, **said, seed=course.seed)
    epochs = preset.epochs if course.epochs is None else course.epochs
    warmup = preset.warmup if course.warmup is None else course.warmup
    steps = max(1, math.ceil(epochs * examples / plan.batch_size))
    risen = min(steps, round(warmup * examples / plan.batch_size))
    return _objective(course), augmentation, replace(plan, steps=steps, warmup=risen)


def _examples(course: Course, pupil: Victim | Pupil, split: str | None) -> Examples:
    source = open_images(course.data, split=split, limit=course.limit)
    return read_examples(source, pupil.preprocessing.size, labelled=_objective(course).labelled, cache=course.cache)


def _check_classes(pupil: Victim | Pupil, data: Examples, course: Course) -> None:
    classes = pupil.model.classes
    if int(data.labels.max()) >= classes:
        raise PrivlabError(
            f"{course.data} has the label {int(data.labels.max())}; {course.model} tells {classes} classes apart "
            f"(labels 0 to {classes - 1})."
        )


def _written(
    course: Course, out: Path, pupil: Victim | Pupil, plan: Plan, lesson: Lesson, command: str, notes: Sequence[str]
) -> dict[str, Any]:
    """Write weights and card."""
    predictor = next((part for part in lesson.model.modules() if isinstance(part, PositionPredictor)), None)
    head = lesson.model.folded() if isinstance(lesson.model, Head) else None
    if course.half:
        for part in (lesson.model, pupil.model, *([head] if head else [])):
            part.half().float()
    kept = not isinstance(lesson.objective, Probe) or lesson.objective.for_victim
    if head is not None and kept and isinstance(pupil, Victim):
        pupil.model.vit.head.load_state_dict(head.state_dict())
    state = {k: v.detach().cpu().contiguous() for k, v in stored.own_layout(pupil.model).items()}
    card: dict[str, Any] = {
        "model": course.model,
        "architecture": pupil.architecture,
        "recipe": course.recipe,
        "objective": _plain(asdict(lesson.objective)),  # pyright: ignore[reportArgumentType]
        "augmentation": asdict(lesson.augmentation),
        "plan": asdict(plan),
        "start": {"weights": pupil.weights.origin, "sha256": pupil.weights.sha256, "notes": list(notes)},
        "data": {"source": Path(course.data).name, "split": course.split}
        | {"pictures": len(lesson.data), "sha256": lesson.data.identity},
        "skipped": list(lesson.data.skipped),
        "course": _of_course(course),
        "command": command,
        "sha256": stored.hash_of(state) if kept else None,
        "predictor_sha256": None if predictor is None else stored.hash_of(predictor.tensors()),
        "probe_sha256": None if head is None else stored.hash_of(head.state_dict()),
        "test": _judged(course, pupil, predictor, lesson.objective, head),
        "versions": versions(),
        "hardware": hardware(pupil.model.mean.device),
        "privlab": __version__,
    }
    if kept:
        small = {k: v.half() if course.half and v.is_floating_point() else v for k, v in state.items()}
        write_whole(out / WEIGHTS, lambda path: stored.save(small, path))
    if head is not None:
        layer = (head.half() if course.half else head).state_dict()
        write_whole(out / PROBE, lambda path: stored.save(layer, path))
    if predictor is not None:
        write_whole(out / PREDICTOR, lambda path: save_predictor(predictor, path, half=course.half))
    text = json.dumps(card, indent=1, ensure_ascii=False)
    write_whole(out / CARD, lambda path: path.write_text(text, encoding="utf-8"))
    return card


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as JSON holds them, which has no infinity."""
    return {name: str(each) if isinstance(each, float) and math.isinf(each) else each for name, each in options.items()}


def _judged(
    course: Course,
    pupil: Victim | Pupil,
    predictor: PositionPredictor | None,
    objective: Objective,
    head: nn.Module | None,
) -> dict[str, Any] | None:
    """Return the scores on the test split: of places, or of classes, plain and shuffled at the γ of MJP's Table 1.

    None where there is no test split.
    """
    if course.test is None:
        return None
    data = _examples(course, pupil, course.test)
    told = {"split": course.test, "sha256": data.identity, "skipped": len(data.skipped)}
    if predictor is not None:
        return told | {"images": len(data)} | position_accuracy(predictor, data, seed=course.seed)
    if head is not None and isinstance(objective, Probe) and isinstance(pupil, Victim):
        share = probe_accuracy(objective, head, pupil.model, data, seed=course.seed)
        return told | {"images": len(data), "accuracy": share}
    return told | asdict(worth(pupil.model, data, seed=course.seed))


def _of_course(course: Course) -> dict[str, Any]:
    """Return the course as plain data, without what does not shape its result, and without a machine's folders."""
    facts = asdict(course) | {"data": Path(course.data).name, "weights": Path(course.weights).name}
    del facts["save_every"], facts["keep"], facts["cache"]
    if facts["layer_decay"] is None:  # older cards do not name it
        del facts["layer_decay"]
    return json.loads(json.dumps(facts))


def _finished(course: Course, out: Path) -> dict[str, Any] | None:
    """Return the card in `out` if it holds this course, finished; else None."""
    if not (out / CARD).is_file():
        return None
    try:
        card = json.loads((out / CARD).read_text(encoding="utf-8"))
        there = card["course"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrivlabError(f"{out / CARD} cannot be read as the card of a training: {error}.") from error
    if there != _of_course(course):
        changed = next(key for key in _of_course(course) if there.get(key) != _of_course(course)[key])
        raise PrivlabError(
            f"{out} holds a finished training whose {changed} is {there.get(changed)}. Give another --out."
        )
    return card
