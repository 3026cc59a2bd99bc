"""`privlab train`: from a victim's name, an objective and pictures to trained weights with their card."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from privlab import __version__
from privlab import weights as stored
from privlab.errors import PrivlabError, unknown_name
from privlab.evaluation import worth
from privlab.images import open_images
from privlab.machine import hardware, versions
from privlab.options import configured, read_options
from privlab.recipes import OBJECTIVES, Lesson
from privlab.training import Augmentation, Compute, Examples, Listener, Plan, read_examples, train, write_atomically
from privlab.victims import Victim, victim

__all__ = ["PRESETS", "Course", "Preset", "teach"]

CARD, WEIGHTS = "card.json", "model.safetensors"


@dataclass(frozen=True)
class Preset:
    """Hyper-parameters of a recipe, in epochs; `plan.steps` is replaced by what the data make of them."""

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

PRESETS: dict[str, dict[str, Preset]] = {
    "classify": {"published": _DEIT, "small": _SMALL},
    "mjp": {"published": _DEIT, "small": _SMALL},
}
"""By recipe: "published" is the papers' (MJP, Table 7), "small" a scaled one for 32 × 32 pixels and a few epochs."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """A training that a user asks for; what is None is the preset's.

    Args:
        recipe: one of `OBJECTIVES`.
        model: a victim's name.
        weights: where it starts: "random", "pretrained", or a file.
        data: what `open_images` opens; `split` of it is learnt, `test` is judged on.
        options: KEY=VALUE of the objective or of the augmentation.
        keep: steps whose weights stay.
    """

    recipe: str
    model: str
    data: str
    weights: str = "random"
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
    schedule: str | None = None
    clip: float | None = None
    ema: float | None = None
    precision: str | None = None
    seed: int = 0
    options: tuple[str, ...] = ()
    keep: tuple[int, ...] = ()
    save_every: int = 500

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            PrivlabError: for an unknown recipe or preset, or an option that neither objective nor augmentation has.
        """
        if self.recipe not in OBJECTIVES:
            raise unknown_name("recipe", self.recipe, OBJECTIVES)
        if self.preset not in PRESETS[self.recipe]:
            raise unknown_name("preset", self.preset, PRESETS[self.recipe])
        read_options(self.options, (OBJECTIVES[self.recipe], Augmentation))


def teach(
    course: Course, out: Path, *, device: str = "cpu", command: str = "", progress: Listener | None = None
) -> dict[str, Any]:
    """Train, judge on the test split, write `model.safetensors` and `card.json` to `out`, and return the card.

    What is there of the same course goes on; a finished one is returned as it is.

    Raises:
        PrivlabError: as `privlab.training.train`, `read_examples` and `victim` do; if `out` holds another course.
    """
    if (done := _finished(course, out)) is not None:
        return done
    pupil = victim(course.model, weights=course.weights, img_size=course.img_size, seed=course.seed).to(device)
    data = _examples(course, pupil, course.split)
    _check_classes(pupil, data, course)
    objective, augmentation, plan = _set_up(course, len(data))
    lesson = Lesson(pupil.model, data, objective, augmentation)
    compute = Compute(device=device, save_every=course.save_every, keep=course.keep)
    train(lesson, plan, compute=compute, out=out, progress=progress)
    return _written(course, out, pupil, data, plan, lesson, command)


def _set_up(course: Course, examples: int) -> tuple[Any, Augmentation, Plan]:
    """Return objective, augmentation and plan: the preset's, and what the user says."""
    preset = PRESETS[course.recipe][course.preset]
    kind = OBJECTIVES[course.recipe]
    objective = configured(kind, (*preset.options, *course.options))
    augmentation = configured(Augmentation, course.options, asdict(preset.augmentation))
    said = {
        name: value
        for name in ("batch_size", "accumulate", "optimiser", "learning_rate", "weight_decay", "schedule", "clip")
        if (value := getattr(course, name)) is not None
    } | {name: value for name in ("ema", "precision") if (value := getattr(course, name)) is not None}
    plan = replace(preset.plan, **said, seed=course.seed)
    epochs = preset.epochs if course.epochs is None else course.epochs
    warmup = preset.warmup if course.warmup is None else course.warmup
    steps = max(1, math.ceil(epochs * examples / plan.batch_size))
    risen = min(steps, round(warmup * examples / plan.batch_size))
    return objective, augmentation, replace(plan, steps=steps, warmup=risen)


def _examples(course: Course, pupil: Victim, split: str | None) -> Examples:
    source = open_images(course.data, split=split, limit=course.limit)
    return read_examples(source, pupil.preprocessing.size)


def _check_classes(pupil: Victim, data: Examples, course: Course) -> None:
    classes = pupil.model.vit.num_classes
    if int(data.labels.max()) >= classes:
        raise PrivlabError(
            f"{course.data} has the label {int(data.labels.max())}; {course.model} tells {classes} classes apart "
            f"(labels 0 to {classes - 1})."
        )


def _written(
    course: Course, out: Path, pupil: Victim, data: Examples, plan: Plan, lesson: Lesson, command: str
) -> dict[str, Any]:
    """Write weights and card."""
    state = {k: v.detach().cpu().contiguous() for k, v in pupil.model.vit.state_dict().items()}
    if pupil.model.unk_embed is not None:
        state["unk_embed"] = pupil.model.unk_embed.detach().cpu()
    card: dict[str, Any] = {
        "model": course.model,
        "architecture": pupil.architecture,
        "recipe": course.recipe,
        "objective": asdict(lesson.objective),  # pyright: ignore[reportArgumentType]
        "augmentation": asdict(lesson.augmentation),
        "plan": asdict(plan),
        "start": {"weights": pupil.weights.origin, "sha256": pupil.weights.sha256},
        "data": {"source": Path(course.data).name, "split": course.split} | _of_data(data),
        "skipped": list(data.skipped),
        "course": _of_course(course),
        "command": command,
        "sha256": stored.hash_of(state),
        "test": _judged(course, pupil),
        "versions": versions(),
        "hardware": hardware(pupil.model.mean.device),
        "privlab": __version__,
    }
    write_atomically(out / WEIGHTS, lambda path: stored.save(state, path))
    text = json.dumps(card, indent=1, ensure_ascii=False)
    write_atomically(out / CARD, lambda path: path.write_text(text, encoding="utf-8"))
    return card


def _of_data(data: Examples) -> dict[str, Any]:
    return {"pictures": len(data), "sha256": data.identity}


def _judged(course: Course, pupil: Victim) -> dict[str, Any] | None:
    """Return what the model is worth on the test split, at the γ of Table 1; None where there is none."""
    if course.test is None:
        return None
    data = _examples(course, pupil, course.test)
    return {"split": course.test, "sha256": data.identity, "skipped": len(data.skipped)} | asdict(
        worth(pupil.model, data, seed=course.seed)
    )


def _of_course(course: Course) -> dict[str, Any]:
    """Return the course as plain data, without what does not shape its result."""
    facts = asdict(course)
    del facts["save_every"], facts["keep"]
    return json.loads(json.dumps(facts))


def _finished(course: Course, out: Path) -> dict[str, Any] | None:
    """Return the card in `out`, if it holds this course, done."""
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
