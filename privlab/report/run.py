"""A run as an object: its records, its table, its verdict, its images, and what they are written to."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torchvision.transforms.functional import to_tensor

from privlab.base import PrivlabError, first
from privlab.grids import specification_of
from privlab.stores import RunDirectory, places_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from privlab.evaluation import Specification
    from privlab.report.tables import Flag, Results
    from privlab.victims import Victim


@dataclass(frozen=True, eq=False)
class Run:
    """The results of a run: records, images and provenance, all of them in its directory.

    `ran` is the specification that this process ran, and `victims` are those that it attacked: files hold no models.
    """

    path: Path
    ran: "Specification | None" = None
    victims: "Sequence[Victim]" = ()

    @cached_property
    def results(self) -> "Results":
        """Return what tables, figures and pages are made of."""
        from privlab.report.tables import load_results

        return load_results(self.path)

    @property
    def records(self) -> pd.DataFrame:
        """Return one row for each image, attack and layout of the patches, and for each control."""
        return self.results.records.drop(columns="case")

    @cached_property
    def spec(self) -> "Specification":
        """Return what was run."""
        stated = self.results.facts
        return self.ran or specification_of(stated["specification"], stated["cases"][0]["jobs"][0]["released"])

    @property
    def warnings(self) -> list[str]:
        """Return the warnings of the run."""
        return self.results.facts["warnings"]

    @property
    def missing(self) -> dict[str, str]:
        """Return the reason for each metric that could not be computed."""
        return self.results.facts["missing_metrics"]

    @property
    def failed(self) -> dict[str, str]:
        """Return the reason of each image that has a failed record."""
        failed = self.records[self.records.status == "failed"]
        return dict(zip(failed.image, failed.reason, strict=True))

    @property
    def verdict(self) -> str:
        """Return what the run shows, in words: the sentence that leads the page, and the verdict on each case."""
        from privlab.report.page import lead_text
        from privlab.report.tables import Facts
        from privlab.report.tables.case_verdicts import verdicts_of

        cells = verdicts_of(Facts.of(self.results))
        return "\n".join([*lead_text(self.results), *(f"{cell.label}: {cell}" for cell in cells)])

    @property
    def flags(self) -> list["Flag"]:
        """Return what weakens the verdict."""
        from privlab.report.tables import Facts, red_flags

        return red_flags(Facts.of(self.results))

    @property
    def leaks(self) -> bool | None:
        """Return whether an image is proven to leak from an audited release; None where that is not known."""
        return self.results.facts.get("leaks")

    def table(self, geometry: str = "in_place") -> pd.DataFrame:
        """Return the means over the images: a row for each victim, setting and attack, and of a grid for each case.

        A grid's table has a column for each argument that was varied.

        Args:
            geometry: the layout of the patches that is scored: "in_place", "oracle" or "reassembled".
        """
        from privlab.report.tables import summarise

        results, columns = self.results, self.results.layout.columns
        if "specification" in results.facts:
            return pd.DataFrame() if results.records.empty else summarise(self.records, columns, geometry)
        tables = [pd.DataFrame()]
        for number, case in enumerate(results.cases):
            own = results.records[results.records.case == number]
            if len(own):
                table = summarise(own.drop(columns="case"), columns, geometry)
                tables.append(table.assign(case=case.label, **case.options))
        return pd.concat(tables, ignore_index=True)

    def images(self, attack: str = "private", case: int | str = 0) -> Float[Tensor, "b c h w"]:
        """Return the images of one case that the run kept, in 8 bits.

        Args:
            attack: the name of an attack, for its reconstructions; "private" or "fed" (what the client fed).
            case: the number of the case, from 0, or its label, as the column `case` of a grid's table has it.

        Raises:
            PrivlabError: if there is no such case, or none of its images was kept.
        """
        labels = [one.label for one in self.results.cases]
        if case not in (*labels, *range(len(labels))):
            raise PrivlabError(f"The run has no case {case!r}. Its cases are {first(map(repr, labels))}.")
        number = labels.index(case) if isinstance(case, str) else case
        hashes = dict.fromkeys(self.results.records.query("case == @number").image_sha256)
        places = (self.results.picture(number, sha256, attack) for sha256 in hashes)
        found = [to_tensor(place.open()) for place in places if place is not None]
        if not found:
            raise PrivlabError(f"No image of '{attack}' of the case '{labels[number]}' was kept in '{self.path}'.")
        return torch.stack(found)

    def plot(self, kind: str, *, x: str | None = None, y: str = "psnr") -> "Figure":
        """Return a figure.

        Args:
            kind: "curve", "trade-off", "distribution", "sheet", "claim" or "strips": those of the first images, of
                each specification of a grid, with the cases that they show as titles.
            x: for a curve, the option that its cases differ in; for a trade-off, the metric of utility.
            y: the metric.

        Raises:
            PrivlabError: for an unknown kind, or if the run lacks what the figure shows.
        """
        from privlab.grids import Figure
        from privlab.report.figures.draw import draw

        if kind == "strips":
            return _strips_figure(self._strips())
        return draw(self.results, Figure(kind, kind, y=y, x=x))

    def to_latex(self, path: str | Path | None = None) -> str:
        """Return the leakage table as LaTeX, and write it if there is a path."""
        from privlab.report.tables import Caption, Table, headline, render

        text = render("latex", Table(headline(self.results.rows), self.results.layout, Caption.of(self.results)))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_html(self, path: str | Path) -> Path:
        """Write the run as one self-contained page, and return its path."""
        from privlab.report.page import write_page

        return write_page(self.results, Path(path))

    def save(self, path: str | Path) -> "Run":
        """Copy the run into a new directory, and return it there.

        Raises:
            PrivlabError: if the directory holds something.
        """
        RunDirectory(Path(path)).check()
        shutil.copytree(self.path, path, dirs_exist_ok=True)
        return Run(Path(path))

    def _strips(self) -> dict[Path, str]:
        """Return strips of the first images, each with the cases that it shows; of a grid, some for all its cases."""
        cases = self.results.records.groupby("cell").case.unique()
        titles: dict[Path, str] = {}
        for file in sorted(self.path.glob("strips/*.png"), key=lambda file: file.stem):
            cells = {panel.partition("-")[0] for panel, _ in places_of(file)}
            shown = {number for cell in cells & {*cases.index} for number in cases[cell]}
            titles[file] = "; ".join(self.results.cases[number].label for number in sorted(shown))
        each = max(1, STRIPS_SHOWN // max(1, len({*titles.values()})))
        files = pd.Series(titles, dtype=object)
        return files.groupby(files, sort=False).head(each).to_dict()

    def _repr_html_(self) -> str:
        from html import escape

        from privlab.images import data_uri

        strips = "".join(
            f'<figure><figcaption>{escape(title)}</figcaption><img src="{data_uri("png", file.read_bytes())}" '
            f'alt="{escape(file.stem)}" style="max-width:100%"></figure>'
            for file, title in self._strips().items()
        )
        verdict = "".join(f"<p>{escape(line)}</p>" for line in self.verdict.splitlines())
        shown = self.table()[[*_SHOWN, *self.results.layout.columns]]
        return f"{verdict}{shown.to_html(index=False, float_format='{:.4g}'.format)}{strips}"


_SHOWN = ("victim", "setting", "defense", "attack", "n", "exact")
STRIPS_SHOWN = 3
"""The strips that a notebook shows of a run: each is some hundred kilobytes of the notebook's file. A grid with more
specifications shows one of each."""


def _strips_figure(strips: Mapping[Path, str]) -> "Figure":
    """Return a figure of strips, one below the other, each under its title."""
    from matplotlib.figure import Figure
    from PIL import Image

    if not strips:
        raise PrivlabError("The run kept no strips.")
    images = [Image.open(file) for file in strips]
    shown = Figure(figsize=(10, sum(10 * image.height / image.width + 0.3 for image in images)), layout="constrained")
    for axes, image, title in zip(
        shown.subplots(len(strips), squeeze=False)[:, 0], images, strips.values(), strict=True
    ):
        axes.imshow(image)
        axes.set_title(title, fontsize="small", loc="left")
        axes.axis("off")
    return shown


def load(path: str | Path) -> Run:
    """Return a run that was saved, or that the command line wrote.

    Raises:
        PrivlabError: if the directory holds none.
    """
    run = Run(Path(path))
    assert run.results is not None  # it raises what is wrong
    return run
