"""Small images, volumes and tars that stand for much: reading one takes at most 4 GiB and 30 seconds."""

import gzip
import io
import runpy
import struct
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from privlab.base import PrivlabError
from privlab.images.archives import tars
from privlab.images.decode import Slice, count_slices, read_image
from privlab.stores import places_of

bombs = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("bombs.py"))))
BOMBS, LARGEST, bomb, images_of, npy_header = bombs.BOMBS, bombs.LARGEST, bombs.bomb, bombs.images_of, bombs.npy_header

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="measures a copy of this process"),
]


def image(path: Path) -> None:
    """Read a file as `open_images` does, the first images and the last of those that it holds."""
    try:
        count = count_slices(path)
    except Exception as error:
        raise PrivlabError(" ".join(str(error).split())) from None
    indices = () if count is None else {*range(min(count, 4)), count - 1}
    for source in [Slice(path, index) for index in indices] or [path]:
        if (problem := read_image(source, name="a").problem) is not None:
            raise PrivlabError(problem)


def zeros(path: Path, gibibytes: float = 1.25, start: bytes = b"", end: bytes = b"") -> None:
    """Write bytes, then as many zeros, then bytes, packed as tightly as gzip does."""
    with gzip.open(path, "wb", 6) as file:
        file.write(start)
        for _ in range(int(gibibytes * 64)):
            file.write(bytes(2**24))
        file.write(end)


# Images and volumes


