"""What the examples of the pages measured: `measured.json`, which `.ci/measure_examples.py` writes."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["describe", "measured"]


@cache
def measured() -> Mapping[str, Mapping[str, Any]]:
    """Return what was measured, by the name of the attack or the defense."""
    return json.loads(files("privlab.inventory").joinpath("measured.json").read_text("utf-8"))


def describe(name: str, command: str) -> str:
    """Return a sentence with what the example of a page measured, or "" if nothing was.

    Args:
        name: of an attack or a defense.
        command: its example. Figures of another command are not shown.
    """
    found = measured().get(name)
    if found is None or found["command"] != command:
        return ""
    mean, *interval = found["psnr"]  # one image has no interval
    within = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    count = f"{found['images']} photograph{'s' * (found['images'] > 1)}"
    who = "The attack" if found["attack"] == name else f"The leakiest attack is `{found['attack']}`: it"
    words = command.split()
    side = words[words.index("--img-size") + 1] if "--img-size" in words else "32"
    return (
        f"The example attacks {count} of scikit-image at {side}×{side} pixels. {who} has a PSNR of {mean:.2f} "
        f"dB{within}, and gives {found['exact']} back exactly; the leakiest control, `{found['control']}`, has "
        f"{found['control_psnr']:.2f} dB. The attack took {found['seconds']:g} s an image on one shared core. "
        "These photographs are few and small: figures to quote are those of the studies."
    )
