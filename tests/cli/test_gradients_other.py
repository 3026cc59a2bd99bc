"""`privlab audit gradients` of what is not as it should be: another preprocessing, other weights, no gradient."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torchvision.transforms import Compose, InterpolationMode, Resize, ToTensor

from privlab.victims import save

State = dict[str, Tensor]
BILINEAR = InterpolationMode.BILINEAR


@pytest.mark.slow
def test_a_reference_is_scored_by_as_the_client_fed_it(
    audit: Callable[..., Any], step: Callable[..., Path], photos: Path
) -> None:
    """One of the usual ways fits: said with both figures, in one line, and scored by."""
    squashed = Compose([Resize((32, 32), BILINEAR), ToTensor()])
    options = ("--reference", photos / "a.png", "--metrics", "psnr", "--attack", "patch-gradient", "--public", photos)
    path = step(preprocess=squashed)
    told = json.loads(audit(path, *options, "--json").out)
    row, said = told["attacks"][1], told["reference"]
    assert row["psnr"] > 60
    found = re.fullmatch(
        r"the client preprocessed it otherwise than vit_ti does \(crop_pct 0\.9, bicubic: residual (\S+), "
        r"patch-gradient at (\d+\.\d\d) dB\)\. It gives the released gradient squashed, bilinear in eight bits \("
        r"residual (\S+), patch-gradient at (\d+\.\d\d) dB\): scores are by that\.",
        said,
    )
    assert found is not None
    own, before, left, after = map(float, found.groups())
    assert left < 1e-4 < 0.05 < own
    assert before < 30 < 60 < after
    shown = audit(path, *options, "--overwrite").out
    assert f"reference: {said}" in shown
    assert "what was fed: it gives the released gradient" in shown
    assert "the private image" not in shown
    run = json.loads((path.parent / "audit" / "run.json").read_text(encoding="utf-8"))
    assert run["reference"] == said


@pytest.mark.slow
def test_a_mirrored_picture_is_found_and_the_victim_s_own_way_is_not_spoken_of(
    audit: Callable[..., Any], step: Callable[..., Path], photos: Path, state: State
) -> None:
    options = ("--reference", photos / "a.png", "--metrics", "psnr", "--attack", "patch-gradient", "--public", photos)
    assert json.loads(audit(step(), *options, "--json").out)["reference"] is None
    mirrored = Compose(
        [Resize(32, BILINEAR), lambda x: x.crop((2, 0, 34, 32)), ToTensor(), partial(torch.flip, dims=[2])]
    )
    told = json.loads(audit(step(preprocess=mirrored), *options, "--json", "--overwrite").out)
    assert "(crop_pct 1), bilinear in eight bits, mirrored (residual" in told["reference"]


@pytest.mark.slow
def test_a_reference_that_no_usual_way_explains(
    audit: Callable[..., Any], step: Callable[..., Path], photos: Path
) -> None:
    """A random crop, or another picture: the low score says nothing, and that is said."""
    options = ("--metrics", "psnr", "--attack", "patch-gradient", "--public", photos)
    corner = Compose([lambda x: x.crop((0, 0, 20, 20)), Resize((32, 32), BILINEAR), ToTensor()])
    for preprocess, reference in ((corner, "a.png"), (None, "b.png")):
        path = step(preprocess=preprocess)
        told = json.loads(audit(path, *options, "--reference", photos / reference, "--json", "--overwrite").out)
        assert told["attacks"][1]["explained"] is True
        assert told["attacks"][1]["psnr"] < 30
        assert " and in none of 70 usual ways (the nearest, " in told["reference"]
        assert told["reference"].endswith("the reference does not: low scores say nothing here.")


@pytest.mark.slow
def test_named_attacks_hear_that_the_hashes_differ(
    audit: Callable[..., Any], step: Callable[..., Path], state: State
) -> None:
    path = step()
    other = path.with_name("moved.safetensors")
    save({name: value + 0.01 for name, value in state.items()}, other)
    error = audit(path, "--weights", other, "--attack", "patch-gradient,mjp-full").error
    assert re.fullmatch(
        r"Attack 'mjp-full' needs the client's weights\. update\.safetensors was taken at other weights \(SHA-256 "
        r"[0-9a-f]{12}\) than file:moved\.safetensors \([0-9a-f]{12}\)\. Give the client's --weights, saved before the "
        r"optimiser's step\.",
        error,
    )
    assert "knows_weights" not in error
    assert "needs what this observation does not grant" in audit(path, "--weights", other, "--attack", "april").error


STEPS: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "adamw": (partial(torch.optim.AdamW, lr=1e-3), "one step of Adam or AdamW (learning rate about 0.001), or a"),
    "adam": (partial(torch.optim.Adam, lr=1e-4), "one step of Adam or AdamW (learning rate about 0.0001), or a"),
    "sgd": (partial(torch.optim.SGD, lr=0.1), "one step of SGD (learning rate about 0.1), not like a gradient"),
    "decay": (
        partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
        "the sums of the head's rows are -0.001 times those of its weights (decay)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_an_optimiser_s_step_is_named(audit: Callable[..., Any], step: Callable[..., Path], name: str) -> None:
    optimiser, said = STEPS[name]
    done = audit(step(optimiser=optimiser), "--attack", "patch-gradient", "--json")
    assert done.status == 0
    told = json.loads(done.out)
    (warning,) = [message for message in told["warnings"] if message.startswith("update.safetensors")]
    assert said in warning
    assert "call privlab.capture after loss.backward() and before the optimiser's step" in warning
    assert "cross-entropy" not in done.err
    assert "noise" not in done.err
    assert told["labels"] is None
    assert "residual" not in told["attacks"][0]
    assert told["flags"] == ["labels given away by signs in the gradient of the head, if they are not smoothed: 7"]


def test_signs_of_a_gradient_are_named(audit: Callable[..., Any], step: Callable[..., Path]) -> None:
    path = step()
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file({name: tensor.sign() for name, tensor in tensors.items()}, path, metadata)
    done = audit(path, "--attack", "patch-gradient")
    assert "update.safetensors looks like a gradient quantised to signs" in done.err
    assert "Adam" not in done.err


def lora(module: str, name: str = "default.") -> State:
    prefix = f"base_model.model.{module}"
    return {f"{prefix}.lora_{side}.{name}weight": torch.ones(4, 4) for side in "AB"}


PARTS: dict[str, tuple[Callable[[State], State], str]] = {
    "lora": (
        lambda _: lora("blocks.0.attn.qkv") | lora("blocks.1.attn.qkv"),
        "holds LoRA's 4 adapters (base_model.model.blocks.0.attn.qkv.lora_A.default.weight and 3 more), and no "
        "gradient of 152 of this model's 152 parameters. No attack here reads files of adapters yet, which is no ",
    ),
    "lora and head": (
        lambda t: (
            lora("blocks.0.attn.qkv", "")
            | {f"base_model.model.head.modules_to_save.default.{k}": t[f"head.{k}"] for k in ("weight", "bias")}
        ),
        "beside head.bias, head.weight, and no gradient of 150 of this model's 152 parameters",
    ),
    "loralib": (lambda t: t | {"blocks.0.attn.qkv.lora_A": torch.ones(4, 4)}, "holds LoRA's 1 adapters"),
    "head": (
        lambda t: {name: g for name, g in t.items() if name.startswith("head.")},
        "holds the gradient of the head alone (head.bias, head.weight), and no gradient of 150 of this model's 152 "
        "parameters. If the client trains nothing else, list the others as without_gradient",
    ),
    "no block": (
        lambda t: {name: g for name, g in t.items() if not name.startswith("blocks.3.")},
        "missing: blocks.3.norm1.weight, ",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_the_model_is_one_short_line(audit: Callable[..., Any], step: Callable[..., Path], name: str) -> None:
    path, (change, said) = step(), PARTS[name]
    with safe_open(path, "pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(change(tensors), path, metadata)
    error = audit(path).error
    assert said in error
    assert len(error) < 450


def test_an_adapter_file_of_peft_needs_no_metadata_to_be_told(audit: Callable[..., Any], tmp_path: Path) -> None:
    save_file(lora("blocks.0.attn.qkv", ""), tmp_path / "adapter_model.safetensors", {"format": "pt"})
    error = audit(tmp_path / "adapter_model.safetensors").error
    assert "adapter_model.safetensors' holds LoRA's 2 adapters" in error
    assert "No attack here reads files of adapters yet" in error


@pytest.mark.slow
def test_a_batch_names_what_could_run(
    audit: Callable[..., Any], step: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step((7, 3))
    told = json.loads(audit(path, "--json").out)
    (flag,) = [flag for flag in told["flags"] if flag.startswith("not tried, ")]
    assert flag.startswith("not tried, as these searches are not of effort standard: gradient-matching")
    assert flag.endswith("Add --attack gradient-matching")
    left = [message for message in told["warnings"] if message.startswith("Left out: ")]
    assert len(left) == 2
    assert told["warnings"][-2:] == left  # after what is said of the file
    assert any("patch-gradient, patch-gradient-prior, mjp-subspace, mjp-full. Each needs" in each for each in left)
    error = audit(path, "--attack", "patch-gradient", "--overwrite").error
    assert error.endswith("Of 2 images in one gradient --attack gradient-matching can be tried.")
    named = audit(path, "--attack", "gradient-matching", "--set", "steps=1", "--overwrite", "--json")
    assert [row["attack"] for row in json.loads(named.out)["attacks"]] == ["gradient-matching"]
    assert not any(flag.startswith("not tried") for flag in json.loads(named.out)["flags"])
    alone = json.loads(audit(step(), "--json", "--overwrite").out)
    assert not any(flag.startswith("not tried") for flag in alone["flags"])
    (april,) = [message for message in alone["warnings"] if message.startswith("Left out: april.")]
    assert april.endswith("`privlab explain april`.")
    assert len(april) <= 160


@pytest.mark.slow
def test_a_picture_of_one_colour_is_said_to_be_nothing(audit: Callable[..., Any], step: Callable[..., Path]) -> None:
    """40 images at once have more tokens than gradients of this width tell apart."""
    done = audit(step(tuple(range(10)) * 4))
    assert "nothing found: one colour" in done.out
