"""Checkpoints that do not fit, are damaged, hold code, or give gradients that are worth nothing."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from privlab.victims import save

State = dict[str, Tensor]


class Code:
    """What runs code while it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.victim, "the code ran")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_file_that_fits(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], state: State, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"mine.{suffix}"
    save(state, path) if suffix == "safetensors" else torch.save({"model": state}, path)
    done = attack("--weights", path, "--details")
    assert done.status == 0
    assert f"vit_ti: weights file:mine.{suffix} (SHA-256 " in done.out
    assert "RANDOM" not in done.err
    assert set(records().weights) == {f"file:mine.{suffix}"}
    assert records().weights_sha256.str.fullmatch("[0-9a-f]{64}").all()


@pytest.mark.slow
def test_auto_falls_back_to_random_with_a_warning(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame]
) -> None:
    done = attack("--weights", "auto", "--json")
    assert done.status == 0
    expected = "vit_ti has RANDOM weights (seed 0): timm/vit_tiny_patch16_224"
    assert f"Warning: {expected}" in done.err
    assert "HF_HUB_OFFLINE forbids a download" in done.err
    assert any(warning.startswith(expected) for warning in json.loads(done.out)["warnings"])
    assert set(records().weights) == {"random"}


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("kept", [0, 10, 5000, -100])
def test_truncated(attack: Callable[..., Any], state: State, tmp_path: Path, suffix: str, kept: int) -> None:
    path = tmp_path / f"cut.{suffix}"
    save(state, path) if suffix == "safetensors" else torch.save(state, path)
    path.write_bytes(path.read_bytes()[:kept])
    error = attack("--weights", path).error
    assert error.startswith(f"'{path}' ")
    assert "it may be truncated, empty or" in error or "it holds code or is not a torch file" in error
    assert not (tmp_path / "run").exists()


def test_missing_file(attack: Callable[..., Any], tmp_path: Path) -> None:
    error = attack("--weights", tmp_path / "no.pth").error
    assert error == f"No weights file at '{tmp_path / 'no.pth'}'. Give a file, auto, pretrained or random."


def test_code_does_not_run(attack: Callable[..., Any], state: State, tmp_path: Path) -> None:
    victim = tmp_path / "proof"
    files = [tmp_path / name for name in ("zip.pth", "raw.pth", "raw.bin", "raw.safetensors")]
    torch.save({"model": state, "extra": Code(victim)}, files[0])
    for path in files[1:]:
        path.write_bytes(pickle.dumps(Code(victim)))
    for path in files:
        error = attack("--weights", path).error
        assert error.startswith(f"'{path}' ")
        assert "it holds code" in error or path.suffix == ".safetensors"
        assert not victim.exists()
    pickle.loads(files[1].read_bytes())
    assert victim.exists()  # it would have run


def test_other_model_is_refused_by_the_names_of_its_tensors(
    attack: Callable[..., Any], state: State, tmp_path: Path
) -> None:
    other = dict(state)
    other["cls_token"] = torch.zeros(1, 1, 384)
    other["blocks.12.norm1.weight"] = torch.zeros(192)
    del other["norm.bias"], other["blocks.3.attn.qkv.weight"]
    torch.save(other, tmp_path / "other.pth")
    assert attack("--weights", tmp_path / "other.pth").error == (
        "The weights of other.pth do not fit this model. missing: blocks.3.attn.qkv.weight, norm.bias; "
        "unexpected: blocks.12.norm1.weight; mis-shaped: cls_token (1, 1, 384) instead of (1, 1, 192)."
    )


def test_many_names_are_cut_short(attack: Callable[..., Any], state: State, tmp_path: Path) -> None:
    torch.save({name: value for name, value in state.items() if "blocks" not in name}, tmp_path / "few.pth")
    error = attack("--weights", tmp_path / "few.pth").error
    assert "missing: blocks.0.norm1.weight, " in error
    assert error.endswith("and 138 more.")


@pytest.mark.parametrize(
    ("model", "tensors", "message"),
    [
        ("vit_ti", {"head.weight": torch.tensor(1.0)}, "mis-shaped: head.weight () instead of (1000, 192)"),
        ("vit_ti", {"pos_embed": torch.ones(5)}, "mis-shaped: pos_embed (5,) instead of (1, 5, 192)"),
        ("vit_ti_mjp", {"pos_embed.weight": torch.ones(3)}, "unexpected: pos_embed.weight"),
        ("vit_ti_mjp", {"unk_embed": torch.ones(1, 1, 64)}, "mis-shaped: unk_embed (1, 1, 64) instead of (1, 1, 192)"),
        (
            "vit_ti",
            {"unk_embed": torch.ones(1, 1, 192)},
            "hold E_unk of MJP (unexpected: unk_embed), which vit_ti lacks",
        ),
        ("vit_ti", {"head.bias": torch.ones(10).to_sparse()}, "cannot be copied into this model"),
    ],
)
def test_tensors_that_are_no_such_weights(
    attack: Callable[..., Any], state: State, tmp_path: Path, model: str, tensors: State, message: str
) -> None:
    torch.save(state | tensors, tmp_path / "odd.pth")
    assert message in attack("--model", model, "--weights", tmp_path / "odd.pth").error


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {0: torch.ones(2)}, torch.ones(2)])
def test_no_state_dict(attack: Callable[..., Any], tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "odd.pth")
    expected = (
        f"'{tmp_path / 'odd.pth'}' holds no state dict: expected tensors by name, found {type(content).__name__}."
    )
    assert attack("--weights", tmp_path / "odd.pth").error == expected


# Gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("head.weight", 0.0), ("head.weight", float("nan")), ("blocks.5.norm1.bias", float("nan"))]
)
def test_gradients_that_are_zero_or_no_numbers(
    attack: Callable[..., Any],
    records: Callable[..., pd.DataFrame],
    state: State,
    tmp_path: Path,
    name: str,
    value: float,
) -> None:
    save(state | {name: torch.full_like(state[name], value)}, tmp_path / "odd.safetensors")
    done = attack("--weights", tmp_path / "odd.safetensors", "--strips", "--json")
    assert done.status == 2
    reason = "what is released is zero or not finite"
    assert json.loads(done.out)["failed"] == {f"{name}.png": reason for name in "abc"}
    assert [line for line in done.err.splitlines() if line.startswith("Failed: ")] == [
        f"Failed: {name}.png: {reason}" for name in "abc"
    ]
    attacked = records().query("attack in ['april', 'patch-gradient']")
    assert len(attacked) == 3 * 2 * 2
    assert set(attacked.status) == {"failed"}
    assert set(attacked.reason) == {reason}
    assert attacked[["mse", "psnr", "ssim", "seconds_attack"]].isna().all(axis=None)
    assert attacked.grad_norm.isna().all() if value else (attacked.grad_norm == 0).all()
    shown = attack("--weights", tmp_path / "odd.safetensors", "--overwrite", "--details").out
    assert "0 (3 failed)" in shown
    assert "n/a" in next(line for line in shown.splitlines() if "april" in line)


@pytest.mark.slow
def test_attack_that_breaks_is_recorded_and_the_others_go_on(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, seen: object) -> Tensor:
        raise RuntimeError("no\nsuch inverse")

    monkeypatch.setattr("privlab.attacks.April.__call__", broken)
    done = attack()
    assert done.status == 2
    assert "Failed: a.png: april: RuntimeError: no such inverse\n" in done.err
    status = records().groupby("attack").status.unique().map(list)
    assert status["april"] == ["failed"]
    assert status["patch-gradient"] == ["ok"]
