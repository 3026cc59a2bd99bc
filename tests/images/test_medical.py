"""DICOM, NIfTI, pages of TIFF and arrays: each is written here with levels that are known, and read again."""

import gzip
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from privlab.base import PrivlabError, PrivlabWarning
from privlab.images import Data, NamedImage, open_images, read_image

pydicom = pytest.importorskip("pydicom")
nibabel = pytest.importorskip("nibabel")

EXPLICIT, DEFLATED, RLE, JPEG_LS = (f"1.2.840.10008.1.2.{number}" for number in ("1", "1.99", "5", "4.80"))
RAMP = np.arange(256).reshape(16, 16)


def dicom(path: Path, pixels: np.ndarray, bits: int | None = None, syntax: str = EXPLICIT, **elements: Any) -> Path:
    """Write an array of h × w, of frames or of colours, with more elements by keyword."""
    colours = pixels.shape[-1] == 3
    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.SOPClassUID, dataset.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", "1.2.3"
    dataset.Rows, dataset.Columns = pixels.shape[-3:-1] if colours else pixels.shape[-2:]
    dataset.SamplesPerPixel = 3 if colours else 1
    dataset.PhotometricInterpretation = "RGB" if colours else "MONOCHROME2"
    if colours:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = 8 * pixels.itemsize
    dataset.BitsStored = bits or dataset.BitsAllocated
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    if pixels.ndim == 3 and not colours:
        dataset.NumberOfFrames = len(pixels)
    dataset.PixelData = pixels.tobytes()
    for name, value in elements.items():
        setattr(dataset, name, value)
    dataset.save_as(path, enforce_file_format=True)
    return path


def grey(image: NamedImage) -> np.ndarray:
    """Return the levels of one image that is grey."""
    assert image.problem is None
    assert isinstance(image.pixels, Image.Image)
    levels = np.asarray(image.pixels).astype(int)
    assert (levels == levels[..., :1]).all()
    return levels[..., 0]


def only(data: Data) -> NamedImage:
    (image,) = data
    return image


# DICOM


def test_levels_of_dicom_have_the_range_of_their_bits(tmp_path: Path) -> None:
    eight = dicom(tmp_path / "8.dcm", RAMP.astype(np.uint8))
    twelve = dicom(tmp_path / "12.dcm", (RAMP * 16).astype(np.uint16), bits=12)
    image = only(open_images(eight))
    assert (grey(image) == RAMP).all()
    assert image.sha256 == hashlib.sha256(eight.read_bytes()).hexdigest()
    assert (grey(only(open_images(twelve))) == (RAMP * 16 * 255 / 4095).round()).all()


def test_monochrome1_is_inverted(tmp_path: Path) -> None:
    path = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8), PhotometricInterpretation="MONOCHROME1")
    assert (grey(read_image(path)) == 255 - RAMP).all()


def test_rescaled_levels_are_seen_through_the_first_of_two_windows(tmp_path: Path) -> None:
    """Hounsfield units from −1024 on: PS3.3 C.11.2.1.2 says what a window of 400 around 40 shows."""
    stored = np.linspace(-200, 2000, 256).round().astype(np.int16).reshape(16, 16)
    windows: dict[str, Any] = {"WindowCenter": [40, 600], "WindowWidth": [400, 1600]}
    path = dicom(tmp_path / "ct.dcm", stored, RescaleSlope=1, RescaleIntercept=-1024, **windows)
    units = stored.astype(float) - 1024
    expected = (((units - 39.5) / 399 + 0.5) * 255).round().clip(0, 255)
    assert (grey(read_image(path)) == expected).all()
    assert 0 < expected.mean() < 255


@pytest.mark.parametrize("windowed", [True, False])
def test_a_negative_slope_turns_black_and_white_round(tmp_path: Path, windowed: bool) -> None:
    window: dict[str, Any] = {"WindowCenter": -127.0, "WindowWidth": 256.0} if windowed else {}
    path = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8), RescaleSlope=-1, RescaleIntercept=0, **window)
    assert np.abs(grey(read_image(path)) - (255 - RAMP)).max() <= 1


