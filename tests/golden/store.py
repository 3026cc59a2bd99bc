"""A golden store: small runs over every attack, defense, release, table and audit, equal bit for bit.

    python tests/golden/store.py make DIR [--inputs DIR]   # run all commands, on the inputs of another store
    python tests/golden/store.py compare DIR DIR           # exit status 1 where a record, an image or a line differs

Floats depend on the machine, so both stores are made on one machine. Times, versions and paths are not compared.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import load_file

from privlab.cli import cli

SMALL = ("--model", "vit_ti", "--weights", "random", "--img-size", "32", "--limit", "2", "--public-limit", "24")
CIFAR = ("--model", "cifar_vit_mjp", "--limit", "2", "--public-limit", "24")
FEATURES = ("--release", "features", "--client-batch", "2")
LEARNED = ("inversion-conv", "inversion-mae", "inversion-set", "inversion-token")
"""The attacks that train a decoder."""
FEW = tuple(text for name in LEARNED for key in ("steps=3", "width=32") for text in ("--set", f"{name}.{key}"))
"""Options by which they train small decoders for three steps."""

RUNS: dict[str, tuple[str, ...]] = {
    "settings": ("--model", "cifar_vit,cifar_vit_mjp", "--setting", "a,b,c", "--limit", "2"),
    "predicted": (*CIFAR, "--labels", "predicted", "--setting", "c", "--eight-bit", "--seed", "3"),
    "oracle": (*CIFAR, "--attack", "patch-gradient,mjp-full", "--geometry", "oracle"),
    "reassembled": (*CIFAR, "--defense", "jigsaw", "--gamma", "1", "--geometry", "reassembled"),
    "mp3": (*CIFAR, "--defense", "jigsaw", "--gamma", "1", "--geometry", "reassembled", "--reassembly", "mp3"),
    "nope": ("--model", "cifar_vit_nope", "--limit", "2", "--setting", "a,b"),
    "batch": (*CIFAR, "--gradient-batch", "2"),
    "masked": (*CIFAR, "--masked-pe", "slot", "--setting", "b,c", "--attack", "april,mjp-subspace"),
    "small": (*SMALL, "--setting", "a,c"),
    "matching": (*SMALL, "--attack", "gradient-matching", "--set", "gradient-matching.steps=5"),
    "breaching": (*SMALL, "--attack", "breaching:analytic,breaching:april_analytic"),
    "noise": (*SMALL, "--defense", "gradient-noise", "--draws", "2"),
    "pruning": (*SMALL, "--defense", "gradient-pruning"),
    "quantisation": (*SMALL, "--defense", "gradient-quantisation"),
    "sign": (*SMALL, "--defense", "gradient-sign"),
    "stack": ("--model", "vit_ti_mjp", *SMALL[2:], "--defense", "mjp+gradient-noise", "--setting", "c"),
    "low-pass": (*SMALL, "--defense", "low-pass", "--setting", "b,c"),
    "blur": (*SMALL, "--defense", "blur", "--setting", "c"),
    "cutmix": (*SMALL, "--defense", "cutmix", "--setting", "c"),
    "features": (*CIFAR, *FEATURES, "--defense", "none"),
    "rows": (*CIFAR, *FEATURES, "--defense", "row-permutation"),
    "depth": (*CIFAR, *FEATURES, "--cut-layer", "2", "--attack", "depth-optimisation", "--set", "steps=5"),
    "columns": (*CIFAR, *FEATURES, "--defense", "column-permutation"),
    "shuffle": (*CIFAR, *FEATURES, "--defense", "batch-shuffle"),
    "gaussian": (*CIFAR, *FEATURES, "--defense", "gaussian-noise"),
    "learned": (*CIFAR, *FEATURES, "--defense", "row-permutation", "--attack", ",".join(LEARNED), *FEW),
}
"""Runs of `privlab attack`, by the name of their directory."""

DEFENSES = (
    *("none", "jigsaw", "mjp", "low-pass", "blur", "cutmix", "gaussian-noise", "row-permutation", "column-permutation"),
    *("batch-shuffle", "gradient-noise", "gradient-pruning", "gradient-quantisation", "gradient-sign"),
)
VOLATILE = re.compile(r"seconds|privlab_version|version|hardware|commit|date|started|path|command|memory")
"""Columns and keys that may differ between two runs of one program."""


def run(directory: Path, name: str, *arguments: str) -> None:
    """Run one command in this process, and keep what it printed."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cli.main(list(arguments), prog_name="privlab", standalone_mode=False, obj=arguments)
        except Exception as error:  # a refusal is a result too
            status = 2
            out.write(f"{type(error).__name__}: {error}\n")
    (directory / f"{name}.txt").write_text(out.getvalue().replace(str(directory), "DIR"), encoding="utf-8")
    print(f"{name}: {status}", flush=True)  # noqa: T201


