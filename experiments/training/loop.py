"""The loop of victims and predictors: Lightning Fabric's processes and precision, other optimisers, and exact resume.

As in `privlab.training`, what step s computes depends on (seed, s) and the weights alone. To continue thus takes the
weights, the optimiser's averages and a step number. On a CPU, the run then ends, bit by bit, with the weights of a run
that was never interrupted.
"""

import logging
import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from timm.utils import ModelEmaV3
from torch import Tensor

from privlab.base import PrivlabError, draw_for, gradients_enabled, one_line, write_whole
from privlab.experiments.training import log
from privlab.experiments.training.checkpoint import Checkpoints
from privlab.experiments.training.plan import Compute, NamedRecipe, Paced, Plan
from privlab.training import Listener, TrainingProgress, tell
from privlab.training.loop import rows_of, schedule_by_steps, seed_globally


def train(
    recipe: NamedRecipe,
    plan: Plan,
    *,
    compute: Compute | None = None,
    out: Path | None = None,
    progress: Listener | None = None,
) -> None:
    """Train `recipe.model` in place and leave it in evaluation mode.

    With `out`, the training goes on with the last checkpoint there, and writes checkpoints and `log.csv`.

    Args:
        recipe: the model, its examples and its loss.
        plan: everything that shapes the result: steps, batch size, optimiser, precision, seed.
        compute: the device, and how often losses are read and weights saved; None for a CPU.
        out: folder of the training; None writes nothing.
        progress: called with each report; None for the listener of `privlab.training.listening`, if there is one.

    Raises:
        PrivlabError: without examples or Lightning Fabric; for an optimiser, schedule, precision or device that is not
            there; if the loss is not finite, with the step and the last good checkpoint; if `out` belongs to another
            training or cannot be written.

    Warns:
        PrivlabWarning: if a damaged checkpoint was passed over.
    """
    if not len(recipe):
        raise PrivlabError("There is nothing to train on: the data hold no examples.")
    compute = compute or Compute()
    with ExitStack() as stack:
        try:
            device = torch.device(compute.device)
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            stack.enter_context(gradients_enabled())
            run = _Run(recipe, plan, compute, out, progress or tell)
        except PrivlabError:
            raise
        except (ValueError, RuntimeError) as error:  # timm, Fabric and torch raise these for unknown names
            raise PrivlabError(f"The training cannot be set up: {one_line(error)}.") from error
        run.go()


class _Run:
    """One training: what Fabric set up, and what happened since the last report."""

    def __init__(self, recipe: NamedRecipe, plan: Plan, compute: Compute, out: Path | None, listener: Listener) -> None:
        self.recipe, self.plan, self.compute, self.listener = recipe, plan, compute, listener
        optimizer, self.scheduler = _optimiser(recipe, plan)
        self.fabric = _fabric(plan, compute)
        with _without_advice():
            self.model, self.optimizer = self.fabric.setup(recipe.model, optimizer)
        identity = {"recipe": recipe.identity} | plan.identity()
        self.checkpoints = None if out is None else Checkpoints(out / "checkpoints", identity)
        self.kept = None if out is None else out / "kept"
        self.average = ModelEmaV3(recipe.model, decay=plan.ema) if plan.ema else None
        self.log = None if out is None else out / "log.csv"
        self.losses: list[Tensor] = []
        self.first = self.saved = self._resume()
        self.start = time.perf_counter()

    def go(self) -> None:
        self.model.train()
        for step in range(self.first, self.plan.steps):
            self.losses.append(self._step(step))
            done, last = step + 1, step + 1 == self.plan.steps
            save = last or done % self.compute.save_every == 0
            if save or done % self.compute.log_every == 0:
                self._report(done)
            if save and self.checkpoints is not None:
                self._save(done, self.checkpoints)
            if done in self.compute.keep and self.kept is not None and self.fabric.is_global_zero:
                self._keep(done, self.kept)
        if self.average is not None:
            self.recipe.model.load_state_dict(self.average.module.state_dict())
        self.model.eval()

    def _step(self, step: int) -> Tensor:
        """Take one step of the optimiser; return the loss before it."""
        plan, total = self.plan, torch.zeros((), device=self.fabric.device)
        recipe = self.recipe.at(step / plan.steps) if isinstance(self.recipe, Paced) else self.recipe
        rows = rows_of(plan.seed, plan.batch_size, step, len(recipe))
        rank, ranks = self.fabric.global_rank, self.fabric.world_size
        for part, some in enumerate(rows.chunk(plan.accumulate)):
            draw = draw_for(plan.seed, "", "training", (step * plan.accumulate + part) * ranks + rank)
            seed_globally(draw.initial_seed(), self.fabric.device)
            mine = some.chunk(ranks)[rank]
            batch = self.fabric.to_device(recipe.batch(mine, draw))
            loss = recipe.loss(self.model, batch, draw) * (len(mine) / len(rows) * ranks)  # DDP takes the mean
            self.fabric.backward(loss)
            total += loss.detach()
        if plan.clip:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=plan.clip, error_if_nonfinite=False)
        if self.scheduler is not None:
            self.scheduler.step_update(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.recipe.model)
        return total

    def _report(self, done: int) -> None:
        """Check the losses since the last report, all in one transfer from the device, and report their mean."""
        losses = self.fabric.all_reduce(torch.stack(self.losses), reduce_op="mean").tolist()
        self.losses.clear()
        for step, loss in enumerate(losses, done - len(losses) + 1):
            if not math.isfinite(loss):
                raise self._stop_error(f"the loss is {loss} at step {step}")
        seconds = time.perf_counter() - self.start
        now = TrainingProgress(
            step=done,
            steps=self.plan.steps,
            epoch=done * self.plan.batch_size / len(self.recipe),
            loss=math.fsum(losses) / len(losses),
            learning_rate=_rate(self.optimizer),
            seconds=seconds,
            seconds_left=seconds / (done - self.first) * (self.plan.steps - done),
        )
        if self.log is not None and self.fabric.is_global_zero:
            log.append(self.log, now)
        if self.fabric.is_global_zero:
            self.listener(now)

    def _stop_error(self, reason: str) -> PrivlabError:
        kept = ""
        if self.checkpoints is not None:
            kept = f" The last good checkpoint, after step {self.saved}, is in {self.checkpoints.folder}."
        return PrivlabError(f"The training stopped: {reason}.{kept} A lower learning rate may help.")

    def _save(self, done: int, checkpoints: Checkpoints) -> None:
        weights = self.recipe.model.state_dict()
        if not all(bool(w.isfinite().all()) for w in weights.values()):  # the next loss would show it too late
            raise self._stop_error(f"the weights are not finite after step {done}")
        state = {"optimizer": self.optimizer.state_dict(), "precision": self.fabric.strategy.precision.state_dict()}
        if self.average is not None:
            state["average"] = self.average.module.state_dict()
        if self.fabric.is_global_zero:
            checkpoints.save(done, weights, state)
        self.saved = done

    def _keep(self, done: int, folder: Path) -> None:
        """Write the weights of a step that is kept for good."""
        model = self.recipe.model if self.average is None else self.average.module
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        write_whole(folder / f"step-{done:08d}.safetensors", lambda path: save_file(weights, path))

    def _resume(self) -> int:
        """Load the last sound checkpoint, if there is one; return the number of steps that are done."""
        found = None if self.checkpoints is None else self.checkpoints.last()
        step, weights, state = found or (0, {}, {})
        if found:
            self.recipe.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state["optimizer"])
            self.fabric.strategy.precision.load_state_dict(state["precision"])
        if found and self.average is not None:
            self.average.module.load_state_dict(state["average"])
        self.fabric.barrier()  # nobody writes before all have read
        if self.log is not None and self.fabric.is_global_zero:
            log.forget_after(self.log, step)
        return step


