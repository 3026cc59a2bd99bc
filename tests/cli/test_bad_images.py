"""Odd, broken and missing pictures and labels: what can be read is scored, what cannot is recorded with its reason."""

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image


def png(width: int, height: int) -> bytes:
    """Return a PNG whose header claims a size; its pixels are missing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


BROKEN = {
    "text.png": (b"not a picture at all", "Not an image in one of the formats JPEG, PNG"),
    "empty.png": (b"", "Empty file: 0 bytes."),
    "bomb.png": (png(12_000, 12_000), "12000×12000 pixels by its header; at most 100 million pixels are decoded."),
    "huge.png": (png(60_000, 60_000), "Image size (3600000000 pixels) by its header; at most 100 million pixels are"),
    "pixel.png": (png(1, 1), "1×1 pixels; each side must have at least 8."),
    "ribbon.png": (png(8, 4000), "8×4000 pixels; the longer side must be at most 100 times the shorter."),
    "hollow.png": (png(32, 32), "Truncated or damaged: "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_picture_that_cannot_be_read(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], tmp_path: Path, name: str
) -> None:
    content, reason = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(content)
    done = attack("--images", path, "--labels", "predicted")
    assert done.status == 2
    assert f"Failed: {path}: {reason}" in done.err
    assert done.out == f"Nothing could be scored. run: {tmp_path / 'run'}\n"
    table = records()
    assert len(table) == 5 * 2  # five attacks, two geometries
    assert set(table.status) == {"failed"}
    assert table.reason.str.startswith(reason).all()
    assert table[["mse", "psnr", "grad_norm", "label"]].isna().all(axis=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cut.png", "cut.jpg"])
def test_truncated_picture(attack: Callable[..., Any], picture: Callable[..., Path], name: str) -> None:
    path = picture(name)
    path.write_bytes(path.read_bytes()[:-30])
    done = attack("--images", path)
    assert done.status == 2
    assert f"Failed: {path}: Truncated or damaged: " in done.err


@pytest.mark.slow
def test_animated_picture(attack: Callable[..., Any], picture: Callable[..., Path]) -> None:
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
    path = picture("moving.gif", save_all=True, append_images=frames)
    done = attack("--images", path)
    assert done.status == 2
    assert f"Failed: {path}: 3 frames; only still images are read." in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("grey.png", "L"),
        ("two.png", "1"),
        ("palette.png", "P"),
        ("alpha.png", "RGBA"),
        ("grey-alpha.png", "LA"),
        ("sixteen.png", "I;16"),
        ("cmyk.jpg", "CMYK"),
        ("colour.webp", "RGB"),
    ],
)
def test_picture_that_becomes_rgb(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], tmp_path: Path, name: str, mode: str
) -> None:
    values = Image.linear_gradient("L").resize((40, 40))
    image = values.convert("I").point(lambda v: v * 257).convert("I;16") if mode == "I;16" else values.convert(mode)
    image.save(tmp_path / name)
    done = attack("--images", tmp_path / name, "--attack", "patch-gradient")
    assert done.status == 0
    assert (records().query("attack == 'patch-gradient'").psnr > 100).all()


@pytest.mark.slow
def test_one_broken_file_among_good_ones(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], photos: Path, tmp_path: Path
) -> None:
    (photos / "b-broken.png").write_text("no picture")
    done = attack("--batch-size", "2", "--strips", "--json")
    assert done.status == 2
    told = json.loads(done.out)
    assert list(told["failed"]) == ["b-broken.png"]
    assert told["failed"]["b-broken.png"].startswith("Not an image in one of the formats")
    assert {(row["images"], row["failed"]) for row in told["rows"]} == {(3, 1), (3, 0)}  # controls fail no image
    assert done.err.splitlines()[-1].startswith("Failed: b-broken.png: Not an image")
    scored = records().query("attack in ['april', 'patch-gradient']")
    assert dict(scored.groupby("image").status.unique().map(list)) == {
        "a.png": ["ok"],
        "b-broken.png": ["failed"],
        "b.png": ["ok"],
        "c.png": ["ok"],
    }
    assert scored.query("status == 'ok'")[["psnr", "ssim"]].notna().all(axis=None)
    assert len(list((tmp_path / "run" / "strips").iterdir())) == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
    assert " 3 (1 failed) " in attack("--overwrite", "--details").out


@pytest.mark.slow
def test_name_that_is_no_text(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], photos: Path, tmp_path: Path
) -> None:
    try:
        (photos / "a.png").rename(os.fsdecode(os.fsencode(photos) + b"/\xff.png"))
    except OSError:
        pytest.skip("this file system takes text only")
    assert attack().status == 0
    assert r"\udcff.png" in set(records().image)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing", "No image in the folder '{}/nothing'. Expected files with .bmp, "),
        ("nowhere", "No file or folder '{}/nowhere'."),
        ("nowhere.png", "No file or folder '{}/nowhere.png'."),
    ],
)
def test_nothing_to_open(attack: Callable[..., Any], tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "nothing").mkdir()
    assert message.format(tmp_path) in attack("--images", tmp_path / source).error
    assert not (tmp_path / "run").exists()


def test_folder_among_files(attack: Callable[..., Any], photos: Path) -> None:
    error = attack("--images", photos / "a.png", "--images", photos).error
    assert error == f"'{photos}' is a folder: give one folder alone, or several files."


def test_unknown_dataset(attack: Callable[..., Any]) -> None:
    assert (
        "Unknown torchvision dataset 'CIFAR1'. Did you mean CIFAR10" in attack("--images", "torchvision:CIFAR1").error
    )


# Labels


def labelled(attack: Callable[..., Any], tmp_path: Path, *rows: str) -> Any:
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    return attack("--labels", tmp_path / "labels.csv", "--attack", "patch-gradient")


@pytest.mark.slow
def test_labels_from_a_file(attack: Callable[..., Any], records: Callable[..., pd.DataFrame], tmp_path: Path) -> None:
    assert labelled(attack, tmp_path, "file,label", "a.png,7", "c.png,999").status == 0
    table = records().set_index("image")
    assert set(table.label["a.png"]) == {7}
    assert set(table.label["c.png"]) == {999}
    origins = table.label_origin.groupby(level=0).unique().map(list)
    assert dict(origins) == {"a.png": ["file"], "b.png": ["predicted"], "c.png": ["file"]}


@pytest.mark.slow
def test_predicted_labels(attack: Callable[..., Any], records: Callable[..., pd.DataFrame], photos: Path) -> None:
    for name in "abc":
        (photos / name).mkdir()
        (photos / f"{name}.png").rename(photos / name / "x.png")
    attack()
    assert set(records().label_origin) == {"folder"}
    assert set(records().label) == {0, 1, 2}
    attack("--labels", "predicted", "--overwrite")
    assert set(records().label_origin) == {"predicted"}


@pytest.mark.slow
def test_label_out_of_range(attack: Callable[..., Any], records: Callable[..., pd.DataFrame], tmp_path: Path) -> None:
    done = labelled(attack, tmp_path, "file,label", "a.png,7", "b.png,1000", f"c.png,{2**63 - 1}")
    assert done.status == 2
    reason = "is out of range: the victim has 1000 classes (0 to 999)."
    assert f"Failed: b.png: Label 1000 {reason}" in done.err
    assert f"Failed: c.png: Label {2**63 - 1} {reason}" in done.err
    table = records().set_index("image")
    assert set(table.status["a.png"]) == {"ok"}
    assert set(table.status["b.png"]) == {"failed"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("file,label", "a.png,-1"), "line 2: label must be an integer from 0 on, of 64 bits. Found '-1'."),
        (
            ("file,label", "a.png,cat", "b.png,3"),
            "line 2: label must be an integer from 0 on, of 64 bits. Found 'cat'.",
        ),
        (("file,label", f"a.png,{2**63}"), "line 2: label must be an integer from 0 on, of 64 bits. Found '9223"),
        (
            ("name,label", "a.png,1"),
            "line 1: expected the columns file and class_index (or label). Found: name, label.",
        ),
        (("file,label", "z.png,1"), "none of its 1 files is an image of the source, as 'a.png' is."),
    ],
)
def test_labels_that_are_none(attack: Callable[..., Any], tmp_path: Path, rows: tuple[str, ...], message: str) -> None:
    assert message in labelled(attack, tmp_path, *rows).error


def test_labels_that_are_not_there(attack: Callable[..., Any], tmp_path: Path) -> None:
    expected = f"Cannot read the labels '{tmp_path / 'no.csv'}': No such file"
    assert attack("--labels", tmp_path / "no.csv").error.startswith(expected)