def test_a_table_of_levels_is_applied(tmp_path: Path) -> None:
    table = pydicom.Dataset()
    table.LUTDescriptor = [256, 0, 16]
    table.add_new("LUTData", "US", [65535 - 257 * level for level in range(256)])
    path = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8), VOILUTSequence=[table])
    assert (grey(read_image(path)) == 255 - RAMP).all()


def test_colours_of_dicom(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (16, 20, 3), dtype=np.uint8)
    image = read_image(dicom(tmp_path / "a.dcm", colours))
    assert (np.asarray(image.pixels) == colours).all()


def test_frames_are_images_with_numbers(tmp_path: Path) -> None:
    frames = np.stack([RAMP, 255 - RAMP, RAMP // 2]).astype(np.uint8)
    path = dicom(tmp_path / "cine.dcm", frames)
    data = open_images(path)
    assert data.names == tuple(f"{path.as_posix()}#{i}" for i in range(3))
    assert all((grey(image) == frame).all() for image, frame in zip(data, frames, strict=True))
    assert len({image.sha256 for image in data}) == 3
    assert (grey(only(open_images(f"{path}#2"))) == RAMP // 2).all()
    with pytest.raises(PrivlabError, match="has 3 images"):
        open_images(f"{path}#3")
    assert "3 frames" in str(read_image(path).problem)


def test_each_frame_of_an_enhanced_file_has_its_own_window(tmp_path: Path) -> None:
    groups = []
    for centre in (64, 192):
        window, group = pydicom.Dataset(), pydicom.Dataset()
        window.WindowCenter, window.WindowWidth = centre, 100
        group.FrameVOILUTSequence = [window]
        groups.append(group)
    frames = np.stack([RAMP, RAMP]).astype(np.uint8)
    path = dicom(tmp_path / "enhanced.dcm", frames, PerFrameFunctionalGroupsSequence=groups)
    first, second = map(grey, open_images(path))
    assert (first[8:] == 255).all()
    assert (second[:8] == 0).all()


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated": (lambda p: cut(dicom(p / "a.dcm", RAMP.astype(np.uint8)), 100), "Truncated or damaged"),
    "short header": (lambda p: cut(dicom(p / "a.dcm", RAMP.astype(np.uint8)), 400), "."),
    "deflated": (lambda p: dicom(p / "a.dcm", RAMP.astype(np.uint8), syntax=DEFLATED), "deflated"),
    "large": (lambda p: dicom(p / "a.dcm", RAMP.astype(np.uint8), Rows=60000, Columns=60000), "million pixels"),
    "frames": (lambda p: dicom(p / "a.dcm", RAMP.astype(np.uint8), NumberOfFrames=10**9), "do not fit into the file"),
    "small": (lambda p: dicom(p / "a.dcm", np.zeros((4, 4), np.uint8)), "at least 8"),
    "report": (lambda p: without_pixels(dicom(p / "a.dcm", RAMP.astype(np.uint8))), "without pixels"),
    "codec": (lambda p: in_jpeg_ls(dicom(p / "a.dcm", RAMP.astype(np.uint8))), "JPEG-LS.*need another package.*jpegls"),
}


def cut(path: Path, end: int) -> Path:
    path.write_bytes(path.read_bytes()[:-end])
    return path


def without_pixels(path: Path) -> Path:
    dataset = pydicom.dcmread(path)
    del dataset.PixelData
    dataset.save_as(path)
    return path


def in_jpeg_ls(path: Path) -> Path:
    dataset = pydicom.dcmread(path)
    dataset.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8" + b"0" * 200])
    dataset.file_meta.TransferSyntaxUID = JPEG_LS
    dataset.save_as(path)
    return path


@pytest.mark.parametrize("case", REFUSED)
def test_odd_dicom_has_a_problem_of_one_line(tmp_path: Path, case: str) -> None:
    make, match = REFUSED[case]
    image = only(open_images(make(tmp_path)))
    assert image.pixels is None
    assert image.problem is not None
    assert "\n" not in image.problem
    with pytest.raises(PrivlabError, match=match):
        raise PrivlabError(image.problem)


@pytest.mark.parametrize("package", ["pydicom", "nibabel"])
def test_without_the_extra_one_line_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    path = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8))
    if package == "nibabel":
        path = nifti(tmp_path / "a.nii", np.zeros((16, 16, 3), np.int16))
    monkeypatch.setitem(sys.modules, package, None)
    assert "pip install 'privlab[medical]'" in str(only(open_images(path)).problem)


