"""What a notebook shows while a run goes: a bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

from privlab.grids import Result
from privlab.training import TrainingProgress, listening


@contextmanager
def shown_progress(*, shown: bool) -> Iterator[Callable[[int, int, Result | None], None]]:
    """Show the images that are done of a run, by tqdm: in Jupyter and on a terminal, and nowhere else."""
    with tqdm(desc="images", unit="image", leave=False, mininterval=0, disable=None if shown else True) as bar:

        def step(now: TrainingProgress) -> None:
            bar.set_postfix_str(f"step {now.step} of {now.steps}")

        def progress(done: int, total: int, last: Result | None) -> None:
            if last is None:
                bar.reset(total)
            bar.set_postfix_str("", refresh=False)  # no longer inside the search that it told of
            bar.update(done - bar.n)

        with listening(step):
            yield progress
