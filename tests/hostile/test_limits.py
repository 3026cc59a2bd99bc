"""Small files that stand for much, of each kind: reading one takes at most 4 GiB and 30 seconds."""

import gzip
import io
import pickle
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from privlab.base import PrivlabError
from privlab.benchmark.cards import read_card
from privlab.benchmark.results import read_result
from privlab.grids import read_experiment
from privlab.images import open_images
from privlab.images.archives import tars
from privlab.images.decode import Slice, count_slices, read_image
from privlab.images.manifest import read_labels, read_manifest
from privlab.keys import load_key
from privlab.release.gradient_file import read_gradient_file
from privlab.stores import places_of
from privlab.victims.weights import read_state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="measures a copy of this process"),
]

SECONDS, MEBIBYTES, LARGEST = 30.0, 4096, 10_000_000
"""The most that reading one file may take, in seconds of a core and in memory, and the largest file in bytes."""

NESTED = 9 * 2**20 // 2
"""Half as many brackets as a file of 9 MiB has."""


def images_of(path: Path) -> object:
    """Read the first images of a source as `privlab attack --limit 8` does."""
    return [image.problem for image in open_images(str(path), limit=8)]


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


Bomb = tuple[str, Callable[[Path], object], Callable[[Path], object]]
BOMBS: dict[str, Bomb] = {}
"""By its description: the name of the file, what writes it, and what reads it."""


def bomb(description: str, name: str, read: Callable[[Path], object]) -> Callable[[Any], Any]:
    def add(write: Callable[[Path], object]) -> Callable[[Path], object]:
        BOMBS[description] = (name, write, read)
        return write

    return add


def zeros(path: Path, gibibytes: float = 1.25, start: bytes = b"", end: bytes = b"") -> None:
    """Write bytes, then as many zeros, then bytes, packed as tightly as gzip does."""
    with gzip.open(path, "wb", 6) as file:
        file.write(start)
        for _ in range(int(gibibytes * 64)):
            file.write(bytes(2**24))
        file.write(end)


# Tables


@bomb("Parquet: a value of 64 MiB, repeated", "a.parquet", images_of)
def _(path: Path) -> None:
    indices = pa.array(np.zeros(2**17, np.int32))
    column = pa.DictionaryArray.from_arrays(indices, pa.array([b"x" * 2**26]))
    pq.write_table(pa.table({"image": column}), path, compression="zstd", store_schema=False)


@bomb("Parquet: two million labels of one row", "a.parquet", images_of)
def _(path: Path) -> None:
    labels = pa.ListArray.from_arrays(pa.array([0, 2**21], pa.int32()), pa.array(np.zeros(2**21, np.int64)))
    pq.write_table(pa.table({"image": [b"x"], "label": labels}), path)


@bomb("Parquet: two million labels that are long texts", "a.parquet", images_of)
def _(path: Path) -> None:
    labels = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**21, np.int32)), pa.array(["x" * 2**16]))
    table = pa.table({"image": pa.array([b"x"] * 2**21), "label": labels})
    pq.write_table(table, path, compression="zstd", store_schema=False)


@bomb("Parquet: thirty thousand columns", "a.parquet", images_of)
def _(path: Path) -> None:
    pq.write_table(pa.table({"image": [b"x"], **{f"c{i}": [1] for i in range(30_000)}}), path, compression="zstd")


@bomb("Parquet: pages that hold more than the metadata state", "a.parquet", images_of)
def _(path: Path) -> None:
    pq.write_table(
        pa.table({"image": [bytes(2**28)] * 4}), path, compression="zstd", compression_level=1, use_dictionary=False
    )
    data = path.read_bytes()
    # The footer is Thrift, whose numbers are zigzag varints: the size of the column before it was packed.
    stated = pq.ParquetFile(path).metadata.row_group(0).total_byte_size
    path.write_bytes(data.replace(varint(stated), varint(1000)))


def varint(number: int) -> bytes:
    """Return a number as Thrift's compact protocol has it, padded to five bytes."""
    value, found = 2 * number, bytearray()
    for _ in range(4):
        found.append(value & 127 | 128)
        value >>= 7
    return bytes(found) + bytes([value])


@bomb("CSV: one line of 9 MB", "a.csv", read_manifest)
def _(path: Path) -> None:
    path.write_text("name,sha256,label\na.png," + "0" * 64 + "," + "1;" * 4_700_000)


@bomb("CSV: a cell of 9 MB", "a.csv", read_manifest)
def _(path: Path) -> None:
    path.write_text('name,sha256\n"' + "x" * 9_000_000 + '",0\n')


