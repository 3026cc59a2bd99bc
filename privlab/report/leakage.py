"""The rows of a leakage table: what a paper printed, its attack here, and the worst case over all attacks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from privlab.experiment import KNOWN
from privlab.records import CONTROL, CONTROLS
from privlab.report.results import Results

__all__ = ["WORST", "Measured", "Row", "Score"]
__all__ += ["bootstrap", "conditions_that_differ", "headline", "leakage", "measured", "per_image", "worst_case"]

WORST = "worst case"
"""The name of the adversary who picks, for each image, the attack that leaks most."""

Kind = Literal["published", "paper", "worst", "attack", "control"]
Floats = NDArray[np.float64]
Whole = NDArray[np.intp]

_RESAMPLES = 2000
_BLOCKS = 2048
"""Above as many images, blocks of images are resampled: the interval's width stays right to about 1/√(2 · 2048)."""
_SEED = 20230617
_AT_ONCE = 2**23
"""Numbers of one resampling that are held in memory together."""
_CELL = ["case", "attack", "external"]


@dataclass(frozen=True)
class Score:
    """A mean over `images`, with the confidence interval [low, high]; NaN is not known, and never zero."""

    mean: float
    low: float = float("nan")
    high: float = float("nan")
    images: int = 0


@dataclass(frozen=True)
class Row:
    """One row of a leakage table.

    `images` have a score; `failed` ones have a failed record, be it in one of several draws, or of the worst case under
    any attack. `leakiest` says by metric, for the worst case, on how many images each attack reached it; all that tie
    count. `refused` says why attacks cannot run here; `external` is the reference of what was measured elsewhere.
    """

    case: int
    label: str
    group: str | None
    kind: Kind
    attack: str | None
    scores: Mapping[str, Score]
    images: int = 0
    failed: int = 0
    leakiest: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    external: str | None = None


Measured = tuple[Mapping[str, Score], int, int]
"""What was measured in one cell, an attack on a case: its scores, the images that have one, those that failed."""


def leakage(results: Results) -> list[Row]:
    """Return the rows of all cases, in their order.

    A case has its published figures (if there are any), the paper's attack (if the layout names one), the worst case,
    every attack that ran or was refused, and the controls. Scores are averaged over the draws of an image, then over
    the images; the worst case takes each image's leakiest score over attacks and draws, by each metric's own direction.
    The interval is that of `bootstrap`: the same records, in any order, give the same rows.
    """
    layout = results.layout
    rows = _tidy(results.records, layout.columns, layout.geometry)
    reached = _reached(rows, layout.columns)
    images = _per_image(rows, reached, layout.columns)
    counts = reached.groupby(["case", "metric", "attack"], sort=True).size().reset_index()
    leakiest: dict[int, dict[str, dict[str, int]]] = {}
    for case, metric, attack, count in counts.to_numpy().tolist():
        leakiest.setdefault(case, {}).setdefault(metric, {})[attack] = count
    cells: dict[int, dict[tuple[str, str], Measured]] = {}
    for (case, attack, external), cell in measured(images, layout.columns, layout.interval):
        cells.setdefault(case, {})[attack, external] = cell
    return [row for case in range(len(results.cases)) for row in _rows(results, case, cells.get(case, {}), leakiest)]


