"""The page of the benchmark: tables, trade-offs, pictures and feeds, from result files alone."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from privlab.base import first, write_whole
from privlab.benchmark.cards import Card
from privlab.benchmark.judged import LEVEL, Judged, highest
from privlab.benchmark.results import Result
from privlab.benchmark.rule import FEW, standings
from privlab.benchmark.standing import Standing
from privlab.benchmark.tracks import TRACKS, VERSION, Track, track
from privlab.evaluation import CONTROL, EXACT_DB
from privlab.grids import KNOWN
from privlab.images import data_uri
from privlab.report.tables import load_results, sign_of
from privlab.report.tables.per_image import attack_label
from privlab.stores import pngs

SCHEMA_VERSION = "0.3.0"
"""The version of Every Eval Ever's `eval.schema.json` (github.com/evaleval/every_eval_ever) that records follow."""

_APART = 0.05
"""How far, in dB, the score of a picture may be from that of its row: the run of a picture has batches of its own."""

_LEFT, _WIDTH, _TOP, _HEIGHT = 48, 300, 15, 195
"""Where the trade-off is drawn, in units of its picture; names of entries stand to the right of their points."""


def write_site(results: Iterable[Result], out: Path) -> list[Path]:
    """Write the page and the feeds into a folder, and return the paths.

    Args:
        results: those of the entries.
        out: the folder.

    Raises:
        PrivlabError: if a file cannot be written.
    """
    found = site_files(results)
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>privlab benchmark</title><body>'
    page = f"{head}<h1>privlab benchmark</h1>{found.pop('table.html')}</body></html>\n"
    written = []
    for name, text in {"index.html": page, **found}.items():
        path = out / name
        write_whole(path, lambda draft, text=text: draft.write_text(text, "utf-8"))
        written.append(path)
    return written


def site_files(results: Iterable[Result]) -> dict[str, str]:
    """Return the table as a piece of HTML, the feed, and a record of Every Eval Ever for each entry, by path.

    Args:
        results: those of the entries.
    """
    rows = standings(results)
    feed = {"version": VERSION, "entries": [row.as_json() for row in rows]}
    records = {f"every_eval_ever/{row.track}-{row.name}.json": _json(evaluation_record(row)) for row in rows}
    return {"table.html": fragment(rows), "feed.json": _json(feed), **records}


