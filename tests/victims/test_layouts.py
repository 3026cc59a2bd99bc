"""Weights as files hold them: in entries, under prefixes, without names, and by the names of other libraries."""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.testing import assert_close
from torchvision.models import VisionTransformer as OfTorchvision

import privlab
from privlab.base import PrivlabError, PrivlabWarning
from privlab.release.update_files import update_between
from privlab.victims import from_any_layout, read_state


@pytest.fixture
def vit(tiny_vit: Callable[..., VisionTransformer]) -> VisionTransformer:
    return tiny_vit(embed_dim=16, depth=2, num_heads=2)


def read(content: object, path: Path, name: str = "a.pth") -> dict[str, Any]:
    torch.save(content, path / "a.pth")
    return from_any_layout(read_state(path / name))


def same(found: dict[str, Any], model: nn.Module) -> bool:
    state = model.state_dict()
    return found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_module.", "net.", "module._orig_mod.vit."])
@pytest.mark.parametrize("entry", [None, "state_dict", "model"])
def test_usual_wrappers_are_left_out(entry: str | None, prefix: str, vit: VisionTransformer, tmp_path: Path) -> None:
    state = prefixed(vit.state_dict(), prefix)
    assert same(read(state if entry is None else {entry: state, "epoch": 3}, tmp_path), vit)


@pytest.mark.parametrize("prefix", ["model.", "backbone.", "encoder.", "module.student.model.", "anything.else."])
def test_any_other_prefix_is_left_out_and_said(prefix: str, vit: VisionTransformer, tmp_path: Path) -> None:
    state = prefixed(vit.state_dict(), prefix) | {"criterion.weight": torch.ones(10)}
    with pytest.warns(PrivlabWarning, match=f"names begin with '{prefix}'"):
        assert same(read({"state_dict": state}, tmp_path), vit)


def test_a_head_outside_the_wrapper_is_kept(vit: VisionTransformer, tmp_path: Path) -> None:
    state = vit.state_dict()
    head = {name: state.pop(name) for name in ("head.weight", "head.bias")}
    with pytest.warns(PrivlabWarning, match="encoder"):
        assert same(read(prefixed(state, "net.encoder.") | prefixed(head, "net."), tmp_path), vit)


@pytest.mark.parametrize("entry", ["model_state_dict", "weights", "my_own"])
def test_entries_of_any_name_are_found_and_said(entry: str, vit: VisionTransformer, tmp_path: Path) -> None:
    content = {entry: vit.state_dict(), "optimizer_state_dict": {"state": {0: {"m": torch.ones(3)}}}, "step": 3}
    with pytest.warns(PrivlabWarning, match=f"entry '{entry}'"):
        assert same(read(content, tmp_path), vit)


def test_arguments_and_numbers_beside_the_weights_run_no_code(vit: VisionTransformer, tmp_path: Path) -> None:
    content = {"state_dict": vit.state_dict(), "args": argparse.Namespace(lr=0.1), "metric": np.float64(0.9)}
    assert same(read(content, tmp_path), vit)


@pytest.mark.parametrize(
    ("content", "first", "second"),
    [
        (lambda a, b: {"state_dict": a, "state_dict_ema": b}, "state_dict", "state_dict_ema"),
        (lambda a, b: {"model_ema": b, "model": a}, "model", "model_ema"),
        (lambda a, b: prefixed(a, "student.") | prefixed(b, "teacher."), "student", "teacher"),
        (lambda a, b: {"teacher": b, "student": a}, "student", "teacher"),
    ],
)
def test_of_two_models_the_first_is_read_or_the_one_that_is_asked_for(
    content: Callable[..., object], first: str, second: str, vit: VisionTransformer, tmp_path: Path
) -> None:
    average = copy.deepcopy(vit)
    with torch.no_grad():
        average.cls_token.add_(1)
    made = content(vit.state_dict(), average.state_dict())
    with pytest.warns(PrivlabWarning, match=f"'{first}'.*#{second}"):
        assert same(read(made, tmp_path), vit)
    with pytest.warns(PrivlabWarning, match=second):
        assert same(read(made, tmp_path, f"a.pth#{second}"), average)
    with pytest.raises(PrivlabError, match="nothing"):
        read(made, tmp_path, "a.pth#nothing")


