"""The page of the benchmark: tables, trade-offs, pictures and feeds, from result files alone."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from privlab.base import write_whole
from privlab.benchmark.judged import LEVEL
from privlab.benchmark.results import Result
from privlab.benchmark.rule import FEW, Standing, standings
from privlab.benchmark.tracks import TRACKS, VERSION, Track, track
from privlab.evaluation import EXACT_DB
from privlab.grids import KNOWN
from privlab.report.tables import sign_of

__all__ = ["SCHEMA_VERSION", "evaluation_record", "fragment", "site_files", "write_site"]

SCHEMA_VERSION = "0.2.1"
"""The version of Every Eval Ever's `eval.schema.json` (github.com/evaleval/every_eval_ever) that records follow."""

_LEFT, _WIDTH, _TOP, _HEIGHT = 48, 300, 15, 195
"""Where the trade-off is drawn, in units of its picture; names of entries stand to the right of their points."""


@dataclass(frozen=True)
class _Point:
    """An entry in the trade-off: its name, its place, and how far its name is moved so that names do not cover."""

    name: str
    x: float
    y: float
    dominated: bool
    shift: int


@dataclass(frozen=True)
class _Group:
    """The rows of a track, and what is drawn of them."""

    track: Track
    rows: Sequence[Any]
    points: Sequence[_Point]
    unit: str
    low: float
    high: float


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
    records = {f"every_eval_ever/{row.track}-{row.name}.json": _json(evaluation_record(row)) for row in rows}
    return {"table.html": fragment(rows), "feed.json": _json(feed(rows)), **records}


def _json(data: object) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def fragment(rows: Sequence[Standing]) -> str:
    """Return the tables of all tracks that have an entry, as a piece of HTML that needs nothing else.

    Args:
        rows: those of `standings`.
    """
    text = (files("privlab.benchmark") / "templates" / "table.html").read_text("utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    groups = [_group(track(name), own) for name in TRACKS if (own := [row for row in rows if row.track == name])]
    return environment.from_string(text).render(groups=groups, number=_number, count=_count(rows))


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


def _group(of: Track, rows: Sequence[Standing]) -> _Group:
    scores = [row.worst_case for row in rows if row.worst_case is not None]
    low, high = (min(scores), max(scores)) if scores else (0.0, 1.0)
    placed = [row for row in rows if row.worst_case is not None and row.measured_utility is not None]
    placed.sort(key=lambda row: row.measured_utility or 0.0, reverse=True)
    points: list[_Point] = []
    for row in placed:
        share = ((row.worst_case or 0.0) - low) / (high - low) if high > low else 0.5
        x, y = _LEFT + share * _WIDTH, _TOP + (1 - min(1.0, max(0.0, row.measured_utility or 0.0))) * _HEIGHT
        near = sum(abs(each.y - y) < 12 and abs(each.x - x) < 100 for each in points)
        points.append(_Point(row.name, round(x, 1), round(y, 1), row.dominated, 4 + 11 * near))
    unit = "dB" if of.lead == "psnr" else "share of the key"
    return _Group(of, [_shown(row) for row in rows], points, unit, low, high)


def _shown(row: Standing) -> dict[str, Any]:
    """Return a row as the template reads it: with its pictures, its commands, and what its card alone states."""
    assert row.result is not None
    commands = [line for each in (row.result, *row.entered) for line in _commands(each)]
    return {**row.as_json(), "shown": row.result.data.get("pictures", {}), "commands": commands} | {
        "stated_alone": row.result.card.stated_alone
    }


def _commands(result: Result) -> Sequence[str]:
    """Return the commands that measure an entry on the same photographs, and that measure a part of it again."""
    folder, stem, parts = "experiments/benchmark", result.path.stem, result.data["photographs"]
    images = (" --images FOLDER" if "public" in parts else "") + (" --hidden" if "hidden" in parts else "")
    public = " --public OWN" if result.data.get("public_sha256") else ""
    submit = f"privlab benchmark submit {folder}/cards/{stem}.toml{images}{public}"
    return submit, f"privlab benchmark verify {folder}/results/{stem}.json{public}"


def feed(rows: Sequence[Standing]) -> dict[str, Any]:
    """Return the rows of all tracks as JSON.

    Args:
        rows: those of `standings`.
    """
    return {"version": VERSION, "entries": [row.as_json() for row in rows]}


def evaluation_record(row: Standing) -> dict[str, Any]:
    """Return an entry as a record of Every Eval Ever: one result for each case, with its confidence interval.

    Scores are continuous; the PSNR of an image that is given back exactly counts as 100 dB.

    Args:
        row: one of `standings`, with its result.
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
            },
        },
        "evaluation_results": [_case(row, name) for name in row.judged.worst],
        "dedupe_identity": {"content_hash": data["signature"]["sha256"], "hash_algorithm": "sha256"},
    }


def _case(row: Standing, name: str) -> dict[str, Any]:
    assert row.judged is not None
    of, score = track(row.track), row.judged.worst[name]
    metric = KNOWN[of.lead]
    high = EXACT_DB if of.lead == "psnr" else metric.range[1]
    capped = {
        key: min(high, value) for key, value in (("score", score.mean), ("lower", score.low), ("upper", score.high))
    }
    uncertainty: dict[str, Any] = {"num_samples": score.images}
    if capped["lower"] == capped["lower"]:  # one image has no interval
        interval = {"lower": capped["lower"], "upper": capped["upper"], "confidence_level": LEVEL}
        uncertainty["confidence_interval"] = interval | {"method": "percentile bootstrap over photographs"}
    return {
        "evaluation_name": f"{VERSION}/{row.track}: {name}, worst case by {of.lead}",
        "source_data": {"dataset_name": ", ".join(row.photograph_parts) or "keys", "source_type": "other"},
        "metric_config": {
            "evaluation_description": f"{metric.source}; the leakiest attack of each photograph, mean over photographs",
            "lower_is_better": sign_of(of.lead) > 0,
            "score_type": "continuous",
            "min_score": 0.0,
            "max_score": high,
        },
        "score_details": {"score": capped["score"], "uncertainty": uncertainty},
    }
