"""The page of the benchmark: tables, trade-offs, pictures and feeds, from result files alone."""

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, StrictUndefined

from privlab.base import first, printable, write_whole
from privlab.benchmark.cards import UNDEFENDED, Card, file_name
from privlab.benchmark.form import Judged
from privlab.benchmark.results import Result
from privlab.benchmark.rule import FEW, LEVEL, highest, shown_images, standings
from privlab.benchmark.standing import Standing
from privlab.benchmark.tracks import TRACKS, VERSION, Track, track
from privlab.evaluation import CONTROL
from privlab.grids import KNOWN
from privlab.images import data_uri
from privlab.report.tables import load_results, sign_of
from privlab.report.tables.per_image import attack_label
from privlab.stores import pngs

SCHEMA_VERSION = "0.3.0"
"""The version of Every Eval Ever's `eval.schema.json` (github.com/evaleval/every_eval_ever) that records follow."""

KNOWN_SHARES = {"key_recovered": "share of the key", "patches_read": "share of the patches"}
"""What a score is that has no unit."""

_APART = 0.05
"""How far, in dB, the score of a picture may be from that of its row: the run of a picture has its own batches."""

_PNG = "data:image/png;base64,"
"""How a picture of a result must begin: the page loads nothing."""

_LEFT, _WIDTH, _TOP, _HEIGHT, _LINE = 225, 310, 30, 150, 14
"""Where the trade-off is drawn, in units of its picture, its least height, and the height of a name."""


def write_site(results: Iterable[Result], out: Path) -> list[Path]:
    """Write the page and the feeds of the entries' results into a folder, and return the paths."""
    found = site_files(results)
    style, script = (_hash_of(found["table.html"], tag) for tag in ("style", "script"))
    policy = f"default-src 'none'; img-src data:; style-src {style}; script-src {script}; base-uri 'none'; form-action"
    meta = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy} \'none\'">'
    head = f'<!doctype html><html lang="en">{meta}<title>privlab benchmark</title><body>'
    page = f"{head}<h1>privlab benchmark</h1>{found.pop('table.html')}</body></html>\n"
    written = []
    for name, text in {"index.html": page, **found}.items():
        path = out / name
        write_whole(path, lambda draft, text=text: draft.write_text(text, "utf-8"))
        written.append(path)
    return written


def site_files(results: Iterable[Result]) -> dict[str, str]:
    """Return the table as a piece of HTML, the feed, and a record of Every Eval Ever for each entry, by path."""
    rows = standings(results)
    feed = {"version": VERSION, "entries": [row.as_json() for row in rows]}
    records = {
        f"every_eval_ever/{file_name(row.track)}-{file_name(row.name)}.json": _json(evaluation_record(row))
        for row in rows
    }
    return {"table.html": fragment(rows), "feed.json": _json(feed), **records}


