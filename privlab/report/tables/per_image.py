"""The scores of every image: of each attack and control, of the best single attack, and of the worst case over all."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from privlab.evaluation import CONTROL, CONTROLS, GEOMETRIES, exact_db
from privlab.grids import KNOWN
from privlab.metrics import MIRRORED

__all__ = ["BOUND", "CELL", "SINGLE", "WORST", "Floats", "Scored", "Segments", "Single", "Whole"]
__all__ += ["attack_label", "groups", "lead_metric", "leakiest_geometries", "measured_images", "per_image", "sign_of"]
__all__ += ["worst_case"]

WORST = "worst case"
"""The name of the bound that takes, for each image, the attack that leaks most."""

BOUND = "the best attack of each image, chosen by the evaluator: an upper bound"
"""What the worst case is. It is a bound, as no adversary can tell which attack came nearest."""

SINGLE = "best single attack"
"""The name of the attack with the leakiest mean over the images, in the geometry in which it leaks most."""

CELL = ["case", "attack", "external"]

Floats = NDArray[np.float64]
Whole = NDArray[np.intp]

_ASSUMED_SHAPE = (3, 384, 384)
"""The shape that is assumed for images whose size is not recorded: the largest input of timm's plain ViTs."""


def lead_metric(columns: Sequence[str]) -> str:
    """Return the metric by which attacks are compared: PSNR where it is a column, or else the first one that leaks."""
    leaky = [name for name in columns if KNOWN[name].direction != "utility"]
    return "psnr" if "psnr" in columns else (leaky or list(columns))[0]


def sign_of(metric: str) -> int:
    """Return 1 where a higher value leaks, −1 where a lower one does, 0 for a utility."""
    return {"higher leaks": 1, "lower leaks": -1}.get(KNOWN[metric].direction, 0)


def attack_label(attack: str, geometry: str) -> str:
    """Return an attack with the geometry of its score, as "april (reassembled)"; in place, return its name alone."""
    return attack if geometry == GEOMETRIES[0] else f"{attack} ({geometry})"


def per_image(records: pd.DataFrame, metrics: Sequence[str], geometry: str = "in_place") -> pd.DataFrame:
    """Return a row per case, attack and image, one for its worst case (`WORST`), one under the best attack (`SINGLE`).

    Columns: case, attack, external (its reference, or empty), image (its SHA-256, or else its name), control, scored,
    failed, the metrics, averaged over the draws that were scored, and exact: 1 where every draw is exact (of a worst
    case: any attack), 0 where not, NaN where PSNR was not measured. Beside metrics of `STRUCTURE` stand those against
    the mirrored image (`MIRRORED`) where records have them. A worst case is `failed` where any attack failed.

    Args:
        records: a row per image, attack, geometry and draw; `case` has the number of its case.
        metrics: the names of the metrics, each of which gets a column.
        geometry: "in_place", "oracle" or "reassembled": in which attacks and controls are scored. Unless it is the
            oracle, the worst case and the best attack are taken over all geometries that an adversary can make;
            `worst_case` and `leakiest_geometries` say in which ones.
    """
    return Scored.of(records, metrics, geometry).images


def measured_images(records: pd.DataFrame, metrics: Sequence[str], geometry: str = "in_place") -> pd.DataFrame:
    """Return the rows of `per_image` that were measured: those of attacks and controls.

    Args:
        records: a row per image, attack, geometry and draw; `case` has the number of its case.
        metrics: the names of the metrics, each of which gets a column.
        geometry: "in_place", "oracle" or "reassembled": in which attacks and controls are scored.
    """
    return _means(_tidy(records, metrics, geometry), metrics, geometry)


def worst_case(records: pd.DataFrame, metrics: Sequence[str], geometry: str = "in_place") -> pd.DataFrame:
    """Return the leakiest score of each case, image and metric over all attacks and draws, and the attack behind it.

    Columns: case, image, metric, value, attack, geometry; a row for each attack that reached the value. Controls,
    failed rows and figures of no known image have no part in it.

    Args:
        records: a row per image, attack, geometry and draw; `case` has the number of its case.
        metrics: the names of the metrics; those of utility are skipped.
        geometry: "oracle" takes the scores of that geometry alone. The other two take those of all geometries that an
            adversary can make, "in_place" and "reassembled".
    """
    return _leakiest_attacks(_pool(_tidy(records, metrics, geometry)), metrics)


