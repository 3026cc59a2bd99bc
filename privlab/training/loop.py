"""The loop that trains the networks of attacks; `privlab train` has its own, with precision, processes and resume.

What step s computes depends on (seed, s) and the weights alone. Examples come as one endless stream of shuffled epochs,
of which step s takes the next B; every draw of step s, dropout's included, comes from generators keyed by (seed, s).
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from privlab.base import PrivlabError, draw_for, gradients_enabled
from privlab.training.plan import Listener, Plan, Recipe, TrainingProgress

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)

_REPORT_EVERY = 20
"""Steps between two reports."""

_CLIP = 1.0
"""The largest norm of a step's gradient."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Report every training inside without a listener to `listener`, such as one that an attack needs."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(now: TrainingProgress) -> None:
    """Report the progress of a training or of a search to the listener of `listening`, if there is one."""
    if (listener := _LISTENER.get()) is not None:
        listener(now)


def train(recipe: Recipe, plan: Plan) -> None:
    """Train `recipe.model` in place, on the device where it is, and leave it in evaluation mode.

    Args:
        recipe: the model, its loss, and its examples on the model's device.
        plan: everything that shapes the result: steps, batch size, rates, seed.

    Raises:
        PrivlabError: if there are no examples, or if the loss is not finite, with the step.
    """
    if not len(recipe):
        raise PrivlabError("There is nothing to train on: the data hold no examples.")
    device = next(recipe.model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), gradients_enabled():
        optimizer, scheduler = _optimiser(recipe.model, plan)
        losses: list[Tensor] = []
        start = time.perf_counter()
        recipe.model.train()
        for step in range(plan.steps):
            draw = draw_for(plan.seed, "", "training", step)
            seed_globally(draw.initial_seed(), device)
            batch = recipe.batch(rows_of(plan.seed, plan.batch_size, step, len(recipe)), draw)
            loss = recipe.loss(recipe.model, batch, draw)
            loss.backward()
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], _CLIP)
            scheduler.step_update(step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            done = step + 1
            if done % _REPORT_EVERY == 0 or done == plan.steps:
                mean = _mean_loss(torch.stack(losses), done)
                seconds, rate = time.perf_counter() - start, optimizer.param_groups[0]["lr"]
                epoch, left = done * plan.batch_size / len(recipe), seconds / done * (plan.steps - done)
                tell(TrainingProgress(done, plan.steps, epoch, mean, rate, seconds, left))
                losses.clear()
        recipe.model.eval()


def _mean_loss(losses: Tensor, done: int) -> float:
    """Return the mean of the losses up to the step `done`, all in one transfer from the device, if all are finite."""
    values = losses.tolist()
    for step, loss in enumerate(values, done - len(values) + 1):
        if not math.isfinite(loss):
            raise PrivlabError(
                f"The training stopped: the loss is {loss} at step {step}. A lower learning rate may help."
            )
    return math.fsum(values) / len(values)


def seed_globally(seed: int, device: torch.device) -> None:
    """Seed torch's global generators, from which dropout draws; the caller forks them."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _optimiser(model: nn.Module, plan: Plan) -> tuple[torch.optim.Optimizer, Any]:
    """Return AdamW, without weight decay on biases and norms, and its schedule by steps."""
    from timm.optim import create_optimizer_v2

    optimizer = create_optimizer_v2(model, opt="adamw", lr=plan.learning_rate, weight_decay=plan.weight_decay)
    return optimizer, schedule_by_steps(optimizer, "cosine", plan.steps, plan.warmup)


def schedule_by_steps(optimizer: torch.optim.Optimizer, kind: str, steps: int, warmup: int) -> Any:  # noqa: ANN401
    """Return timm's schedule of the learning rate, counted in steps; None where this kind of schedule is none.

    Args:
        optimizer: the optimiser, whose rates are the largest ones.
        kind: one of timm's: "cosine", "constant" …
        steps: the number of steps of the training.
        warmup: the number of them in which the rate rises linearly from zero.
    """
    from timm.scheduler import create_scheduler_v2

    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=kind,
        num_epochs=max(1, steps - warmup),
        warmup_epochs=warmup,
        warmup_lr=0,
        warmup_prefix=True,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return scheduler


def rows_of(seed: int, size: int, step: int, n: int) -> Tensor:
    """Return the numbers of a step's examples: the next ones of the epochs, each shuffled by (seed, epoch).

    Args:
        seed: the seed of the training.
        size: the number of examples of a step.
        step: the number of the step, from 0.
        n: the number of all examples.
    """
    first, after = step * size, (step + 1) * size
    epochs = range(first // n, (after - 1) // n + 1)
    stream = torch.cat([_order(seed, epoch, n) for epoch in epochs])
    return stream[first % n : first % n + size]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, n: int) -> Tensor:
    return torch.randperm(n, generator=draw_for(seed, "", "epoch", epoch))
