"""`privlab keys finetune-study`: Table 7, Figures 4 and 5 of Permutation Equivariance, and the recovery of the key.

Four fine-tunings start from the same weights and see the same batches: `normal`; `authorized`, the encrypted backbone
with the key (Eq. 5); `unauthorized`, the encrypted backbone without it, after the public embedding; `scratch`, a random
one. At marked steps of the authorized one the adversary compares the backbone with the public weights and looks for the
key.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import timm
import torch
from jaxtyping import Int
from torch import Generator, Tensor

from privlab.attacks.weights.weight_matching import WeightMatching, WeightObservation, recovered_fraction
from privlab.base import check_name, write_whole
from privlab.experiments.studies.data import FineTuning, Images, check_folder, fresh_head, load_split, loss_of
from privlab.experiments.training.loop import train
from privlab.experiments.training.plan import Compute, Plan
from privlab.keys import ModelKey, ModelShape, apply_key, new_key
from privlab.patches import permute_features, restore_features
from privlab.training import TrainingProgress
from privlab.victims import Victim, VictimModel, victim

MANNERS = ("normal", "authorized", "unauthorized", "scratch")
PUBLISHED: dict[str, float] = {"normal": 97.74, "authorized": 97.94, "unauthorized": 78.03}
"""Test accuracy in %, ViT-Base on CIFAR-10, as printed in Table 7."""


@dataclass(frozen=True, kw_only=True)
class FinetuneStudy:
    """What is fine-tuned, on what, and for how long.

    Args:
        images: a folder with `train` and `test`, each with a folder per class.
        model: name of a victim; its `weights` are the public base.
        every: steps between two points of a curve: the validation loss on the test images, and the key's recovery.
        space: the key space, "full" or "paper".
    """

    images: Path
    model: str
    weights: str = "auto"
    img_size: int | None = None
    manners: tuple[str, ...] = MANNERS
    steps: int = 500
    every: int = 50
    batch: int = 32
    learning_rate: float = 1e-4
    space: str = "full"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError for an unknown manner, or a folder without `train` and `test`."""
        for manner in self.manners:
            check_name("manner", manner, MANNERS)
        check_folder(self.images)


@dataclass(frozen=True, eq=False)
class _Keyed(FineTuning):
    """A recipe that fine-tunes a model; `columns` permutes its features before the backbone, and is undone after it."""

    columns: Int[Tensor, " d"] | None

    def loss(self, model: Any, batch: tuple[Tensor, Tensor], draw: Generator) -> Tensor:  # noqa: ANN401
        images, labels = batch
        return loss_of(_logits(model, images, self.columns), labels)


def _logits(model: Any, images: Tensor, columns: Tensor | None) -> Tensor:  # noqa: ANN401
    """Return F₂(T_C(F₁(x) P_C) P_C⁻¹) (Eq. 5), of a `VictimModel` or of what Fabric wraps around it."""
    outputs = model.backbone(permute_features(model.embed(images), columns=columns))
    return model.head(restore_features(outputs, columns=columns))


@dataclass(eq=False)
class _Watch:
    """Listens to a training and keeps the curves: validation loss and accuracy, and the recovered share of the key."""

    recipe: _Keyed
    test: Images
    every: int
    key: ModelKey | None
    public: dict[str, Tensor]
    shape: ModelShape
    points: list[dict[str, int | float]] = field(default_factory=list)

    def __call__(self, now: TrainingProgress) -> None:
        if now.step % self.every == 0 or now.step == now.steps:
            self.look(now.step, now.loss)

    def look(self, step: int, loss: float | None = None) -> None:
        model = self.recipe.model
        with torch.no_grad():
            logits = torch.cat([_logits(model, x, self.recipe.columns) for x in self.test.pixels.split(64)])
        point: dict[str, int | float] = {"step": step, "validation_loss": loss_of(logits, self.test.labels).item()}
        point["accuracy"] = float((logits.argmax(1) == self.test.labels).double().mean())
        if loss is not None:
            point["training_loss"] = loss
        if self.key is not None:
            seen = WeightObservation(dict(model.vit.state_dict()), self.public, self.shape)
            point["key_recovered"] = recovered_fraction(WeightMatching()(seen).residual, self.key.residual)
        self.points.append(point)


def finetune_study(
    plan: FinetuneStudy, out: Path, *, device: str = "cpu", say: Callable[[str], None] = lambda line: None
) -> pd.DataFrame:
    """Fine-tune in every manner and return the curves, a row per manner and point; a manner that is done is kept.

    Args:
        plan: what is fine-tuned, on which images, and for how long.
        out: folder of the curves, a file `MANNER.json` for each manner that is done.
        device: device of the training.
        say: is called with a line for each manner that begins.

    Raises:
        PrivlabError: if the images or the weights do not fit.
    """
    base = victim(plan.model, weights=plan.weights, img_size=plan.img_size, seed=plan.seed)
    train_images, test = (load_split(plan.images, part, base.preprocessing).to(device) for part in ("train", "test"))
    curves = []
    for manner in plan.manners:
        path = out / f"{manner}.json"
        if not path.exists():
            say(f"{manner}: {plan.steps} steps")
            points = _finetune(plan, manner, base, train_images, test, device)
            out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(points, indent=1)
            write_whole(path, lambda temporary, text=text: temporary.write_text(text))
        curves += [{"manner": manner} | point for point in json.loads(path.read_text())]
    return pd.DataFrame(curves)


def _finetune(
    plan: FinetuneStudy, manner: str, base: Victim, images: Images, test: Images, device: str
) -> list[dict[str, int | float]]:
    """Fine-tune in one manner and return its curve."""
    model = copy.deepcopy(base.model)
    shape, public = ModelShape.of(model.vit), dict(base.model.vit.state_dict())
    key = new_key(shape, plan.space) if manner in ("authorized", "unauthorized") else None
    classes = int(max(images.labels.max(), test.labels.max())) + 1
    model.vit.head, model.vit.num_classes = fresh_head(model.vit.embed_dim, classes, plan.seed), classes
    if manner == "scratch":
        _randomise(model, base, plan.seed)
    if key is not None:
        model.vit.load_state_dict(apply_key(model.vit.state_dict(), key, shape))
    columns = key.residual.to(device) if key is not None and manner == "authorized" else None
    model = model.requires_grad_(True).to(device)
    recipe = _Keyed(model, f"key-finetune {manner} {base.weights.sha256}", images, columns)
    watch = _Watch(recipe, test, plan.every, key if manner == "authorized" else None, public, shape)
    watch.look(0)
    schedule = Plan(steps=plan.steps, batch_size=plan.batch, learning_rate=plan.learning_rate, seed=plan.seed)
    train(recipe, schedule, compute=Compute(device=device, log_every=plan.every), progress=watch)
    return watch.points


def _randomise(model: VictimModel, base: Victim, seed: int) -> None:
    """Replace the backbone behind the embedding by a random one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = timm.create_model(base.architecture, img_size=model.image_shape[1:])
    blocks = {name: tensor for name, tensor in fresh.state_dict().items() if name.startswith(("blocks.", "norm_pre."))}
    model.vit.load_state_dict(blocks, strict=False)