def _optimiser(recipe: NamedRecipe, plan: Plan) -> tuple[torch.optim.Optimizer, Any]:
    """Return timm's optimiser, without weight decay on biases and norms, and its schedule by steps (None: none)."""
    from timm.optim import create_optimizer_v2

    layered = plan.layer_decay != 1
    if layered and not hasattr(recipe.model, "group_matcher"):
        raise PrivlabError("layer_decay needs a model that knows its layers: leave it out for this recipe.")
    optimizer = create_optimizer_v2(
        recipe.model,
        opt=plan.optimiser,
        lr=plan.learning_rate,
        weight_decay=plan.weight_decay,
        layer_decay=plan.layer_decay if layered else None,
    )
    scheduler = schedule_by_steps(optimizer, plan.schedule, plan.steps, plan.warmup)
    if scheduler is None:  # a scheduler would scale the rates of the layers
        for group in optimizer.param_groups:
            group["lr"] *= group.get("lr_scale", 1.0)
    return optimizer, scheduler


def _rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of the head."""
    first = optimizer.param_groups[0]
    return first["lr"] / first.get("lr_scale", 1.0)


def _fabric(plan: Plan, compute: Compute) -> Any:  # noqa: ANN401
    """Return Fabric for this process: alone on its device, or one of those that `torchrun` started (DDP)."""
    try:
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import DDPStrategy
    except ImportError as error:
        raise PrivlabError("Training needs Lightning Fabric: pip install 'privlab[training]'.") from error
    device, ranks = torch.device(compute.device), int(os.environ.get("WORLD_SIZE", "1"))
    if plan.batch_size // plan.accumulate < ranks:
        raise PrivlabError(f"{ranks} processes share a batch of {plan.batch_size}: give at least one example to each.")
    where: dict[str, Any] = {"devices": [device.index or 0] if device.type == "cuda" else 1}
    if ranks > 1:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        strategy = DDPStrategy(find_unused_parameters=True)  # E_unk, where nothing is masked
        where = {"devices": local, "num_nodes": ranks // local, "strategy": strategy}
    with _without_advice():
        fabric = Fabric(accelerator=device.type, precision=plan.precision, **where)  # pyright: ignore[reportArgumentType]
        fabric.launch()
    return fabric


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence what Lightning says of the machine while it is set up."""
    from lightning_utilities.core import rank_zero

    loggers = (
        logging.getLogger("lightning_fabric"),
        rank_zero.log,
    )  # Lightning's Trainer, if imported, moves the latter
    levels = [logger.level for logger in loggers]
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(max(level, logging.WARNING))  # it logs the precision that the plan asks for
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