def png(width: int, height: int, packed: int, extra: bytes = b"") -> bytes:
    """Return a grey PNG of zeros with a size in its header, and as many bytes of pixels as `packed`."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + extra + chunk(b"IDAT", zlib.compress(bytes(packed))) + chunk(b"IEND", b"")


@bomb("PNG: a hundred million pixels", "a.png", image)
def _(path: Path) -> None:
    path.write_bytes(png(10_000, 10_000, 10_001 * 10_000))


@bomb("PNG: four billion pixels by its header", "a.png", image)
def _(path: Path) -> None:
    path.write_bytes(png(65_536, 65_536, 10**6))


@bomb("PNG: more pixels than its header states", "a.png", image)
def _(path: Path) -> None:
    path.write_bytes(png(64, 64, 2**28))


@bomb("PNG: packed texts", "a.png", image)
def _(path: Path) -> None:
    packed = b"x\x00\x00" + zlib.compress(bytes(2**26))
    chunk = struct.pack(">I", len(packed)) + b"zTXt" + packed + struct.pack(">I", zlib.crc32(b"zTXt" + packed))
    path.write_bytes(png(64, 64, 65 * 64, chunk * 140))


@bomb("strip: packed texts", "a.png", places_of)
def _(path: Path) -> None:
    packed = b"x\x00\x00" + zlib.compress(bytes(2**26))
    chunk = struct.pack(">I", len(packed)) + b"zTXt" + packed + struct.pack(">I", zlib.crc32(b"zTXt" + packed))
    path.write_bytes(png(64, 64, 65 * 64, chunk * 140))


@bomb("PNG: 100 million pixels of colours in 16 bits", "a.png", image)
def _(path: Path) -> None:
    whole = bytearray(png(10_000, 10_000, 80_001 * 10_000))
    whole[24:26] = b"\x10\x06"  # depth 16, colours with transparency
    whole[29:33] = struct.pack(">I", zlib.crc32(bytes(whole[12:29])))
    path.write_bytes(whole)


def picture(form: str, **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        from PIL import Image

        Image.new(options.pop("mode", "L"), options.pop("size", (9_990, 9_990))).save(path, form, **options)

    return write


BOMBS["JPEG: a hundred million pixels"] = ("a.jpg", picture("JPEG", mode="RGB"), image)


@bomb("GIF: a hundred thousand frames", "a.gif", image)
def _(path: Path) -> None:
    start = b"GIF89a" + struct.pack("<HHBBB", 9000, 9000, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 9000, 9000, 0) + b"\x02\x02\x44\x01\x00"
    path.write_bytes(start + frame * 580_000 + b";")


@bomb("JPEG: a progressive one of very many scans", "a.jpg", image)
def _(path: Path) -> None:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (9_000, 9_000)).save(buffer, "JPEG", progressive=True, quality=10)
    data = buffer.getvalue()
    at = data.rindex(b"\xff\xda")
    scan = data[at:-2]
    path.write_bytes(data[:-2] + scan * ((LARGEST - len(data)) // len(scan)) + b"\xff\xd9")


@bomb("TIFF: eighty thousand pages", "a.tif", image)
def _(path: Path) -> None:
    tags = ((256, 16), (257, 16), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, 16), (279, 256))
    each = 6 + 12 * len(tags)
    pages = 9_000_000 // each
    data = bytearray(b"II*\x00" + struct.pack("<I", 8))
    for i in range(pages):
        data += struct.pack("<H", len(tags))
        for tag, value in tags:
            data += struct.pack("<HHII", tag, 4, 1, value)
        after = 8 + (i + 1) * each
        data += struct.pack("<I", after if i + 1 < pages else 0)
    path.write_bytes(data)


@bomb("TIFF: pages that follow each other in a circle", "a.tif", image)
def _(path: Path) -> None:
    path.write_bytes(b"II*\x00" + struct.pack("<IHI", 8, 0, 8))


@bomb("TIFF: a tag of four billion numbers", "a.tif", image)
def _(path: Path) -> None:
    tag = struct.pack("<HHII", 256, 4, 2**32 - 1, 8)
    path.write_bytes(b"II*\x00" + struct.pack("<IH", 8, 1) + tag + bytes(9_000_000))


@bomb("TIFF: many tags that share one long value", "a.tif", image)
def _(path: Path) -> None:
    tags = b"".join(struct.pack("<HHII", 1000 + i, 5, 10**6, 8) for i in range(60_000))
    path.write_bytes(b"II*\x00" + struct.pack("<IH", 8, 60_000) + tags + bytes(8_100_000))


@bomb("TIFF: packed zeros", "a.tif", image)
def _(path: Path) -> None:
    picture("TIFF", mode="RGB", compression="tiff_adobe_deflate")(path)


@bomb("TIFF: 100 million pixels of 16 bits", "a.tif", image)
def _(path: Path) -> None:
    picture("TIFF", mode="I;16", compression="tiff_adobe_deflate")(path)


def dicom_file(path: Path, **changes: Any) -> None:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.data import get_testdata_file

    dataset = pydicom.dcmread(get_testdata_file("CT_small.dcm", download=False))
    for name, value in changes.items():
        setattr(dataset, name, value)
    dataset.save_as(path)


@bomb("DICOM: four billion pixels by its header", "a.dcm", image)
def _(path: Path) -> None:
    dicom_file(path, Rows=65535, Columns=65535)


@bomb("DICOM: two billion frames", "a.dcm", image)
def _(path: Path) -> None:
    dicom_file(path, NumberOfFrames=2**31 - 1)


@bomb("DICOM: a million frames of one pixel", "a.dcm", image)
def _(path: Path) -> None:
    dicom_file(
        path,
        NumberOfFrames=2**20,
        Rows=8,
        Columns=8,
        BitsAllocated=8,
        BitsStored=8,
        HighBit=7,
        PixelData=bytes(9_000_000),
    )


@bomb("DICOM: a frame of 100 million pixels, run-length encoded", "a.dcm", image)
def _(path: Path) -> None:
    from pydicom.encaps import encapsulate
    from pydicom.uid import RLELossless

    pydicom = pytest.importorskip("pydicom")
    dicom_file(path)
    dataset = pydicom.dcmread(path)
    dataset.WindowCenter, dataset.WindowWidth, dataset.VOILUTFunction = 40, 400, "SIGMOID"
    run = b"\x81\x00" * (10**8 // 128 + 1)
    segments = struct.pack("<16I", 2, 64, 64 + len(run), *[0] * 13)
    dataset.Rows = dataset.Columns = 10_000
    dataset.file_meta.TransferSyntaxUID = RLELossless
    dataset.PixelData = encapsulate([segments + run + run])
    dataset["PixelData"].is_undefined_length = True
    dataset.save_as(path)


@bomb("DICOM: sequences inside each other", "a.dcm", image)
def _(path: Path) -> None:
    dicom_file(path)
    data = path.read_bytes()
    at = data.index(b"\xe0\x7f\x10\x00")
    nested = b"\x08\x00\x40\x11SQ\x00\x00\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0\xff\xff\xff\xff"
    path.write_bytes(data[:at] + nested * 400_000)


@bomb("DICOM: a million elements", "a.dcm", image)
def _(path: Path) -> None:
    dicom_file(path)
    data = path.read_bytes()
    at = data.index(b"\xe0\x7f\x10\x00")
    many = b"".join(struct.pack("<HH2sH", 9 + 2 * (i >> 16), i & 0xFFFF, b"LO", 0) for i in range(1_100_000))
    path.write_bytes(data[:at] + many)


def nifti_header(shape: tuple[int, ...], kind: int, bits: int, offset: float = 352.0) -> bytes:
    header = bytearray(348)
    struct.pack_into("<i", header, 0, 348)
    struct.pack_into("<8h", header, 40, len(shape), *shape, *[1] * (7 - len(shape)))
    struct.pack_into("<hh", header, 70, kind, bits)
    struct.pack_into("<8f", header, 76, *[1.0] * 8)
    struct.pack_into("<f", header, 108, offset)
    struct.pack_into("<ff", header, 112, 1.5, 2.0)
    # A rotated affine, so that the axes must be turned.
    struct.pack_into("<hh", header, 252, 0, 1)
    struct.pack_into("<12f", header, 280, 0, -1, 0, 0, 0, 0, -1, 0, 1, 0, 0, 0)
    header[344:348] = b"n+1\0"
    return bytes(header)


@bomb("NIfTI: 512 MiB of packed bytes", "a.nii.gz", image)
def _(path: Path) -> None:
    zeros(path, gibibytes=0.5, start=nifti_header((1024, 1024, 512), 2, 8) + bytes(4))


@bomb("NIfTI: 2**27 packed voxels, whose axes are turned", "a.nii.gz", image)
def _(path: Path) -> None:
    zeros(path, gibibytes=0.25, start=nifti_header((512, 512, 512), 4, 16) + bytes(4))


@bomb("NIfTI: one slice of half a billion voxels", "a.nii.gz", image)
def _(path: Path) -> None:
    zeros(path, gibibytes=0.5, start=nifti_header((23_000, 23_000, 1), 2, 8) + bytes(4))


@bomb("NIfTI: voxels behind 1.25 GiB of packed zeros", "a.nii.gz", image)
def _(path: Path) -> None:
    zeros(path, start=nifti_header((16, 16, 4), 2, 8, 1.25 * 2**30) + bytes(4), end=bytes(1024))


@bomb("NIfTI: an extension of 900 MiB", "a.nii.gz", image)
def _(path: Path) -> None:
    extension = struct.pack("<ii", 900 * 2**20, 6)
    zeros(path, 900 / 1024, nifti_header((16, 16, 4), 2, 8, 900 * 2**20) + b"\x01\0\0\0" + extension, bytes(2000))


@bomb("npy: more than it holds", "a.npy", image)
def _(path: Path) -> None:
    path.write_bytes(npy_header(f"({2**20},{2**20})") + bytes(1000))


@bomb("npy: very many images", "a.npy", image)
def _(path: Path) -> None:
    path.write_bytes(npy_header("(140000,8,8)") + bytes(140_000 * 64))


@bomb("images npz: packed zeros", "a.npz", images_of)
def _(path: Path) -> None:
    np.savez_compressed(path, images=np.zeros((2**13 - 1, 256, 256), np.uint8))


@bomb("images npz: packed labels", "a.npz", images_of)
def _(path: Path) -> None:
    np.savez_compressed(path, images=np.zeros((2, 16, 16), np.uint8), labels=np.zeros((2, 2**28 - 128), np.uint8))


# WebDataset


@bomb("tar: sparse members of 8 GiB", "a.tar", lambda path: [*tars({"a.tar": path}, frozenset({".png"}))])
def _(path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for i in range(1000):
            info = tarfile.TarInfo(f"{i}.png")
            info.type = tarfile.GNUTYPE_SPARSE
            archive.addfile(info)


@bomb("tar: members that state 8 GiB", "a.tar", lambda path: [*tars({"a.tar": path}, frozenset({".png"}))])
def _(path: Path) -> None:
    info = tarfile.TarInfo("a.png")
    info.size = 2**33
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(10_000))


@bomb("tar: a long header that states 8 GiB", "a.tar", lambda path: [*tars({"a.tar": path}, frozenset({".png"}))])
def _(path: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**33
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(10_000))


@bomb("tar: long headers inside each other", "a.tar", lambda path: [*tars({"a.tar": path}, frozenset({".png"}))])
def _(path: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 4
    path.write_bytes((info.tobuf(tarfile.GNU_FORMAT) + b"abc".ljust(512, b"\0")) * 9000)


@bomb("tar: sparse maps of PAX headers", "a.tar", lambda path: [*tars({"a.tar": path}, frozenset({".png"}))])
def _(path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for i in range(2):
            info = tarfile.TarInfo(f"{i}.png")
            info.pax_headers = {"GNU.sparse.map": "0,1," * 1_000_000 + "0,1", "GNU.sparse.size": "8"}
            archive.addfile(info)


@bomb("tar: ten thousand labels", "a.tar", lambda path: [*tars({"a.tar": path}, frozenset({".png"}))])
def _(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for i in range(6000):
            for name, data in ((f"{i}.png", b""), (f"{i}.cls", b"[" * 100)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("description", BOMBS)
def test_a_small_file_takes_little(description: str, tmp_path: Path, separately: Any, capsys: Any) -> None:
    bombs.takes_little(description, tmp_path, separately, capsys)
