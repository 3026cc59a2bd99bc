"""Pictures: every way in which a file can be odd, every source, and timm's own evaluation transform."""

import csv
import hashlib
import struct
import sys
import types
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageOps
from timm.data.transforms_factory import create_transform
from torch.testing import assert_close

from privlab import images
from privlab.errors import PrivlabError
from privlab.images import Picture, Preprocessing, batches, open_images, read_picture

GREY = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3, 1.0, "bicubic")


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def saved(path: Path, image: Image.Image | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (noise(16, 20, zlib.crc32(path.name.encode())) if image is None else image).save(path, **options)
    return path


def pixels(picture: Picture) -> np.ndarray:
    assert picture.problem is None
    assert picture.pixels is not None
    assert picture.pixels.mode == "RGB"
    return np.asarray(picture.pixels)


def labels(source: images.ImageSource) -> dict[str, tuple[int | None, str]]:
    return {picture.name: (picture.label, picture.label_origin) for picture in source}


def table(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


# Reading one file


def test_rgb_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", noise(16, 20))
    picture = read_picture(path)
    assert (pixels(picture) == np.asarray(noise(16, 20))).all()
    assert picture.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (picture.name, picture.label, picture.label_origin) == (path.as_posix(), None, "none")


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK"])
def test_modes_without_transparency_become_rgb(tmp_path: Path, mode: str) -> None:
    image = noise(16, 20).convert(mode)
    path = saved(tmp_path / "a.tiff", image)
    assert (pixels(read_picture(path)) == np.asarray(image.convert("RGB"))).all()


def test_cmyk_jpeg(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", Image.new("CMYK", (16, 16), (255, 0, 0, 0)), quality=100)
    assert abs(pixels(read_picture(path)).astype(int) - [0, 255, 255]).max() <= 2


@pytest.mark.parametrize("alpha", [0, 100, 255])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_composited_over_white(tmp_path: Path, mode: str, alpha: int) -> None:
    image = Image.new("RGBA", (16, 16), (10, 10, 10, alpha)).convert(mode)
    expected = round((10 * alpha + 255 * (255 - alpha)) / 255)
    assert abs(pixels(read_picture(saved(tmp_path / "a.png", image))).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("transparency", [1, bytes([255, 0])])
def test_transparent_palette_colour_becomes_white(tmp_path: Path, transparency: int | bytes) -> None:
    image = Image.new("P", (16, 16), 0)
    image.putpalette([200, 30, 40, 0, 0, 255])
    image.paste(1, (0, 0, 8, 16))
    values = pixels(read_picture(saved(tmp_path / "a.png", image, transparency=transparency)))
    assert (values[:, :8] == 255).all()
    assert (values[:, 8:] == [200, 30, 40]).all()


def test_transparent_colour_of_rgb_and_grey_becomes_white(tmp_path: Path) -> None:
    rgb = saved(tmp_path / "rgb.png", Image.new("RGB", (16, 16), (1, 2, 3)), transparency=(1, 2, 3))
    grey = saved(tmp_path / "grey.png", Image.new("L", (16, 16), 7), transparency=7)
    assert (pixels(read_picture(rgb)) == 255).all()
    assert (pixels(read_picture(grey)) == 255).all()


@pytest.mark.parametrize("suffix", [".png", ".tiff", ".pgm"])
def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path, suffix: str) -> None:
    ramp = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    values = pixels(read_picture(saved(tmp_path / f"a{suffix}", Image.fromarray(ramp))))
    assert (values[..., 0] == np.arange(256).reshape(16, 16)).all()
    assert (values == values[..., :1]).all()


def test_dark_16_bit_grey_stays_dark(tmp_path: Path) -> None:
    """The scale is that of the format, not of the brightest pixel."""
    for suffix in (".png", ".pgm"):
        path = saved(tmp_path / f"a{suffix}", Image.fromarray(np.full((16, 16), 200, np.uint16)))
        assert (pixels(read_picture(path)) == 1).all()


def test_big_endian_16_bit_grey(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.tiff", Image.new("I;16B", (16, 16), 40000))
    with Image.open(path) as image:
        assert image.mode == "I;16B"
    assert (pixels(read_picture(path)) == 156).all()


@pytest.mark.parametrize(("value", "expected"), [(200, 200), (25700, 100)])
def test_32_bit_integers_within_16_bits(tmp_path: Path, value: int, expected: int) -> None:
    path = saved(tmp_path / "a.tiff", Image.new("I", (16, 16), value))
    assert (pixels(read_picture(path)) == expected).all()


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    upright = noise(16, 24)
    exif = Image.Exif()
    turned = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    for orientation, turn in turned.items():
        exif[0x0112] = orientation
        path = saved(tmp_path / f"{orientation}.png", upright.transpose(turn), exif=exif)
        assert (pixels(read_picture(path)) == np.asarray(upright)).all()
    exif[0x0112] = 6
    assert pixels(read_picture(saved(tmp_path / "a.jpg", noise(16, 24), exif=exif))).shape == (24, 16, 3)


@pytest.mark.parametrize("orientation", range(1, 10))
def test_every_orientation_equals_pillows(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path / "a.jpg", noise(16, 24), exif=exif)
    with Image.open(path) as image:
        assert (pixels(read_picture(path)) == np.asarray(ImageOps.exif_transpose(image))).all()


def test_corrupt_exif_is_no_problem(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", exif=b"Exif\0\0neither little nor big")
    assert pixels(read_picture(path)).shape == (16, 20, 3)


def test_phone_picture_with_a_preview_is_one_picture(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[noise(8, 10)])
    assert pixels(read_picture(path)).shape == (16, 20, 3)


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def cut(path: Path, keep: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])
    return path


def raw(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated jpeg": (lambda p: cut(saved(p / "a.jpg", noise(64, 64)), 0.6), "Truncated or damaged"),
    "truncated png": (lambda p: cut(saved(p / "a.png", noise(64, 64)), 0.6), "Truncated or damaged"),
    "png without its end": (lambda p: cut(saved(p / "a.png", noise(64, 64)), 0.999), "Truncated or damaged"),
    "truncated bmp": (lambda p: cut(saved(p / "a.bmp", noise(64, 64)), 0.6), "Truncated or damaged"),
    "empty": (lambda p: raw(p / "a.png", b""), "Empty file: 0 bytes."),
    "text": (lambda p: raw(p / "a.png", b"not a picture\n"), "Not an image in one of the formats JPEG, PNG"),
    "postscript": (
        lambda p: raw(p / "a.png", b"%!PS-Adobe-3.0 EPSF-3.0\n"),
        "Not an image in one of the formats",
    ),
    "1x1": (lambda p: saved(p / "a.png", noise(1, 1)), "1×1 pixels; each side must have at least 8."),
    "7 high": (lambda p: saved(p / "a.png", noise(7, 20)), "20×7 pixels; each side must have at least 8."),
    "bomb": (
        lambda p: raw(p / "a.png", png_header(60000, 60000)),
        "3600000000 pixels. by its header; at most 100 million",
    ),
    "big": (
        lambda p: raw(p / "a.png", png_header(12000, 11000)),
        "12000×11000 pixels by its header; at most 100",
    ),
    "strip": (
        lambda p: saved(p / "a.png", noise(8, 801)),
        "801×8 pixels; the longer side must be at most 100",
    ),
    "float": (lambda p: saved(p / "a.tiff", Image.new("F", (16, 16), 0.5)), "Floating-point pixels"),
    "32 bit": (
        lambda p: saved(p / "a.tiff", Image.new("I", (16, 16), 70000)),
        "Integer pixels from 70000 to 70000",
    ),
    "gif": (
        lambda p: saved(p / "a.gif", save_all=True, append_images=[noise(16, 20, 1), noise(16, 20, 2)]),
        "3 frames; only still pictures",
    ),
    "missing": (lambda p: p / "a.png", "Cannot be opened: No such file"),
    "folder": (lambda p: p, "Not a regular file."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_file_has_a_one_line_problem(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    picture = read_picture(make(tmp_path), name="a", label=3, label_origin="folder")
    assert picture.problem is not None
    with pytest.raises(PrivlabError, match=message):
        raise PrivlabError(picture.problem)
    assert "\n" not in picture.problem
    assert "0x" not in picture.problem
    assert (picture.name, picture.pixels, picture.label, picture.label_origin) == ("a", None, 3, "folder")


def test_picture_between_pillows_limit_and_ours_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would warn of a bomb here, and warnings are errors."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    assert pixels(read_picture(saved(tmp_path / "a.png", noise(16, 20)))).shape == (16, 20, 3)


def test_huge_file_is_refused_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with path.open("wb") as file:
        file.truncate(2**29 + 2**20)  # sparse: no disk is used
    assert read_picture(path).problem == "513 MiB; at most 512 MiB are read."


def test_permission_error_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    path = saved(tmp_path / "a.png")
    monkeypatch.setattr(Path, "read_bytes", deny)
    picture = read_picture(path)
    assert (picture.problem, picture.sha256) == ("Cannot be opened: Permission denied.", "")


# Samples, files, folders


def test_samples_are_distinct_photographs() -> None:
    source = open_images("samples")
    pictures = list(source)
    assert len(pictures) == len(source) == source.count
    assert len(pictures) >= 12
    assert tuple(picture.name for picture in pictures) == source.names
    assert len({picture.sha256 for picture in pictures}) == len(pictures)
    assert len({picture.name.split("-")[0] for picture in pictures[:8]}) == 8
    for picture in pictures:
        values = pixels(picture)
        assert values.shape[0] == values.shape[1] >= 200
        assert values.std() > 10
        assert (values.max(axis=(0, 1)) > 100).all()  # no crop reaches over the edge into black
        assert picture.label is None


def test_samples_need_scikit_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PrivlabError, match="pip install scikit-image"):
        open_images("samples")


def test_missing_sample_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda _: spec)
    assert [p.problem for p in open_images("samples", limit=1)] == ["Cannot be opened: No such file or directory."]


def test_files_keep_their_order(tmp_path: Path) -> None:
    paths = [str(saved(tmp_path / name)) for name in ("b.png", "a.png")]
    source = open_images(paths)
    assert [picture.name for picture in source] == paths == list(source.names or ())
    assert len(open_images(paths[:1])) == len(open_images(Path(paths[0]))) == 1


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"No file or folder '.*/nowhere'"):
        open_images(str(tmp_path / "nowhere"))
    with pytest.raises(PrivlabError, match=r"No file or folder '.*/b.png'"):
        open_images([saved(tmp_path / "a.png"), tmp_path / "b.png"])
    with pytest.raises(PrivlabError, match="is a folder: give one folder alone"):
        open_images([saved(tmp_path / "a.png"), tmp_path])
    with pytest.raises(PrivlabError, match="No image given"):
        open_images([])


def test_flat_folder_is_sorted_and_has_no_labels(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPEG", "c.PPM"):
        saved(tmp_path / name)
    for name in ("notes.txt", ".hidden.png"):
        (tmp_path / name).write_text("")
    source = open_images(str(tmp_path))
    assert labels(source) == {"a.JPEG": (None, "none"), "b.png": (None, "none"), "c.PPM": (None, "none")}
    assert source.class_names is None
    assert open_images([tmp_path]).count == 3


def test_class_folders_are_labelled_as_by_torchvision(tmp_path: Path) -> None:
    for name in ("dog/b.png", "dog/a.png", "Cat/z.png", "ant/y.png"):
        saved(tmp_path / name)
    saved(tmp_path / "dog/deep/er.png")
    source = open_images(str(tmp_path))
    reference = torchvision.datasets.ImageFolder(tmp_path)
    expected = {Path(file).relative_to(tmp_path).as_posix(): (label, "folder") for file, label in reference.samples}
    assert labels(source) == expected
    assert list(labels(source)) == list(expected)
    assert list(source.class_names or ()) == reference.classes


def test_hidden_folders_do_not_shift_labels(tmp_path: Path) -> None:
    saved(tmp_path / ".ipynb_checkpoints/a.png")
    saved(tmp_path / "cat/a.png")
    assert labels(open_images(str(tmp_path))) == {"cat/a.png": (0, "folder")}


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    saved(tmp_path / "data/cat/a.png")
    saved(tmp_path / "dogs/b.png")
    (tmp_path / "data/dog").symlink_to(tmp_path / "dogs")
    (tmp_path / "data/cat/loop").symlink_to(tmp_path / "data")
    assert list(labels(open_images(str(tmp_path / "data")))) == ["cat/a.png", "dog/b.png"]


def test_folder_with_pictures_beside_folders_has_no_labels(tmp_path: Path) -> None:
    saved(tmp_path / "cat/a.png")
    saved(tmp_path / "b.png")
    assert labels(open_images(str(tmp_path))) == {"b.png": (None, "none"), "cat/a.png": (None, "none")}


def test_class_to_index_is_used_where_it_knows_all_folders(tmp_path: Path) -> None:
    saved(tmp_path / "cat/a.png")
    saved(tmp_path / "dog/a.png")

    def opened(indices: Mapping[str, int]) -> images.ImageSource:
        return open_images(str(tmp_path), class_to_index=indices)

    known = opened({"ant": 0, "dog": 1, "cat": 2})
    assert labels(known) == {"cat/a.png": (2, "folder"), "dog/a.png": (1, "folder")}
    assert known.class_names == ("ant", "dog", "cat")
    assert "given indices" in known.description
    assert opened({"dog": 1, "cat": 281}).class_names is None
    partial = opened({"cat": 281})
    assert labels(partial) == {"cat/a.png": (0, "folder"), "dog/a.png": (1, "folder")}
    assert "order of their folders" in partial.description


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with pytest.raises(PrivlabError, match="No image in the folder"):
        open_images(str(tmp_path))


def test_unlistable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(top: Path, onerror: Callable[[OSError], None], followlinks: bool) -> list[Any]:
        onerror(PermissionError(13, "Permission denied", str(top)))
        return []

    monkeypatch.setattr(images.os, "walk", deny)
    with pytest.raises(PrivlabError, match=r"Cannot list the folder '.*': Permission denied"):
        open_images(str(tmp_path))


def test_split_is_a_sub_folder(tmp_path: Path) -> None:
    saved(tmp_path / "val/cat/a.png")
    saved(tmp_path / "train/cat/b.png")
    assert labels(open_images(str(tmp_path), split="val")) == {"val/cat/a.png": (0, "folder")}
    with pytest.raises(PrivlabError, match=r"for split 'test'. Found: train, val"):
        open_images(str(tmp_path), split="test")
    with pytest.raises(PrivlabError, match="holds splits, not classes: choose split from train, val"):
        open_images(str(tmp_path))
    with pytest.raises(PrivlabError, match=r"split is for folders and datasets. Found split 'val'"):
        open_images("samples", split="val")


def test_limit(tmp_path: Path) -> None:
    for name in "abc":
        saved(tmp_path / f"{name}.png")
    source = open_images(str(tmp_path), limit=2)
    assert (len(source), source.names) == (2, ("a.png", "b.png"))
    assert [picture.name for picture in source] == [picture.name for picture in source] == ["a.png", "b.png"]
    assert open_images(str(tmp_path), limit=9).count == 3


@pytest.mark.parametrize("limit", [0, -1, True])
def test_limit_must_be_positive(limit: int) -> None:
    with pytest.raises(PrivlabError, match=f"limit must be a positive integer. Found {limit}"):
        open_images("samples", limit=limit)


def test_nothing_is_read_before_iteration(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"{i:03}.png") for i in range(50)]
    source = open_images(str(tmp_path))
    for path in paths[1:]:
        path.unlink()
    assert source.count == 50
    first, second, *_ = source
    assert first.problem is None
    assert second.problem == "Cannot be opened: No such file or directory."


# Labels from a file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cat/a.png", "cat/b.png", "dog/a.png"):
        saved(tmp_path / "data" / name)
    return tmp_path / "data"


@pytest.mark.parametrize("column", ["label", "class_index"])
def test_labels_from_a_file_replace_all_others(folder: Path, tmp_path: Path, column: str) -> None:
    path = table(tmp_path / "labels.csv", f"{column},file", "7,./cat/a.png", "9,b.png")
    source = open_images(str(folder), labels=path)
    assert labels(source) == {"cat/a.png": (7, "file"), "cat/b.png": (9, "file"), "dog/a.png": (None, "none")}
    assert source.class_names is None


def test_class_index_goes_before_a_label_that_is_a_word(folder: Path, tmp_path: Path) -> None:
    path = table(tmp_path / "labels.csv", "\ufefffile,label,class_index", "dog/a.png,dog,4")
    assert labels(open_images(str(folder), labels=str(path)))["dog/a.png"] == (4, "file")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["name,label", "a.png,1"],
            r"line 1: expected the columns file and class_index .* Found: name, label",
        ),
        (
            ["file,class", "a.png,1"],
            r"line 1: expected the columns file and class_index .* Found: file, class",
        ),
        ([""], "line 1: expected the columns .* Found: none"),
        (
            ["file,label", "b.png,1", "cat/a.png,dog"],
            r"line 3: label must be an integer from 0 on. Found 'dog'",
        ),
        (["file,label", "b.png,-1"], r"line 2: label must be an integer from 0 on. Found '-1'"),
        (["file,label", "b.png,1.5"], "line 2: label must be an integer .* Found '1.5'"),
        (["file,label", "b.png"], "line 2: label must be an integer .* Found None"),
        (["file,label", "b.png,1", "./b.png,2"], r"line 3: the file 'b.png' is listed twice"),
        (["file,label", "a.png,1"], "'a.png' could be 2 pictures; give the path, as in 'cat/a.png'"),
        (["file,label", "x.png,1"], "none of its 1 files is a picture of the source, as 'cat/a.png' is"),
    ],
)
def test_bad_labels_are_named(folder: Path, tmp_path: Path, rows: list[str], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        open_images(str(folder), labels=table(tmp_path / "labels.csv", *rows))


def test_unreadable_labels_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"Cannot read the labels '.*no.csv'.*No such file"):
        open_images(str(folder), labels=tmp_path / "no.csv")
    with pytest.raises(PrivlabError, match=r"Cannot read the labels .*utf-8"):
        open_images(str(folder), labels=raw(tmp_path / "a.csv", b"file,label\n\xff\xfe,1\n"))
    long = "x" * (csv.field_size_limit() + 1)
    with pytest.raises(PrivlabError, match=r"Cannot read the labels .*field larger"):
        open_images(str(folder), labels=table(tmp_path / "b.csv", "file,label", f"{long},1"))


# torchvision


def test_fake_data() -> None:
    source = open_images("torchvision:FakeData", limit=2)
    first, second = source
    assert (len(source), first.name, first.label_origin) == (2, "FakeData/0", "dataset")
    assert pixels(first).shape == (224, 224, 3)
    assert first.sha256 != second.sha256
    assert next(iter(source)).sha256 == first.sha256
    with pytest.raises(PrivlabError, match=r"FakeData has no splits. Found split 'test'"):
        open_images("torchvision:FakeData", split="test")


def test_labels_file_for_a_dataset(tmp_path: Path) -> None:
    path = table(tmp_path / "labels.csv", "file,label", "FakeData/1,5")
    assert labels(open_images("torchvision:FakeData", limit=2, labels=path)) == {
        "FakeData/0": (None, "none"),
        "FakeData/1": (5, "file"),
    }


def test_unknown_torchvision_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(PrivlabError, match=r"Unknown torchvision dataset 'CIFAR11'. Did you mean CIFAR10"):
        open_images("torchvision:CIFAR11")
    with pytest.raises(PrivlabError, match="Unknown torchvision dataset 'ImageFolder'"):
        open_images("torchvision:ImageFolder")
    with pytest.raises(PrivlabError, match="CocoDetection also needs annFile"):
        open_images("torchvision:CocoDetection")
    with pytest.raises(PrivlabError, match="EMNIST also needs split"):
        open_images("torchvision:EMNIST")


@pytest.mark.parametrize("name", ["CIFAR10", "ImageNet"])
def test_failed_download_tells_where_the_data_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def offline(self: object) -> None:
        raise OSError("no network\nat all")

    monkeypatch.setenv("PRIVLAB_DATA", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", offline)
    with pytest.raises(PrivlabError, match=f"{name}, looked for in '{tmp_path}' .set PRIVLAB_DATA") as error:
        open_images(f"torchvision:{name}")
    assert "\n" not in str(error.value)


class Trained:
    """Stands for CIFAR10: data in a root, a train= argument, a download."""

    present = False
    classes = ("cat", "dog")

    def __init__(self, root: str, train: bool = True, download: bool = False) -> None:
        if not (self.present or download):
            raise RuntimeError("Dataset not found")
        self.train = train
        self.download = download
        self.root = root

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[object, int]:
        if index == 2:
            raise OSError("broken")
        seen = (100 * self.train, 100 * self.download, 0)
        return [Image.new("RGB", (8, 8), seen), Image.new("L", (8, 8)), None, torch.zeros(3)][index], 1 - 2 * (
            index == 1
        )


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("split", [None, "test", "train"])
def test_train_argument_and_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str | None, present: bool
) -> None:
    monkeypatch.setenv("PRIVLAB_DATA", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Trained)
    monkeypatch.setattr(Trained, "present", present)
    source = open_images("torchvision:CIFAR10", split=split)
    first, unlabelled, broken, tensor = source
    assert first.name == f"CIFAR10/{split or 'test'}/0"
    assert (pixels(first) == [100 * (split == "train"), 100 * (not present), 0]).all()
    assert (first.label, first.label_origin, source.class_names) == (1, "dataset", ("cat", "dog"))
    assert (unlabelled.label, unlabelled.label_origin) == (None, "none")
    assert broken.problem == "Truncated or damaged: broken."
    assert tensor.problem == "Not a picture but a Tensor."
    with pytest.raises(PrivlabError, match="Unknown split of torchvision's CIFAR10 'val'"):
        open_images("torchvision:CIFAR10", split="val")


def test_split_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    class Split(torchvision.datasets.FakeData):
        def __init__(self, root: str, split: str = "train") -> None:
            assert root
            super().__init__(size=1, image_size=(3, 4 if split == "test" else 8, 8))

    monkeypatch.setattr(torchvision.datasets, "SVHN", Split)
    assert [picture.name for picture in open_images("torchvision:SVHN")] == ["SVHN/train/0"]
    (small,) = open_images("torchvision:SVHN", split="test")
    assert (small.name, small.problem) == ("SVHN/test/0", "8×4 pixels; each side must have at least 8.")


# Hugging Face


def test_hugging_face_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PrivlabError, match=r"'hf:food' needs the extra: pip install 'privlab\[datasets\]'"):
        open_images("hf:food")


