"""What a run shows while it goes: on a terminal the table so far, in a pipe a line for each image; warnings at once."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from privlab.base import PrivlabError
from privlab.cli.common import err, progress_of
from privlab.grids.engine import Engine

if TYPE_CHECKING:
    from privlab.grids import Result
    from privlab.training import TrainingProgress


ENGINE_OPTIONS = ("engine", "workers", "ray_address", "task_cpus", "task_gpus")
"""The names of the options of an `Engine`, in the order of its fields."""


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

    A terminal shows a bar and the mean scores so far; a pipe has a line for each image. A warning is printed once, as
    soon as it is known.
    """

    quiet: bool
    bar: Progress
    live: Live
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
            self._draw(done, total, found)
            return
        for number, (image, scores) in enumerate(found.items(), done - len(found) + 1):
            err.print(f"{number} of {total}: {image}: {_line(scores, self.metric)}", markup=False)

    def step(self, now: "TrainingProgress") -> None:
        """Show the steps of a search or of a training inside an attack."""
        if _redraws() and not self.quiet:
            left = timedelta(seconds=round(now.seconds_left))
            self.bar.update(self.bar.task_ids[0], description=f"images (step {now.step} of {now.steps}, {left} left)")
            self.live.start()

    def _draw(self, done: int, total: int, found: Mapping[str, Scores]) -> None:
        """Draw the bar and the table so far."""
        self.bar.update(self.bar.task_ids[0], description="images", completed=done, total=total)
        for key, score in (pair for scores in found.values() for pair in scores.items()):
            self.scores[key] += [] if score is None else [score]
        table = Table("victim", "attack", "images", f"mean {self.metric} so far", header_style="bold")
        for (victim, attack), values in self.scores.items():
            mean = f"{sum(values) / len(values):.2f}" if values else "n/a"
            table.add_row(escape(victim), escape(attack), str(len(values)), mean)
        self.live.update(Group(table, self.bar) if self.scores else self.bar)
        self.live.start()


def _redraws() -> bool:
    """Return whether standard error is a terminal that can draw over what it shows; TERM=dumb cannot."""
    return err.is_terminal and not err.is_dumb_terminal


def _leakiest(last: "Result", metric: str) -> dict[str, Scores]:
    """Return the scores of each image of a result, the last attack first, which costs most.

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

    bar = progress_of(speed_estimate_period=600, auto_refresh=False)
    bar.add_task("images", total=None)
    live = Live(bar, console=err, refresh_per_second=4, transient=True)  # the whole table follows
    display = RunDisplay(quiet, bar, live)
    try:
        with listening(display.step):
            yield display
    finally:
        if live.is_started:
            live.stop()