@bomb("CSV: four million columns", "a.csv", read_manifest)
def _(path: Path) -> None:
    path.write_text("name,sha256," + "," * 9_000_000 + "\n")


@bomb("CSV: labels of 600,000 files", "a.csv", read_labels)
def _(path: Path) -> None:
    path.write_text("file,label\n" + "".join(f"{i},{i}\n" for i in range(600_000)))


@bomb("CSV: a soft label of four million classes", "a.csv", read_labels)
def _(path: Path) -> None:
    path.write_text("file,label\na," + "0|" * 4_000_000 + "1\n")


# Text


@bomb("TOML: nested tables", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("x = " + "[" * 10**6 + "]" * 10**6)


@bomb("TOML: a name of a million parts", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("[" + "a." * 10**6 + "b]\nx = 1\n")


@bomb("TOML: many names of many parts", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("".join(f"[{'a.' * 98}b{i}]\n" for i in range(9500)))


@bomb("TOML: dotted keys in dotted tables", "a.toml", read_card)
def _(path: Path) -> None:
    path.write_text("".join(f"{'a.' * 90}b{i} = 1\n" for i in range(10_000)))


@bomb("TOML: a million small tables", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("x = [" + "{}," * 690_000 + "]\n")


@bomb("TOML: a million tables in a list", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("[[run]]\n" * 260_000)


@bomb("TOML: a number of two million digits", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("x = " + "9" * 2_000_000)


@bomb("TOML: a text of escapes", "a.toml", read_card)
def _(path: Path) -> None:
    path.write_text('x = "' + "\\u0000" * 340_000)


@bomb("JSON: nested lists", "a.json", read_result)
def _(path: Path) -> None:
    path.write_text("[" * NESTED + "]" * NESTED)


@bomb("JSON: four million empty objects", "a.json", read_result)
def _(path: Path) -> None:
    path.write_text('{"x": [' + "{}," * 3_000_000 + "{}]}")


@bomb("JSON: wide at every depth", "a.json", read_result)
def _(path: Path) -> None:
    path.write_text('{"x": [' + ",".join(["[" * 90 + "]" * 90] * 50_000) + "]}")


# Tensors


def header(path: Path, entries: str, rest: int = 0) -> None:
    data = entries.encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(rest))


def entry(name: str, shape: str, start: int = 0, end: int = 0) -> str:
    return f'"{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}'


@bomb("safetensors: a hundred thousand empty tensors", "a.safetensors", read_state)
def _(path: Path) -> None:
    header(path, "{" + ",".join(entry(str(i), "[0]") for i in range(140_000)) + "}")


@bomb("safetensors: gradients, a hundred thousand empty tensors", "a.safetensors", read_gradient_file)
def _(path: Path) -> None:
    header(path, "{" + ",".join(entry(str(i), "[0]") for i in range(140_000)) + "}")


@bomb("safetensors: a header of 2**60 bytes", "a.safetensors", read_state)
def _(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**60) + bytes(9_000_000))


@bomb("safetensors: a tensor with a million axes", "a.safetensors", read_state)
def _(path: Path) -> None:
    header(path, "{" + entry("a", "[0" + ",1" * 4_000_000 + "]") + "}")


@bomb("safetensors: an empty tensor of 2**60 rows", "a.safetensors", read_state)
def _(path: Path) -> None:
    header(path, "{" + entry("a", f"[0,{2**60}]") + "}")


@bomb("safetensors: nested metadata", "a.safetensors", read_state)
def _(path: Path) -> None:
    header(path, '{"__metadata__":' + "[" * NESTED + "]" * NESTED + "}")


@bomb("key: a hundred thousand orders", "a.key", load_key)
def _(path: Path) -> None:
    header(path, "{" + ",".join(entry(str(i), "[0]") for i in range(140_000)) + "}")
    path.chmod(0o600)


def torch_zip(path: Path, pickled: bytes, packing: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", packing, compresslevel=9) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/byteorder", b"little")
        archive.writestr("a/version", b"3\n")


def call(name: bytes, *arguments: bytes) -> bytes:
    """Return the opcodes that call a function, whose module and name a line end parts, with arguments as opcodes."""
    return b"c" + name + b"\n(" + b"".join(arguments) + b"tR"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


HEX = b"_codecs\nencode"


@bomb("torch: an array of 2**33 bytes, copied", "a.pt", read_state)
def _(path: Path) -> None:
    once = call(b"__builtin__\nbytearray", number(2**32))
    torch_zip(path, b"\x80\x02}" + text("a") + b"(" + call(b"__builtin__\nbytearray", once) * 4 + b"ts.")


@bomb("torch: a text that doubles at each encoding", "a.pt", read_state)
def _(path: Path) -> None:
    made = call(HEX, text("a" * 1000), text("latin1"))
    for _ in range(26):
        made = call(HEX, made, text("hex_codec"))
    torch_zip(path, b"\x80\x02}" + text("a") + made + b"s.")


@bomb("torch: a text that is copied many times", "a.pt", read_state)
def _(path: Path) -> None:
    first = text("a" * 2**22) + b"q\x00" + b"c" + HEX + b"\nq\x01" + text("latin1") + b"q\x02"
    copy = b"h\x01h\x00h\x02\x86R"
    torch_zip(path, b"\x80\x02" + first + b"(" + copy * 400_000 + b"t.")


@bomb("torch: a text that is copied and dropped many times", "a.pt", read_state)
def _(path: Path) -> None:
    first = text("a" * 2**22) + b"q\x00" + b"c" + HEX + b"\nq\x01" + text("latin1") + b"q\x02"
    copy = b"h\x02h\x01h\x00h\x02\x86Rs"
    torch_zip(path, b"\x80\x02" + first + b"}" + copy * 400_000 + b".")


@bomb("torch: numbers of 2 GiB", "a.pt", read_state)
def _(path: Path) -> None:
    kind = call(b"numpy\ndtype", text(f"V{2**31 - 1}"))
    made = call(b"numpy.core.multiarray\nscalar", kind) * 6
    torch_zip(path, b"\x80\x02}" + text("a") + b"(" + made + b"ts.")


@bomb("torch: nine million empty lists", "a.pt", read_state)
def _(path: Path) -> None:
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + b"\x80\x02(" + b"]" * 9_000_000)


@bomb("torch: empty lists in a packed archive", "a.pt", read_state)
def _(path: Path) -> None:
    torch_zip(path, b"\x80\x02(" + b"]" * 2**29 + b"t.")


@bomb("torch: sets of one long tuple", "a.pt", read_state)
def _(path: Path) -> None:
    row = b"(" + b"".join(b"J" + struct.pack("<i", i) for i in range(2**17)) + b"tq\x00"
    copies = call(b"__builtin__\nset", b"h\x00") * 5000
    torch_zip(path, b"\x80\x02" + row + b"(" + copies + b"t.")


@bomb("torch: a tensor of repeated numbers", "a.pt", read_state)
def _(path: Path) -> None:
    torch.save({"x": torch.zeros(1).expand(10**10)}, path)


@bomb("npz: packed zeros", "a.npz", read_state)
def _(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(8):
            buffer = io.BytesIO()
            np.save(buffer, np.zeros(2**27 - 64, np.uint8))
            archive.writestr(f"{i}.npy", buffer.getvalue())


@bomb("npz: an array that states more than it holds", "a.npz", read_state)
def _(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(100):
            archive.writestr(f"{i}.npy", npy_header(f"({2**33},)") + bytes(1000))


@bomb("npz: a header of a million brackets", "a.npz", read_state)
def _(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", npy_header("(" * 100_000 + ")" * 100_000))


@bomb("npz: one member under many names", "a.npz", read_state)
def _(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        buffer = io.BytesIO()
        np.save(buffer, np.zeros(2**23, np.uint8))
        archive.writestr("a.npy", buffer.getvalue())
        first = archive.infolist()[0]
        for i in range(100_000):
            again = zipfile.ZipInfo(f"{i}.npy")
            for name in ("header_offset", "file_size", "compress_size", "CRC", "compress_type"):
                setattr(again, name, getattr(first, name))
            archive.filelist.append(again)


def npy_header(shape: str) -> bytes:
    data = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(data)) + data


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
    name, write, read = BOMBS[description]
    path = tmp_path / name
    ended, _, _ = separately(lambda: write(path))
    assert ended == "None"
    assert path.stat().st_size < LARGEST

    def work() -> None:
        read(path)

    ended, seconds, mebibytes = separately(work)
    with capsys.disabled():
        print(f"\n{description}: {seconds:.1f} s, {mebibytes} MiB, {ended[:60]}")  # noqa: T201
    assert ended == "None" or ended.startswith("refused: ")
    assert seconds < SECONDS
    assert mebibytes < MEBIBYTES
