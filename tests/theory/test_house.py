"""The house plan: nothing imports upward, and attacks and defenses do not know each other."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = [
    {"base", "errors", "registry", "draws", "patches", "permutation", "model", "threat"},
    {"victims", "backbones", "relative", "zoo", "weights", "images", "sources", "datasets", "labels", "decode"}
    | {"manifest", "gradients", "stack", "features", "options", "training", "decoders", "inversion"}
    | {"effects", "photographs", "public", "reconstruction"}
    | {"layouts", "keyed", "keyed_text", "keyfile", "encrypted", "tampering", "borders", "jigsaw", "reassembly"}
    | {"recipes", "evaluation", "robustness", "shelf", "positions", "position_accuracy"}
    | {"capture", "recording", "released", "labels_from_gradients", "labels_by_rank"}
    | {"reference", "residual", "updates"},
    {
        "attacks",
        "defenses",
        "metrics",
        "pair",
        "window",
        "lpips_backbones",
        "f_sim",
        "placement",
        "reconstruction_bound",
    },
    {"plan", "records", "trial", "controls", "geometries", "evaluate", "experiment"},
    {
        "store",
        "strips",
        "machine",
        "subjects",
        "run",
        "audit",
        "audit_gradients",
        "audit_reference",
        "split",
        "experiments",
    }
    | {"lessons", "judgement"}
    | {"admission", "admission_claims", "admission_measures"}
    | {"tasks", "grid", "engines", "table", "maintenance", "external"},
    {"report", "bench"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS, 1) for room in rooms}


def rooms() -> list[tuple[str, Path]]:
    """Return (room, file) of every source file."""
    inside = [(path.stem, path) for path in (ROOT / "privlab").glob("*.py") if path.stem != "__init__"]
    inner = [f"privlab/{name}" for name in ("base", "bench", "cli", "recipes", "report", "split", "training")]
    for folder in (*inner, "attacks", "defenses", "experiments"):
        inside += [(Path(folder).name, path) for path in (ROOT / folder).glob("*.py")]
    return inside


def imported(path: Path) -> set[str]:
    """Return the rooms of privlab that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module == "privlab":
            names = [f"privlab.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("privlab.")}
    return found & set(FLOOR)


def test_every_file_has_a_floor() -> None:
    assert {room for room, _ in rooms()} == set(FLOOR)


def test_nothing_imports_upward() -> None:
    upward = [(room, other) for room, path in rooms() for other in imported(path) if FLOOR[other] > FLOOR[room]]
    assert upward == []


def test_attacks_and_defenses_do_not_import_each_other() -> None:
    seen = {
        room: set().union(*(imported(path) for r, path in rooms() if r == room)) for room in ("attacks", "defenses")
    }
    assert "defenses" not in seen["attacks"]
    assert "attacks" not in seen["defenses"]
    assert "threat" in seen["attacks"]
