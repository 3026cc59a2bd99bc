"""Run the example of each attack's and each defense's page, and write `privlab/inventory/measured.json`.

    python .ci/measure_examples.py                  # all but those of breaching
    python .ci/measure_examples.py mjp-full mjp     # these pages alone; the others stay as they are

The pages and `privlab explain` print these figures next to the command.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from scipy import stats

from privlab.attacks import ATTACKS
from privlab.defenses import DEFENSES
from privlab.inventory.explain import explain

FILE = Path("privlab/inventory/measured.json")
LIMIT = 600
"""Seconds that an example may take; one that takes longer is named, and has no figure."""


def measure(name: str) -> dict[str, object] | None:
    """Return what the example of a page measures, or None if it takes too long or leaves no score."""
    command = explain(name).sections["Example"].strip()
    with tempfile.TemporaryDirectory() as folder:
        words = [str(Path(sys.executable).with_name("privlab")), *shlex.split(command)[1:]]
        more = ["--json", "--quiet", "--no-strips", "--workers", "1", "--out", f"{folder}/run"]
        try:
            done = subprocess.run([*words, *more], capture_output=True, text=True, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: more than {LIMIT} s", flush=True)
            return None
        if done.returncode:
            print(f"{name}: {done.stderr.splitlines()[-1]}", flush=True)
            return None
        records = pd.read_parquet(f"{folder}/run/records")
    measured = json.loads(done.stdout)["verdicts"][0]["measure"]
    if measured["metric"] != "psnr":  # all figures of the file are in dB
        print(f"{name}: its verdict is by {measured['metric']}, and only PSNR is kept", flush=True)
        return None
    own = records[records.attack == measured["attack"]]
    scores = own[own.geometry == own.geometry.iloc[0]].psnr.clip(upper=200.0)
    mean = float(scores.mean())
    half = float(stats.t.ppf(0.975, len(scores) - 1) * scores.sem()) if len(scores) > 1 else 0.0
    return {
        "command": command,
        "attack": measured["attack"],
        "images": len(scores),
        "exact": measured["exact"],
        "psnr": [round(value, 2) for value in (mean, mean - half, mean + half)],
        "control": measured["control"],
        "control_psnr": round(measured["control_mean"], 2),
        "seconds": float(f"{own.seconds_attack.mean():.2g}"),
    }


def chosen(names: list[str]) -> Iterator[str]:
    """Yield the names that were given, or all that have a page with an example that ends."""
    yield from names or [name for name in (*ATTACKS, *DEFENSES) if not name.startswith("breaching:")]


def main() -> None:
    """Measure, and write after each page."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    for name in chosen(sys.argv[1:]):
        found.pop(name, None)
        if figures := measure(name):
            found[name] = figures
            print(name, figures, flush=True)
        FILE.write_text(json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
