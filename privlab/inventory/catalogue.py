"""The installed victims, attacks, defenses, metrics and experiments, as rows."""

from collections.abc import Mapping
from dataclasses import fields, replace

from privlab.attacks import attacks
from privlab.base import warn
from privlab.defenses import defenses
from privlab.experiments.tables.named import experiment_names, find_experiment
from privlab.grids import read_experiment
from privlab.inventory.texts import docstrings
from privlab.metrics import METRICS, PLACEMENT
from privlab.metrics.names import LPIPS
from privlab.threat import Capability, acts_on, attack_declarations
from privlab.victims import ARCHITECTURES, ZOO, victim_names

Listing = Mapping[str, object]

_RELEASED = ((Capability.CLIENT_UPDATE, "update"), (Capability.RELEASED_FEATURES, "features"))
"""What an attack is for that needs a capability; others are for gradients, and may read updates too."""


def catalogue(what: str) -> list[Listing]:
    """Return the rows of "victims", "attacks", "defenses", "metrics" or "experiments"."""
    kinds = {"victims": _victims, "attacks": _attacks, "defenses": _defenses, "metrics": _metrics}
    return (kinds | {"experiments": _experiments})[what]()


def _victims() -> list[Listing]:
    variants = {"_nope": "no position embeddings", "_mjp": "with MJP's unknown position embedding"}
    rows: list[Listing] = []
    for name in victim_names():
        base = name.removesuffix("_nope").removesuffix("_mjp")
        note = variants.get(name.removeprefix(base), "plain") if base in ARCHITECTURES else "from another package"
        if name in ZOO:
            note, base = f"trained, comes with privlab: {ZOO[name].about}", ZOO[name].architecture
        rows.append({"name": name, "timm": ARCHITECTURES.get(base, ""), "variant": note})
    return [*rows, {"name": "timm:NAME", "timm": "NAME", "variant": "any ViT of timm with one linear patch embedding"}]


def _attacks() -> list[Listing]:
    return [
        {
            "name": name,
            "released": next((what for capability, what in _RELEASED if capability in kind.requires), "gradients"),
            "does": docstrings(name)[0].summary,
            "paper": kind.paper,
            "needs": ", ".join(sorted(capability.value for capability in kind.requires)),
            "reads": ", ".join(declared.parameters or declared.if_released or ("the sent features",)),
            "runs": "if named" if declared.named_only else f"from effort {declared.effort}",
        }
        for name, kind in attacks().items()
        for declared in [attack_declarations(kind)]
    ]


def _defenses() -> list[Listing]:
    return [
        {
            "name": name,
            "acts on": acts_on(kind),
            "paper": kind.paper,
            "options": ", ".join(f"{f.name}={f.default!r}" for f in fields(kind)),
        }
        for name, kind in defenses().items()
    ]


def _metrics() -> list[Listing]:
    for reason in METRICS.broken.values():
        warn(reason)
    return [
        {
            "name": m.name,
            "leaks": f"{m.arrow} {m.direction}",
            "range": f"[{m.range[0]:g}, {m.range[1]:g}]",
            "source": m.source,
        }
        for m in [*METRICS.values(), _LPIPS, *PLACEMENT.values()]
    ]


_LPIPS = replace(METRICS["lpips_alex"], name=LPIPS, source="lpips_alex where it can be had, else lpips_squeeze")
"""What `--metrics lpips` stands for, which is the default."""


def _experiments() -> list[Listing]:
    found = [read_experiment(find_experiment(name)) for name in experiment_names()]
    return [
        {"name": e.name, "title": e.title, "published figures": e.source or "", "cases": len(e.cases)} for e in found
    ]
