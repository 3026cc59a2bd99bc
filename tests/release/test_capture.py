"""A gradient of somebody's own training loop, saved and read back, is the observation that privlab makes itself."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from privlab.attacks import MjpSubspace, PatchGradient
from privlab.base import PrivlabError, PrivlabWarning
from privlab.defenses import Mjp
from privlab.metrics import psnr
from privlab.release import (
    EXPLAINED_RESIDUAL,
    HEAD_BIAS,
    GradientFile,
    check_fit,
    check_head,
    head_of,
    observation,
    observe,
    read_gradient_file,
    released_parameters,
)
from privlab.release.capture import capture
from privlab.release.explained import residual
from privlab.threat import Capability, Feed, Observation
from privlab.victims import VictimModel, hash_of, victim

Made = Callable[..., VictimModel]


def step(model: VictimModel, images: Tensor, labels: Tensor, path: Path, reduction: str = "mean") -> GradientFile:
    """Take one training step of plain PyTorch on timm's model, and read the file that it leaves."""
    vit = model.vit.requires_grad_(True)
    loss = F.cross_entropy(vit(model.normalise(images)), labels, reduction=reduction)
    loss.backward()
    capture(vit, path, batch_size=len(images), reduction=reduction)
    vit.requires_grad_(False).zero_grad()
    return read_gradient_file(path)


def assert_same(found: Observation, wanted: Observation) -> None:
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-9, atol=1e-12)


def test_a_captured_step_is_privlab_s_own_observation(tiny_model: Made, crops: Tensor, tmp_path: Path) -> None:
    model = tiny_model(unknown=False)
    x, y = crops[:1].double(), torch.tensor([3])
    released = step(model, x, y, tmp_path / "update.safetensors")
    check_fit(released, model)
    check_head(released)
    seen = observation(released, model)
    own = observe(model, x, y, released_parameters(model))
    assert set(seen.gradients) == {name for name, _ in model.vit.named_parameters()}
    assert seen.grants == own.grants
    assert_same(seen, own)
    reconstruction = PatchGradient()(seen)
    assert psnr(reconstruction, x).item() > 100
    assert residual(seen, reconstruction, 3) < 1e-4


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_is_the_mean_of_its_images(tiny_model: Made, crops: Tensor, tmp_path: Path, reduction: str) -> None:
    model = tiny_model(unknown=False)
    x, y = crops[:3].double(), torch.tensor([3, 1, 3])
    seen = observation(step(model, x, y, tmp_path / "update.safetensors", reduction), model)
    own = observe(model, x, y, released_parameters(model))
    assert_same(seen, replace(own, gradients={name: g.mean(0, keepdim=True) for name, g in own.gradients.items()}))
    assert own.grants - seen.grants == {Capability.BATCH_SIZE_ONE}
    together = observe(model, x, y, released_parameters(model), images_per_release=3)
    assert_same(seen, together)
    assert (seen.images_per_release, seen.grants) == (3, together.grants)


def test_a_step_under_mjp_shows_its_mask(tiny_model: Made, crops: Tensor, tmp_path: Path) -> None:
    """A client with MJP of its own calls E_unk `unk_embed`; its gradient is what the observation of MJP holds."""
    model = tiny_model()
    x, y, masked = crops[:1].double(), torch.tensor([2]), torch.zeros(1, 16, dtype=torch.bool)
    masked[0, [1, 4, 5]] = True
    model.requires_grad_(True)
    F.cross_entropy(model(x, masked), y).backward()
    capture(model, tmp_path / "update.safetensors", batch_size=1)
    model.requires_grad_(False)
    released = read_gradient_file(tmp_path / "update.safetensors")
    check_fit(released, model)
    seen = observation(released, model)
    feed = replace(Feed.undefended(x, model.patch), masked_pe=masked)
    assert_same(seen, observe(model, feed, y, released_parameters(model)))
    assert observation(released, model, defense=(Mjp(),)).defense == (Mjp(),)
    assert residual(seen, x, 2) < 1e-9
    assert residual(seen, MjpSubspace()(seen), 2) > residual(seen, x, 2)