def test_parameters_need_no_gradient_when_they_are_read(vit: VisionTransformer, tmp_path: Path) -> None:
    found = read({name: nn.Parameter(tensor) for name, tensor in vit.state_dict().items()}, tmp_path)
    assert same(found, vit)
    assert not any(tensor.requires_grad for tensor in found.values())


def test_the_decoder_of_a_masked_autoencoder_is_left_out(vit: VisionTransformer, tmp_path: Path) -> None:
    extra = {"mask_token": torch.ones(1, 1, 8), "decoder_blocks.0.norm1.weight": torch.ones(8)}
    assert same(read({"model": vit.state_dict() | extra}, tmp_path), vit)


@pytest.mark.parametrize("named", [True, False])
def test_arrays_are_read_by_name_or_in_the_models_order(named: bool, vit: VisionTransformer, tmp_path: Path) -> None:
    arrays = {name: tensor.numpy() for name, tensor in vit.state_dict().items()}
    after = {name: array + 0.01 for name, array in arrays.items()}
    for name, each in (("a", arrays), ("b", after)):
        np.savez(tmp_path / f"{name}.npz", **(each if named else {f"arr_{i}": a for i, a in enumerate(each.values())}))
    states = [read_state(tmp_path / f"{name}.npz") for name in "ab"]
    found = update_between(*states, 1, ("a.npz", "b.npz"), [*arrays]).gradients
    assert found.keys() == arrays.keys()
    for name, each in found.items():
        assert_close(each, torch.full_like(each, -0.01).reshape(arrays[name].shape), atol=1e-6, rtol=0)


def test_another_number_of_arrays_is_refused(vit: VisionTransformer) -> None:
    names = [*vit.state_dict()]
    arrays = {f"arr_{i}": torch.ones(2) for i in range(3)}
    with pytest.raises(PrivlabError, match=f"{len(names)} tensors. Found 3"):
        update_between(arrays, arrays, 1, ("a", "b"), names)


def test_a_difference_is_added_to_the_weights_before(vit: VisionTransformer) -> None:
    before = vit.state_dict()
    generator = torch.Generator().manual_seed(0)
    moved = {name: 0.01 * torch.randn(tensor.shape, generator=generator) for name, tensor in before.items()}
    names, after = ("a", "b"), {name: before[name] + moved[name] for name in before}
    expected = update_between(before, after, 1, names, [*before]).gradients
    with pytest.warns(PrivlabWarning, match="difference"):
        found = update_between(before, moved, 1, names, [*before]).gradients
    for name, each in expected.items():
        assert_close(found[name], each, atol=1e-6, rtol=0)


@pytest.fixture
def of_torchvision() -> OfTorchvision:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OfTorchvision(32, 16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=48, num_classes=5)
        nn.init.normal_(model.heads.head.weight)  # zero as torchvision makes it
    return model.eval()


@torch.no_grad()
def test_torchvisions_vit_has_the_same_outputs(of_torchvision: OfTorchvision, tmp_path: Path) -> None:
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    made = privlab.victim(of_torchvision)
    assert_close(made.model(images), of_torchvision((images - made.model.mean) / made.model.std), atol=1e-5, rtol=0)
    save_file(prefixed(of_torchvision.state_dict(), "net."), tmp_path / "a.safetensors")
    with pytest.warns(PrivlabWarning, match="names of torchvision"):
        assert same(from_any_layout(read_state(tmp_path / "a.safetensors")), made.model.vit)


def test_torchvisions_vit_gives_its_own_gradients(of_torchvision: OfTorchvision) -> None:
    images, labels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([3])
    made = privlab.victim(of_torchvision)
    seen = privlab.observe(made, images, labels)
    nn.functional.cross_entropy(of_torchvision((images - made.model.mean) / made.model.std), labels).backward()
    own = from_any_layout({name: p.grad for name, p in of_torchvision.named_parameters() if p.grad is not None})
    for name, gradient in seen.gradients.items():
        assert_close(gradient[0], own[name], atol=1e-5, rtol=1e-4)