class ImageType:
    """Stands for datasets.Image."""

    def __init__(self, decode: bool = True) -> None:
        self.decode = decode

    def decode_example(self, value: Mapping[str, Any]) -> Image.Image:
        """Open what the path names."""
        return Image.open(value["path"])


class ClassLabel:
    """Stands for datasets.ClassLabel."""

    names = ("cat", "dog")


class Stream:
    """Stands for datasets.IterableDataset."""

    def __init__(self, rows: list[Any], features: dict[str, Any], number: int | None = None) -> None:
        self.rows, self.hidden, self.features = rows, features, features if number else None
        splits = {"test": types.SimpleNamespace(num_examples=number)} if number else None
        self.info = types.SimpleNamespace(splits=splits)

    def _resolve_features(self) -> "Stream":
        self.features = self.hidden
        return self

    def cast_column(self, column: str, kind: ImageType) -> "Stream":
        """Ask for undecoded pictures."""
        assert self.hidden[column]
        assert not kind.decode
        return self

    def __iter__(self) -> Any:
        for row in self.rows:
            if isinstance(row, Exception):
                raise row
            yield row


def hub(monkeypatch: pytest.MonkeyPatch, **splits: Stream) -> None:
    def load_dataset(name: str, streaming: bool) -> dict[str, Stream]:
        assert streaming
        if name != "pets":
            raise ConnectionError("no\nnetwork")
        return splits

    module = types.SimpleNamespace(Image=ImageType, ClassLabel=ClassLabel, load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hugging_face_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "a.png", noise(16, 20))
    rows = [
        {"photo": {"bytes": path.read_bytes(), "path": None}, "kind": 1},
        {"photo": {"bytes": None, "path": path}, "kind": -1},
        {"photo": {"bytes": b"", "path": None}, "kind": 0},
        {"photo": None, "kind": 0},
        {"photo": {"bytes": None, "path": tmp_path / "no.png"}, "kind": 0},
        OSError("timed out"),
    ]
    features = {"photo": ImageType(), "kind": ClassLabel()}
    hub(monkeypatch, train=Stream([], features), test=Stream(rows, features))
    source = open_images("hf:pets")
    assert (source.count, source.class_names) == (None, ("cat", "dog"))
    with pytest.raises(TypeError, match="length of Hugging Face pets/test is unknown"):
        len(source)
    first, second, empty, absent, missing = open_images("hf:pets", limit=5)
    assert (first.name, first.label, first.label_origin) == ("pets/test/0", 1, "dataset")
    assert first.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (pixels(first) == pixels(second)).all()
    assert (second.label, second.label_origin) == (None, "none")
    assert empty.problem == "Empty file: 0 bytes."
    assert absent.problem == "No picture in this row."
    assert missing.problem is not None
    with pytest.raises(PrivlabError, match="stream of 'pets' broke at picture 5: timed out"):
        list(source)


