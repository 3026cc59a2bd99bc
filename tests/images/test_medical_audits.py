"""What medical clients send: a slice of a computed tomography, a radiograph with several labels, bands of a sensor."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import privlab
from privlab.base import PrivlabError

pydicom = pytest.importorskip("pydicom")

AUDIT: dict[str, Any] = {"normalisation": "0.5/0.5", "attacks": "patch-update", "metrics": ["psnr"]}


def dicom(path: Path, levels: np.ndarray, **elements: Any) -> Path:
    """Write grey levels of 12 bits in 16, with more elements by keyword."""
    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    dataset.SOPClassUID, dataset.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.2", "1.2.3"
    dataset.Rows, dataset.Columns = levels.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, 12, 11
    dataset.PixelRepresentation, dataset.PixelData = 0, levels.astype("<u2").tobytes()
    for name, value in elements.items():
        setattr(dataset, name, value)
    dataset.save_as(path, enforce_file_format=True)
    return path


def tomography() -> np.ndarray:
    """Return 12 slices of a chest of ellipsoids, in Hounsfield units: body, lungs, a vertebra and a nodule."""
    z, y, x = np.meshgrid(*(np.linspace(-1, 1, n) for n in (12, 64, 64)), indexing="ij")
    units = np.full(z.shape, -1000.0)
    for centre, radii, value in (
        ((0, 0, 0), (1.2, 0.8, 0.9), 40),
        ((0, -0.1, -0.42), (0.9, 0.45, 0.3), -800),
        ((0, -0.1, 0.42), (0.9, 0.45, 0.3), -800),
        ((0, 0.55, 0), (1.2, 0.15, 0.15), 400),
        ((0.1, -0.2, 0.45), (0.3, 0.1, 0.1), 60),
    ):
        distances = [((axis - at) / radius) ** 2 for axis, at, radius in zip((z, y, x), centre, radii, strict=True)]
        units[np.sum(distances, axis=0) < 1] = value
    return units


def updated(
    model: nn.Module, images: Tensor, loss: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights before and after a step of SGD at a rate of 0.01 on images in [0, 1]."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    loss(model((images - 0.5) / 0.5)).backward()
    optimiser.step()
    return before, {name: value.clone() for name, value in model.state_dict().items()}


def vit(classes: int, size: int = 64, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=size, num_classes=classes, **options)


@pytest.mark.slow
def test_a_slice_of_a_tomography_comes_back_from_its_dicom_file(tmp_path: Path) -> None:
    """Its 12 bits are seen through the first of two windows."""
    windows: dict[str, Any] = {"WindowCenter": [-300, 40], "WindowWidth": [1400, 400]}
    for number, units in enumerate(tomography()):
        levels = np.clip(units + 1024, 0, 4095)
        dicom(tmp_path / f"{number:03}.dcm", levels, RescaleSlope=1, RescaleIntercept=-1024, **windows)
    fed = np.clip((tomography()[5] + 300.5) / 1399 + 0.5, 0, 1)  # PS3.3, C.11.2.1.2
    model = vit(3)
    images = torch.tensor((fed * 255).round() / 255, dtype=torch.float32).expand(1, 3, 64, 64)
    before, after = updated(model, images, lambda logits: cross_entropy(logits, torch.tensor([2])))
    client = privlab.Client(lr=0.01)
    audit = privlab.audit_update(before, after, model=model, client=client, reference=tmp_path / "005.dcm", **AUDIT)
    assert audit.leaks
    assert audit.records.psnr.max() > 60


@pytest.mark.slow
def test_a_radiograph_with_several_labels_comes_back(tmp_path: Path) -> None:
    levels = np.random.default_rng(0).integers(0, 4096, (64, 64))
    path = dicom(tmp_path / "radiograph.dcm", levels, PhotometricInterpretation="MONOCHROME1")
    model = vit(14, in_chans=1)
    images = torch.tensor(1 - (levels * (255 / 4095)).round() / 255, dtype=torch.float32)[None, None]
    target = torch.zeros(1, 14)
    target[0, [2, 5, 9]] = 1
    before, after = updated(model, images, lambda logits: binary_cross_entropy_with_logits(logits, target))
    client = privlab.Client(lr=0.01, loss="binary")
    audit = privlab.audit_update(before, after, model=model, client=client, reference=path, **AUDIT)
    assert audit.leaks
    assert audit.records.psnr.max() > 60


def audited(update: tuple[Path, Path], *options: str, out: Path) -> str:
    """Run the two commands of an audit, from the files to the page of evidence, and return that as Markdown."""
    files = [str(path) for path in update]
    said = command("audit", "update", *files, "--client", "sgd", *options, "--fail-on-leak", "--out", str(out))
    assert said.returncode == 3, said.stderr
    assert "leaks: yes" in said.stdout
    for name in ("evidence.md", "evidence.html"):
        said = command("report", str(out), "--out", str(out.parent / name))
        assert said.returncode == 0, said.stderr
    return (out.parent / "evidence.md").read_text("utf-8")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((sys.executable, "-m", "privlab", *words), capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_slices_of_a_volume_go_from_dicom_files_to_the_page_of_evidence(
    tmp_path: Path, shared: Callable[[str], str]
) -> None:
    """Three slices in one step, with one prediction by the mean of their features: each is matched and exact."""
    window: dict[str, Any] = {"WindowCenter": -300, "WindowWidth": 1400}
    noise = np.random.default_rng(0).normal(0, 70, (3, 64, 64))
    levels = np.clip(tomography()[4:7] + noise + 1024, 0, 4095).astype("<u2")
    volume = tmp_path / "volume"
    volume.mkdir()
    for number, of_slice in enumerate(levels):
        dicom(volume / f"{number:03}.dcm", of_slice, RescaleSlope=1, RescaleIntercept=-1024, **window)
    fed = np.clip((levels.astype(float) - 1024 + 300.5) / 1399 + 0.5, 0, 1)  # PS3.3, C.11.2.1.2
    images = torch.tensor((fed * 255).round() / 255, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
    weights = shared("weights/vit_tiny_patch16_224.safetensors")
    model = copy.deepcopy(privlab.victim("vit_ti", weights=weights, img_size=64).model.vit).requires_grad_(True)
    before, after = updated(
        model, images, lambda logits: cross_entropy(logits.mean(0, keepdim=True), torch.tensor([2]))
    )
    update = privlab.capture_update(before, after, tmp_path / "update")
    options = ["--model", "vit_ti", "--img-size", "64", "--attack", "token-separation"]
    for setting in ("lr=0.01", "images=3", "batch_size=3", "fusion=mean"):
        options += ["--set", f"client.{setting}"]
    evidence = audited(update, *options, "--reference", str(volume), out=tmp_path / "audit")
    assert "token-separation" in evidence
    records = privlab.load(tmp_path / "audit").records.query("attack == 'token-separation'")
    assert [Path(name).name for name in records.image] == ["000.dcm", "001.dcm", "002.dcm"]
    assert records.psnr.min() > 60
    assert (records.explained > 0.9975).all()
    with pytest.raises(PrivlabError, match="holds 3 images, and the release is of 1"):
        privlab.audit_update(*update, model="vit_ti", img_size=64, reference=volume, attacks="patch-update")


@pytest.mark.slow
def test_a_radiograph_goes_from_its_dicom_file_to_the_page_of_evidence(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 30, (64, 64))
    levels = np.clip(tomography().mean(0) * 2 + 2500 + noise, 0, 4095).astype("<u2")
    path = dicom(tmp_path / "radiograph.dcm", levels, PhotometricInterpretation="MONOCHROME1")
    model = vit(14, in_chans=1)
    images = torch.tensor(1 - (levels * (255 / 4095)).round() / 255, dtype=torch.float32)[None, None]
    target = torch.zeros(1, 14)
    target[0, [2, 5, 9]] = 1
    before, after = updated(model, images, lambda logits: binary_cross_entropy_with_logits(logits, target))
    update = privlab.capture_update(before, after, tmp_path / "update")
    options = ["--model", "timm:vit_tiny_patch16_224", "--img-size", "64", "--normalisation", "0.5/0.5"]
    options += ["--set", "client.lr=0.01", "--set", "client.loss=binary", "--attack", "patch-update"]
    evidence = audited(update, *options, "--reference", str(path), out=tmp_path / "audit")
    assert "label: 1.00 of class 2, 1.00 of class 5, 1.00 of class 9" in evidence
    assert "{'2'" not in evidence
    assert privlab.load(tmp_path / "audit").records.psnr.max() > 60


@pytest.mark.slow
def test_images_of_five_channels_need_a_model_that_takes_them(tmp_path: Path) -> None:
    np.save(tmp_path / "bands.npy", np.random.default_rng(0).random((9, 5, 16, 16), np.float32))
    how: dict[str, Any] = {"attacks": "april", "limit": 1, "metrics": ["psnr"], "progress": False}
    labels = [0] * 9
    victim = privlab.victim(vit(4, 16, in_chans=5, patch_size=4), normalisation="0.5/0.5")
    run = privlab.attack(victim, tmp_path / "bands.npy", labels, **how)
    assert run.records.psnr.max() > 60
    with pytest.raises(PrivlabError, match="Found 5: take a model with in_chans=5"):
        privlab.attack(privlab.victim(vit(4, 32), normalisation="0.5/0.5"), tmp_path / "bands.npy", labels, **how)


def test_a_vit_for_volumes_is_refused_in_one_line() -> None:
    model = vit(3, 32)
    model.patch_embed.proj = nn.Conv3d(1, 192, 16, 16)
    with pytest.raises(PrivlabError, match=r"ViT for volumes \(Conv3d\)"):
        privlab.victim(model, normalisation="0.5/0.5")
