"""Images of medicine and of arrays: DICOM, NIfTI and npy files, and the slices that they hold."""

import io
import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from privlab.base import PrivlabError, check_archive, most_unpacked, one_line, open_file
from privlab.images.decode import MAX_BYTES, MAX_CHANNELS, check_size, file_bytes

if TYPE_CHECKING:
    from pydicom import Dataset

SUFFIXES = frozenset({".dcm", ".dicom", ".ima", ".nii", ".nii.gz", ".npy"})
_DEFLATE = 1032
"""By how much gzip packs at most."""
_DEFLATED_DICOM = b"1.2.840.10008.1.2.1.99"
"""The transfer syntax that packs a whole file."""


def is_dicom(data: bytes) -> bool:
    """Return whether bytes begin as a DICOM file does."""
    return data[128:132] == b"DICM"


def is_npy(data: bytes) -> bool:
    """Return whether bytes begin as a npy file does."""
    return data[:6] == b"\x93NUMPY"


def count_slices(path: Path) -> int | None:
    """Return how many images a file holds; None for a file that is not a volume.

    Raises:
        PrivlabError: if its header claims more than it holds, or the extra is missing.
    """
    with open_file(path, "image") as file:
        start = file.read(132)
    if is_dicom(start):
        frames = int(_dicom(path, path.stat().st_mtime_ns).get("NumberOfFrames") or 1)
        if not 1 <= frames <= max(1, path.stat().st_size // 8):
            raise PrivlabError(f"{frames} frames by its header, which do not fit into the file.")
        return None if frames == 1 else frames
    if is_npy(start):
        count = len(stack_of(np.load(path, mmap_mode="r", allow_pickle=False)))
        return None if count == 1 else count
    return _nifti(path, path.stat().st_mtime_ns).shape[2] if is_nifti(path) else None


def whole_image(data: bytes) -> Image.Image | np.ndarray | None:
    """Return the image of a DICOM or npy file, as `array_image` returns it; None for another file.

    Raises:
        PrivlabError: if it cannot be used, or holds several images.
    """
    if is_dicom(data):
        dataset = read_dicom(data)
        if (frames := int(dataset.get("NumberOfFrames") or 1)) != 1:
            raise PrivlabError(f"{frames} frames; only still images are read here.")
        return dicom_image(dataset)
    if is_npy(data):
        stack = stack_of(np.load(io.BytesIO(data), allow_pickle=False))
        if len(stack) != 1:
            raise PrivlabError(f"{len(stack)} images; only files of one are read here.")
        return array_image(stack[0])
    return None


def slice_of(path: Path, index: int) -> Image.Image | np.ndarray:
    """Return one of the images of a file that holds several, as `array_image` returns it.

    Args:
        path: the file.
        index: the position of the image, less than `count_slices`.

    Raises:
        PrivlabError: if it cannot be used.
    """
    with open_file(path, "image") as file:
        start = file.read(132)
    if is_dicom(start):
        return dicom_image(_dicom(path, path.stat().st_mtime_ns), index)
    if is_npy(start):
        return array_image(stack_of(np.load(path, mmap_mode="r", allow_pickle=False))[index])
    return Image.fromarray(_nifti(path, path.stat().st_mtime_ns)[:, :, index])


# DICOM


@lru_cache(maxsize=1)
def _dicom(path: Path, modified: int) -> "Dataset":
    """Return a file's data set, which is kept for the next of its frames."""
    return read_dicom(file_bytes(path))


def read_dicom(data: bytes) -> "Dataset":
    """Return the data set of a DICOM file; its pixels are not decoded yet.

    Raises:
        PrivlabError: if the extra is missing, or the whole file is packed.
    """
    try:
        import pydicom
    except ImportError:
        raise PrivlabError("A DICOM file needs the extra: pip install 'privlab[medical]'.") from None
    if _DEFLATED_DICOM in data:  # pydicom would unpack it without a limit
        raise PrivlabError("A deflated DICOM file is not read. Save it in another transfer syntax.")
    return pydicom.dcmread(io.BytesIO(data))


def dicom_image(dataset: "Dataset", frame: int = 0) -> Image.Image:
    """Return a frame with 8 bits: grey after the modality's rescaling and the first window, or colours.

    White is the largest level that the window allows, or else the bits that are stored; MONOCHROME1 is inverted.

    Args:
        dataset: the data set that `read_dicom` returns.
        frame: the position of the frame, from 0 on.

    Raises:
        PrivlabError: if there are no such pixels, or a package that decodes them is missing.
    """
    from pydicom import pixels

    if "PixelData" not in dataset:
        raise PrivlabError("A DICOM file without pixels, or with floating-point ones; 8 to 16 bits are read.")
    check_size((int(dataset.Columns), int(dataset.Rows)))
    try:
        levels = pixels.pixel_array(dataset, index=frame)  # h × w, or h × w × 3 in RGB
    except (RuntimeError, NotImplementedError) as error:  # pydicom names the packages
        syntax = dataset.file_meta.TransferSyntaxUID.name
        raise PrivlabError(f"DICOM pixels in '{syntax}' need another package: {one_line(error)}.") from None
    kind = str(dataset.PhotometricInterpretation)
    if kind == "PALETTE COLOR":
        levels = pixels.apply_color_lut(levels, dataset)
        return Image.fromarray(_to_bytes(levels, 0, np.iinfo(levels.dtype).max))
    if levels.ndim == 3:
        return Image.fromarray(_to_bytes(levels, *_stored_range(dataset)))
    stated = _of_frame(dataset, frame)
    shown = pixels.apply_voi_lut(pixels.apply_modality_lut(levels, stated), stated, index=0)
    grey = _to_bytes(shown, *_shown_range(stated))
    return Image.fromarray(255 - grey if kind == "MONOCHROME1" else grey)


def _of_frame(dataset: "Dataset", frame: int) -> "Dataset":
    """Return the data set with the rescaling and the window of a frame, which enhanced files state in groups."""
    from pydicom import Dataset

    of_frames = dataset.get("PerFrameFunctionalGroupsSequence") or []
    groups = [*(dataset.get("SharedFunctionalGroupsSequence") or []), *of_frames[frame : frame + 1]]
    if not groups:
        return dataset
    stated = Dataset()
    stated.update(dataset)
    for group in groups:
        for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            for item in group.get(name) or []:
                stated.update(item)
    return stated


def _stored_range(dataset: "Dataset") -> tuple[int, int]:
    white = 2 ** int(dataset.BitsStored) - 1
    return (-(white + 1) // 2, white // 2) if dataset.PixelRepresentation else (0, white)


def _shown_range(dataset: "Dataset") -> tuple[float, float]:
    """Return the levels of black and of white after the look-up tables.

    Source: DICOM PS3.3, C.11.1 and C.11.2. A table's third descriptor is the number of its bits. A window's output has
    the range of the stored levels after rescaling, as pydicom defines it: it begins at the image of the least one.
    """
    for name in ("VOILUTSequence", "ModalityLUTSequence"):
        if dataset.get(name):
            return 0.0, 2.0 ** int(dataset[name].value[0].LUTDescriptor[2]) - 1
    slope, intercept = float(dataset.get("RescaleSlope") or 1), float(dataset.get("RescaleIntercept") or 0)
    first, last = (slope * level + intercept for level in _stored_range(dataset))
    return (first, last) if "WindowWidth" in dataset else (min(first, last), max(first, last))


def _to_bytes(values: np.ndarray, low: float | int, high: float | int) -> np.ndarray:
    """Return levels as the nearest of 0 to 255, with `low` as 0 and `high` as 255; those outside are clipped."""
    scale = 255 / (high - low) if high != low else 0.0
    scaled = values.astype(np.float64)
    scaled -= low
    scaled *= scale
    return scaled.round(out=scaled).clip(0, 255, out=scaled).astype(np.uint8)


# NIfTI


def is_nifti(path: Path) -> bool:
    """Return whether a file's name is that of a NIfTI file."""
    return path.name.lower().endswith((".nii", ".nii.gz"))


@lru_cache(maxsize=1)
def _nifti(path: Path, modified: int) -> np.ndarray:
    """Return a volume as h × w × d bytes, which is kept for the next of its slices.

    The file's orientation is undone: rows go from the front of the body to the back, columns from its right to its
    left, and slices from the feet to the head, as radiologists, DICOM and MediSwarm have them. Black and white are the
    display range of the header (cal_min and cal_max), else 0 and 255 for bytes, else the extremes of the volume.
    """
    try:
        import nibabel
    except ImportError:
        raise PrivlabError("A NIfTI file needs the extra: pip install 'privlab[medical]'.") from None
    check_archive(path, "image")
    image: Any = nibabel.load(path)
    shape, kind = tuple(int(side) for side in image.shape), image.get_data_dtype()
    found = " × ".join(map(str, shape))
    if len(shape) < 3 or math.prod(shape[3:]) != 1 or kind.kind not in "iuf":
        raise PrivlabError(f"A NIfTI file must hold one volume of numbers with three axes. Found {found} of {kind}.")
    claimed, size = math.prod(shape) * kind.itemsize, path.stat().st_size
    held = math.prod(shape) * 8  # nibabel turns the axes of numbers in float64
    packed = _DEFLATE if path.name.lower().endswith(".gz") else 1
    if claimed > min(MAX_BYTES, size * packed) or held > most_unpacked(size):
        right = f"the file has {size} bytes, and at most {MAX_BYTES // 2**20} MiB or {2**27} voxels are read."
        raise PrivlabError(f"{found} voxels by its header, {claimed / 2**20:.0f} MiB; {right}")
    canonical = nibabel.as_closest_canonical(image)  # from left to right, from back to front, from feet to head
    voxels = canonical.get_fdata(dtype=np.float32, caching="unchanged").reshape(canonical.shape[:3])
    voxels = voxels[::-1, ::-1].transpose(1, 0, 2)
    check_size((voxels.shape[1], voxels.shape[0]))
    low, high = float(image.header["cal_min"]), float(image.header["cal_max"])
    if not low < high:
        finite = voxels[np.isfinite(voxels)]
        if not finite.size:
            raise PrivlabError("No voxel is a finite number.")
        low, high = (0, 255) if kind == np.uint8 else (float(finite.min()), float(finite.max()))
    slices = [_to_bytes(np.nan_to_num(voxels[:, :, k], nan=low), low, high) for k in range(voxels.shape[2])]
    return np.stack(slices, axis=2)


# Arrays


def stack_of(array: np.ndarray, *, several: bool = False) -> np.ndarray:
    """Return the images of an array, n × h × w or n × h × w × c.

    An array is h × w; h × w × c or c × h × w; n × h × w; n × h × w × c or n × c × h × w; or n × d × h × w, volumes
    whose slices follow each other. c is at most `MAX_CHANNELS`, the other sides are larger.

    Args:
        array: the array.
        several: whether its first axis is that of images for certain; n may be small then.

    Raises:
        PrivlabError: if it is none of these.
    """
    shape = array.shape[1:] if several else array.shape
    if len(shape) in (3, 4) and shape[-1] > MAX_CHANNELS and shape[-3] <= MAX_CHANNELS:
        array = np.moveaxis(array, -3, -1)
    has_channels = len(shape) > 2 and array.shape[-1] <= MAX_CHANNELS
    axes = array.ndim - has_channels
    if axes == 2 and not several:
        return array[None]
    if axes == 4:
        return array.reshape(-1, *array.shape[2:])
    if axes != 3:
        found = " × ".join(map(str, array.shape))
        raise PrivlabError(f"An array of images is h × w, or n × h × w, with channels first or last. Found {found}.")
    return array


def array_image(array: np.ndarray) -> Image.Image | np.ndarray:
    """Return an image as one of Pillow's where that has such pixels (8 or 16 bits), else as c × h × w values.

    Args:
        array: h × w or h × w × c.
    """
    array = np.array(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array, order="C")
    grey = array.ndim == 2 and array.dtype in (np.uint8, np.uint16)
    if grey or (array.shape[2:] == (3,) and array.dtype == np.uint8):
        image = Image.fromarray(array)
        check_size(image.size)
        return image
    return np.ascontiguousarray(np.moveaxis(array[..., None] if array.ndim == 2 else array, -1, 0))
