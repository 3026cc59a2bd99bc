"""The scores of every image: of each attack and control, of the best single attack, and of the worst case over all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from privlab.base import parse_object
from privlab.evaluation import CONTROL, CONTROLS, GEOMETRIES, exact_db
from privlab.grids import KNOWN
from privlab.metrics import MIRRORED

WORST = "worst case"
"""The name of the bound that takes, for each image, the attack that leaks most."""

BOUND = "the best attack of each image, chosen by the evaluator: an upper bound"
"""What the worst case is. It is a bound, as no adversary can tell which attack came nearest."""

SINGLE = "best single attack"
"""The name of the attack with the leakiest mean over the images, in the geometry in which it leaks most."""

CELL = ["case", "attack", "external"]

Floats = NDArray[np.float64]
Whole = NDArray[np.intp]

_VICTIM = "victim_params of a record"
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


@dataclass(frozen=True, eq=False)
class Scored:
    """The scores of the images of records; each table is made once.

    Args:
        records: a row per image, attack, geometry and draw; `case` has the number of its case.
        metrics: the names of the metrics, each of which gets a column; by the lead metric, attacks are compared.
        geometry: "in_place", "oracle" or "reassembled": in which attacks and controls are scored. The worst case and
            the best single attack are taken over "oracle" alone, or else over all geometries that an adversary can
            make, "in_place" and "reassembled".
    """

    records: pd.DataFrame
    metrics: Sequence[str]
    geometry: str = "in_place"

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Return a row per case, attack or control, and image.

        Columns: case, attack, external (its reference, or empty), image (its SHA-256, or else its name), control,
        scored, failed, the metrics, averaged over the draws that were scored, and exact: 1 where every draw is exact, 0
        where not, NaN where that was not measured. Metrics of `STRUCTURE` also have a column against the mirrored image
        (`MIRRORED`) where records have them.
        """
        found = self._averaged
        return found.loc[found.geometry == self.geometry].drop(columns="geometry").reset_index(drop=True)

    @cached_property
    def images(self) -> pd.DataFrame:
        """Return the rows of `measured`, and for each case and image its worst case and that of the best attack.

        The attack of these two is `WORST` and `SINGLE`. A worst case is exact where any attack is, and failed where any
        attack failed.
        """
        found = self.measured
        if not found.empty:
            kinds = found.dtypes.to_dict()
            chosen = self._attacked.merge(self._best[[*CELL, "geometry"]], on=[*CELL, "geometry"])
            made = [(WORST, self._worst), (SINGLE, chosen)]
            rows = [of.assign(attack=name, external="", control=False) for name, of in made]
            found = pd.concat([found, *(of.reindex(columns=found.columns).astype(kinds) for of in rows)])
        return found.sort_values([*CELL, "image"], ignore_index=True)

    @cached_property
    def reached(self) -> pd.DataFrame:
        """Return the leakiest score of each case, image and metric over all attacks and draws, and the attack behind.

        Columns: case, image, metric, value, attack, geometry; a row for each attack that reached the value. Controls,
        failed rows, figures of no known image and metrics of utility have no part in it.
        """
        by, columns = ["case", "image", "metric"], ["case", "image", "metric", "value", "attack", "geometry"]
        leaky = [name for name in self.metrics if sign_of(name)]
        long = self._pool.melt(["case", "image", "attack", "geometry"], leaky, "metric", "value").dropna(subset="value")
        leaks = long["value"] * long.metric.map(sign_of).astype("float64")
        best = leaks.groupby([long[name] for name in by]).transform("max")
        found = long.loc[leaks == best].sort_values([*by, "attack", "geometry"])
        return found.drop_duplicates([*by, "attack"], ignore_index=True)[columns]

    @cached_property
    def leakiest_geometries(self) -> pd.DataFrame:
        """Return, for each attack that was scored on a case, the geometry in which it leaks most.

        Columns: case, attack, external, geometry, value (the mean over the images, by the lead metric), images. Of two
        geometries that leak equally, it is the first by name, which is `in_place`.
        """
        images, lead = self._attacked, lead_metric(self.metrics)
        cells = images.loc[images.scored].groupby([*CELL, "geometry"])[lead].agg(["mean", "count"]).reset_index()
        cells = cells.rename(columns={"mean": "value", "count": "images"}).sort_values([*CELL, "geometry"])
        if sign_of(lead):
            cells = cells.sort_values("value", ascending=sign_of(lead) < 0, kind="stable")
        return cells.drop_duplicates(CELL).sort_values(CELL, ignore_index=True)

    @cached_property
    def single(self) -> Mapping[int, tuple[str, str]]:
        """Return the best single attack of each case: its label, and its reference if it was measured elsewhere.

        It has the leakiest mean over the images, by the lead metric, among the attacks that were scored on at least
        half as many images as any other one.
        """
        best = self._best
        labels = map(attack_label, best.attack, best.geometry)
        return dict(zip(best.case.tolist(), zip(labels, best.external, strict=True), strict=True))

    @cached_property
    def _best(self) -> pd.DataFrame:
        """Return `single` as rows of `leakiest_geometries`."""
        found, sign = self.leakiest_geometries, sign_of(lead_metric(self.metrics))
        found = found.loc[found["value"].notna() & (2 * found.images >= found.groupby("case").images.transform("max"))]
        found = found if sign else found.iloc[:0]
        return found.sort_values("value", ascending=sign < 0, kind="stable").drop_duplicates("case")

    @cached_property
    def _worst(self) -> pd.DataFrame:
        # Metrics of utility have no leakiest value: of these, an image's worst case is the mean over all attacks.
        worst = _average(self._pool, ["case", "image"], [name for name in self.metrics if not sign_of(name)])
        best = self.reached.drop_duplicates(["case", "image", "metric"])
        wide = best.pivot(index=["case", "image"], columns="metric", values="value").reset_index()
        exact = self._pool.groupby(["case", "image"]).exact.max().reset_index()
        return worst.merge(wide, how="left", on=["case", "image"]).merge(exact, how="left", on=["case", "image"])

    @cached_property
    def _averaged(self) -> pd.DataFrame:
        """Return the scores of each image, averaged over its draws, in each geometry."""
        rows = self._rows
        metrics = [*self.metrics, *(name for name in MIRRORED.values() if name in rows), "exact"]
        return _average(rows, [*CELL, "geometry", "image", "control"], metrics)

    @property
    def _attacked(self) -> pd.DataFrame:
        return self._averaged.loc[~self._averaged.control & (self._averaged.image != "")]

    @cached_property
    def _pool(self) -> pd.DataFrame:
        """Return the rows from which the worst case and the best single attack are taken."""
        return self._rows.loc[~self._rows.control & (self._rows.image != "")]

    @cached_property
    def _rows(self) -> pd.DataFrame:
        """Return the rows of the geometry, and of all geometries that an adversary can make.

        The columns that name a row have no null, and failed rows have no score.
        """
        records, geometry = self.records, self.geometry
        attacks, names = pd.factorize(records.attack, sort=True)
        control = np.array([str(name).startswith(CONTROL) for name in names], dtype=bool)[attacks]
        several = {geometry} if geometry == GEOMETRIES[1] else {geometry, GEOMETRIES[0], GEOMETRIES[2]}
        wanted = np.where(control, _controls(records, control, geometry), records.geometry.isin(several))
        rows, control = records.loc[wanted], control[wanted]
        sha = rows.image_sha256.fillna("")
        ok = (rows.status == "ok").to_numpy(bool)
        unread = (sha == "").to_numpy(bool) & ~ok  # a file that cannot be read has no hash
        named: dict[str, object] = {
            "case": rows.case.to_numpy("int64"),
            "attack": rows.attack,
            "geometry": rows.geometry.mask(control, geometry),
            "external": rows.external.where(rows.external.notna(), "") if "external" in rows else "",
            "image": sha.mask(unread, "name:" + rows.image.fillna("").astype(str)),
            "control": control,
            "scored": ok,
            "failed": ~ok,
        }
        mirrored = [MIRRORED[name] for name in self.metrics if MIRRORED.get(name) in rows]
        scores = {name: _numbers(rows, name) for name in (*self.metrics, *mirrored)} | {"exact": _exact(rows)}
        columns = named | {name: np.where(ok, values, np.nan) for name, values in scores.items()}
        return pd.DataFrame(columns, index=rows.index)


