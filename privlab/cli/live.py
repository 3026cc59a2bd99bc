"""What a run shows while it goes: on a terminal the table so far, in a pipe a line for each image; warnings at once."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from privlab.base import PrivlabError
from privlab.cli.common import Decorator, all_of, err
from privlab.grids.engine import Engine

if TYPE_CHECKING:
    from privlab.grids import Result
    from privlab.training import TrainingProgress


ENGINE_OPTIONS = ("engine", "workers", "ray_address", "task_cpus", "task_gpus")
"""The names of the options of an `Engine`, in the order of its fields."""


def engine_options(workers: str, default: object) -> Decorator:
    """Return a decorator that adds the options which say where tasks run, and `--quiet`.

    Args:
        workers: the help of --workers.
        default: its default.
    """
    return all_of(
        click.option("--workers", default=default, help=workers),
        click.option("--engine", default="local", help="local or ray."),
        click.option(
            "--ray-address", help="A running cluster: auto, HOST:PORT or ray://….  [default: one is started here]"
        ),
        click.option("--task-cpus", type=float, default=1.0, help="With ray: cores of a task."),
        click.option("--task-gpus", type=float, default=0.0, help="With ray: GPUs of a task."),
        click.option("--quiet", is_flag=True, help="Show no progress."),
    )


def engine_of(options: dict[str, Any]) -> Engine | None:
    """Return where tasks run, and remove its options from `options`; None where the run decides ("auto", locally).

    Raises:
        PrivlabError: if `workers` is neither auto nor a number, or an option does not fit.
    """
    name, workers, address, cpus, gpus = (options.pop(each) for each in ENGINE_OPTIONS)
    if workers == "auto" and name == "local" and address is None:
        return None
    if workers != "auto" and not workers.isdecimal():
        raise PrivlabError(f"--workers must be auto or a positive number. Found '{workers}'.")
    return Engine(name, 1 if workers == "auto" else int(workers), address, cpus, gpus)


Scores = dict[tuple[str, str], float | None]
"""The leakiest score of each attack for one image, by (victim and setting, attack); None is not known."""


@dataclass(eq=False)
class RunDisplay:
    """What is shown of a run on standard error, from its results as they come.

    A terminal shows a bar for the run, one for each of several workers, and the mean scores so far; a pipe has a line
    for each image. A warning is printed once, as soon as it is known.
    """

    quiet: bool
    bar: Progress
    live: Live
    workers: dict[str, Any] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    scores: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    metric: str = ""
    """The leading one of the run's metrics, whose scores are shown; the first result says which."""

    def warn(self, message: str) -> None:
        """Print a warning, unless it was printed before."""
        if message not in self.told:
            self.told.add(message)
            err.print(f"Warning: {message}", style="yellow", markup=False)

    def progress(self, done: int, total: int, last: "Result | None") -> None:
        """Show how far the run is; `last` is the result that has just come, None before the first."""
        if self.quiet or not total:
            return  # or nothing was missing
        if last is not None and not self.metric:
            from privlab.report.tables import lead_metric  # its imports must not keep the first image waiting

            self.metric = lead_metric(last.task.spec.metrics)
        found = {} if last is None else _leakiest(last, self.metric)
        if _redraws():
            self._draw(done, total, last, found)
            return
        for number, (image, scores) in enumerate(found.items(), done - len(found) + 1):
            err.print(f"{number} of {total}: {image}: {_line(scores, self.metric)}", markup=False)

    def step(self, now: "TrainingProgress") -> None:
        """Show the steps of a search or of a training inside an attack."""
        if _redraws() and not self.quiet:
            left = timedelta(seconds=round(now.seconds_left))
            self.bar.update(self.bar.task_ids[0], description=f"images (step {now.step} of {now.steps}, {left} left)")
            self.live.start()

    def _draw(self, done: int, total: int, last: "Result | None", found: Mapping[str, Scores]) -> None:
        """Draw the bars and the table so far."""
        self.bar.update(self.bar.task_ids[0], description="images", completed=done, total=total)
        if last is not None:
            self._worker(last, done, total)
        for key, score in (pair for scores in found.values() for pair in scores.items()):
            self.scores[key] += [] if score is None else [score]
        table = Table("victim", "attack", "images", f"mean {self.metric} so far", header_style="bold")
        for (victim, attack), values in self.scores.items():
            mean = f"{sum(values) / len(values):.2f}" if values else "n/a"
            table.add_row(escape(victim), escape(attack), str(len(values)), mean)
        self.live.update(Group(table, self.bar) if self.scores else self.bar)
        self.live.start()

    def _worker(self, last: "Result", done: int, total: int) -> None:
        """Update the bar of the worker that a result came from, where there are several."""
        images, speed = len(last.task.images), f"{len(last.task.images) / last.seconds:.2f}/s" if last.seconds else ""
        known = self.workers.setdefault(last.worker, [None, 0])
        known[1] += images
        if len(self.workers) < 2:
            return
        share = (total - done) / len(self.workers)  # of the remaining images
        for number, (name, worker) in enumerate(self.workers.items(), 1):
            if worker[0] is None:
                worker[0] = self.bar.add_task(f"worker {number} ({name})", total=0, speed="")
            self.bar.update(worker[0], completed=worker[1], total=worker[1] + share)
        self.bar.update(known[0], speed=speed)


def _redraws() -> bool:
    """Return whether standard error is a terminal that can draw over what it shows; TERM=dumb cannot."""
    return err.is_terminal and not err.is_dumb_terminal


def _leakiest(last: "Result", metric: str) -> dict[str, Scores]:
    """Return the scores of each image of a result, the last attack first, which is the dearest.

    Of the geometries that an adversary can make, and of several draws, it is the leakiest score.
    """
    from privlab.evaluation import CONTROL
    from privlab.images import as_text
    from privlab.report.tables import sign_of

    found: dict[str, Scores] = {as_text(image.name): {} for image in last.task.images}
    rows = last.rows.select(["image", "victim", "setting", "attack", "geometry", metric]).to_pylist()
    for row in reversed(rows):
        if row["geometry"] == "oracle" or row["attack"].startswith(CONTROL):
            continue
        key, score = (f"{row['victim']}, setting {row['setting']}", row["attack"]), row[metric]
        best = found.setdefault(row["image"], {}).setdefault(key, score)
        if best is None or (score is not None and sign_of(metric) * (score - best) > 0):
            found[row["image"]][key] = score
    return found


def _line(scores: Scores, metric: str) -> str:
    """Return the scores of one image as a line."""
    by_case: dict[str, list[str]] = {}
    for (case, attack), score in scores.items():
        by_case.setdefault(case, []).append(f"{attack} {'n/a' if score is None else f'{score:.4g}'}")
    said = "; ".join(f"{case}: {', '.join(attacks)}" for case, attacks in by_case.items())
    return f"{metric}, {said or 'no score'}"


@contextmanager
def run_display(*, quiet: bool) -> Iterator[RunDisplay]:
    """Show a run on standard error; if `quiet`, its warnings alone."""
    from privlab.training import listening  # this imports torch, which is slow

    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TextColumn("{task.fields[speed]}"), TimeElapsedColumn(), TimeRemainingColumn()),
    )
    bar = Progress(*columns, speed_estimate_period=600, auto_refresh=False)
    bar.add_task("images", total=None, speed="")
    live = Live(bar, console=err, refresh_per_second=4, transient=True)  # the whole table follows
    display = RunDisplay(quiet, bar, live)
    try:
        with listening(display.step):
            yield display
    finally:
        if live.is_started:
            live.stop()
