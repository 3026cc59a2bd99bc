"""Mutated files of each kind that privlab reads: each is read, or refused with one line, and nothing else happens."""

import json
import os
import random
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from privlab.base import PrivlabError
from privlab.benchmark.cards import read_card
from privlab.benchmark.results import PACKAGE, read_result
from privlab.evaluation import SCHEMA
from privlab.grids import read_experiment
from privlab.images.archives import arrays, tars
from privlab.images.datasets import parquet
from privlab.images.decode import Slice, count_slices, read_image
from privlab.images.manifest import read_manifest
from privlab.keys import ModelShape, load_key, new_key, save_key
from privlab.release.gradient_file import read_gradient_file
from privlab.release.recording import Recorder, read_recording
from privlab.report.tables.results import load_results
from privlab.stores import RunDirectory, places_of
from privlab.victims.weights import read_state

MUTATIONS = int(os.environ.get("PRIVLAB_MUTATIONS", "40"))
SECONDS, MEBIBYTES = 30.0, 4096
"""The most that reading one file may take; the memory is the peak of a process that reads all of a kind."""

TEXTS = ("[" * 3000, "\x00", "1e999", "-1", "9" * 5000, '"\x1b[2J"', "null", "../../..", "=1+1", "\u202e")
"""What is put into texts."""


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return a file that is cut, has bits flipped where its structure is, or holds what does not belong there."""
    kind, at = rng.randrange(6), rng.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.choice(TEXTS).encode() + data[at:]
    if kind == 2:
        return data[:at] + data[at + rng.randrange(1, 50) :]
    if kind == 3:
        return data[:at] + data[: rng.randrange(len(data) + 1)]
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 8)):
        place = min(int(rng.expovariate(0.01)), len(changed) - 1)
        if kind == 5:  # the end, where Parquet and zip archives have their structure
            place = len(changed) - 1 - place
        changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


def write_run(path: Path) -> Path:
    """Write a run with one record, and return the folder."""
    run = RunDirectory.create(path)
    facts = {"specification": {"metrics": ["psnr"]}, "status": "finished", "written": "2026"}
    run.write_run(facts)
    names = {"cell": "c", "attack": "april", "geometry": "in_place", "status": "ok", "victim": "v", "setting": "a"}
    run.write_records([{**names, "schema": SCHEMA, "image": "x", "image_sha256": "0" * 64, "psnr": 1.0}])
    return path


Made = tuple[Path, Callable[[Path], object]]


def text_file(name: str, text: str, read: Callable[[Path], object]) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        (folder / name).write_text(text)
        return folder / name, read

    return make


def tensors(
    name: str, read: Callable[[Path], object], metadata: dict[str, str] | None = None
) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=24, num_heads=3)
        save_file({name: value.clone() for name, value in model.state_dict().items()}, folder / name)
        return folder / name, read

    return make


def torch_file(folder: Path) -> Made:
    torch.save({"model": {"a": torch.zeros(3), "b": torch.ones(2, 2)}, "epoch": 3}, folder / "a.pt")
    return folder / "a.pt", read_state


def npz(folder: Path) -> Made:
    np.savez(folder / "a.npz", a=np.zeros(3), b=np.ones((2, 2)))
    return folder / "a.npz", read_state


def table(folder: Path) -> Made:
    pq.write_table(pa.table({"image": [b"x", b"y"], "label": [1, 2], "split": ["a", "b"]}), folder / "a.parquet")
    return folder / "a.parquet", parquet


def picture(form: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        pixels = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"a.{form}")

        def read(path: Path) -> None:
            if (problem := read_image(path).problem) is not None:
                raise PrivlabError(problem)

        return folder / f"a.{form}", read

    return make


def images_npz(folder: Path) -> Made:
    np.savez(folder / "a.npz", images=np.zeros((3, 16, 16, 3), np.uint8), labels=np.arange(3))
    return folder / "a.npz", lambda path: [*arrays(path)]


def images_tar(folder: Path) -> Made:
    picture("png")(folder)
    (folder / "a.json").write_text('{"label": 3}')
    with tarfile.open(folder / "a.tar", "w") as archive:
        for name in ("a.png", "a.json"):
            archive.add(folder / name, name)
    return folder / "a.tar", lambda path: [*tars({"a.tar": path}, frozenset({".png"}))]


def dicom(folder: Path) -> Made:
    data = pytest.importorskip("pydicom.data")
    path = data.get_testdata_file("CT_small.dcm", download=False)
    (folder / "a.dcm").write_bytes(Path(path).read_bytes())
    return folder / "a.dcm", volume


def nifti(folder: Path) -> Made:
    nibabel = pytest.importorskip("nibabel")
    voxels = np.random.default_rng(0).integers(0, 255, (16, 16, 4), np.uint8)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / "a.nii.gz")
    return folder / "a.nii.gz", volume


def volume(path: Path) -> None:
    """Read the slices of a file as `open_images` does, whose errors become problems of images."""
    try:
        count = count_slices(path)
    except Exception as error:
        raise PrivlabError(" ".join(str(error).split())) from None
    sources = [path] if count is None else [Slice(path, index) for index in range(min(count, 8))]
    for problem in [read_image(source, name="a").problem for source in sources]:
        if problem is not None:
            raise PrivlabError(problem)


def model_key(folder: Path) -> Made:
    shape = ModelShape(width=16, depth=2, heads=2, head_dim=8, hidden=32)
    save_key(new_key(shape), shape, folder / "a.key")
    return folder / "a.key", load_key


def copied(path: Path, read: Callable[[Path], object]) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        (folder / path.name).write_bytes(path.read_bytes())
        return folder / path.name, read

    return make


def strip(folder: Path) -> Made:
    Image.new("RGB", (40, 40)).save(folder / "a.png")
    return folder / "a.png", places_of


def of_run(pattern: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        path = write_run(folder / "run")
        return next(path.glob(pattern)), lambda file: load_results(path)

    return make


def begun_run(folder: Path) -> Made:
    path = write_run(folder / "run")
    return path / "run.json", lambda file: RunDirectory(path).begun()


def recording(pattern: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        session = Recorder(folder / "seen", {}, on_stop=pytest.fail).session("a", {})
        session.step(1, torch.ones(1, 4, 8), torch.ones(1, 4, 8))
        return next((folder / "seen").glob(pattern)), lambda file: [*read_recording(folder / "seen")]

    return make


TOML = """[run]
model = "tiny_vit"
setting = "c"
limit = 2
seeds = [1, 2]
[grid]
gamma = [0.1, 0.5]
[table]
columns = ["psnr"]
"""
MANIFEST = f"name,sha256,label\na.png,{'0' * 64},3\nb.png,{'1' * 64},\n"

KINDS: dict[str, Callable[[Path], Made]] = {
    "experiment": text_file("a.toml", TOML, read_experiment),
    "manifest": text_file("a.csv", MANIFEST, read_manifest),
    "weights, safetensors": tensors("a.safetensors", read_state),
    "weights, torch": torch_file,
    "weights, NumPy": npz,
    "gradients": tensors("a.safetensors", read_gradient_file),
    "images, Parquet": table,
    **{f"image, {form}": picture(form) for form in ("png", "jpg", "webp", "bmp", "tif")},
    "images, npz": images_npz,
    "images, tar": images_tar,
    "image, DICOM": dicom,
    "image, NIfTI": nifti,
    "model key": model_key,
    "card": copied(PACKAGE / "cards/gradients-quantisation.toml", read_card),
    "result": copied(PACKAGE / "results/gradients-quantisation.json", read_result),
    "strip": strip,
    "run.json": of_run("run.json"),
    "run.json beside": begun_run,
    "records": of_run("records/*.parquet"),
    "recording": recording("a/step-*"),
    "session.json": recording("a/session.json"),
}
"""What makes a good file of each kind, and returns it with what reads it."""


def outcomes(kind: str, folder: Path) -> str:
    """Return how reading mutated files of a kind ended, how often each, as JSON, with the seconds of the slowest."""
    path, read = KINDS[kind](folder)
    good, rng, ended, slowest = path.read_bytes(), random.Random(kind), Counter[str](), 0.0
    for number in range(MUTATIONS):
        path.write_bytes(mutated(good, rng))
        began = time.process_time()
        try:
            read(path)
            ended["read"] += 1
        except PrivlabError as error:
            ended["refused" if "\n" not in str(error) else f"{number}: several lines"] += 1
        slowest = max(slowest, time.process_time() - began)
    return json.dumps(dict(ended) | {"slowest_seconds": round(slowest, 2)})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures a copy of this process")
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_are_read_or_refused_in_one_line(
    kind: str, tmp_path: Path, separately: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    said, _, mebibytes = separately(lambda: outcomes(kind, tmp_path))
    with capsys.disabled():
        print(f"\n{kind}: {said}, {mebibytes} MiB")  # noqa: T201
    figures = json.loads(said)
    assert figures.keys() <= {"read", "refused", "slowest_seconds"}
    assert figures["slowest_seconds"] < SECONDS
    assert mebibytes < MEBIBYTES