@dataclass(frozen=True, eq=False)
class Segments:
    """Measured values by group; `group` has the number of the group that starts at each of `starts`."""

    values: Floats
    starts: Whole
    group: Whole

    @classmethod
    def of(cls, values: Floats, group: Whole, *, ascending: bool = True) -> "Segments":
        """Return the values of each group, numbered from 0, as one segment; those not measured (NaN) are left out.

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


def _controls(records: pd.DataFrame, control: NDArray[np.bool_], geometry: str) -> NDArray[np.bool_]:
    """Return which rows are the controls of a geometry: its own, and for controls that have none there, those in place.

    Shuffled patches are not a control under the oracle: in its order they are the private image.
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


def _numbers(rows: pd.DataFrame, name: str) -> Floats:
    """Return a column, NaN where it is null or not there."""
    return rows[name].to_numpy("float64", na_value=np.nan) if name in rows else np.full(len(rows), np.nan)


def _exact(rows: pd.DataFrame) -> Floats:
    """Return 1 where every grey level is right, 0 where it may not be, and NaN where that was not measured.

    Records state how many levels are wrong; those of before schema 9 have the PSNR alone (`exact_db`). A key without an
    image is exact where all of it was recovered.
    """
    wrong, key, psnr = (_numbers(rows, name) for name in ("levels_wrong", "key_recovered", "psnr"))
    stated = rows.victim_params.astype(object).fillna("{}") if "victim_params" in rows else pd.Series("{}", rows.index)
    codes, victims = pd.factorize(stated)
    levels = [exact_db(math.prod(parse_object(victim, _VICTIM).get("input", _ASSUMED_SHAPE))) for victim in victims]
    by_psnr = np.where(np.isnan(psnr), np.nan, psnr > np.array([*levels, math.inf])[codes])
    by_level = np.where(np.isnan(wrong), by_psnr, (wrong == 0) | (by_psnr == 1))
    return np.where(np.isnan(by_level) & ~np.isnan(key), key == 1, by_level)


def _average(rows: pd.DataFrame, by: list[str], metrics: Sequence[str]) -> pd.DataFrame:
    """Return one row per group: its mean scores, whether any of its rows was scored, and whether any failed."""
    group, keys = groups(rows, by)
    for name in ("scored", "failed"):
        keys[name] = np.bincount(group, rows[name].to_numpy(), minlength=len(keys)) > 0
    for name in metrics:
        segments = Segments.of(rows[name].to_numpy(), group)
        means = np.full(len(keys), np.nan)
        means[segments.group] = segments.means()
        keys[name] = means
    if "exact" in metrics:  # in every draw
        keys["exact"] = keys.exact.where(keys.exact.isna(), (keys.exact == 1).astype(float))
    return keys