def _hash_of(page: str, tag: str) -> str:
    """Return the hash of the one element of a page with this tag, by which its content security policy allows it."""
    text = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: object) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _render(template: str, **values: object) -> str:
    """Return a template of this package with its values; in HTML, texts are escaped."""
    text, html = (files("privlab.benchmark") / "templates" / template).read_text("utf-8"), template.endswith(".html")
    environment = Environment(autoescape=html, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.from_string(text).render(values)


def fragment(rows: Sequence[Standing]) -> str:
    """Return the tables of all tracks that have an entry, as a piece of HTML that needs nothing else."""
    return _render(
        "table.html",
        groups=[_group(track(name), own) for name in TRACKS if (own := [row for row in rows if row.track == name])],
        number=lambda value: "—" if value is None else f"{value:.2f}".replace("-", "−"),
        percent=lambda share: f"{100 * share:.0f}",
        first=first,
        count=_count(rows),
        verdicts=sorted({row.verdict for row in rows}),
        holding=[row for row in rows if row.verdict == "holds" and row.identity and row.identity.above_control],
    )


def _count(rows: Sequence[Standing]) -> dict[str, Any]:
    """Return how many different defenses are measured and known, whatever their parameters, track and entries."""
    own = [(row, "+".join(parts)) for row in rows if row.result and (parts := row.result.card.parts) != (UNDEFENDED,)]
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


def _group(of: Track, rows: Sequence[Standing]) -> dict[str, Any]:
    """Return what the template reads of a track: the rows with their pictures, the commands, and the trade-off."""
    scores = [row.score for row in rows if row.score is not None] or [0.0, 1.0]
    height = max(_HEIGHT, _LINE * len(rows))
    return {
        "track": of,
        "rows": [(row, pictures_of(row)) for row in rows],
        "commands": list(dict.fromkeys(line for row in rows for line in _commands(row))),
        "points": _points(rows, min(scores), max(scores), height),
        "height": height,
        "unit": of.unit.strip() or KNOWN_SHARES[of.lead],
        "low": min(scores),
        "high": max(scores),
    }


def _points(rows: Sequence[Standing], low: float, high: float, height: int) -> list[dict[str, Any]]:
    """Return the points of the trade-off: place, name, the side of the plot with the name, and the height of the name.

    A row without a score or utility has no point. The plot's `height` has room for a name per row.
    """
    points: list[dict[str, Any]] = []
    for row in rows:
        if row.score is not None and row.measured_utility is not None:
            share = (row.score - low) / (high - low) if high > low else 1.0
            y = _TOP + (1 - min(1.0, max(0.0, row.measured_utility))) * (height - 10)
            place = {"x": round(_LEFT + share * _WIDTH, 1), "y": round(y, 1), "left": share < 0.5}
            points.append(place | {"name": row.name, "dominated": row.dominated})
    for left in (True, False):
        side = sorted((point for point in points if point["left"] == left), key=lambda point: point["y"])
        for point, label in zip(side, _spread([point["y"] for point in side], height + _TOP - 10.0), strict=True):
            point["label"] = label
    return points


def _spread(wanted: Sequence[float], lowest: float) -> list[float]:
    """Return a height for each name, at least a line below that of the name before it, and none below `lowest`."""
    heights: list[float] = []
    for i, height in enumerate(wanted):
        after = heights[-1] + _LINE if heights else _TOP
        room = lowest - _LINE * (len(wanted) - 1 - i)  # the names that follow need a line each
        heights.append(round(min(max(height, after), room), 1))
    return heights


def _commands(row: Standing) -> list[str]:
    """Return the commands that measure an entry on the same photographs, and that measure a part of it again."""
    lines: list[str] = []
    for result in _results(row):
        names = (f"cards/{result.path.stem}.toml", f"results/{result.path.stem}.json")
        card, file = (shlex.quote(printable(f"experiments/benchmark/{name}").replace("\n", " ")) for name in names)
        parts, weights = result.parts, _weights(result)
        images = (" --images FOLDER" if "public" in parts else "") + (" --hidden" if "hidden" in parts else "")
        public = " --public OWN" if result.data.get("public_sha256") else ""
        lines.append(f"privlab benchmark submit {card}{images}{public}{weights}")
        lines.append(f"privlab benchmark verify {file}{public}{weights}")
    if row.identity is not None:
        table, *identify = row.identity.commands
        lines += [table + _weights(_results(row)[0]), *identify]
    return lines


def _weights(result: Result) -> str:
    """Return the option of a command that names the weights of a victim that is not in the package."""
    return " --weights FILE" if result.rows.weights.dropna().str.startswith("file:").any() else ""


def _results(row: Standing) -> list[Result]:
    """Return the result of an entry, and those of the attacks that entered."""
    assert row.result is not None
    return [row.result, *row.entered]


def evaluation_record(row: Standing) -> dict[str, Any]:
    """Return an entry as a record of Every Eval Ever: one result for each case, with its confidence interval.

    Scores are continuous; the PSNR of an image that is given back exactly counts as 100 dB.
    """
    of, result = track(row.track), _results(row)[0]
    metric = KNOWN[of.lead]
    text = _render(
        "every_eval_ever.jinja",
        schema_version=SCHEMA_VERSION,
        version=VERSION,
        level=LEVEL,
        row=row,
        data=result.data,
        parameters=dict(result.card.parameters),
        track=of,
        metric=metric,
        most=min(highest(of), metric.range[1]),
    )
    return json.loads(text)


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
        run: returns the run directory that shows the subject of a row.
    """
    found: dict[str, dict[str, Any]] = {}
    for what, image in shown_images(judged).items():
        for row in best_rows(records, card.of, judged["leakiest"], image).head(1).to_dict("records"):
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


def pictures_of(row: Standing) -> list[dict[str, Any]]:
    """Return the pictures of the median and the worst photograph of a row, from its result and those that entered.

    Of several pictures of a photograph the one that leaks most is taken. Where no result has one of it, the entry's own
    picture is used, of the photograph that was the median or the worst one before others entered (`own` is false).
    `score` is that of the picture; `whole` is that of the photograph in the table, which the attacks `by` reach, and
    `shown` says that the picture is theirs.
    """
    of, kept = track(row.track), list[dict[str, Any]]()
    for result in _results(row):
        theirs = result.pictures.get(row.name, {})
        shown = [{**each, "what": what} for what, each in theirs.items()]
        kept += [each for each in shown if all(each[name].startswith(_PNG) for name in ("private", "made"))]
    if not kept:
        return []
    records = pd.concat([result.rows_on(row.name) for result in _results(row)], ignore_index=True)
    found: list[dict[str, Any]] = []
    for what, image in shown_images(row.judged).items():
        ours = [each for each in kept if each["image"] == image]
        if not (able := ours or [each for each in kept if each["what"] == what]):
            continue
        best = max(able, key=lambda each: sign_of(of.lead) * float(each["score"]))
        if (rows := best_rows(records, of, row.judged["leakiest"], best["image"])).empty:
            continue
        whole = min(float(rows[of.lead].iloc[0]), highest(of))
        by = list(dict.fromkeys(map(attack_label, rows.attack, rows.geometry)))
        score, attack = float(best["score"]), attack_label(best["attack"], best["geometry"])
        shown = attack in by and abs(min(score, highest(of)) - whole) <= _APART
        text = {"what": what, "attack": attack, "score": score, "whole": whole, "by": by}
        found.append({**best, **text, "shown": shown, "own": bool(ours)})
    return found
