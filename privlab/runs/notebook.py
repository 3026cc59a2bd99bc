"""What a notebook shows of a run: a bar while it goes, and the strips of its first images with its scores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from privlab.grids import KNOWN, Result
from privlab.images import data_uri
from privlab.runs.attack import STRIPS_SHOWN
from privlab.training import TrainingProgress, listening

_ALWAYS = ("image", "attack")
_WHERE_SEVERAL = ("victim", "setting", "geometry", "status")
"""The columns that tell rows apart, if they hold more than one value."""


class Records(pd.DataFrame):
    """The records of a run, one row per image, attack and geometry.

    It is a DataFrame. A notebook shows the strips of its first images, and the columns that tell rows apart and hold
    scores. What is selected or computed from it is a plain DataFrame.
    """

    strips: tuple[bytes, ...] = ()
    """PNGs: the private image, what the client fed, and each reconstruction."""

    @classmethod
    def of(cls, records: pd.DataFrame, strips: tuple[bytes, ...], path: Path | None) -> "Records":
        """Return the records of a run with the strips of its first images.

        Args:
            records: what `execute` returns.
            strips: PNGs of a run that writes nothing.
            path: the directory of a run that holds the strips itself; None for one that writes nothing.
        """
        own = cls(records)
        files = [] if path is None else sorted(path.glob("strips/*.png"))[:STRIPS_SHOWN]
        own.strips = strips if path is None else tuple(file.read_bytes() for file in files)
        return own

    def _repr_html_(self) -> str:
        apart = [name for name in _WHERE_SEVERAL if name in self and self[name].nunique() > 1]
        shown = [name for name in _ALWAYS if name in self] + apart
        shown += [name for name in KNOWN if name in self and self[name].notna().any()]
        with pd.option_context("display.float_format", "{:.4g}".format, "display.notebook_repr_html", True):
            table = self[shown]._repr_html_()
        style = "display:block;max-width:100%;height:auto"
        alt = "The private image, what the client fed, and each reconstruction"
        strips = "".join(f'<img src="{data_uri("png", strip)}" alt="{alt}" style="{style}">' for strip in self.strips)
        return f"{strips}{table}<p>{len(shown)} of {len(self.columns)} columns</p>"


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
