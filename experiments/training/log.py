"""The log of a training: one row of CSV per report."""

import csv
from dataclasses import astuple, fields
from pathlib import Path

from privlab.base import write_whole
from privlab.training import TrainingProgress


def append(log: Path, now: TrainingProgress) -> None:
    """Add a row to the log; a new log begins with the names of the columns."""
    log.parent.mkdir(parents=True, exist_ok=True)
    head = [] if log.exists() else [tuple(f.name for f in fields(TrainingProgress))]
    with log.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([*head, astuple(now)])


def forget_after(log: Path, step: int) -> None:
    """Drop the rows after a step: steps that were done but not saved are done again."""
    if not log.exists():
        return
    head, *rows = log.read_text(encoding="utf-8").splitlines() or [""]
    kept = [row for row in rows if row.partition(",")[0].isdecimal() and int(row.partition(",")[0]) <= step]
    text = "".join(f"{row}\n" for row in (head, *kept))
    write_whole(log, lambda path: path.write_text(text, encoding="utf-8"))
