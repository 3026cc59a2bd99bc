"""The step of on_a_card.py that compares devices: each attack on the CPU and on the card, and what differs."""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

MOST_DB = 0.1
"""Results that differ by more, in dB, are counted separately."""

FINE_DB = 40
"""PSNR from which a difference is no longer to be seen: a solve amplifies rounding errors."""

PARTS = ("below", "above")
"""Results that are not exact, by `FINE_DB`: their number, that within `MOST_DB`, and the largest difference of each."""

BUNDLED: dict[str, dict[str, Any]] = {
    "mjp": {"model": "cifar_vit_mjp27", "settings": ("c",)},
    "april": {"model": "cifar_vit", "block": "april", "attacks": ("april", "breaching:april_analytic")},
    "plain": {"model": "cifar_vit", "settings": ("a",), "attacks": ("patch-gradient", "patch-gradient-prior")},
    "matching": {
        "model": "cifar_vit_mjp27",
        "settings": ("c",),
        "attacks": ("gradient-matching",),
        "options": ("gradient-matching.steps=10",),
    },
}
"""Cases with the whole budget of their attacks; those of test_attacks.py cut searches short."""

SMALL = ("adapter-separation", "qkv-span", "means", "qkv-completion")
"""Cases on 16 × 16 pixels, whose tokens are few enough for the rank that the client trains, or for their cost."""

ON_FEATURES = ("rows", "columns", "batch", "noisy features", "posterior", "filter", "mixture", "depth")
"""Cases whose attacks need photographs of their own, those that are not in the batch; so do attacks on features."""

LONGEST = (
    "short: adapter-separation",
    "short: orthogonal-matching",
    "short: learning-to-invert",
    "short: posterior",
    "matching",
    "mjp",
    "short: staged-likelihood",
    "short: qkv-completion",
    "short: means",
)
"""Cases that are begun first."""

IMAGES = {
    **{"short: adapter-separation": 2, "short: orthogonal-matching": 2, "short: learning-to-invert": 2},
    "short: posterior": 6,
}
"""The most images of cases that take a core a minute for each."""

PLURALS = {"attack": "attacks", "setting": "settings"}
"""Arguments of `privlab.attack`, by the option that test_attacks.py uses."""

WITH_TF32 = ("april", "short: gradient-matching", "short: noise")
"""Cases that run with TF32 allowed too: attacks forbid it, so that the results must be as without."""

ON_OLDER = ("april", "short: update", "short: adam", "short: fedleak", "short: fedavg-matching", "mjp")
"""Cases that differ between devices, and so are compared with the same CPU's older instructions too."""