def headline(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that a paper's table shows: published, the paper's attack, the worst case."""
    return [row for row in rows if row.kind in ("published", "paper", "worst")]


def per_image(records: pd.DataFrame, metrics: Sequence[str], geometry: str = "in_place") -> pd.DataFrame:
    """Return one row per case, attack and image, and one for each image's worst case, where `attack` is `WORST`.

    Columns: case, attack, external (its reference, or empty), image (its SHA-256, or else its name), control, scored,
    failed, and the metrics, averaged over the draws that were scored. A worst case is `failed` where any attack failed.
    """
    rows = _tidy(records, metrics, geometry)
    return _per_image(rows, _reached(rows, metrics), metrics)


def worst_case(records: pd.DataFrame, metrics: Sequence[str], geometry: str = "in_place") -> pd.DataFrame:
    """Return the leakiest score of each case, image and metric over all attacks and draws, and the attack behind it.

    Columns: case, image, metric, value, attack; a row for each attack that reached the value. Controls, failed rows and
    figures of no known image have no part in it, nor have metrics of utility.
    """
    return _reached(_tidy(records, metrics, geometry), metrics)


def conditions_that_differ(results: Results) -> list[str]:
    """Return a line for each condition of the paper's that is not met here, as "weights: paper: … / here: …".

    The paper's conditions are free text: a line is left out only where what was run is certain to be the same.
    """
    lines = []
    for name, paper in results.conditions.items():
        here, same = _here(results, name, paper)
        if not same:
            lines.append(f"{name}: paper: {paper} / here: {here}")
    if results.layout.geometry != "in_place" and "geometry" not in results.conditions:
        lines.append(f"geometry: paper: in_place / here: {results.layout.geometry}")
    attack = results.layout.paper_attack
    lines += [
        f"attack on {case.label}: paper: {attack} / here: refused: {reason}"
        for case in results.cases
        for name, reason in case.refused.items()
        if name == attack
    ]
    return lines


_COLUMN_OF = {"labels": "label_origin", "model": "victim", "models": "victim", "victims": "victim"}
_TRUE_LABELS = {"folder", "file", "dataset"}


def _here(results: Results, name: str, paper: str) -> tuple[str, bool]:
    """Return what a condition is here, and whether it is certain to be the paper's."""
    records, said = results.records, paper.casefold().replace("_", "-")
    own = records if "external" not in records else records.loc[records.external.isna()]
    if name == "images":
        source = (results.facts.get("images") or {}).get("source")
        counts = own.loc[own.status == "ok"].groupby("case").image_sha256.nunique()
        least, most = int(counts.min() if len(counts) else 0), int(counts.max() if len(counts) else 0)
        here = (f"{least}" if least == most else f"{least} to {most}") + (f" of {source}" if source else "")
        return here, here.casefold() == paper.casefold()
    if name == "attack":
        attack = results.layout.paper_attack
        return attack or "none is named", attack is not None and attack in said
    if name == "geometry":
        return results.layout.geometry, results.layout.geometry.replace("_", "-") in said.replace(" ", "-")
    column = _COLUMN_OF.get(name, name)
    if name == "block" and results.layout.paper_attack is not None:
        own = own.loc[own.attack == results.layout.paper_attack]
    if column in own:
        found = sorted(map(str, own[column].dropna().unique()))
    else:
        found = list(dict.fromkeys(str(case.options[name]) for case in results.cases if name in case.options))
    if not found:
        return "not recorded", False
    trained = name == "weights" and said == "trained" and all(v.startswith(("pretrained:", "file:")) for v in found)
    truth = name == "labels" and said in ("true", "ground truth") and set(found) <= _TRUE_LABELS
    return ", ".join(found), trained or truth or [value.casefold().replace("_", "-") for value in found] == [said]


def bootstrap(values: Floats, starts: Whole, level: float) -> tuple[Floats, Floats]:
    """Return the ends of the percentile bootstrap interval of the mean of each segment values[starts[i]:starts[i + 1]].

    The means of 2000 resamples are cut at the shares (1 ± level) / 2; the generator is seeded by the segment's length,
    so equal segments have equal intervals, and scores of the same images are resampled alike. An infinite value makes
    a resample that holds it infinite. A segment of one value has no interval: NaN.
    """
    sizes = np.diff(np.append(starts, len(values)))
    low, high = np.full(len(starts), np.nan), np.full(len(starts), np.nan)
    for size in np.unique(sizes[sizes > 1]).tolist():
        of_size = np.flatnonzero(sizes == size)
        step = max(1, _AT_ONCE // max(size, _RESAMPLES))
        for chunk in (of_size[i : i + step] for i in range(0, len(of_size), step)):
            found = values[starts[chunk][:, None] + np.arange(size)]
            low[chunk], high[chunk] = _percentiles(found, level)
    return low, high


def _percentiles(values: Floats, level: float) -> tuple[Floats, Floats]:
    """Return the ends of the interval for each row of (segments × images)."""
    blocks = min(values.shape[1], _BLOCKS)
    weights = _weights(values.shape[1], blocks)
    finite = np.isfinite(values)
    sums = _folded(np.where(finite, values, 0.0), blocks) @ weights
    means = sums / (_folded(np.ones((1, values.shape[1])), blocks) @ weights)
    for infinity in (np.inf, -np.inf):
        if (at := values == infinity).any():
            means[_folded(at.astype(float), blocks) @ weights > 0] = infinity
    cut = int((1 - level) / 2 * (_RESAMPLES - 1))
    means.partition((cut, _RESAMPLES - 1 - cut), axis=1)
    least, most = values.min(axis=1), values.max(axis=1)  # sums round: the mean of equal values may miss them
    return means[:, cut].clip(least, most), means[:, -1 - cut].clip(least, most)


def _folded(values: Floats, blocks: int) -> Floats:
    """Add up every `blocks`-th column."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % blocks)))
    return padded.reshape(len(values), -1, blocks).sum(axis=1)


@lru_cache(maxsize=4)
def _weights(size: int, blocks: int) -> Floats:
    """Return how often each block is in each resample (blocks × resamples)."""
    drawn = np.random.default_rng([_SEED, size]).integers(blocks, size=(_RESAMPLES, blocks))
    drawn += np.arange(_RESAMPLES)[:, None] * blocks
    counts = np.bincount(drawn.ravel(), minlength=_RESAMPLES * blocks)
    return np.ascontiguousarray(counts.reshape(_RESAMPLES, blocks).T, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class _Segments:
    """Measured values in ascending order within their groups; `group` names the one that starts at each of `starts`."""

    values: Floats
    starts: Whole
    group: Whole

    @classmethod
    def of(cls, values: Floats, group: Whole, *, ascending: bool = True) -> "_Segments":
        """Leave out what was not measured; without `ascending` a group keeps its order."""
        kept = ~np.isnan(values)
        values, group = values[kept], group[kept]
        order = np.lexsort((values, group)) if ascending else np.argsort(group, kind="stable")
        values, group = values[order], group[order]
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        return cls(values, starts, group[starts])

    @property
    def sizes(self) -> Whole:
        return np.diff(np.append(self.starts, len(self.values)))

    def means(self) -> Floats:
        """Return the mean of each group, never outside its values by rounding; NaN for infinities of both signs."""
        if not len(self.starts):
            return np.empty(0)
        with np.errstate(invalid="ignore"):
            sums = np.add.reduceat(self.values, self.starts)
        least, most = (end.reduceat(self.values, self.starts) for end in (np.minimum, np.maximum))
        return (sums / self.sizes).clip(least, most)


def _tidy(records: pd.DataFrame, metrics: Sequence[str], geometry: str) -> pd.DataFrame:
    """Return the rows of one geometry, and the controls, with no null in what names them and no score of a failure."""
    attacks, names = pd.factorize(records.attack, sort=True)
    control = np.array([str(name).startswith(CONTROL) for name in names], dtype=bool)[attacks]
    wanted = (records.geometry == geometry).to_numpy(bool) | control
    rows = records.loc[wanted]
    sha = rows.image_sha256.fillna("")
    unread = (sha == "").to_numpy(bool) & (rows.status != "ok").to_numpy(bool)  # a file that cannot be read has no hash
    ok = (rows.status == "ok").to_numpy(bool)
    external = rows.external.fillna("") if "external" in rows else ""
    named: dict[str, object] = {
        "case": rows.case.to_numpy("int64"),
        "attack": rows.attack,
        "external": external,
        "image": sha.mask(unread, "name:" + rows.image.fillna("").astype(str)),
        "control": control[wanted],
        "scored": ok,
        "failed": ~ok,
    }
    absent = np.full(len(rows), np.nan)
    scores = {name: rows[name].to_numpy("float64", na_value=np.nan) if name in rows else absent for name in metrics}
    return pd.DataFrame(named | {name: np.where(ok, value, np.nan) for name, value in scores.items()}, index=rows.index)


def _per_image(rows: pd.DataFrame, reached: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    means = _averaged(rows, [*_CELL, "image", "control"], metrics)
    attacks = rows.loc[~rows.control & (rows.image != "")]
    # What is of use to the client has no leakiest value: an image's worst case shows the mean over all attacks.
    worst = _averaged(attacks, ["case", "image"], [name for name in metrics if not KNOWN[name].arrow])
    best = reached.drop_duplicates(["case", "image", "metric"])
    wide = best.pivot(index=["case", "image"], columns="metric", values="value").reset_index()
    worst = worst.merge(wide, how="left", on=["case", "image"]).assign(attack=WORST, external="", control=False)
    worst = worst.reindex(columns=means.columns)
    if not means.empty:
        means = pd.concat([means, worst.astype(means.dtypes.to_dict())], ignore_index=True)
    return means.sort_values([*_CELL, "image"], ignore_index=True)


def _reached(rows: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    rows = rows.loc[~rows.control & (rows.image != "")]
    group, _ = _groups(rows, ["case", "image"])
    found = []
    for name in metrics:
        if not KNOWN[name].arrow:
            continue
        sign = 1.0 if KNOWN[name].direction == "lower leaks" else -1.0
        values = sign * rows[name].to_numpy()
        segments = _Segments.of(values, group)
        best = np.full(group.max(initial=-1) + 1, np.nan)
        best[segments.group] = segments.values[segments.starts]
        hit = values == best[group]
        at = rows.loc[hit, ["case", "image", "attack"]].assign(metric=name, value=sign * values[hit])
        found.append(at.drop_duplicates(["case", "image", "attack"]))
    columns = ["case", "image", "metric", "value", "attack"]
    if not found:
        return pd.DataFrame(columns=columns).astype({"case": "int64", "value": "float64"})
    ordered = pd.concat(found).sort_values(["case", "image", "metric", "attack"], ignore_index=True)
    return ordered.reindex(columns=columns)


def _groups(rows: pd.DataFrame, by: list[str]) -> tuple[Whole, pd.DataFrame]:
    """Return the number of each row's group, in the order of the keys, and the keys."""
    group = rows.groupby(by, sort=True).ngroup().to_numpy(np.intp)
    _, first = np.unique(group, return_index=True)
    return group, rows.iloc[first][by].reset_index(drop=True)


def _averaged(rows: pd.DataFrame, by: list[str], metrics: Sequence[str]) -> pd.DataFrame:
    """Return one row per group: its mean scores, and whether any row was scored, and failed."""
    group, keys = _groups(rows, by)
    for name in ("scored", "failed"):
        keys[name] = np.bincount(group, rows[name].to_numpy(), minlength=len(keys)) > 0
    for name in metrics:
        segments = _Segments.of(rows[name].to_numpy(), group)
        keys[name] = np.nan
        keys.loc[segments.group, name] = segments.means()
    return keys


def measured(
    images: pd.DataFrame, metrics: Sequence[str], level: float
) -> Iterator[tuple[tuple[int, str, str], Measured]]:
    """Yield (case, attack, external) and what was measured there, from a table like that of `per_image`."""
    group, keys = _groups(images, _CELL)
    known = (images.image != "").to_numpy(bool)
    count, failed = (
        np.bincount(group, images[name].to_numpy(bool) & known, minlength=len(keys)).astype(int).tolist()
        for name in ("scored", "failed")
    )
    scores: dict[str, dict[int, Score]] = {}
    for name in metrics:
        of = _Segments.of(images[name].to_numpy(), group, ascending=False)
        columns = (of.group, of.means(), *bootstrap(of.values, of.starts, level), of.sizes)
        cells = zip(*(column.tolist() for column in columns), strict=True)
        scores[name] = {cell: Score(mean, low, high, n) for cell, mean, low, high, n in cells}
    for i, key in enumerate(zip(keys.case.tolist(), keys.attack.tolist(), keys.external.tolist(), strict=True)):
        of_cell = {name: scores[name].get(i, Score(float("nan"))) for name in metrics}
        yield key, (of_cell, count[i], failed[i])


def _rows(
    results: Results,
    case: int,
    cells: Mapping[tuple[str, str], Measured],
    leakiest: Mapping[int, Mapping[str, Mapping[str, int]]],
) -> Iterator[Row]:
    facts, layout = results.cases[case], results.layout
    nothing: Measured = ({name: Score(float("nan")) for name in layout.columns}, 0, 0)

    def row(
        kind: Kind,
        attack: str | None,
        cell: Measured,
        external: str = "",
        refused: Mapping[str, str] = {},
        leakiest: Mapping[str, Mapping[str, int]] = {},
    ) -> Row:
        return Row(case, facts.label, facts.group, kind, attack, *cell, leakiest, refused, external or None)

    if facts.published:
        printed = {name: _published(name, facts.published) for name in (*layout.columns, *facts.published)}
        yield row("published", None, (printed, 0, 0))
    attacks = [key for key in cells if key[0] != WORST and not key[0].startswith(CONTROL)]
    attacks.sort(key=lambda key: (key[0] != layout.paper_attack, key))
    if (paper := layout.paper_attack) is not None:
        key = next((key for key in attacks if key[0] == paper), (paper, ""))
        refused = {paper: facts.refused[paper]} if paper in facts.refused and key not in cells else {}
        yield row("paper", paper, cells.get(key, nothing), key[1], refused)
    taken = (key[1] for key in attacks if key[1] and cells[key][1])  # figures of no image are in no worst case
    elsewhere = "; ".join(dict.fromkeys(taken))
    worst = cells.get((WORST, ""), nothing)
    yield row("worst", WORST, worst, elsewhere, facts.refused, leakiest.get(case, {}))
    for key in attacks:
        yield row("attack", key[0], cells[key], key[1])
    for attack, reason in sorted(facts.refused.items()):
        if attack not in {name for name, _ in attacks}:
            yield row("attack", attack, nothing, "", {attack: reason})
    controls = [key for key in cells if key[0].startswith(CONTROL)]
    for key in sorted(controls, key=lambda key: (CONTROLS.index(key[0]) if key[0] in CONTROLS else len(CONTROLS), key)):
        yield row("control", key[0], cells[key], key[1])


def _published(name: str, printed: Mapping[str, float]) -> Score:
    value = printed.get(name, float("nan"))
    return Score(value / 100 if KNOWN[name].direction == "utility" and value > 1 else value)  # printed in per cent