def leakiest_geometries(records: pd.DataFrame, metrics: Sequence[str], geometry: str = "in_place") -> pd.DataFrame:
    """Return, for each attack that was scored on a case, the geometry in which it leaks most.

    Columns: case, attack, external, geometry, value (the mean over the images, by the lead metric), images.

    Args:
        records: a row per image, attack, geometry and draw; `case` has the number of its case.
        metrics: the names of the metrics, of which the lead metric decides.
        geometry: "oracle" takes that geometry alone. The other two take all that an adversary can make, "in_place" and
            "reassembled".
    """
    return _leakiest(_by_geometry(_pool(_tidy(records, metrics, geometry)), metrics), lead_metric(metrics))


@dataclass(frozen=True)
class Single:
    """The best single attack of a case: its name with its geometry, and its reference if it was measured elsewhere."""

    name: str
    external: str


@dataclass(frozen=True, eq=False)
class Scored:
    """The tables of `per_image` and `worst_case`, and the best single attack of each case, from one reading.

    The best single attack has the leakiest mean over the images, by the lead metric, among the attacks that were scored
    on at least half as many images as any other one.
    """

    images: pd.DataFrame
    reached: pd.DataFrame
    single: Mapping[int, Single]

    @classmethod
    def of(cls, records: pd.DataFrame, metrics: Sequence[str], geometry: str) -> "Scored":
        """Return the tables of records in one geometry; worst case and best attack are taken over more geometries.

        Args:
            records: a row per image, attack, geometry and draw; `case` has the number of its case.
            metrics: the names of the metrics; the lead metric decides which attack is the best single one.
            geometry: "in_place", "oracle" or "reassembled", as in `per_image`.
        """
        rows = _tidy(records, metrics, geometry)
        pool = _pool(rows)
        reached, of_geometry = _leakiest_attacks(pool, metrics), _by_geometry(pool, metrics)
        means = _means(rows, metrics, geometry)
        best = _best(of_geometry, lead_metric(metrics))
        names = map(attack_label, best.attack, best.geometry)
        single = dict(zip(best.case.tolist(), map(Single, names, best.external), strict=True))
        if not means.empty:
            worst = _worst(pool, reached, metrics).reindex(columns=means.columns)
            chosen = of_geometry.merge(best[[*CELL, "geometry"]], on=[*CELL, "geometry"])
            chosen = chosen.assign(attack=SINGLE, external="", control=False).reindex(columns=means.columns)
            kinds = means.dtypes.to_dict()
            means = pd.concat([means, worst.astype(kinds), chosen.astype(kinds)], ignore_index=True)
        return cls(means.sort_values([*CELL, "image"], ignore_index=True), reached, single)


@dataclass(frozen=True, eq=False)
class Segments:
    """Measured values by group, ascending within a group unless `of` is told otherwise.

    `group` has the number of the group that starts at each of `starts`.
    """

    values: Floats
    starts: Whole
    group: Whole

    @classmethod
    def of(cls, values: Floats, group: Whole, *, ascending: bool = True) -> "Segments":
        """Return the values of each group as one segment; those that were not measured (NaN) are left out.

        Args:
            values: one for each row of a table.
            group: the number of each row's group, from 0.
            ascending: whether values ascend within a group; otherwise they keep the order of the rows.
        """
        kept = ~np.isnan(values)
        values, group = values[kept], group[kept]
        order = np.lexsort((values, group)) if ascending else np.argsort(group, kind="stable")
        values, group = values[order], group[order]
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        return cls(values, starts, group[starts])

    @property
    def sizes(self) -> Whole:
        """Return the number of values of each group."""
        return np.diff(np.append(self.starts, len(self.values)))

    def means(self) -> Floats:
        """Return the mean of each group, never outside its values by rounding; NaN for infinities of both signs."""
        if not len(self.starts):
            return np.empty(0)
        with np.errstate(invalid="ignore"):
            sums = np.add.reduceat(self.values, self.starts)
        least, most = (end.reduceat(self.values, self.starts) for end in (np.minimum, np.maximum))
        return (sums / self.sizes).clip(least, most)


