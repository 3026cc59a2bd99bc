"""`privlab train`: from a victim's name, an objective and images to trained weights with their card.

A training's folder holds `model.safetensors`, the victim's weights, from which any other recipe can start
(`--weights`), and `card.json`. For a position predictor it also holds `predictor.safetensors`, the ViT with what stands
on it, as `privlab.reassembly.predictors` reads it. For a probe it holds `probe.safetensors`, its linear layer, and the
victim's weights only where that layer can be their head.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from privlab import __version__
from privlab.base import (
    PrivlabError,
    check_name,
    collect_warnings,
    configure,
    hardware,
    read_options,
    versions,
    warn,
    write_whole,
)
from privlab.experiments.methods.consistency import measure_consistency
from privlab.experiments.training.classifiers import NamedClassifier, classifier
from privlab.experiments.training.examples import Augmentation, Examples
from privlab.experiments.training.loop import train
from privlab.experiments.training.objectives import OBJECTIVES, Objective, ObjectiveRecipe, Probe
from privlab.experiments.training.objectives.probe import Head, probe_accuracy
from privlab.experiments.training.plan import Compute, Plan
from privlab.experiments.training.position_accuracy import position_accuracy
from privlab.experiments.training.reading import read_examples
from privlab.images import open_images
from privlab.reassembly import PositionPredictor, save_predictor
from privlab.training import Listener
from privlab.victims import Victim, own_layout, victim
from privlab.victims import weights as stored

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
            _PLACES, epochs=5.0, plan=Plan(steps=1, batch_size=256, learning_rate=3e-3, weight_decay=0.0, clip=0.0)
        ),
    },
}
"""Presets by recipe: "published" is that of the papers (MJP, Table 7; MP3, Section 4, on ImageNet-1K, with DeiT's
learning rate and warm-up; DropPos, Supplement A; MAE's linear probe), "small" a scaled one for 32 × 32 pixels and a few
epochs. The small ones of `mp3` and `droppos` are for predictors: what the papers add for fine-tuning costs a predictor
accuracy (DropPos, Tables 3 and 4).
"""

_ANY_CLASSIFIER = ("classify", "mjp")
"""The recipes that do not need a plain ViT."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """A training that a user asks for; what is None is the preset's.

    Args:
        recipe: one of `OBJECTIVES`.
        model: a victim's name.
        weights: where it starts: "random", "auto", "pretrained", or a file; by default "auto" to fine-tune or probe,
            else "random".
        data: what `open_images` opens; the model learns from `split` of it, and is evaluated on `test`.
        options: KEY=VALUE of the objective or of the augmentation.
        keep: the steps whose weights stay.
        half: whether the result is rounded to half precision, and evaluated as such: half the bytes.
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


def train_victim(
    config: TrainingConfig, out: Path, *, device: str = "cpu", command: str = "", progress: Listener | None = None
) -> dict[str, Any] | None:
    """Train, evaluate on the test split, write the weights and `card.json` to `out`, and return the card.

    An unfinished training with the same configuration in `out` goes on; a finished one is returned as it is. Of several
    processes that torchrun started, the first evaluates and writes; the others return None.

    Args:
        config: what is trained, on what, and how.
        out: folder of the training, with its checkpoints and `log.csv`.
        device: a device of torch, such as "cpu" or "cuda:0".
        command: the command line, which the card states.
        progress: called with each report; None for the listener of `listening`, if there is one.

    Raises:
        PrivlabError: as `train`, `read_examples` and `victim` do; if `out` holds another training.
    """
    if (done := _finished_card(config, out)) is not None:
        return done
    with collect_warnings(notes := list[str]()):
        network = _network(config).to(device)
    data = _examples(config, network, config.split)
    if _objective(config).labelled:
        with collect_warnings(notes):
            _take_head(network, data.classes, config)
        _check_classes(network, data, config)
    for note in notes:
        warn(note)
    objective, augmentation, plan = _set_up(config, len(data))
    recipe = ObjectiveRecipe(network.model, data, objective, augmentation)
    compute = Compute(device=device, save_every=config.save_every, keep=config.keep)
    train(recipe, plan, compute=compute, out=out, progress=progress)
    if os.environ.get("RANK", "0") != "0":
        return None
    return _write(config, out, network, plan, recipe, command, notes)


def _network(config: TrainingConfig) -> Victim | NamedClassifier:
    """Return the victim that is trained.

    Raises:
        PrivlabError: as `victim` does; for random weights to fine-tune.
    """
    tuned = config.recipe == "finetune"
    if config.recipe in _ANY_CLASSIFIER or (tuned and config.model.endswith("_relpos")):
        made = classifier(config.model, weights=config.weights, img_size=config.img_size, seed=config.seed)
    else:
        made = victim(config.model, weights=config.weights, img_size=config.img_size, seed=config.seed, start=tuned)
    if tuned and made.weights.is_random:
        raise PrivlabError(f"finetune starts from trained weights, and {config.model} has random ones: --weights FILE.")
    return made


def _take_head(network: Victim | NamedClassifier, classes: int, config: TrainingConfig) -> None:
    """Give the victim a head for as many classes as the data have, where it is to learn a new one.

    Warns:
        PrivlabWarning: if the head of the weights has another number of classes, and is left behind.
    """
    if config.recipe in _ANY_CLASSIFIER or network.model.classes == classes:
        return
    vit = network.model.vit if isinstance(network, Victim) else network.model.net
    message = f"{config.model}: the weights' head is for {network.model.classes} classes, the data have {classes}"
    warn(f"{message}: a new one begins, UNTRAINED.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        vit.reset_classifier(classes)
    vit.to(network.model.mean.device)


def _objective(config: TrainingConfig) -> Any:  # noqa: ANN401
    """Return the objective with the preset's options, and the user's in their place."""
    preset = PRESETS[config.recipe][config.preset]
    return configure(OBJECTIVES[config.recipe], (*preset.options, *config.options))


def _set_up(config: TrainingConfig, examples: int) -> tuple[Any, Augmentation, Plan]:
    """Return objective, augmentation and plan of the preset, with the user's options in their place."""
    preset = PRESETS[config.recipe][config.preset]
    augmentation = configure(Augmentation, config.options, asdict(preset.augmentation))
    said = {
        name: value
        for name in Plan.__dataclass_fields__.keys() - {"steps", "warmup", "seed"}
        if (value := getattr(config, name)) is not None
    }
    plan = replace(preset.plan, **said, seed=config.seed)
    epochs = preset.epochs if config.epochs is None else config.epochs
    warmup = preset.warmup if config.warmup is None else config.warmup
    steps = max(1, math.ceil(epochs * examples / plan.batch_size))
    risen = min(steps, round(warmup * examples / plan.batch_size))
    return _objective(config), augmentation, replace(plan, steps=steps, warmup=risen)


def _examples(config: TrainingConfig, network: Victim | NamedClassifier, split: str | None) -> Examples:
    source = open_images(config.data, split=split, limit=config.limit)
    return read_examples(source, network.preprocessing.size, labelled=_objective(config).labelled, cache=config.cache)


def _check_classes(network: Victim | NamedClassifier, data: Examples, config: TrainingConfig) -> None:
    classes = network.model.classes
    if int(data.labels.max()) >= classes:
        raise PrivlabError(
            f"{config.data} has the label {int(data.labels.max())}; {config.model} tells {classes} classes apart "
            f"(labels 0 to {classes - 1})."
        )


def _write(
    config: TrainingConfig,
    out: Path,
    network: Victim | NamedClassifier,
    plan: Plan,
    recipe: ObjectiveRecipe,
    command: str,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Write weights and card."""
    predictor = next((part for part in recipe.model.modules() if isinstance(part, PositionPredictor)), None)
    head = recipe.model.fold() if isinstance(recipe.model, Head) else None
    if config.half:
        for part in (recipe.model, network.model, *([head] if head else [])):
            part.half().float()
    kept = not isinstance(recipe.objective, Probe) or recipe.objective.for_victim
    if head is not None and kept and isinstance(network, Victim):
        network.model.vit.head.load_state_dict(head.state_dict())
    state = {k: v.detach().cpu().contiguous() for k, v in own_layout(network.model).items()}
    card: dict[str, Any] = {
        "model": config.model,
        "architecture": network.architecture,
        "recipe": config.recipe,
        "objective": _plain(asdict(recipe.objective)),  # pyright: ignore[reportArgumentType]
        "augmentation": asdict(recipe.augmentation),
        "plan": asdict(plan),
        "start": {"weights": network.weights.origin, "sha256": network.weights.sha256, "notes": list(notes)},
        "data": {
            "source": Path(config.data).name,
            "split": config.split,
            "pictures": len(recipe.data),
            "sha256": recipe.data.identity,
        },
        "skipped": list(recipe.data.skipped),
        "course": _of_config(config),
        "command": command,
        "sha256": stored.hash_of(state) if kept else None,
        "predictor_sha256": None if predictor is None else stored.hash_of(predictor.tensors()),
        "probe_sha256": None if head is None else stored.hash_of(head.state_dict()),
        "test": _test_scores(config, network, predictor, recipe.objective, head),
        "versions": versions(),
        "hardware": hardware(network.model.mean.device),
        "privlab": __version__,
    }
    if kept:
        small = {k: v.half() if config.half and v.is_floating_point() else v for k, v in state.items()}
        write_whole(out / WEIGHTS, lambda path: stored.save(small, path))
    if head is not None:
        layer = (head.half() if config.half else head).state_dict()
        write_whole(out / PROBE, lambda path: stored.save(layer, path))
    if predictor is not None:
        write_whole(out / PREDICTOR, lambda path: save_predictor(predictor, path, half=config.half))
    text = json.dumps(card, indent=1, ensure_ascii=False)
    write_whole(out / CARD, lambda path: path.write_text(text, encoding="utf-8"))
    return card


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as JSON holds them, which has no infinity."""
    return {name: str(each) if isinstance(each, float) and math.isinf(each) else each for name, each in options.items()}


def _test_scores(
    config: TrainingConfig,
    network: Victim | NamedClassifier,
    predictor: PositionPredictor | None,
    objective: Objective,
    head: nn.Module | None,
) -> dict[str, Any] | None:
    """Return the scores on the test split, if any: of places, or of classes, plain and at the γ of MJP's Table 1."""
    if config.test is None:
        return None
    data = _examples(config, network, config.test)
    told = {"split": config.test, "sha256": data.identity, "skipped": len(data.skipped)}
    if predictor is not None:
        return told | {"images": len(data)} | position_accuracy(predictor, data, seed=config.seed)
    if head is not None and isinstance(objective, Probe) and isinstance(network, Victim):
        share = probe_accuracy(objective, head, network.model, data, seed=config.seed)
        return told | {"images": len(data), "accuracy": share}
    return told | asdict(measure_consistency(network.model, data, seed=config.seed))


def _of_config(config: TrainingConfig) -> dict[str, Any]:
    """Return the configuration as plain data, without what leaves its result unchanged and a machine's folders."""
    facts = asdict(config) | {"data": Path(config.data).name, "weights": Path(config.weights).name}
    del facts["save_every"], facts["keep"], facts["cache"]
    if facts["layer_decay"] is None:  # older cards do not name it
        del facts["layer_decay"]
    return json.loads(json.dumps(facts))


def _finished_card(config: TrainingConfig, out: Path) -> dict[str, Any] | None:
    """Return the card in `out` if it is that of this training, finished; else None."""
    if not (out / CARD).is_file():
        return None
    try:
        card = json.loads((out / CARD).read_text(encoding="utf-8"))
        there = card["course"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrivlabError(f"{out / CARD} cannot be read as the card of a training: {error}.") from error
    if there != _of_config(config):
        changed = next(key for key in _of_config(config) if there.get(key) != _of_config(config)[key])
        raise PrivlabError(
            f"{out} holds a finished training whose {changed} is {there.get(changed)}. Give another --out."
        )
    return card