def test_the_layout_of_the_mjp_authors_is_read(tiny_model: Made, crops: Tensor, tmp_path: Path) -> None:
    """Their position embeddings are one table: class token, patches, unknown."""
    model = tiny_model()
    own = observe(model, crops[:1].double(), torch.tensor([2]), released_parameters(model))

    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Embedding(18, 64).double()

    theirs = Theirs()
    rows = torch.cat([own.gradients["pos_embed"][0, 0], own.gradients["unk_embed"][0, 0]])
    theirs.pos_embed.weight.grad = rows
    capture(theirs, tmp_path / "update.safetensors", batch_size=1, hash_weights=False)
    found = read_gradient_file(tmp_path / "update.safetensors").gradients
    torch.testing.assert_close(found["pos_embed"], own.gradients["pos_embed"][0])
    torch.testing.assert_close(found["unk_embed"], own.gradients["unk_embed"][0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_the_residual_tells_the_private_image_from_others(photographs: Callable[..., Tensor], tmp_path: Path) -> None:
    """Without any private image: what the threshold lets through is the photograph, on random weights too."""
    model = victim("vit_ti", weights="random", img_size=64).model
    x = photographs(4, 64)
    seen = observation(step(model, x[:1], torch.tensor([7]), tmp_path / "update.safetensors"), model)
    assert residual(seen, x[:1], 7) < 1e-5
    others = [*x[1:], x[0].mean((1, 2), keepdim=True).expand_as(x[0]), torch.rand_like(x[0]), x[0].flip(2)]
    assert all(residual(seen, other[None], 7) > 2 * EXPLAINED_RESIDUAL for other in others)


@pytest.mark.slow
def test_what_the_file_says(tiny_model: Made, crops: Tensor, tmp_path: Path) -> None:
    """Metadata as the format has them; frozen parameters and those not used are named, and their grants fall away."""
    model = tiny_model(unknown=False)
    vit: VisionTransformer = model.vit.requires_grad_(True)
    assert vit.pos_embed is not None
    vit.pos_embed.requires_grad_(False)
    F.cross_entropy(vit(crops[:2].double()), torch.tensor([0, 1])).backward()
    vit.get_parameter("norm.bias").grad = None
    path = tmp_path / "update.safetensors"
    capture(torch.compile(vit), str(path), batch_size=2, reduction="sum", name="mine")  # pyright: ignore[reportArgumentType]
    vit.requires_grad_(False)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) == {name for name, _ in vit.named_parameters()} - {"pos_embed", "norm.bias"}
    assert json.loads(metadata.pop("without_gradient")) == ["norm.bias", "pos_embed"]
    assert metadata == {
        "format": "privlab-gradients",
        "version": "1",
        "batch_size": "2",
        "reduction": "sum",
        "model": "mine",
        "weights_sha256": hash_of(vit.state_dict()),
    }
    released = read_gradient_file(path)
    check_fit(released, model)
    grants = observation(released, model, knows_weights=False).grants
    assert not grants & {Capability.LEARNABLE_PE_GRADIENT, Capability.PE_OF_EVERY_TOKEN, Capability.KNOWS_WEIGHTS}


@pytest.mark.slow
def test_capture_brings_nothing_heavy() -> None:
    heavy = "{'timm', 'torchvision', 'pandas', 'breaching'}"
    code = f"from privlab import capture; import sys; print(*({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b""


def test_a_mistake_in_the_loop_is_one_line(tmp_path: Path) -> None:
    layer, path = nn.Linear(2, 2), tmp_path / "update.safetensors"
    with pytest.raises(PrivlabError, match=r"loss\.backward\(\).*zero_grad\(\)"):
        capture(layer, path, batch_size=1)
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(PrivlabError, match=r"batch_size.*0"):
        capture(layer, path, batch_size=0)
    with pytest.raises(PrivlabError, match="'none'"):
        capture(layer, path, batch_size=1, reduction="none")
    (file := tmp_path / "file").touch()
    with pytest.raises(PrivlabError, match="cannot be written"):
        capture(layer, file / "update.safetensors", batch_size=1)
    assert list(tmp_path.iterdir()) == [file]


def released_head(mean: Tensor, size: int, reduction: str) -> GradientFile:
    return GradientFile("head.safetensors", {HEAD_BIAS: mean}, size, reduction)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 12),
    classes=st.integers(2, 12),
    scale=st.floats(0.01, 30),
    smoothing=st.floats(0, 0.9),
    reduction=st.sampled_from(["mean", "sum"]),
    mixed=st.floats(0, 1),
)
def test_an_honest_step_never_contradicts_itself(
    seed: int, size: int, classes: int, scale: float, smoothing: float, reduction: str, mixed: float
) -> None:
    """Whatever the logits, the labels, their smoothing and their mixing within the batch."""
    draw = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(size, classes, generator=draw)).requires_grad_()
    labels = F.one_hot(torch.randint(classes, (size,), generator=draw), classes).float()
    targets = mixed * labels + (1 - mixed) * labels.flip(0)
    F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction=reduction).backward()
    assert logits.grad is not None
    released = released_head(logits.grad.sum(0), size, reduction)
    assert check_head(released)
    found = head_of(released)
    assert found is not None
    assert found.clamp(min=0).sum() <= 1 + 1e-5


def test_a_head_that_contradicts_the_metadata_is_refused() -> None:
    p = torch.full((4, 10), 0.1)
    h = (p - F.one_hot(torch.tensor([1, 2, 3, 3]), 10)).sum(0)
    assert check_head(released_head(h, 4, "sum"))
    assert check_head(released_head(h / 4, 4, "mean"))
    with pytest.raises(PrivlabError, match=r"4.*reduction.*1.*2\.8"):
        check_head(released_head(h, 4, "mean"))
    with pytest.warns(PrivlabWarning, match=r"1.*reduction.*3"):
        assert not check_head(released_head(h / 4, 1, "mean"))
    with pytest.raises(PrivlabError, match=r"reduction.*2.*2\.8"):
        check_head(released_head(h, 2, "sum"))


def test_a_head_that_tells_nothing_is_warned_of() -> None:
    with pytest.warns(PrivlabWarning, match=r"-2.*0.*cross-entropy"):
        assert not check_head(released_head(torch.tensor([-1.0, -1.0]), 1, "mean"))
    with pytest.warns(PrivlabWarning, match=r"no gradient of head\.bias"):
        assert not check_head(GradientFile("f", {}, 1, "mean"))