def make(directory: Path, inputs: Path | None) -> None:
    """Run every command into a directory."""
    torch.set_num_threads(1)
    directory.mkdir(parents=True)
    os.environ["PRIVLAB_CACHE"] = str(directory / "cache")  # decoders are trained anew
    if inputs is None:
        make_inputs(directory / "inputs")
    else:
        shutil.copytree(inputs / "inputs", directory / "inputs")
    os.chdir(directory)  # so that what a command is given has one name in both stores
    given = Path("inputs")
    for name, arguments in RUNS.items():
        run(directory, name, "attack", *arguments, "--json", "--out", name)
    step = ("audit", "gradients", str(given / "update.safetensors"), "--model", "cifar_vit", "--json")
    run(directory, "step", *step, "--out", "step")
    run(directory, "scored", *step, "--reference", str(given / "0.png"), "--out", "scored")
    recorded = ("audit", "features", str(given / "recording"), "--model", "cifar_vit", "--public-limit", "24")
    run(directory, "recorded", *recorded, "--json", "--out", "recorded")
    run(directory, "quick", "table", "quick", "--json", "--out", "quick")
    for form in ("latex", "csv", "markdown"):
        run(directory, f"quick-{form}", "table", "quick", "--format", form, "--out", "quick")
    for defense in DEFENSES:
        run(directory, f"admit-{defense}", "admit", defense, "--json")
    for what in ("attacks", "defenses", "victims", "metrics", "experiments"):
        run(directory, f"list-{what}", "list", what, "--json")
    evaluate = ("evaluate", "--model", "cifar_vit,cifar_vit_mjp", "--data", str(given / "classes"), "--json")
    run(directory, "evaluate", *evaluate)
    for recipe in ("classify", "mjp", "mp3", "droppos"):
        model = ("--model", "cifar_vit" if recipe == "classify" else "cifar_vit_mjp")
        training = ("train", recipe, *model, "--data", str(given / "classes"), "--preset", "small", "--epochs", "1")
        options = ("--batch-size", "4", "--precision", "32-true", "--out", recipe)
        run(directory, f"train-{recipe}", *training, *options)


def make_inputs(given: Path) -> None:
    """Write photographs of two classes, a recorded step of training and recorded features."""
    from privlab.images import open_images
    from privlab.release import Recorder
    from privlab.release.capture import capture
    from privlab.victims import victim

    base = victim("cifar_vit")
    model = base.model
    samples = [image for image in open_images("samples", limit=8) if image.pixels]
    given.mkdir(parents=True)
    for number, image in enumerate(samples):
        for split in ("train", "test"):
            folder = given / "classes" / split / str(number % 2)
            folder.mkdir(parents=True, exist_ok=True)
            image.pixels.resize((32, 32)).save(folder / f"{number}.png")
    samples[0].pixels.resize((32, 32)).save(given / "0.png")
    images = torch.stack([base.preprocessing(image.pixels) for image in samples])
    vit = model.vit.requires_grad_(True)
    normalised = (images - model.mean) / model.std
    torch.nn.functional.cross_entropy(vit(normalised[:1]), torch.tensor([3])).backward()
    capture(vit, given / "update.safetensors", batch_size=1)
    session = Recorder(given / "recording", {"model": "cifar_vit"}, on_stop=print).session("s", {})
    with torch.no_grad():
        features = vit._pos_embed(vit.patch_embed(normalised))
    session.inference(features[:4])


def same_tensors(one: Path, other: Path) -> bool:
    """Return whether two files hold the same tensors, to the last bit; metadata may be in any order."""
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def records(store: Path) -> pa.Table | None:
    """Return the records of a run directory, in an order of their own."""
    parts = sorted((store / "records").glob("*.parquet"))
    if not parts:
        return None
    table = pa.concat_tables([pq.read_table(part) for part in parts])
    kept = [name for name in table.column_names if not VOLATILE.search(name)]
    rows = sorted(json.dumps(row, sort_keys=True) for row in table.select(kept).to_pylist())
    return pa.table({"row": rows})


def stripped(text: str) -> str:
    """Return what a command printed without times, versions and paths."""
    try:
        return json.dumps(_without(json.loads(text)), sort_keys=True, indent=1)
    except json.JSONDecodeError:
        return "\n".join(line for line in text.splitlines() if not re.search(r"\bs\b|second|/s|DIR", line))


def _without(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without(kept) for key, kept in value.items() if not VOLATILE.search(key)}
    return [_without(kept) for kept in value] if isinstance(value, list) else value


def differences(one: Path, other: Path) -> Iterator[str]:
    """Yield a line for everything that differs between two stores."""
    names = {path.relative_to(root) for root in (one, other) for path in root.rglob("*") if path.is_file()}
    for name in sorted(name for name in names if not {"inputs", "cache"} & set(name.parts)):
        a, b = one / name, other / name
        if (
            "records" in name.parts
            or name.name in ("run.json", "log.csv", ".lock")
            or name.suffix in (".ckpt", ".jsonl")
        ):
            continue
        if not (a.exists() and b.exists()):
            yield f"{name}: only in {one if a.exists() else other}"
        elif name.suffix == ".png" and not np.array_equal(np.asarray(Image.open(a)), np.asarray(Image.open(b))):
            yield f"{name}: another image"
        elif name.suffix in (".txt", ".tex", ".csv") and stripped(a.read_text()) != stripped(b.read_text()):
            yield f"{name}: another text"
        elif name.suffix == ".safetensors" and not same_tensors(a, b):
            yield f"{name}: other weights"
    for store in sorted({path.parent.name for root in (one, other) for path in root.glob("*/records")}):
        a, b = records(one / store), records(other / store)
        if (a is None) != (b is None) or (a is not None and not a.equals(b)):
            yield f"{store}: other records"


def main() -> None:
    """Make a store, or compare two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("directory", type=Path)
    making.add_argument("--inputs", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("stores", type=Path, nargs=2)
    chosen = parser.parse_args()
    if chosen.command == "make":
        make(chosen.directory.resolve(), chosen.inputs and chosen.inputs.resolve())
        return
    found = list(differences(*chosen.stores))
    print(*(found or ["equal"]), sep="\n")  # noqa: T201
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
