"""`privlab audit update BEFORE AFTER` of files with a mistake or something odd: it is refused in one line, or said."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from privlab import capture_update
from privlab.base import PrivlabError

State = dict[str, Tensor]


@pytest.mark.slow
def test_a_head_that_did_not_move_is_said_to_tell_no_label(
    audit_update: Callable[..., Any], trained: Callable[..., tuple[Path, Path]]
) -> None:
    before, after = trained(1)
    bias = load_file(before)["head.bias"]
    files = before, edited(after, lambda tensors: tensors.update({"head.bias": bias}))
    plain = ("--set", "client.lr=0.01", "--set", "client.momentum=0.9")
    done = audit_update(files, "--attack", "patch-gradient", stated=plain)
    assert done.status == 0
    assert "have equal biases of the head, so that the update tells no label" in " ".join(done.err.split())


def edited(path: Path, change: Callable[[State], object]) -> Path:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


COUNTER = "bn.num_batches_tracked"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((3, 8), f"before.safetensors: {COUNTER} is left aside: integers that are none of this model's "),
        (
            (None, 8),
            f"after.safetensors: {COUNTER} is left aside: integers that are none of this model's ",
        ),
        ((3, None), f"before.safetensors: {COUNTER} is left aside: integers that are none of this model's "),
    ],
)
def test_integers_that_the_model_does_not_have_are_left_aside_and_said_so_once(
    audit_update: Callable[..., Any], trained: Callable[..., Any], counts: tuple[int | None, int | None], said: str
) -> None:
    files = trained(steps=1, momentum=0.0, weight_decay=0.0)
    for path, count in zip(files, counts, strict=True):
        if count is not None:
            edited(path, lambda tensors, count=count: tensors.update({COUNTER: torch.tensor(count)}))
    done = audit_update(files, "--attack", "patch-update", "--json", stated=())
    assert done.status == 0
    assert json.loads(done.out)["attacks"][0]["explained"] is True
    warned = json.loads(done.out)["warnings"]
    assert [COUNTER in line for line in warned] == [True]
    assert warned[0].startswith(said)


@pytest.mark.slow
def test_weights_of_two_models_are_called_that(audit_update: Callable[..., Any], trained: Callable[..., Any]) -> None:
    """A model of the same shape, whose head alone goes on as a training would."""

    def other(tensors: State) -> None:
        for name, tensor in tensors.items():
            if name != "head.bias":
                order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(1))
                tensor.copy_(tensor.flatten()[order].view_as(tensor))

    before, after = trained(steps=1)
    done = audit_update((before, edited(after, other)), "--attack", "patch-gradient", "--json")
    assert done.status == 0
    found = [line for line in json.loads(done.out)["warnings"] if "eights of two models" in line]
    assert len(found) == 1
    assert "give the weights that this client began with" in found[0].lower()


@pytest.mark.slow
def test_noise_is_named_and_tells_no_label(audit_update: Callable[..., Any], trained: Callable[..., Any]) -> None:
    def noisy(tensors: State) -> None:
        for tensor in tensors.values():
            tensor.add_(0.5 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())))

    before, after = trained(steps=1)
    done = audit_update((before, edited(after, noisy)), "--attack", "patch-gradient", "--json")
    assert done.status == 0
    told = json.loads(done.out)
    assert told["labels"] is None
    assert not any("labels" in flag for flag in told["flags"])
    assert not any(row.get("explained") for row in told["attacks"])
    assert any("looks like noise" in line for line in told["warnings"])


def _of(name: str) -> Callable[[tuple[Path, Path]], tuple[Path, Path]]:
    def longer(files: tuple[Path, Path]) -> tuple[Path, Path]:
        return files[0], edited(files[1], lambda tensors: tensors.update({"head.bias": torch.zeros(11)}))

    def missing(files: tuple[Path, Path]) -> tuple[Path, Path]:
        return files[0], edited(files[1], lambda tensors: tensors.pop("head.bias"))

    def diverged(files: tuple[Path, Path]) -> tuple[Path, Path]:
        return files[0], edited(files[1], lambda tensors: tensors["head.bias"].fill_(torch.nan))

    def whole(files: tuple[Path, Path]) -> tuple[Path, Path]:
        return files[0], edited(files[1], lambda tensors: tensors.update(_integer(tensors, "pos_embed")))

    def both_whole(files: tuple[Path, Path]) -> tuple[Path, Path]:
        before, after = (edited(path, lambda tensors: tensors.update(_integer(tensors, *tensors))) for path in files)
        return before, after

    of = {"longer": longer, "missing": missing, "diverged": diverged, "whole": whole, "both whole": both_whole}
    return of[name]


def _integer(tensors: State, *names: str) -> State:
    return {name: (tensors[name] * 2**20).int() for name in names}


MISTAKES: dict[str, tuple[Callable[[tuple[Path, Path]], tuple[Path, Path]], tuple[str, ...], str]] = {
    "other shapes": (
        _of("longer"),
        (),
        "must be weights of one model. In the second, mis-shaped: head.bias (11,) instead of (10,).",
    ),
    "missing": (_of("missing"), (), "must be weights of one model. In the second, missing: head.bias."),
    "swapped": (lambda files: (files[1], files[0]), (), "BEFORE and AFTER are swapped"),
    "same": (lambda files: (files[0], files[0]), (), "Nothing was trained: "),
    "diverged": (_of("diverged"), (), "Found NaN or infinity in head.bias: the client diverged"),
    "integers after": (
        _of("whole"),
        (),
        "after.safetensors' must be floating-point numbers. Found pos_embed of torch.int32: save them as the model",
    ),
    "integers": (
        _of("both whole"),
        (),
        "The weights of before.safetensors must be floating-point numbers. Found blocks.0.attn.proj.bias of torch.int",
    ),
    "no file": (
        lambda files: (files[0], files[1].with_name("none.safetensors")),
        (),
        "none.safetensors'. Give the weights after the round, BEFORE AFTER.",
    ),
    "no file before": (
        lambda files: (files[0].with_name("none.safetensors"), files[1]),
        (),
        "none.safetensors'. Give the weights before the round, BEFORE AFTER.",
    ),
    "another name": (
        lambda files: files,
        ("--set", "client.learning_rate=0.1"),
        "Unknown option 'learning_rate'. Did you mean lr?",
    ),
    "no steps": (lambda files: files, ("--set", "client.steps=0"), "client.steps must be at least 1. Found 0."),
    "size": (lambda files: files, ("--img-size", "48"), "--img-size sets the client's resolution"),
    "model": (lambda files: files, ("--model", "cifar_vit"), "before.safetensors holds the weights of"),
    "no rate": (
        lambda files: files,
        ("--set", "client.lr=unknown"),
        "Found client.lr=unknown: state the likeliest value. `privlab audit update` of one image and SGD fits",
    ),
    "no decay of AdamW": (
        lambda files: files,
        ("--client", "adamw", "--set", "client.momentum=0", "--set", "client.weight_decay=unknown"),
        "Found client.weight_decay=unknown: state the likeliest value",
    ),
    "no dropout": (
        lambda files: files,
        ("--set", "client.dropout=private"),
        "a client sets is public here: an attack knows it. Found client.dropout=private: state the likeliest value",
    ),
    "weights": (lambda files: files, ("--weights", "random"), "No such option '--weights'."),
    "normalisation": (lambda files: files, ("--normalisation", "half"), "Found 'half'."),
    "setting": (lambda files: files, ("--setting", "c"), "No such option '--setting'."),
    "metrics": (lambda files: files, ("--metrics", "psnr"), "--metrics needs a --reference to score by."),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(
    audit_update: Callable[..., Any], trained: Callable[..., tuple[Path, Path]], name: str
) -> None:
    change, arguments, said = MISTAKES[name]
    assert said in audit_update(change(trained(steps=2)), *arguments).error


def test_a_client_must_be_named(cli: Callable[..., Any], weights: Path) -> None:
    said = cli("audit", "update", weights, weights, "--model", "vit_ti", "--img-size", "32").error
    assert said.startswith("An update needs --client, the optimiser that the client trained with: sgd, adam, adamw, or")
    assert "flower-default" in said


def test_a_capture_that_is_no_copy_or_of_another_model_is_refused(state: State, tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    before = vit.state_dict()
    with torch.no_grad():
        vit.get_parameter("head.bias").add_(1)
    with pytest.raises(PrivlabError, match="weights"):
        capture_update(before, vit, tmp_path)
    with pytest.raises(PrivlabError, match=r"head.bias"):
        capture_update({name: value for name, value in state.items() if name != "head.bias"}, vit, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PrivlabError, match="cannot be written"):
        capture_update(state, vit, tmp_path / "file" / "round")
    held = copy.deepcopy(state)
    paths = capture_update(state, {f"module.{name}": value for name, value in vit.state_dict().items()}, tmp_path)
    assert [path.name for path in paths] == ["before.safetensors", "after.safetensors"]
    assert all(torch.equal(value, held[name]) for name, value in load_file(paths[0]).items())
    assert load_file(paths[1])["head.bias"].equal(vit.state_dict()["head.bias"])