def _json(data: object) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def fragment(rows: Sequence[Standing]) -> str:
    """Return the tables of all tracks that have an entry, as a piece of HTML that needs nothing else."""
    text = (files("privlab.benchmark") / "templates" / "table.html").read_text("utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    groups = [_group(track(name), own) for name in TRACKS if (own := [row for row in rows if row.track == name])]
    holding = [row for row in rows if row.verdict == "holds" and row.identity and row.identity.above_control]
    return environment.from_string(text).render(
        groups=groups,
        number=_number,
        percent=lambda share: f"{100 * share:.0f}",
        first=first,
        count=_count(rows),
        holding=holding,
    )


def _count(rows: Sequence[Standing]) -> dict[str, Any]:
    """Return how many different defenses are measured and known, whatever their parameters, track and entries."""
    own = [(row, "+".join(parts)) for row in rows if row.result and (parts := row.result.card.parts) != ("none",)]
    measured = {name for row, name in own if row.worst_case is not None}
    known = {name for row, name in own if row.worst_case is not None and row.known_by}
    return {
        "defenses": len(measured),
        "entries": len(own),
        "known": len(known),
        "unknown": sorted(measured - known),
        "whole": sum(not any(reason.startswith(FEW) for reason in row.unreliable) for row, _ in own),
        "ranked": sum(row.rank is not None for row, _ in own),
    }


def _number(value: float | None) -> Markup | str:
    return "—" if value is None else f"{value:.2f}".replace("-", "−")


def _group(of: Track, rows: Sequence[Standing]) -> dict[str, Any]:
    """Return the rows of a track as the template reads them, the commands that make them, and the trade-off.

    A point has a name, a place, and `shift`: how far its name is moved down so that names do not cover each other.
    """
    scored = [(row.worst_case, row) for row in rows if row.worst_case is not None]
    scores = [score for score, _ in scored] or [0.0, 1.0]
    low, high = min(scores), max(scores)
    placed = [(row.measured_utility, score, row) for score, row in scored if row.measured_utility is not None]
    points: list[dict[str, Any]] = []
    for kept, score, row in sorted(placed, key=lambda each: -each[0]):
        share = (score - low) / (high - low) if high > low else 0.5
        x, y = _LEFT + share * _WIDTH, _TOP + (1 - min(1.0, max(0.0, kept))) * _HEIGHT
        near = sum(abs(each["y"] - y) < 12 and abs(each["x"] - x) < 100 for each in points)
        place = {"x": round(x, 1), "y": round(y, 1), "shift": 4 + 11 * near}
        points.append(place | {"name": row.name, "dominated": row.dominated})
    shown = [_shown(row) for row in rows]
    commands = list(dict.fromkeys(line for row in shown for line in row["commands"]))
    unit = of.unit.strip() or "share of the key"
    return {"track": of, "rows": shown, "commands": commands, "points": points, "unit": unit, "low": low, "high": high}


def _shown(row: Standing) -> dict[str, Any]:
    """Return a row as the template reads it: with its pictures, its commands, and what its card alone states."""
    assert row.result is not None
    told = list(row.identity.commands) if row.identity else []
    told[:1] = [table + _weights(row.result) for table in told[:1]]
    return row.as_json() | {
        "identity": row.identity,
        "concluded": row.concluded,
        "shown": pictures_of(row),
        "commands": [*(line for each in (row.result, *row.entered) for line in _commands(each)), *told],
        "stated_alone": row.result.card.stated_alone,
    }


def _commands(result: Result) -> Sequence[str]:
    """Return the commands that measure an entry on the same photographs, and that measure a part of it again."""
    folder, stem, parts = "experiments/benchmark", result.path.stem, result.data["photographs"]
    images = (" --images FOLDER" if "public" in parts else "") + (" --hidden" if "hidden" in parts else "")
    public = " --public OWN" if result.data.get("public_sha256") else ""
    weights = _weights(result)
    submit = f"privlab benchmark submit {folder}/cards/{stem}.toml{images}{public}{weights}"
    return submit, f"privlab benchmark verify {folder}/results/{stem}.json{public}{weights}"


def _weights(result: Result) -> str:
    """Return the option of a command that names the weights of a victim that is not in the package."""
    return " --weights FILE" if result.rows.weights.dropna().str.startswith("file:").any() else ""


def evaluation_record(row: Standing) -> dict[str, Any]:
    """Return an entry as a record of Every Eval Ever: one result for each case, with its confidence interval.

    Scores are continuous; the PSNR of an image that is given back exactly counts as 100 dB.
    """
    assert row.result is not None
    assert row.judged is not None
    data, of, card = row.result.data, track(row.track), row.result.card
    stamp = str(data["created"])
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": f"{VERSION}-{row.track}/{row.victim}+{row.name}/{stamp}",
        "evaluation_timestamp": stamp,
        "retrieved_timestamp": stamp,
        "source_metadata": {
            "source_name": f"privlab benchmark, track {row.track} of {VERSION}",
            "source_type": "evaluation_run",
            "source_organization_name": "privlab",
            "evaluator_relationship": "third_party",
        },
        "eval_library": {"name": "privlab", "version": str(data["versions"].get("privlab") or "unknown")},
        "model_info": {
            "name": f"{row.victim} under {row.name}",
            "id": f"privlab/{row.victim}+{row.name}",
            "additional_details": {
                "paper": card.paper,
                "parameters": str(dict(card.parameters)),
                "weights_sha256": of.victim(row.victim).weights_sha256,
                "verdict": row.verdict,
                "unreliable": "; ".join(row.unreliable),
                "known_by": ", ".join(row.known_by),
                "result_sha256": data["signature"]["sha256"],
                "model_availability": "open_weights",
                "deployment_type": "self_deployed",
            },
        },
        "evaluation_results": [_case(row, name) for name in row.judged.worst],
    }


def _case(row: Standing, name: str) -> dict[str, Any]:
    assert row.judged is not None
    of, score = track(row.track), row.judged.worst[name]
    metric = KNOWN[of.lead]
    most = EXACT_DB if of.lead == "psnr" else metric.range[1]
    mean, low, high = (min(value, most) for value in (score.mean, score.low, score.high))
    uncertainty: dict[str, Any] = {"num_samples": score.images}
    if not math.isnan(low):  # one image has no interval
        interval = {"lower": low, "upper": high, "confidence_level": LEVEL}
        uncertainty["confidence_interval"] = interval | {"method": "Student's t over photographs"}
    return {
        "evaluation_name": f"{VERSION}/{row.track}: {name}, worst case by {of.lead}",
        "source_data": {"dataset_name": ", ".join(row.photograph_parts) or "keys", "source_type": "other"},
        "metric_config": {
            "evaluation_description": f"{metric.source}; the leakiest attack of each photograph, mean over photographs",
            "lower_is_better": sign_of(of.lead) > 0,
            "score_type": "continuous",
            "min_score": 0.0,
            "max_score": most,
        },
        "score_details": {"score": mean, "uncertainty": uncertainty},
    }


