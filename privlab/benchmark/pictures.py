"""The pictures of a result: the photograph, and what the leakiest attack makes of it, for two bundled photographs."""

from pathlib import Path

from privlab.benchmark.rule import Judged
from privlab.benchmark.tracks import Track
from privlab.evaluation import CONTROL
from privlab.images import data_uri
from privlab.report.tables import Results, load_results, sign_of
from privlab.stores import pngs

__all__ = ["pictures"]


def pictures(folder: Path, judged: Judged, of: Track) -> dict[str, dict[str, str]]:
    """Return PNGs as data URIs, by "median" and "worst": a photograph, and what leaks most of it in draw 0.

    Args:
        folder: that of the run directories, of the entry alone.
        judged: names the two photographs.
        of: the track, whose first metric decides.
    """
    found: dict[str, dict[str, str]] = {}
    scores: dict[str, float] = {}
    for results in map(load_results, sorted(path.parent for path in folder.glob("*/run.json"))):
        if results.records.setting.eq("a").all() != judged.leakiest.endswith("undefended"):
            continue
        for name, image in (("median", judged.median), ("worst", judged.worst_image)):
            attack, score = _leakiest(results, image, of)
            places = [results.picture(0, image, what) for what in ("private", attack)] if attack else []
            if places and None not in places and score > scores.get(name, float("-inf")):
                private, made = (data_uri("png", pngs([place])[0]) for place in places if place)
                scores[name] = score
                shown = score * sign_of(of.lead)
                found[name] = {"private": private, "made": made, "attack": attack, "score": f"{shown:.2f}"}
    return found


def _leakiest(results: Results, image: str, of: Track) -> tuple[str, float]:
    """Return the attack that leaks most from an image in the first draw, in place, and its score, higher where more."""
    rows = results.records
    own = rows.loc[
        (rows.image_sha256 == image)
        & (rows.geometry == "in_place")
        & (rows.draw == 0)
        & (rows.status == "ok")
        & ~rows.attack.str.startswith(CONTROL)
    ]
    if own.empty:
        return "", float("-inf")
    values = own[of.lead] * sign_of(of.lead)
    return str(own.attack[values.idxmax()]), float(values.max())