def write(path: Path, value: object) -> None:
    """Write JSON, whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(value, indent=1))
    beside.replace(path)


def equality_cases(*, few: bool) -> dict[str, dict[str, Any]]:
    """Return cases by name: victims that come with privlab, with every attack that runs on one of them."""
    from privlab.attacks import ATTACKS
    from privlab.threat import Capability, attack_declarations

    spec = importlib.util.spec_from_file_location("card_test_attacks", HERE / "test_attacks.py")
    assert spec is not None
    assert spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    cases = dict(BUNDLED)
    for name, case in tests.CASES.items():
        kind = ATTACKS.get(name)
        if kind and attack_declarations(kind).activation:
            continue  # no bundled victim has it
        options = tests.short(case.get("attack") or tests.default_attacks())
        reads_features = name in ON_FEATURES or (kind and Capability.RELEASED_FEATURES in kind.requires)
        own: dict[str, Any] = {"model": "cifar_vit_mjp27" if "mjp" in case.get("defense", "mjp") else "cifar_vit"}
        own |= {"setting": ("c",)} | case | {"options": (*options, *case.get("options", ()))}
        own = {PLURALS.get(name, name): value for name, value in own.items()}
        own |= {"img_size": 16} if name in SMALL else {}
        own |= {"client_batch": 4} if reads_features else {}
        cases[f"short: {name}"] = own
    cases.pop("short: mjp")
    return {name: cases[name] for name in ("april", "plain", "short: rows")} if few else cases


def compare_devices(given: argparse.Namespace) -> int:
    """Run each case on the CPU and on the card; some on the card with TF32 allowed, and as on an older CPU.

    The scores are written side by side. What is not done after `--seconds` is missing. The status is 1 if something
    failed or is missing, or is exact on one device alone; how many dB others differ by is in the table.
    """
    cases, cores = equality_cases(few=given.few), os.cpu_count() or 1
    pools = {  # workers, device, TF32, the instructions of an older CPU, cases
        "cpu": (max(1, cores - 7), "cpu", False, False, list(cases)),
        "card": (5, given.device, False, False, list(cases)),
        "tf32": (1, given.device, True, False, [name for name in WITH_TF32 if name in cases]),
        "older cpu": (2, "cpu", False, True, [name for name in ON_OLDER if name in cases]),
    }
    if given.device == "cpu":
        pools = {"cpu": (1, "cpu", False, False, list(cases)), "card": (1, "cpu", False, False, list(cases))}
    found: dict[str, dict[str, Any]] = {name: {} for name in cases}
    running: dict[Future[list[dict[str, Any]]], tuple[str, str]] = {}
    context, began = multiprocessing.get_context("spawn"), time.monotonic()
    with contextlib.ExitStack() as stack:
        add_metric(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        for pool, (workers, device, tf32, older, names) in pools.items():
            executor = ProcessPoolExecutor(workers, context, begin_worker, (tf32, older))
            stack.callback(executor.shutdown, wait=False, cancel_futures=True)
            for name in sorted(names, key=lambda name: name not in LONGEST):
                count = min(given.images, IMAGES.get(name, given.images))
                running[executor.submit(run_case, cases[name], device, count)] = (name, pool)
        try:
            for future in as_completed(running, timeout=given.seconds):
                name, pool = running[future]
                found[name][pool] = future.result()
                print(f"{time.monotonic() - began:6.1f} s: {name} ({pool})", flush=True)
                write(given.out, compared(found))
        except TimeoutError:
            for worker in multiprocessing.active_children():
                worker.terminate()
    result = compared(found)
    result["not done"] = [f"{name} ({pool})" for name, pool in running.values() if pool not in found[name]]
    write(given.out, result)
    return 1 if result["not done"] or result["wrong"] else 0


def add_metric(folder: Path) -> None:
    """Let this process and its children find `worst_level` as a metric of another package."""
    info = folder / "card_metric-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: card-metric\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[privlab.metrics]\nworst_level = worst_level:WORST_LEVEL\n")
    sys.path[:0] = [str(folder), str(HERE)]


def begin_worker(tf32: bool, older: bool) -> None:
    """Set up a worker: one core, whether a caller's process allows TF32, and the instructions of its CPU."""
    if older:
        os.environ |= {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    import torch

    torch.set_num_threads(1)
    if tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True


def run_case(case: dict[str, Any], device: str, images: int) -> list[dict[str, Any]]:
    """Return the scores of one case on one device: a row for each attack, geometry and image."""
    import pandas as pd

    import privlab

    given = dict(case)
    model, settings, named = given.pop("model"), given.pop("settings", None), given.pop("attacks", None)
    metrics = "psnr,worst_level"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            how = {"limit": images, "metrics": metrics, "device": device, "progress": False}
            records = privlab.attack(model, settings=settings, attacks=named, **how, **given).records
        except Exception as error:  # a case that cannot run is a row of the result
            return [{"key": "all", "failed": f"{type(error).__name__}: {error}"}]
    rows = []
    for row in records.to_dict("records"):
        key = f"{row['setting']} {row['block']} {row['attack']} {row['geometry']} {row['image']}"
        if str(row["attack"]).startswith("control:"):
            continue
        if row["status"] != "ok":
            rows.append({"key": key, "failed": str(row["reason"])})
            continue
        exact = float(row["worst_level"]) < 0.5
        found = [int(row[name]) for name in ("tokens_found", "tokens_sure") if pd.notna(row.get(name))]
        rows.append(
            {"key": key, "psnr": float(row["psnr"]), "exact": exact, "seconds": row["seconds_attack"], "found": found}
        )
    return rows


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the scores of all devices by case, what each attack's differ by from the CPU's, and what is wrong."""
    wrong, cases = [], {}
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for name, of_pool in found.items():
        if "cpu" not in of_pool:
            continue
        cpu = {row["key"]: row for row in of_pool["cpu"]}
        cases[name] = {pool: summary(rows) for pool, rows in of_pool.items()}
        for pool, rows in of_pool.items():
            if pool == "cpu":
                continue
            table = tables.setdefault(pool, {})
            for row in rows:
                attack = row["key"].split()[2] if " " in row["key"] else row["key"]
                of_attack = table.setdefault(
                    attack, {"rows": 0, "failed": 0, "exact": 0} | {part: [0, 0, 0.0] for part in PARTS}
                )
                of_attack["rows"] += 1
                if said := add(of_attack, cpu.get(row["key"]), row):
                    wrong.append(f"{name}, {pool}: {row['key']}: {said}")
            if left := cpu.keys() - {row["key"] for row in rows}:
                wrong.append(f"{name}, {pool}: {len(left)} rows of the CPU are missing")
    return {"most_db": MOST_DB, "tables": tables, "wrong": wrong, "cases": cases}


def add(of_attack: dict[str, Any], cpu: dict[str, Any] | None, row: dict[str, Any]) -> str | None:
    """Count a result: exact on both devices, or by how much it differs; return what is wrong, if anything is."""
    if cpu is None:
        return "the CPU has no such row"
    if "failed" in row or "failed" in cpu:
        of_attack["failed"] += 1
        return f"{row.get('failed')} (CPU: {cpu.get('failed')})"
    if cpu["exact"] != row["exact"]:
        return f"{row['psnr']:.2f} dB, CPU {cpu['psnr']:.2f}: one is exact"
    if row["exact"]:
        of_attack["exact"] += 1
        return None
    off = abs(cpu["psnr"] - row["psnr"])
    part = of_attack[PARTS[min(cpu["psnr"], row["psnr"]) >= FINE_DB]]
    part[0] += 1
    part[1] += off <= MOST_DB
    part[2] = max(part[2], round(off, 3))
    return None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean PSNR, the number of exact images and the seconds for an image of each attack."""
    made: dict[str, Any] = {}
    for row in rows:
        attack = row["key"].split()[2] if " " in row["key"] else row["key"]
        of_attack = made.setdefault(attack, {"rows": 0, "exact": 0, "psnr": [], "seconds": 0.0, "failed": []})
        of_attack["rows"] += 1
        if "failed" in row:
            of_attack["failed"] = sorted({*of_attack["failed"], row["failed"]})[:3]
            continue
        of_attack["exact"] += row["exact"]
        of_attack["psnr"].append(round(row["psnr"], 2))
        of_attack.setdefault("tokens", []).append(row["found"])
        of_attack["seconds"] = round(float(row["seconds"]), 4)
    return made


def print_equality(equality: dict[str, Any]) -> None:
    """Print by how much the results of each attack differ from the CPU's."""
    for pool, table in equality.get("tables", {}).items():
        print(f"\n{pool} beside CPU{'':12} rows  failed  exact on both", end="")
        print(f"  below {FINE_DB} dB: within {MOST_DB}, most   above: ...")
        for attack, of in sorted(table.items()):
            parts = "".join(f"{of[part][1]:>10} of {of[part][0]:<4}{of[part][2]:>8.2f}" for part in PARTS)
            print(f"  {attack:26}{of['rows']:>6}{of['failed']:>8}{of['exact']:>10}     {parts}")
    for name in ("wrong", "not done"):
        print(f"{name}: {len(equality.get(name, []))}", *equality.get(name, [])[:20], sep="\n  ")
