"""`privlab bench train`: the recipes' throughput against a bare timm loop, and against one another."""

from collections.abc import Callable

import torch
from timm.optim import create_optimizer_v2
from torch import Generator, nn
from torch.nn import functional as F

from privlab.base import Progress, configure, draw_for, pick_device
from privlab.benchmarks.common import Bench, machine, quiet, time_rounds
from privlab.experiments.training.examples import Augmentation, Examples
from privlab.experiments.training.loop import train
from privlab.experiments.training.objectives import OBJECTIVES, ObjectiveRecipe
from privlab.experiments.training.plan import Compute, Plan
from privlab.victims import VictimModel, victim

_BARE, _BARE_FUSED = "bare timm loop", "bare timm loop, fused attention"
_SMALL, _LOADING = "cifar_vit: classify", "cifar_vit: batches alone"
_NO_AUGMENTATION = Augmentation(flip=False, shift=0)

_TARGETS = {
    "classify_over_bare": "≥ 0.95",
    "classify_over_bare_fused": "—",
    "mjp_over_classify": "≤ 1.03",
    "classify_over_mp3": "≥ 1.2",
    "classify_over_droppos": "—",
    "loading_over_step": "≤ 0.05",
}


def bench_train(
    *,
    model: str,
    batch: int,
    steps: int,
    repeats: int,
    device: str,
    progress: Progress = lambda done, total: None,
) -> Bench:
    """Time `steps` steps of each recipe on 8-bit images in memory, in `repeats` rounds that hold nothing else.

    The bare loop feeds the same images to the same victim's network, with the same loss, gradient clipping and
    optimiser, and does nothing else; its attention is computed as privlab's training does on this device, and as timm
    ships it. Throughputs are compared for `classify_over_bare`, times for `mjp_over_classify`; `mp3` is at η = 0.75.
    Images are augmented for `loading_over_step` alone: making batches of the small victim, as its recipe does, over the
    steps on them.

    Args:
        model: name of the victim; `mjp` and `mp3` train its variants `_mjp` and `_nope`.
        batch: number of images in a step; the small victim has 128.
        steps: steps of each stage in a round.
        repeats: rounds that are timed, after one that warms up.
        device: "auto", "cpu", "cuda" or "cuda:N".
        progress: is called with the stages done and their number.

    Raises:
        PrivlabError: for a model or a device that is not there.
    """
    target = pick_device(device)
    with quiet():
        stages = _stages(model, batch, steps, target) | _small(steps, target)
        seconds = time_rounds(stages, repeats, target, progress)
    ratios = {
        "classify_over_bare": seconds[_BARE] / seconds["classify"],
        "classify_over_bare_fused": seconds[_BARE_FUSED] / seconds["classify"],
        "mjp_over_classify": seconds["mjp"] / seconds["classify"],
        "classify_over_mp3": seconds["classify"] / seconds["mp3"],
        "classify_over_droppos": seconds["classify"] / seconds["droppos"],
        "loading_over_step": seconds[_LOADING] / seconds[_SMALL],
    }
    of_small = (_SMALL, _LOADING)
    per_image = {name: each / steps / (128 if name in of_small else batch) for name, each in seconds.items()}
    setup = {"model": model, "batch": batch, "steps": steps, "repeats": repeats}
    return Bench(ratios, _TARGETS, per_image, setup | machine(target))


def _stages(model: str, batch: int, steps: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the bare loops and the recipes, each on a network of its own."""
    plan = Plan(steps=steps, batch_size=batch)
    of = {"classify": model, "mjp": f"{model}_mjp", "mp3": f"{model}_nope", "droppos": model}
    options = {"mp3": ("eta=0.75",)}
    recipes = {
        name: _recipe(name, victim_name, batch, options.get(name, ()), device, _NO_AUGMENTATION)
        for name, victim_name in of.items()
    }
    bare, fused = (_recipe("classify", model, batch, (), device, _NO_AUGMENTATION) for _ in range(2))
    assert isinstance(fused.victim, VictimModel)
    for block in fused.victim.vit.blocks:
        setattr(block.attn, "fused_attn", True)  # noqa: B010  # timm's modules are typed loosely
    stages: dict[str, Callable[[], object]] = {
        _BARE: lambda: _bare(bare, plan),
        _BARE_FUSED: lambda: _bare(fused, plan),
    }
    return stages | {name: _training(recipe, plan, device) for name, recipe in recipes.items()}


def _small(steps: int, device: torch.device) -> dict[str, Callable[[], object]]:
    plan = Plan(steps=steps, batch_size=128)
    recipe = _recipe("classify", "cifar_vit", 128, (), device, Augmentation())

    def load() -> None:
        for step in range(steps):
            recipe.batch(torch.arange(128), draw_for(0, "", "bench", step))

    return {_SMALL: _training(recipe, plan, device), _LOADING: load}


def _training(recipe: ObjectiveRecipe, plan: Plan, device: torch.device) -> Callable[[], object]:
    return lambda: train(recipe, plan, compute=Compute(device=str(device)))


def _recipe(
    recipe: str, model: str, batch: int, options: tuple[str, ...], device: torch.device, augmentation: Augmentation
) -> ObjectiveRecipe:
    """Return a recipe on random images."""
    network = victim(model, weights="random").to(device)
    draw = Generator().manual_seed(0)
    images = torch.randint(256, (batch, *network.model.image_shape), generator=draw, dtype=torch.uint8)
    data = Examples(images, torch.arange(batch) % 10, 10, "random")
    return ObjectiveRecipe(network.model, data, configure(OBJECTIVES[recipe], options), augmentation)


def _bare(recipe: ObjectiveRecipe, plan: Plan) -> None:
    """Train as a script of twenty lines would, without logs, checks or seeds."""
    model, data, device = recipe.victim, recipe.data, recipe.victim.mean.device
    assert isinstance(model, VictimModel)
    optimizer = create_optimizer_v2(model, opt=plan.optimiser, lr=plan.learning_rate, weight_decay=plan.weight_decay)
    model.train()
    for _ in range(plan.steps):
        rows = torch.randperm(len(data))[: plan.batch_size]
        images, labels = data.pixels(rows).to(device), data.labels[rows].to(device)
        F.cross_entropy(model.vit(model.normalise(images)), labels, label_smoothing=0.1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        optimizer.zero_grad()
