"""A run as an object: its records, its table, its verdict, its images, and what they are written to."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import pandas as pd
import torch
from jaxtyping import Float
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text
from torch import Tensor
from torchvision.transforms.functional import to_tensor

from privlab.base import PrivlabError, check_name, first, printable, read_bytes, write_whole
from privlab.evaluation import CONTROL
from privlab.grids import FIGURES, case_of
from privlab.report import tables
from privlab.stores import places_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from privlab.evaluation import Case


TEMPORARY = "privlab-run-"
"""The start of the name of the folder around a run without `out`, which is removed with its object."""

LEAKS = {
    True: "yes, a private image was reconstructed",
    False: "no, nothing was released",
    None: "not known: no reconstruction is proven to be a private image, and that attacks fail proves nothing",
}
"""What is said of an audit's `leaks`."""


@dataclass(frozen=True, eq=False)
class Run:
    """The results of a run: records, images and provenance, all of them in its directory.

    Args:
        path: the directory.
        ran: the case that this process ran, if it did.
        geometry: the layout of the patches whose scores are compared; by default that of the run.

    Example:
        >>> import privlab
        >>> run = privlab.attack("cifar_vit", attacks="patch-gradient", metrics="psnr", limit=1, progress=False)
        >>> int(run.table()["exact"].max())
        1
    """

    path: Path
    ran: "Case | None" = None
    geometry: str | None = None

    @cached_property
    def results(self) -> "tables.Results":
        """Return what tables, figures and pages are made of."""
        results = tables.load_results(self.path)
        return results if self.geometry is None else results.laid_out(geometry=self.geometry)

    @cached_property
    def facts(self) -> "tables.Facts":
        """Return what the verdicts and the flags are made of."""
        return tables.Facts.of(self.results)

    @cached_property
    def verdicts(self) -> list["tables.CaseVerdict"]:
        """Return the verdict on each case."""
        return tables.verdicts_of(self.facts)

    @property
    def records(self) -> pd.DataFrame:
        """Return one row for each image, attack and layout of the patches, and for each control."""
        return self.results.records.drop(columns="case")

    @cached_property
    def lead(self) -> list[str]:
        """Return what the run shows over all its cases: the sentences that lead the page."""
        from privlab.report.page import lead_text

        return lead_text(self.results)

    @cached_property
    def spec(self) -> "Case":
        """Return what was run."""
        stated = self.results.facts
        return self.ran or case_of(stated["specification"], stated["cases"][0]["jobs"][0]["released"])

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
    def failed_attacks(self) -> dict[str, str]:
        """Return the reason of each attack that failed on every image."""
        attacked = self.records[~self.records.attack.astype(str).str.startswith(CONTROL)]
        by_attack = {str(attack): rows for attack, rows in attacked.groupby("attack", sort=False)}
        return {
            attack: str(rows.reason.iloc[0]).removeprefix(f"{attack}: ")
            for attack, rows in by_attack.items()
            if (rows.status == "failed").all()
        }

    @property
    def verdict(self) -> str:
        """Return what the run shows, in words: the verdict on each case, and the sentences on all cases.

        An audit begins with whether an image is proven to leak; without a reference nothing else is known.
        """
        facts, leaks = self.results.facts, f"leaks: {LEAKS[self.leaks]}"
        if "unscored" in facts:
            return leaks
        cases = [f"{cell.label}: {cell}" for cell in self.verdicts]
        return "\n".join([leaks, *cases] if "leaks" in facts else [*cases, *self.lead])

    @cached_property
    def flags(self) -> list["tables.Flag"]:
        """Return what weakens the verdict."""
        return tables.red_flags(self.facts)

    @property
    def leaks(self) -> bool | None:
        """Return whether an image leaks: of a run, True where a verdict says so; of an audit, where it is proven.

        False is an audited release that is empty. None is not known, as that attacks fail proves nothing.
        """
        if "leaks" in self.results.facts:
            return self.results.facts["leaks"]
        return any(verdict.word in ("broken", "leaks") for verdict in self.verdicts) or None

    def table(self, *, metrics: Sequence[str] = (), geometry: str | None = None) -> pd.DataFrame:
        """Return the means over the images: a row for each case, attack and control, narrow enough to be printed.

        Its columns are the options in which the cases differ, `attack`, `images`, `exact` and the metrics.
        `details().data` has all options and metrics, with the intervals of the means.

        Args:
            metrics: the metrics that are shown; by default PSNR and SSIM, as far as they were measured.
            geometry: as in `details`.
        """
        details = self.details(geometry=geometry)
        data = details.data
        measured = self.results.layout.columns
        for name in metrics:
            check_name("metric of the run", name, measured)
        shown = metrics or [name for name in ("psnr", "ssim") if name in measured] or measured[:1]
        options = dict.fromkeys(name for each in details.options for name in each)
        differing = [name for name in options if data[name].astype(str).nunique() > 1]
        once = ~data.duplicated(["group", "case", "attack"])  # the paper's attack may have a second row
        return data.loc[once, [*differing, "attack", "images", "exact", *shown]].reset_index(drop=True)

    def details(self, *, geometry: str | None = None, all_attacks: bool = True) -> "tables.Table":
        """Return the leakage table: the means over the images, by case, attack and control, and what they rest on.

        `print` shows it, a notebook too; `.data` is a DataFrame, and `.render` writes Markdown, LaTeX, CSV, JSON and
        HTML. `privlab table` and `privlab attack --details` print the same object.

        Args:
            geometry: the layout of the patches that is scored: "in_place", "oracle" or "reassembled"; by default that
                of the run.
            all_attacks: whether there is a row for every attack and control, or only for those that a paper shows.
        """
        run = self if geometry is None else replace(self, geometry=geometry)
        results, about = run.results, [*run.lead, tables.scope(run.records)]
        once = set[tuple[int, str | None]]()
        if "specification" in results.facts:  # a run, where the paper's attack has one row; in a grid it has two
            results = tables.with_placement(results)
            once = {(row.case, row.attack) for row in results.rows if row.kind == "paper"}
            about = [*tables.remarks_of(results, run.spec, run.missing), *about]
        rows = results.rows if all_attacks else tables.headline(results.rows)
        return tables.leakage_table(
            results,
            [row for row in rows if row.kind != "attack" or (row.case, row.attack) not in once],
            remarks=(*about, *tables.apart_lines(tables.apart(results)), *tables.flag_lines(run.flags)),
            verdicts={} if "unscored" in results.facts else {each.case: str(each) for each in run.verdicts},
        )

    def images(self, attack: str = "private", case: int | str = 0) -> Float[Tensor, "b c h w"]:
        """Return the images of one case that the run kept, in 8 bits.

        Args:
            attack: the name of an attack, for its reconstructions; "private" or "fed" (what the client fed).
            case: the number of the case, from 0, or its label, as the column `case` of a grid's table has it.

        Raises:
            PrivlabError: if there is no such case, or none of its images was kept.
        """
        tried = self.records.attack.dropna().astype(str)
        check_name("images", attack.partition(" (")[0], {"private", "fed", *tried[~tried.str.startswith(CONTROL)]})
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

        check_name("figure", kind, {**FIGURES, "strips": ""})
        if kind == "strips":
            return _strips_figure(self._strips())
        return draw(self.results, Figure(kind, kind, y=y, x=x))

    def to_latex(
        self,
        path: str | Path | None = None,
        *,
        caption: str | None = None,
        label: str | None = None,
        notes_outside: bool = False,
        all_attacks: bool = True,
    ) -> str:
        """Return the leakage table as a float of LaTeX, and write it if there is a path.

        Args:
            path: the file; None writes none.
            caption: plain text; by default the title of the run.
            label: the name by which the text refers to it; by default "tab:" and the title in kebab-case.
            notes_outside: whether the notes follow the float, so that it fits a page with a long table.
            all_attacks: as in `details`.
        """
        table = self.details(all_attacks=all_attacks)
        text = table.render("latex", caption=caption, label=label, notes_outside=notes_outside)
        if path is not None:
            write_whole(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"), place="path")
        return text

    def to_html(self, path: str | Path) -> Path:
        """Write the run as one self-contained page, and return its path; that of an audit begins with the evidence."""
        from privlab.report.page import write_page

        return write_page(self.results, Path(path))

    def to_markdown(self, path: str | Path | None = None) -> str:
        """Return what an audit is evidence of as Markdown, and write it if there is a path; it has no pictures.

        Raises:
            PrivlabError: if the run is not an audit.
        """
        from privlab.report.evidence import to_markdown_text

        text = to_markdown_text(self.results)
        if path is not None:
            write_whole(Path(path), lambda draft: draft.write_text(text, encoding="utf-8"), durable=False, place="file")
        return text

    def save(self, path: str | Path) -> "Run":
        """Copy the run into a new directory, and return it there.

        Raises:
            PrivlabError: if the directory holds something.
        """
        path = Path(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise PrivlabError(f"'{path}' already exists and is not empty. Save the run to a new directory.")
        shutil.copytree(self.path, path, dirs_exist_ok=True)
        return Run(path)

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

    def _weakness(self, width: int) -> str:
        """Return the flags as one line, as many as fit into the width, with the command that explains them."""
        heads = [flag.head for flag in self.flags]
        line = "Weakened by: nothing that privlab looks for"
        for shown in range(len(heads), 0, -1):
            more = f" and {len(heads) - shown} more" if shown < len(heads) else ""
            line = f"Weakened by: {'; '.join(heads[:shown])}{more} (privlab explain flags)"
            if len(line) <= width:
                break
        return line

    def _overview(self) -> "tables.Table":
        """Return the table of the cases; of an audit without a reference that of its attacks, which have no scores."""
        if "unscored" not in self.results.facts:
            return tables.overview(self.results)
        from privlab.report.evidence import attacks_table  # it imports this module

        return attacks_table(self.results)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield what a terminal shows: the verdict, a table of the cases, what weakens it, and where the images are."""
        yield Text("Verdict", style="bold")
        for line in self.verdict.splitlines():
            yield Text(_indented(printable(line), options.max_width))
        yield self._overview()
        for attack, reason in self.failed_attacks.items():
            yield Text(printable(f"Failed on every image: {attack}: {reason}"))
        yield Text(printable(self._weakness(options.max_width)), no_wrap=True, overflow="ignore")
        pictures = self.path / ("strips" if self._strips() else "pictures")
        where = str(pictures) if pictures.is_dir() else "none were kept"
        if self.path.parent.name.startswith(TEMPORARY):
            where = "kept as long as this run is in use; give out= to keep them"
        yield Text(printable(f"Pictures: {where}"), no_wrap=True, overflow="ignore")

    def __str__(self) -> str:
        """Return what a terminal of 80 columns shows."""
        return tables.terminal_text(self)

    def _repr_html_(self) -> str:
        from privlab.images import data_uri

        strips = "".join(
            f'<figure><figcaption>{escape(title)}</figcaption><img src="{data_uri("png", read_bytes(file, "strip"))}" '
            f'alt="{escape(file.stem)}" style="max-width:100%"></figure>'
            for file, title in self._strips().items()
        )
        verdict = "".join(f"<p>{escape(line)}</p>" for line in self.verdict.splitlines())
        shown = self._overview().render("html")
        failed = [f"Failed on every image: {attack}: {reason}" for attack, reason in self.failed_attacks.items()]
        below = "".join(f"<p>{escape(line)}</p>" for line in [*failed, self._weakness(500)])
        return f"{verdict}{shown}{below}{strips}"


def _indented(line: str, width: int) -> str:
    return fill(
        line, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


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