def groups(rows: pd.DataFrame, by: list[str]) -> tuple[Whole, pd.DataFrame]:
    """Return the group number of each row, in the order of the keys, and the keys of all groups."""
    group = rows.groupby(by, sort=True).ngroup().to_numpy(np.intp)
    _, first = np.unique(group, return_index=True)
    return group, rows.iloc[first][by].reset_index(drop=True)


def _tidy(records: pd.DataFrame, metrics: Sequence[str], geometry: str) -> pd.DataFrame:
    """Return the rows of a geometry, and of all geometries that an adversary can make.

    The columns that name a row have no null, and failed rows have no score.
    """
    attacks, names = pd.factorize(records.attack, sort=True)
    control = np.array([str(name).startswith(CONTROL) for name in names], dtype=bool)[attacks]
    several = {geometry} if geometry == GEOMETRIES[1] else {geometry, GEOMETRIES[0], GEOMETRIES[2]}
    wanted = np.where(control, _controls(records, control, geometry), records.geometry.isin(several))
    rows, control = records.loc[wanted], control[wanted]
    sha = rows.image_sha256.fillna("")
    unread = (sha == "").to_numpy(bool) & (rows.status != "ok").to_numpy(bool)  # a file that cannot be read has no hash
    ok = (rows.status == "ok").to_numpy(bool)
    laid: dict[str, object] = {
        "case": rows.case.to_numpy("int64"),
        "attack": rows.attack,
        "geometry": rows.geometry.mask(control, geometry),
        "external": rows.external.fillna("") if "external" in rows else "",
        "image": sha.mask(unread, "name:" + rows.image.fillna("").astype(str)),
        "control": control,
        "scored": ok,
        "failed": ~ok,
    }
    absent = np.full(len(rows), np.nan)
    wanted = [*metrics, *(MIRRORED[name] for name in metrics if name in MIRRORED and MIRRORED[name] in rows)]
    scores = {name: rows[name].to_numpy("float64", na_value=np.nan) if name in rows else absent for name in wanted}
    scores["exact"] = _exact(rows)
    return pd.DataFrame(laid | {name: np.where(ok, value, np.nan) for name, value in scores.items()}, index=rows.index)


def _controls(records: pd.DataFrame, control: NDArray[np.bool_], geometry: str) -> NDArray[np.bool_]:
    """Return which rows are the controls of a geometry: its own, and for controls that have none there, those in place.

    Shuffled patches are no control under the oracle: in its order they are the private image.
    """
    plain = control & (records.geometry.isna() | (records.geometry == GEOMETRIES[0])).to_numpy(bool)
    own = control & (records.geometry == geometry).to_numpy(bool)
    if geometry == GEOMETRIES[1]:
        plain &= (records.attack != CONTROLS[2]).to_numpy(bool)
    if own.any() and geometry != GEOMETRIES[0]:
        key = [name for name in ("case", "attack", "image_sha256", "image", "seed", "draw") if name in records]
        at = np.flatnonzero(plain | own)
        rows = records.iloc[at][key].astype(object)
        of_image = pd.MultiIndex.from_frame(rows.where(rows.notna(), ""))
        plain[at] &= ~of_image.isin(of_image[own[at]])
    return plain | own


def _exact(rows: pd.DataFrame) -> Floats:
    """Return 1 where the PSNR leaves no grey level wrong, 0 where it may, and NaN where there is no PSNR."""
    psnr = rows.psnr.to_numpy("float64", na_value=np.nan) if "psnr" in rows else np.full(len(rows), np.nan)
    stated = rows.victim_params.astype(object).fillna("{}") if "victim_params" in rows else pd.Series("{}", rows.index)
    codes, victims = pd.factorize(stated)
    levels = [exact_db(math.prod(json.loads(victim).get("input", _ASSUMED_SHAPE))) for victim in victims]
    return np.where(np.isnan(psnr), np.nan, psnr > np.array([*levels, math.inf])[codes])