# NIfTI


def nifti(path: Path, voxels: np.ndarray, affine: np.ndarray | None = None) -> Path:
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4) if affine is None else affine), path)
    return path


def volume() -> np.ndarray:
    """Return a volume of x × y × z, from left to right, from back to front, from feet to head."""
    return np.random.default_rng(1).integers(-1000, 1000, (16, 20, 5)).astype(np.int16)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("codes", ["RAS", "LPS", "SRP", "IAL"])
def test_slices_are_those_of_radiologists_for_any_order_of_axes(tmp_path: Path, name: str, codes: str) -> None:
    image = nibabel.Nifti1Image(volume(), np.eye(4))
    wanted = nibabel.orientations.axcodes2ornt(codes)
    turned = nibabel.orientations.ornt_transform(nibabel.orientations.io_orientation(np.eye(4)), wanted)
    nibabel.save(image.as_reoriented(turned), tmp_path / name)
    data = open_images(tmp_path / name)
    assert len(data) == 5
    low, high = volume().min(), volume().max()
    for z, slice_ in enumerate(data):
        expected = ((volume()[:, :, z] - float(low)) * (255 / (int(high) - int(low)))).round()
        assert (grey(slice_) == expected[::-1, ::-1].T).all()


def test_levels_of_nifti_have_the_range_that_the_file_states(tmp_path: Path) -> None:
    voxels = np.tile(RAMP[..., None], (1, 1, 2))
    image = nibabel.Nifti1Image(voxels.astype(np.int16), np.eye(4))
    image.header["cal_min"], image.header["cal_max"] = 0, 510
    nibabel.save(image, tmp_path / "stated.nii")
    nifti(tmp_path / "bytes.nii", (voxels // 2).astype(np.uint8))
    turned = RAMP[::-1, ::-1].T
    for slice_ in open_images(tmp_path / "stated.nii"):
        assert (grey(slice_) == (turned / 2).round()).all()
    for slice_ in open_images(tmp_path / "bytes.nii"):
        assert (grey(slice_) == turned // 2).all()


def claiming(path: Path, sides: tuple[int, ...], pack: bool = False) -> Path:
    """Write a header that claims a volume, and a hundred bytes."""
    header = nibabel.Nifti1Header()
    header.set_data_shape(sides)
    header.set_data_dtype(np.int16)
    header["magic"], header["vox_offset"] = b"n+1", 352
    data = header.binaryblock + b"\0" * 104
    path.write_bytes(gzip.compress(data) if pack else data)
    return path


ODD_NIFTI: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a thousand million": (lambda p: claiming(p / "a.nii", (1000, 1000, 1000)), "voxels by its header"),
    "packed": (lambda p: claiming(p / "a.nii.gz", (1000, 1000, 1000), pack=True), "voxels by its header"),
    "packed, but few": (lambda p: claiming(p / "a.nii.gz", (30, 30, 30), pack=True), "Truncated or damaged"),
    "four axes": (lambda p: nifti(p / "a.nii", np.zeros((16, 16, 4, 3), np.int16)), "one volume.*16 × 16 × 4 × 3"),
    "no header": (lambda p: cut(nifti(p / "a.nii", np.zeros((16, 16, 4), np.int16)), 2100), "Truncated or damaged"),
    "small": (lambda p: nifti(p / "a.nii", np.zeros((4, 16, 4), np.int16)), "at least 8"),
    "not finite": (lambda p: nifti(p / "a.nii", np.full((16, 16, 2), np.nan, np.float32)), "finite"),
}


@pytest.mark.parametrize("case", ODD_NIFTI)
def test_odd_nifti_has_a_problem_of_one_line(tmp_path: Path, case: str) -> None:
    make, match = ODD_NIFTI[case]
    (tmp_path / "set").mkdir()
    make(tmp_path / "set")
    Image.fromarray(RAMP.astype(np.uint8)).save(tmp_path / "set" / "b.png")
    odd, fine = open_images(tmp_path / "set")
    assert (odd.pixels, fine.problem) == (None, None)
    with pytest.raises(PrivlabError, match=match):
        raise PrivlabError(odd.problem or "")
    assert "\n" not in (odd.problem or "\n")


def test_volumes_in_class_folders_give_each_slice_the_label(tmp_path: Path) -> None:
    for label, name in enumerate(("ill", "well")):
        (tmp_path / name).mkdir()
        nifti(tmp_path / name / "scan.nii.gz", volume() + np.int16(label))
    data = open_images(tmp_path)
    assert [image.label for image in data] == [0] * 5 + [1] * 5
    first, second = open_images(tmp_path, limit=2)
    assert (first.name, second.name) == ("ill/scan.nii.gz#0", "well/scan.nii.gz#0")


# Pages of TIFF


def test_pages_of_a_tiff_are_images(tmp_path: Path) -> None:
    pages = np.stack([RAMP, 255 - RAMP, RAMP // 3]).astype(np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", pages, photometric="minisblack")
    data = open_images(tmp_path)
    assert data.names == ("a.tif#0", "a.tif#1", "a.tif#2")
    assert all((grey(image) == page).all() for image, page in zip(data, pages, strict=True))


@pytest.mark.parametrize("colours", [False, True])
def test_pages_of_twelve_bits_are_named_and_read_by_their_depth(tmp_path: Path, colours: bool) -> None:
    pages = np.stack([RAMP * 16, 4095 - RAMP * 16]).astype(np.uint16)
    if colours:
        pages = np.repeat(pages[..., None], 3, axis=3)
    path = tmp_path / "a.tiff"
    tifffile.imwrite(path, pages, photometric="rgb" if colours else "minisblack")
    with pytest.warns(PrivlabWarning, match="--bit-depth 12"):
        list(open_images(path))
    for page, image in zip(pages, open_images(path, bit_depth=12), strict=True):
        expected = page[..., 0] if colours else page
        assert np.abs(grey(image) - expected * (255 / 4095)).max() <= 0.5


# Arrays


def test_arrays_of_bytes(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (5, 16, 20, 3), dtype=np.uint8)
    for name, array in {
        "last": colours,
        "first": colours.transpose(0, 3, 1, 2),
        "fortran": np.asfortranarray(colours),
    }.items():
        np.save(tmp_path / f"{name}.npy", array)
        data = open_images(tmp_path / f"{name}.npy")
        assert len(data) == 5
        assert all((np.asarray(found.pixels) == image).all() for found, image in zip(data, colours, strict=True))
    np.save(tmp_path / "one.npy", colours[0, ..., 0])
    assert (grey(only(open_images(tmp_path / "one.npy"))) == colours[0, ..., 0]).all()
    np.save(tmp_path / "volumes.npy", np.zeros((2, 9, 16, 20), np.uint8))
    assert len(open_images(tmp_path / "volumes.npy")) == 18


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("channels", [2, 4, 8])
def test_channels_of_arrays_are_kept(tmp_path: Path, dtype: type, channels: int) -> None:
    values = np.random.default_rng(0).random((16, 20, channels)).astype(np.float32)
    array = (values * 255).astype(np.uint8) if dtype is np.uint8 else values
    np.save(tmp_path / "a.npy", array)
    image = only(open_images(tmp_path / "a.npy"))
    expected = array.transpose(2, 0, 1) / np.float32(255 if dtype is np.uint8 else 1)
    assert np.allclose(np.asarray(image.pixels), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros((2, 9, 9, 9, 9), np.uint8), "n × h × w"),
        (np.full((16, 16), 7.0, np.float32), "outside"),
        (np.zeros((16, 16), np.int16), "int16"),
        (np.array([{}]), "Truncated or damaged"),
    ],
)
def test_odd_arrays_have_a_problem_of_one_line(tmp_path: Path, array: np.ndarray, match: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(PrivlabError, match=match):
        raise PrivlabError(only(open_images(tmp_path / "a.npy")).problem or "")
