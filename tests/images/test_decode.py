"""One file: every way in which it can be odd, told apart from every way in which it can be unusable."""

import hashlib
import os
import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps

from privlab.base import PrivlabError, PrivlabWarning
from privlab.images import NamedImage, decode, open_images, read_image


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def saved(path: Path, image: Image.Image | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (noise(16, 20, zlib.crc32(path.name.encode())) if image is None else image).save(path, **options)
    return path


def pixels(image: NamedImage) -> np.ndarray:
    assert image.problem is None
    assert image.pixels is not None
    assert image.pixels.mode == "RGB"
    return np.asarray(image.pixels)


def test_rgb_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", noise(16, 20))
    image = read_image(path)
    assert (pixels(image) == np.asarray(noise(16, 20))).all()
    assert image.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (image.name, image.label, image.label_origin) == (path.as_posix(), None, "none")


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK"])
def test_modes_without_transparency_become_rgb(tmp_path: Path, mode: str) -> None:
    image = noise(16, 20).convert(mode)
    path = saved(tmp_path / "a.tiff", image)
    assert (pixels(read_image(path)) == np.asarray(image.convert("RGB"))).all()


def test_cmyk_jpeg(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", Image.new("CMYK", (16, 16), (255, 0, 0, 0)), quality=100)
    assert abs(pixels(read_image(path)).astype(int) - [0, 255, 255]).max() <= 2


@pytest.mark.parametrize("alpha", [0, 100, 255])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_composited_over_white(tmp_path: Path, mode: str, alpha: int) -> None:
    image = Image.new("RGBA", (16, 16), (10, 10, 10, alpha)).convert(mode)
    expected = round((10 * alpha + 255 * (255 - alpha)) / 255)
    assert abs(pixels(read_image(saved(tmp_path / "a.png", image))).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("transparency", [1, bytes([255, 0])])
def test_transparent_palette_colour_becomes_white(tmp_path: Path, transparency: int | bytes) -> None:
    image = Image.new("P", (16, 16), 0)
    image.putpalette([200, 30, 40, 0, 0, 255])
    image.paste(1, (0, 0, 8, 16))
    values = pixels(read_image(saved(tmp_path / "a.png", image, transparency=transparency)))
    assert (values[:, :8] == 255).all()
    assert (values[:, 8:] == [200, 30, 40]).all()


def test_transparent_colour_of_rgb_and_grey_becomes_white(tmp_path: Path) -> None:
    rgb = saved(tmp_path / "rgb.png", Image.new("RGB", (16, 16), (1, 2, 3)), transparency=(1, 2, 3))
    grey = saved(tmp_path / "grey.png", Image.new("L", (16, 16), 7), transparency=7)
    assert (pixels(read_image(rgb)) == 255).all()
    assert (pixels(read_image(grey)) == 255).all()


@pytest.mark.parametrize("suffix", [".png", ".tiff", ".pgm"])
def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path, suffix: str) -> None:
    ramp = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    values = pixels(read_image(saved(tmp_path / f"a{suffix}", Image.fromarray(ramp))))
    assert (values[..., 0] == np.arange(256).reshape(16, 16)).all()
    assert (values == values[..., :1]).all()


def test_dark_16_bit_grey_stays_dark(tmp_path: Path) -> None:
    """The scale is that of the format, not of the brightest pixel."""
    for suffix in (".png", ".pgm"):
        path = saved(tmp_path / f"a{suffix}", Image.fromarray(np.full((16, 16), 200, np.uint16)))
        assert (pixels(read_image(path)) == 1).all()


def png_of_16_bits(levels: np.ndarray) -> bytes:
    """Return a PNG with 16 bits a channel, of h × w or h × w × c levels; Pillow writes none with colours."""
    channels = 1 if levels.ndim == 2 else levels.shape[2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    header = struct.pack(">IIBBBBB", levels.shape[1], levels.shape[0], 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(rows), b"IEND": b""}
    parts = [struct.pack(">I", len(v)) + k + v + struct.pack(">I", zlib.crc32(k + v)) for k, v in chunks.items()]
    return b"".join([b"\x89PNG\r\n\x1a\n", *parts])


@pytest.mark.parametrize("bits", [8, 10, 12, 14])
@pytest.mark.parametrize("kind", ["grey.png", "grey.tiff", "colour.png", "colour.tiff", "colour-zip.tiff"])
def test_levels_of_fewer_bits_are_named_and_read_by_their_depth(tmp_path: Path, bits: int, kind: str) -> None:
    white, path = 2**bits - 1, tmp_path / kind
    levels = np.linspace(0, white, 16 * 16 * 3).round().astype(np.uint16).reshape(16, 16, 3)
    if kind.startswith("grey"):
        Image.fromarray(levels[..., 0].copy()).save(path)
        levels = levels[..., :1]
    elif kind.endswith("png"):
        path.write_bytes(png_of_16_bits(levels))
    else:
        tifffile.imwrite(path, levels, photometric="rgb", compression="zlib" if "zip" in kind else None)
    high = int(levels.max())
    with pytest.warns(PrivlabWarning, match=f"levels from 0 to {high} in 16 bits .* --bit-depth {bits} ") as caught:
        (dark,) = open_images(path)
    assert len(caught) == 1
    assert pixels(dark).max() <= high / 65535 * 255 + 1
    (image,) = open_images(path, bit_depth=bits)
    assert np.abs(pixels(image) - levels * (255 / white)).max() <= 0.5
    assert image.sha256 == dark.sha256
    (stated,) = open_images(path, bit_depth=16)
    assert (pixels(stated) == pixels(dark)).all() or kind.startswith("colour")
    (small,) = open_images(path, bit_depth=bits - 2)
    assert small.problem is not None
    assert f"Levels up to {high} do not fit" in small.problem


def test_the_first_dark_image_of_a_source_is_named_once(tmp_path: Path) -> None:
    for name, level in (("a", 60000), ("b", 4000), ("c", 900)):
        saved(tmp_path / f"{name}.png", Image.fromarray(np.full((16, 16), level, np.uint16)))
    with pytest.warns(PrivlabWarning, match=r"'b.png'.*4000.*4000") as caught:
        list(open_images(tmp_path))
    assert len(caught) == 1


@pytest.mark.parametrize("level", [0, 2**14, 65535])
def test_black_and_ordinary_levels_of_16_bits_are_no_reason_to_warn(tmp_path: Path, level: int) -> None:
    grey = np.full((16, 16), level, np.uint16)
    raw(tmp_path / "b.png", png_of_16_bits(np.stack([grey] * 3, 2)))
    for path in (saved(tmp_path / "a.png", Image.fromarray(grey)), tmp_path / "b.png"):
        (image,) = open_images(path)
        assert (pixels(image) == round(level / 257)).all()


def test_the_depth_of_8_bit_files_is_theirs(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", noise(16, 16))
    assert (pixels(read_image(path, bit_depth=12)) == pixels(read_image(path))).all()


@pytest.mark.parametrize("depth", [0, 17, -1, True])
def test_a_depth_is_a_number_of_bits(tmp_path: Path, depth: Any) -> None:
    path = saved(tmp_path / "a.png", noise(16, 16))
    for read in (read_image, open_images):
        with pytest.raises(PrivlabError, match=r"bit_depth.*1.*16"):
            read(path, bit_depth=depth)


def test_a_tiff_may_state_its_12_bits(tmp_path: Path) -> None:
    """Two levels are packed into three bytes."""
    levels = np.arange(256).reshape(16, 16) * 16
    first, second = levels.reshape(-1, 2).T
    packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], 1).astype(np.uint8).tobytes()
    tags = [(256, 16), (257, 16), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, 16), (279, len(packed))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    path = raw(tmp_path / "a.tiff", b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + directory)
    (image,) = open_images(path)
    assert np.abs(pixels(image)[..., 0] - levels / 4095 * 255).max() <= 0.5


def test_16_bit_colours_in_separate_planes_are_refused(tmp_path: Path) -> None:
    """Pillow reads every byte of them as a pixel."""
    levels = np.full((3, 16, 16), 300, np.uint16)
    tifffile.imwrite(path := tmp_path / "a.tiff", levels, photometric="rgb", planarconfig="separate")
    assert "separate planes" in (read_image(path).problem or "")


def test_orientation_and_transparency_hold_at_a_stated_depth(tmp_path: Path) -> None:
    levels = np.zeros((16, 24, 3), np.uint16)
    levels[:, :12] = 4095
    tifffile.imwrite(path := tmp_path / "a.tiff", levels, photometric="rgb", extratags=[(274, "H", 1, 6, True)])
    turned = pixels(read_image(path, bit_depth=12))
    assert turned.shape == (24, 16, 3)
    assert (turned[:12] == 255).all()
    assert (turned[12:] == 0).all()
    clear = np.full((16, 16, 4), 65535, np.uint16)
    clear[..., :3] = 2000
    clear[:8, :, 3] = 0
    values = pixels(read_image(raw(tmp_path / "b.png", png_of_16_bits(clear)), bit_depth=12))
    assert (values[:8] == 255).all()
    assert (values[8:] == round(2000 / 4095 * 255)).all()
    grey = clear[..., [0, 3]]
    assert "without transparency" in (
        read_image(raw(tmp_path / "c.png", png_of_16_bits(grey)), bit_depth=12).problem or ""
    )


def test_big_endian_16_bit_grey(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.tiff", Image.new("I;16B", (16, 16), 40000))
    with Image.open(path) as image:
        assert image.mode == "I;16B"
    assert (pixels(read_image(path)) == 156).all()


@pytest.mark.parametrize(("value", "expected"), [(200, 200), (25700, 100)])
def test_32_bit_integers_within_16_bits(tmp_path: Path, value: int, expected: int) -> None:
    path = saved(tmp_path / "a.tiff", Image.new("I", (16, 16), value))
    assert (pixels(read_image(path)) == expected).all()


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    upright = noise(16, 24)
    exif = Image.Exif()
    turned = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    for orientation, turn in turned.items():
        exif[0x0112] = orientation
        path = saved(tmp_path / f"{orientation}.png", upright.transpose(turn), exif=exif)
        assert (pixels(read_image(path)) == np.asarray(upright)).all()
    exif[0x0112] = 6
    assert pixels(read_image(saved(tmp_path / "a.jpg", noise(16, 24), exif=exif))).shape == (24, 16, 3)


@pytest.mark.parametrize("orientation", range(1, 10))
def test_every_orientation_equals_pillows(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path / "a.jpg", noise(16, 24), exif=exif)
    with Image.open(path) as image:
        assert (pixels(read_image(path)) == np.asarray(ImageOps.exif_transpose(image))).all()


def test_corrupt_exif_is_no_problem(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", exif=b"Exif\0\0neither little nor big")
    assert pixels(read_image(path)).shape == (16, 20, 3)


def test_phone_image_with_a_preview_is_one_image(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[noise(8, 10)])
    assert pixels(read_image(path)).shape == (16, 20, 3)


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
    "text": (lambda p: raw(p / "a.png", b"not an image\n"), "Not an image in one of the formats JPEG, PNG"),
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
        "3 frames; only still images",
    ),
    "missing": (lambda p: p / "a.png", "Cannot be read: No such file"),
    "folder": (lambda p: p, "it is a folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_file_has_a_one_line_problem(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    image = read_image(make(tmp_path), name="a")
    assert image.problem is not None
    with pytest.raises(PrivlabError, match=message):
        raise PrivlabError(image.problem)
    assert "\n" not in image.problem
    assert "0x" not in image.problem
    assert (image.name, image.pixels) == ("a", None)


def test_image_between_pillows_limit_and_ours_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would warn of a bomb here, and warnings are errors."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    assert pixels(read_image(saved(tmp_path / "a.png", noise(16, 20)))).shape == (16, 20, 3)


def test_huge_file_is_refused_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with path.open("wb") as file:
        file.truncate(2**29 + 2**20)  # sparse: no disk is used
    assert "513 MiB, and at most 512 MiB are read" in (read_image(path).problem or "")


def test_permission_error_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    path = saved(tmp_path / "a.png")
    monkeypatch.setattr(os, "open", deny)
    image = read_image(path)
    assert (image.problem, image.sha256) == ("Cannot be read: Permission denied.", "")


def test_damage_found_late_is_a_problem(tmp_path: Path) -> None:
    """Pillow opens a file by its header: a data set may hand over an image whose pixels cannot be read."""
    with Image.open(cut(saved(tmp_path / "a.png", noise(64, 64)), 0.6)) as image:
        found = read_image(image, name="a")
    assert (found.sha256, found.pixels) == ("", None)
    assert found.problem is not None
    assert found.problem.startswith("Truncated or damaged: ")


def test_threads_that_overlap_leave_the_filters_of_warnings_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one in is the first one out: what each restores must not be what the other had set."""
    path, plain, before = saved(tmp_path / "a.png"), decode._rgb, list(warnings.filters)
    inside, may_leave = ({name: threading.Event() for name in "ab"} for _ in range(2))

    def held(image: Image.Image, bit_depth: int | None) -> tuple[Image.Image, tuple[int, int] | None]:
        name = threading.current_thread().name
        inside[name].set()
        assert may_leave[name].wait(60)
        return plain(image, bit_depth)

    monkeypatch.setattr(decode, "_rgb", held)
    threads = {name: threading.Thread(target=read_image, args=(path,), name=name) for name in "ab"}
    for name, thread in threads.items():
        thread.start()
        assert inside[name].wait(60)
    for name, thread in threads.items():
        may_leave[name].set()
        thread.join(60)
    assert warnings.filters == before
    with pytest.warns(UserWarning, match="still heard"):
        warnings.warn("still heard", UserWarning, stacklevel=1)