@dataclass(frozen=True)
class Picture:
    """A photograph of an entry, what an attack makes of it, and what the score of the row is of.

    `what` is "median" or "worst". `score` is that of the picture; `whole` is that of the photograph in the table, which
    the attacks `by` reach. `shown` says that the picture is theirs, and `own` that no other photograph stands in.
    """

    what: str
    private: str
    made: str
    attack: str
    score: float
    whole: float
    by: tuple[str, ...]
    shown: bool
    own: bool


def best_rows(records: pd.DataFrame, of: Track, case: str, image: str) -> pd.DataFrame:
    """Return the rows in which most leaks from a photograph, over all attacks, draws and geometries of a case.

    Args:
        records: all rows of an entry; `attack` has the attack's name alone.
        of: the track, whose first metric decides.
        case: the name of the case.
        image: the hash of the photograph.
    """
    there = (records.case == case) & (records.image_sha256 == image) & (records.status == "ok")
    own = records.loc[there & ~records.attack.str.startswith(CONTROL)]
    leaks = own[of.lead].clip(upper=highest(of)) * sign_of(of.lead)
    return own.loc[leaks == leaks.max()]


def pictures(
    card: Card, judged: Judged, records: pd.DataFrame, run: Callable[[Mapping[str, Any]], Path]
) -> dict[str, dict[str, Any]]:
    """Return PNGs as data URIs, by "median" and "worst": a photograph, and what leaks most of it, as the score counts.

    A picture states its photograph, attack, draw and geometry, and the score that its run has. What no run keeps is
    left out.

    Args:
        card: that of the defense.
        judged: names the two photographs, and the case.
        records: the rows of the attacks whose pictures are kept.
        run: returns the run directory that shows what a row is of.
    """
    found: dict[str, dict[str, Any]] = {}
    for what, image in judged.shown.items():
        for row in best_rows(records, card.of, judged.leakiest, image).head(1).to_dict("records"):
            results = load_results(run(row))
            label = attack_label(row["attack"], row["geometry"])
            places = [place for each in ("private", label) if (place := results.picture(0, image, each))]
            if len(places) == 2:
                private, made = (data_uri("png", pngs([place])[0]) for place in places)
                own = {name: row[name] for name in ("attack", "geometry", "case")} | {"draw": int(row["draw"])}
                again = results.records.assign(case=row["case"])
                for name in ("attack", "geometry", "draw"):
                    again = again.loc[again[name] == row[name]]
                score = f"{best_rows(again, card.of, row['case'], image)[card.of.lead].iloc[0]:.2f}"
                found[what] = {"private": private, "made": made, "image": image, **own, "score": score}
    return found


def pictures_of(row: Standing) -> list[Picture]:
    """Return the pictures of the median and the worst photograph of a row, from its result and those that entered.

    Of several pictures of a photograph the one that leaks most is taken. Where no result has one of it, the entry's own
    picture stands in, of the photograph that was the median or the worst one before others entered.
    """
    assert row.result is not None
    assert row.judged is not None
    of, judged = track(row.track), row.judged
    kept = [each for result in (row.result, *row.entered) for each in _kept(result, row.name)]
    if not kept:
        return []
    own = [each.rows.loc[lambda rows: rows.entry == row.name].drop(columns="entry") for each in row.entered]
    records = pd.concat([row.result.rows, *own], ignore_index=True)
    found = []
    for what, image in judged.shown.items():
        ours = [each for each in kept if each["image"] == image]
        if not (able := ours or [each for each in kept if each["what"] == what]):
            continue
        best = max(able, key=lambda each: sign_of(of.lead) * float(each["score"]))
        if (rows := best_rows(records, of, judged.leakiest, best["image"])).empty:
            continue
        whole = min(float(rows[of.lead].iloc[0]), highest(of))
        by = tuple(dict.fromkeys(map(attack_label, rows.attack, rows.geometry)))
        score, attack = float(best["score"]), attack_label(best["attack"], best.get("geometry", "in_place"))
        shown = attack in by and abs(min(score, highest(of)) - whole) <= _APART
        found.append(Picture(what, best["private"], best["made"], attack, score, whole, by, shown, bool(ours)))
    return found


def _kept(result: Result, entry: str) -> Iterator[Mapping[str, Any]]:
    """Yield the pictures that a result holds of an entry, each with what it is of; older files name no photograph."""
    pictures, judged = result.data.get("pictures", {}), result.data["judged"]
    if result.card.kind == "attack":
        pictures, judged = pictures.get(entry, {}), judged[entry]
    images = {"median": judged.get("median", ""), "worst": judged.get("worst_image", "")}
    for what, each in pictures.items():
        yield {"image": images[what], "what": what, **each}
