"""The page: one self-contained HTML file of a directory of results."""

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

import privlab
from privlab.base import first, read_bytes, write_whole
from privlab.evaluation import CONTROL
from privlab.images import data_uri
from privlab.report.evidence import evidence_of, pictures_of, without_folders
from privlab.report.page.data import images_of, page_data, sets_of
from privlab.report.page.overview import answer, flags, lead_text, opening_case, opening_pictures, verdict
from privlab.report.page.pictures import Album, albums
from privlab.report.tables import Facts, Results, apart, apart_lines, case_names, figure_text, scope
from privlab.report.tables.case_verdicts import verdicts_of
from privlab.report.tables.per_image import sign_of


def write_page(results: Results, out: Path) -> Path:
    """Write the page of the results to the file `out` and return its path; only `results` and its directory are read.

    Raises:
        PrivlabError: if the file cannot be written.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.tests["nan"] = math.isnan
    environment.globals["figure"] = figure_text
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
    is_scored = "unscored" not in results.facts  # an audit without a reference has the verdict of its evidence alone
    command = results.facts.get("command") or ""
    command = command if isinstance(command, str) else shlex.join(command)
    found = Facts.of(results)
    verdicts = verdicts_of(found) if is_scored else []
    opens = opening_case(found, verdicts) if verdicts else 0
    evidence = [replace(part, lines=_shorten(part.lines), rows=_shorten(part.rows)) for part in evidence_of(results)]
    leads = bool(verdicts) and not evidence  # an audit leads with its evidence
    return {
        "title": results.title,
        "source": results.source,
        "path": shlex.quote(_shorten(str(results.path))),
        "answer": answer(verdicts[opens]) if leads else "",
        "opens": opens,
        "version": privlab.__version__,
        "css": Markup(css),
        "js": Markup(js),
        "hashes": {"css": _digest(css), "js": _digest(js)},
        "counts": _counts(results),
        "evidence": evidence,
        "reconstructions": _reconstructions(results),
        "paper_attack": results.layout.paper_attack,
        "interval": f"{results.layout.interval:.0%}",
        "lead": lead_text(results) if is_scored else [],
        "scope": scope(results.records),
        "case_verdicts": verdicts,
        "lead_metric": results.lead,
        "members": apart_lines(apart(results)),
        "flags": flags(results),
        "verdicts": [verdict(results, name) for name in results.layout.columns if sign_of(name) and is_scored],
        "tables": [(name, [(key, _shorten(value)) for key, value in rows]) for name, rows in _tables(results)],
        "facts": json.dumps(_shorten(results.facts), indent=2, ensure_ascii=False, default=str),
        "command": _shorten(command),
    } | _script_data(results, opens if leads else None)


def _script_data(results: Results, opens: int | None) -> dict[str, Any]:
    """Return the data of the script, the albums, how many images the page shows, and those of the case it opens on."""
    if results.records.empty:
        return {"data": "", "albums": {}, "opening": []}
    images = images_of(results.records)
    sets = sets_of(results, images)
    held = albums(results, images, sets)
    by_sha256 = {sha256: held[n] for sha256, n in zip(images.image_sha256, images.number, strict=True) if n in held}
    fed = any(what.endswith("/fed") for album in held.values() for what in album.of)
    kept = "pictures" if any((results.path / "pictures").glob("*/")) else "strips"
    return {
        "data": _script(page_data(results, images, sets, fed=fed, kept=kept)),
        "opening": [] if opens is None else opening_pictures(results, opens, by_sha256),
        "albums": {number: _script(asdict(album)) for number, album in held.items()},
        "pictures": _pictures(held, len(images), kept),
    }


def _reconstructions(results: Results) -> list[tuple[str, str]]:
    """Return the first reconstructions of an audit, as the names of their attacks and data."""
    shown = pictures_of(results)[:_MOST_VALUES]
    return [(attack, data_uri("png", read_bytes(path, "image"))) for attack, path in shown]


def _script(data: object) -> Markup:
    """Return JSON without <, & and >, so that it cannot end a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _digest(text: str) -> str:
    """Return the hash by which the page's own security policy allows a script or a style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _pictures(held: Mapping[int, Album], images: int, kept: str) -> dict[str, Any]:
    """Return how many images are shown, in full size, as thumbnails, and without their reconstructions."""
    shown = [album for album in held.values() if album.of]
    whole = [album for album in shown if None not in album.full]
    alone = [album for album in shown if all(what.endswith("/private") for what in album.of) and album not in whole]
    counts = {"images": images, "shown": len(shown), "whole": len(whole), "alone": len(alone)}
    return {**counts, "unread": sum(album.unread for album in held.values()), "kept": kept}


def _counts(results: Results) -> dict[str, int]:
    """Return the numbers of cases, images, attacks, controls, records and failures."""
    records = results.records
    control = records.attack.str.startswith(CONTROL).astype(bool)
    return {
        "case": len(results.cases),
        "image": len(records[["image", "image_sha256"]].drop_duplicates()),
        "attack": records.attack[~control].nunique(),
        "control": records.attack[control].nunique(),
        "record": len(records),
        "failed": int((records.status != "ok").sum()),
    }


_STATED = ("victim", "weights", "block", "defense", "setting", "release", "label_origin", "seed", "draw", "dtype")
_STATED += ("device", "privlab_version")
_RUN = ("started", "written", "seconds", "status", "engine", "workers")


def _tables(results: Results) -> list[tuple[str, list[tuple[str, object]]]]:
    """Return what was run, the paper's conditions, versions and hardware, as tables of two columns."""
    facts, records = results.facts, results.records
    run: dict[str, object] = {
        name.replace("_", " "): first(map(str, records[name].dropna().unique()), 12)
        for name in _STATED
        if name in records
    }
    run |= {name: facts.get(name) for name in _RUN}
    run["images"] = (facts.get("images") or {}).get("source")
    run["commit"] = ", ".join(f"{name} {value}" for name, value in (facts.get("commit") or {}).items())
    options = [", ".join(f"{name} {value}" for name, value in case.options.items()) for case in results.cases]
    return [
        ("What was run", [(name, value) for name, value in run.items() if value not in (None, "")]),
        ("Cases", list(zip(case_names(results), options, strict=True))),
        ("The paper's conditions", [*results.conditions.items()]),
        ("Versions", [*(facts.get("versions") or {}).items()]),
        ("Hardware", [*(facts.get("hardware") or {}).items()]),
    ]


def _shorten(facts: Any) -> Any:  # noqa: ANN401
    """Return the facts with long lists cut and without the folders of this machine.

    The hashes of the images would otherwise hide everything else.
    """
    if isinstance(facts, str):
        return without_folders(facts)
    if isinstance(facts, Mapping):
        return {str(name): _shorten(value) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        rest = [f"… {len(facts) - _MOST_VALUES} more"] if len(facts) > _MOST_VALUES else []
        return [_shorten(value) for value in facts[:_MOST_VALUES]] + rest
    return facts


_MOST_VALUES = 20
"""The most values of a column that the page lists, and the most reconstructions next to the evidence of an audit."""
