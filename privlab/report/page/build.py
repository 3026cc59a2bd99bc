"""The page: one self-contained HTML file of a directory of results."""

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

import privlab
from privlab.base import first, write_whole
from privlab.evaluation import CONTROL
from privlab.report.page.data import images_of, page_data, scores_of
from privlab.report.page.overview import flags, lead_text, verdict
from privlab.report.page.pictures import Album, albums, order_of
from privlab.report.tables import Facts, Results, apart, apart_lines, case_names, scope
from privlab.report.tables.case_verdicts import verdicts_of
from privlab.report.tables.per_image import sign_of


def write_page(results: Results, out: Path) -> Path:
    """Write the page of the results to the file `out` and return its path; only `results` and its directory are read.

    Raises:
        PrivlabError: if the file cannot be written.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    page = environment.from_string(_part("page.html")).render(_context(results))
    write_whole(
        out,
        lambda draft: draft.write_text(page, encoding="utf-8", errors="backslashreplace", newline="\n"),
        durable=False,
        place="file",
    )
    return out


def _part(name: str) -> str:
    return (files("privlab.report.page") / name).read_text("utf-8")


def _context(results: Results) -> dict[str, Any]:
    """Return the variables of the template."""
    css, js = _part("page.css"), _part("page.js")
    command = results.facts.get("command") or ""
    return {
        "title": results.title,
        "source": results.source,
        "path": shlex.quote(str(results.path)),
        "version": privlab.__version__,
        "css": Markup(css),
        "js": Markup(js),
        "hashes": {"css": _digest(css), "js": _digest(js)},
        "counts": _counts(results),
        "paper_attack": results.layout.paper_attack,
        "interval": f"{results.layout.interval:.0%}",
        "lead": [*lead_text(results), scope(results.records)],
        "case_verdicts": verdicts_of(Facts.of(results)),
        "lead_metric": results.lead,
        "members": apart_lines(apart(results)),
        "flags": flags(results),
        "verdicts": [verdict(results, name) for name in results.layout.columns if sign_of(name)],
        "tables": _tables(results),
        "facts": json.dumps(_shorten(results.facts), indent=2, ensure_ascii=False, default=str),
        "command": command if isinstance(command, str) else shlex.join(command),
    } | _script_data(results)


def _script_data(results: Results) -> dict[str, Any]:
    """Return the data of the script, the albums, and a sentence on how many images the page shows."""
    if results.records.empty:
        return {"data": "", "albums": {}, "pictures": ""}
    images = images_of(results.records)
    scores = scores_of(results, images)
    held = albums(results, list(images.image_sha256), scores, order_of(scores, results.lead, len(images)))
    fed = any(what.endswith("/fed") for album in held.values() for what in album.of)
    kept = "pictures" if any((results.path / "pictures").glob("*/")) else "strips"
    return {
        "data": _script(page_data(results, images, scores, fed=fed, kept=kept)),
        "albums": {number: _script(asdict(album)) for number, album in held.items()},
        "pictures": _size_text(held, len(images), kept),
    }


def _script(data: object) -> Markup:
    """Return JSON without <, & and >, so that it cannot end a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _digest(text: str) -> str:
    """Return the hash by which the page's own security policy allows a script or a style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _size_text(held: Mapping[int, Album], images: int, kept: str) -> str:
    """Return a sentence on how many images are shown in full size, as thumbnails, and not at all."""
    shown = [album for album in held.values() if album.of]
    if not shown:
        return "No images were kept in this directory."
    whole = sum(album.whole for album in shown)
    alone = sum(not album.whole and all(what.endswith("/private") for what in album.of) for album in shown)
    parts = [f"{whole:,} of {images:,} images are shown in full size"]
    if whole < len(shown):
        parts.append(f"{len(shown) - whole - alone:,} as thumbnails")
    if alone:
        parts.append(f"{alone:,} without their reconstructions")
    if len(shown) < images:
        parts.append(f"{images - len(shown):,} have no image")
    text = ", ".join(parts) + "."
    if whole < len(shown):
        text += f" The others lie in the directory, under {kept}/. Best, median and worst scores come first."
    if unread := sum(album.unread for album in held.values()):
        text += f" {unread:,} files could not be read as images."
    return text


def _counts(results: Results) -> list[tuple[str, int]]:
    """Return the numbers of cases, images, attacks, controls, records and failures, with their names."""
    records = results.records
    control = records.attack.str.startswith(CONTROL).astype(bool)
    counts = {
        "case": len(results.cases),
        "image": records[["image", "image_sha256"]].drop_duplicates().shape[0],
        "attack": records.attack[~control].nunique(),
        "control": records.attack[control].nunique(),
        "record": len(records),
    }
    failed = int((records.status != "ok").sum())
    return [*((name if n == 1 else f"{name}s", n) for name, n in counts.items()), ("failed", failed)]


_STATED = ("victim", "weights", "block", "defense", "setting", "release", "label_origin", "seed", "draw", "dtype")
_STATED += ("device", "privlab_version")
_RUN = ("started", "written", "seconds", "status", "engine", "workers")


def _tables(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return what was run, the paper's conditions, versions and hardware, as tables of two columns."""
    facts, records = results.facts, results.records
    stated = {name: records[name].dropna().unique() for name in _STATED if name in records}
    run = [(name.replace("_", " "), first(map(str, values), 12)) for name, values in stated.items()]
    run += [(name, str(facts[name])) for name in _RUN if facts.get(name) is not None]
    run += [("images", str((facts.get("images") or {}).get("source") or ""))]
    run += [("commit", ", ".join(f"{name} {value}" for name, value in (facts.get("commit") or {}).items()))]
    options = [", ".join(f"{name} {value}" for name, value in case.options.items()) for case in results.cases]
    tables = [
        ("What was run", [(name, value) for name, value in run if value]),
        ("Cases", list(zip(case_names(results), options, strict=True))),
        ("The paper's conditions", [(name, str(value)) for name, value in results.conditions.items()]),
        ("Versions", _pairs(facts.get("versions"))),
        ("Hardware", _pairs(facts.get("hardware"))),
    ]
    return [(name, rows) for name, rows in tables if rows]


def _pairs(facts: object) -> list[tuple[str, str]]:
    if not isinstance(facts, Mapping):
        return []
    return [(str(name), "not there" if value is None else str(value)) for name, value in facts.items()]


def _shorten(facts: object) -> object:
    """Return the facts with long lists cut; the hashes of the images would otherwise hide everything else."""
    if isinstance(facts, Mapping):
        return {str(name): _shorten(value) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        rest = [f"… {len(facts) - _MOST_VALUES} more"] if len(facts) > _MOST_VALUES else []
        return [_shorten(value) for value in facts[:_MOST_VALUES]] + rest
    return facts


_MOST_VALUES = 20
"""The most values of a column that the page lists."""
