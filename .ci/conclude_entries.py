"""Conclude from the result files of all entries again, and write what `privlab benchmark` keeps of that.

    python .ci/conclude_entries.py

It writes two files of `experiments/benchmark/concluded`. `identity.json` says how often the photograph behind an entry
is recognised among candidates, from what `privlab identify` printed into `experiments/benchmark/identity`.
`standing.json` holds the rows of the table, which `privlab benchmark list` reads while the files are those that it was
made from. Run this after a result file, a file of `identify` or the rule has changed;
`tests/benchmark/test_standing.py` says when.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from privlab.base import PrivlabError, read_text
from privlab.benchmark import TRACKS, Standing, entries, standings
from privlab.benchmark.results import defense_entries
from privlab.benchmark.standing import CONCLUDED, IDENTITY, PACKAGE, Recognised, evidence, hash_of
from privlab.evaluation import CONTROL


def recognised(folder: Path) -> dict[tuple[str, str], Recognised]:
    """Return how often the photograph behind each entry is recognised among candidates, by track and name.

    The table of a file TABLE-pictures.json or TABLE-releases.json has a case for each entry, with the track as its
    group and the name as its label. Of several features, attacks and files the one with the highest rate among the most
    candidates counts.

    Args:
        folder: of the files, each the output of `privlab identify runs/TABLE … --json`.

    Raises:
        PrivlabError: if a file has no rows of `privlab identify`, or names an entry that this package does not have.
    """
    cards = [card for track in TRACKS for card in defense_entries(track)]
    known = {f"{card.track} {card.name}": (card.track, card.name) for card in cards}
    rows = [row for path in sorted(folder.glob("*.json")) for row in _identified(path)]
    for row in rows:
        if row["case"] not in known:
            raise PrivlabError(
                f"'{row['path']}' has the case '{row['case']}'. It must be 'TRACK ENTRY', with an entry of this "
                "package."
            )
    found = {key: _best([row for row in rows if row["case"] == case]) for case, key in known.items()}
    return {key: own for key, own in found.items() if own is not None}


def _identified(path: Path) -> list[Mapping[str, Any]]:
    """Return the rows of a file of `privlab identify --json`, each with the file's path."""
    names = ("case", "attack", "features", "n", "rank_1", "low", "high", "images")
    try:
        rows = json.loads(read_text(path, "file of privlab identify"))["identity"]
        return [{"path": path} | {name: row[name] for name in names} for row in rows]
    except (ValueError, KeyError, TypeError):
        raise PrivlabError(f"'{path}' is not what privlab identify --json prints: it has no rows 'identity'.") from None


def _best(rows: Sequence[Mapping[str, Any]]) -> Recognised | None:
    """Return the best of what was compared for an entry; None of controls alone, or of nothing."""
    most = max((row["n"] for row in rows), default=0)
    controls, attacks = [], []
    for row in rows:
        if row["n"] == most:
            (controls if row["attack"].startswith(CONTROL) else attacks).append(row)
    if not attacks:
        return None
    best = max(attacks, key=lambda row: row["rank_1"])
    table, _, compared = best["path"].stem.rpartition("-")
    by, option = f"{best['features']} of pictures by {best['attack']}", ""
    if compared != "pictures":
        by, option = best["features"].replace("release", compared), f" --compare {compared}"
    run = f"privlab table {table} --images FOLDER --manifest privlab/benchmark/tracks/public.csv"
    return Recognised(
        rate=best["rank_1"],
        low=best["low"],
        high=best["high"],
        images=best["images"],
        among=most,
        control=max((row["rank_1"] for row in controls), default=0.0),
        by=by,
        commands=(run, f"privlab identify runs/{table} --candidates FOLDER --among 2,10,50,500{option} --json"),
        compared=tuple(sorted({row["path"].stem.rpartition("-")[2] for row in attacks})),
    )


def identity_text(found: Mapping[tuple[str, str], Recognised]) -> str:
    """Return the text of `identity.json`, one entry a line."""
    rows = [{"track": track, "name": name, **asdict(own)} for (track, name), own in found.items()]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    return f"[\n{lines}\n]\n"


def standing_text(rows: Sequence[Standing]) -> str:
    """Return the text of `standing.json`: each row, and what `judge` says of the entry."""
    found = [[row.as_json(), row.judged] for row in rows]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in found)
    return f'{{"evidence": "{evidence()}", "sha256": "{hash_of(found)}", "rows": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    IDENTITY.write_text(identity_text(recognised(PACKAGE / "identity")), "utf-8")
    CONCLUDED.write_text(standing_text(standings(entries(), again=True)), "utf-8")