def _pool(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows from which the worst case and the best single attack are taken."""
    return rows.loc[~rows.control & (rows.image != "")]


def _means(rows: pd.DataFrame, metrics: Sequence[str], geometry: str) -> pd.DataFrame:
    """Return the scores of each case, attack, control and image in one geometry, averaged over the draws."""
    measured = [*metrics, *(name for name in MIRRORED.values() if name in rows), "exact"]
    return _average(rows.loc[rows.geometry == geometry], [*CELL, "image", "control"], measured)


def _worst(pool: pd.DataFrame, reached: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    # Metrics of utility have no leakiest value: of these, an image's worst case is the mean over all attacks.
    worst = _average(pool, ["case", "image"], [name for name in metrics if not KNOWN[name].arrow])
    best = reached.drop_duplicates(["case", "image", "metric"])
    wide = best.pivot(index=["case", "image"], columns="metric", values="value").reset_index()
    exact = pool.groupby(["case", "image"]).exact.max().reset_index()
    worst = worst.merge(wide, how="left", on=["case", "image"]).merge(exact, how="left", on=["case", "image"])
    return worst.assign(attack=WORST, external="", control=False)


def _best(images: pd.DataFrame, lead: str) -> pd.DataFrame:
    """Return the best single attack of each case, as `Scored` has it, as a row of `leakiest_geometries`."""
    found = _leakiest(images, lead)
    found = found.loc[found["value"].notna() & (2 * found.images >= found.groupby("case").images.transform("max"))]
    found = found if sign_of(lead) else found.iloc[:0]
    return found.sort_values("value", ascending=sign_of(lead) < 0, kind="stable").drop_duplicates("case")


def _by_geometry(pool: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    return _average(pool, [*CELL, "geometry", "image"], [*metrics, "exact"])


def _leakiest(images: pd.DataFrame, lead: str) -> pd.DataFrame:
    """Return `leakiest_geometries`; of two geometries that leak alike, the first by name, which is `in_place`."""
    cells = images.loc[images.scored].groupby([*CELL, "geometry"])[lead].agg(["mean", "count"]).reset_index()
    cells = cells.rename(columns={"mean": "value", "count": "images"}).sort_values([*CELL, "geometry"])
    if sign_of(lead):
        cells = cells.sort_values("value", ascending=sign_of(lead) < 0, kind="stable")
    return cells.drop_duplicates(CELL).sort_values(CELL, ignore_index=True)


def _leakiest_attacks(pool: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    group, _ = groups(pool, ["case", "image"])
    found, columns = [], ["case", "image", "metric", "value", "attack", "geometry"]
    for name in metrics:
        if not KNOWN[name].arrow:
            continue
        values = -sign_of(name) * pool[name].to_numpy()
        segments = Segments.of(values, group)
        best = np.full(group.max(initial=-1) + 1, np.nan)
        best[segments.group] = segments.values[segments.starts]
        hit = values == best[group]
        at = pool.loc[hit, ["case", "image", "attack", "geometry"]]
        found.append(at.assign(metric=name, value=-sign_of(name) * values[hit]))
    if not found:
        return pd.DataFrame(columns=columns).astype({"case": "int64", "value": "float64"})
    ordered = pd.concat(found).sort_values(["case", "image", "metric", "attack", "geometry"])
    return ordered.drop_duplicates(["case", "image", "metric", "attack"], ignore_index=True).reindex(columns=columns)


def _average(rows: pd.DataFrame, by: list[str], metrics: Sequence[str]) -> pd.DataFrame:
    """Return one row per group: its mean scores, whether any of its rows was scored, and whether any failed."""
    group, keys = groups(rows, by)
    for name in ("scored", "failed"):
        keys[name] = np.bincount(group, rows[name].to_numpy(), minlength=len(keys)) > 0
    for name in metrics:
        segments = Segments.of(rows[name].to_numpy(), group)
        keys[name] = np.nan
        keys.loc[segments.group, name] = segments.means()
    if "exact" in metrics:  # in every draw
        keys["exact"] = keys.exact.where(keys.exact.isna(), (keys.exact == 1).astype(float))
    return keys