def test_hugging_face_splits_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Stream([], {"image": ImageType(), "label": int}, number=5)
    hub(monkeypatch, train=plain, test=plain, text=Stream([], {"words": str}))
    assert len(open_images("hf:pets")) == 5
    assert len(open_images("hf:pets", limit=3)) == 3
    assert list(open_images("hf:pets", split="train")) == []
    with pytest.raises(PrivlabError, match=r"Unknown split of 'pets' 'tets'. Did you mean"):
        open_images("hf:pets", split="tets")
    with pytest.raises(PrivlabError, match=r"'pets' has no image column. Found: words"):
        open_images("hf:pets", split="text")
    with pytest.raises(PrivlabError, match=r"Cannot open the Hugging Face dataset 'food': no network\."):
        open_images("hf:food")


# Preprocessing and chunks

SIZES = [(32, 32), (8, 8), (500, 333), (333, 500), (224, 224), (225, 1000), (57, 640), (1000, 31), (256, 255)]


@pytest.mark.parametrize("size", [(224, 224), (32, 32), (64, 96)])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_preprocessing_equals_timms(size: tuple[int, int], crop_pct: float, interpolation: str) -> None:
    reference: Any = create_transform(
        (3, *size),
        is_training=False,
        interpolation=interpolation,
        crop_pct=crop_pct,
        crop_mode="center",
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
    )
    ours = Preprocessing(size, (0.5,) * 3, (0.5,) * 3, crop_pct, interpolation)
    for index, (height, width) in enumerate(SIZES):
        image = noise(height, width, index)
        assert_close(ours(image), reference(image), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("size", "crop_pct", "interpolation", "message"),
    [
        ((0, 224), 1.0, "bicubic", "size must be a positive integer. Found 0"),
        ((224, 224), 0.0, "bicubic", r"crop_pct must be in \(0, 1\]. Found 0.0"),
        ((224, 224), 87.5, "bicubic", r"crop_pct must be in \(0, 1\]. Found 87.5"),
        ((224, 224), 1.0, "bicubc", "Unknown interpolation 'bicubc'. Did you mean bicubic"),
    ],
)
def test_bad_preprocessing(size: tuple[int, int], crop_pct: float, interpolation: str, message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        Preprocessing(size, (0.5,) * 3, (0.5,) * 3, crop_pct, interpolation)


def test_chunks_are_full_and_carry_the_failed(tmp_path: Path) -> None:
    for index in range(6):
        saved(tmp_path / f"{index}.png")
    for index in (1, 5):
        raw(tmp_path / f"{index}.png", b"")
    source = open_images(str(tmp_path))
    chunks = list(batches(source, GREY, 2))
    assert [[picture.name for picture in chunk.pictures] for chunk in chunks] == [
        ["0.png", "2.png"],
        ["3.png", "4.png"],
        [],
    ]
    assert [[picture.name for picture in chunk.failed] for chunk in chunks] == [["1.png"], [], ["5.png"]]
    assert [tuple(chunk.images.shape) for chunk in chunks] == [(2, 3, 16, 16), (2, 3, 16, 16), (0, 3, 16, 16)]
    assert all(picture.pixels is None for chunk in chunks for picture in chunk.pictures)
    kept = {picture.name: picture.pixels for picture in source if picture.pixels is not None}
    expected = torch.stack([GREY(kept[name]) for name in ("3.png", "4.png")])
    assert_close(chunks[1].images, expected, rtol=0, atol=0)
    assert 0 <= expected.min() < expected.max() <= 1
    assert [len(chunk.pictures) for chunk in batches(source, GREY, 3)] == [3, 1]
    with pytest.raises(PrivlabError, match=r"size must be a positive integer. Found 0"):
        batches(source, GREY, 0)
