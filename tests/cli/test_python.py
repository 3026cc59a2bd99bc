"""`privlab.attack` from Python: the same records, and a caller's model that stays as it was."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import timm
import torch
from pandas.testing import assert_frame_equal
from timm.models.vision_transformer import VisionTransformer

import privlab
from privlab.base import PrivlabError, PrivlabWarning
from privlab.evaluation import COLUMNS

OPTIONS: dict[str, Any] = {"weights": "random", "img_size": 32}


@pytest.fixture
def own() -> VisionTransformer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=7, drop_rate=0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_records_are_those_of_the_command(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], photos: Path, tmp_path: Path
) -> None:
    attack("--setting", "a,c", "--attack", "april,patch-gradient")
    frame = privlab.attack(
        "vit_ti", photos, settings=["a", "c"], attacks=("april", "patch-gradient"), **OPTIONS
    ).records
    times = ["seconds_observe", "seconds_attack", "seconds_score"]
    own, theirs = (each.drop(columns=[*times, "member"]) for each in (frame, records()))
    assert_frame_equal(own, theirs, check_exact=True)
    kept = privlab.attack("vit_ti", [str(photos / "a.png")], settings="a,c", out=tmp_path / "kept", **OPTIONS)
    assert set(kept.records.image) == set(records(tmp_path / "kept").image)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_columns_and_their_types(photos: Path) -> None:
    frame = privlab.attack("vit_ti_mjp", photos, limit=1, **OPTIONS).records
    assert list(frame.columns) == COLUMNS.names
    types = frame.convert_dtypes().dtypes.astype(str)
    for name in ("label", "seed", "schema"):
        assert types[name] == "Int64"
    for name in ("mse", "psnr", "ssim", "fft2d", "psnr_masked", "grad_norm", "seconds_observe", "lpips_vgg"):
        assert frame[name].dtype == "float64"
    for name in ("victim", "setting", "attack", "image_sha256", "weights_sha256", "status", "privlab_version"):
        assert types[name] == "string"
    assert set(frame.setting) == {"c"}
    assert json.loads(frame.defense_params[0]) == {"gamma": 0.27, "masked_pe": "unknown"}
    assert json.loads(frame.victim_params[0])["unk_embed"] == "random"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:april. patches of 768 values:privlab.base.warnings.PrivlabWarning")
@pytest.mark.parametrize("training", [False, True])
def test_own_model_stays_as_it_was(own: VisionTransformer, photos: Path, training: bool) -> None:
    own.train(training)
    own.head.requires_grad_(False)
    own.blocks[1].eval()
    own.cls_token.grad = torch.ones_like(own.cls_token)
    calls: list[str] = []
    own.blocks[0].register_forward_hook(lambda *_: calls.append("hook"))
    state = copy.deepcopy(own.state_dict())
    flags = {name: (p.requires_grad, p.grad is None) for name, p in own.named_parameters()}
    modes = {name: module.training for name, module in own.named_modules()}
    hooks = {name: len(module._forward_hooks) for name, module in own.named_modules()}
    rng = torch.get_rng_state()

    frame = privlab.attack(own, photos, settings="a,c", metrics="psnr", attacks="april,patch-gradient").records

    assert own.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in own.state_dict().items())
    assert {name: (p.requires_grad, p.grad is None) for name, p in own.named_parameters()} == flags
    assert {name: module.training for name, module in own.named_modules()} == modes
    assert {name: len(module._forward_hooks) for name, module in own.named_modules()} == hooks
    assert type(own.blocks[0]).__name__ == "Block"
    assert torch.equal(torch.get_rng_state(), rng)
    assert set(frame.weights) == {"given"}
    assert set(frame.status) == {"ok"}
    exact = frame.query("attack == 'patch-gradient' and setting == 'a'")
    assert (exact.psnr > 100).all()


@pytest.mark.slow
def test_what_weakens_the_verdict_is_warned_of(photos: Path) -> None:
    with pytest.warns(PrivlabWarning) as told:
        privlab.attack("vit_ti_mjp", images=photos, metrics=["psnr"], **OPTIONS)
    said = " ".join(str(warning.message) for warning in told)
    for word in ("RANDOM weights (seed 0), as asked", "E_unk is random too, UNTRAINED", "768 values", "no gradient"):
        assert word in said


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_paths_may_be_paths(state: dict[str, torch.Tensor], photos: Path, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "mine.pth")
    (tmp_path / "labels.csv").write_text("file,label\na.png,3\n")
    run = tmp_path / "run"
    options: dict[str, Any] = {"weights": tmp_path / "mine.pth", "labels": tmp_path / "labels.csv", "img_size": 32}
    frame = privlab.attack("vit_ti", [photos / "a.png"], out=run, **options).records
    assert set(frame.label) == {3}
    assert json.loads((run / "run.json").read_text())["specification"]["weights"] == str(tmp_path / "mine.pth")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attacks": "aprl"}, "Unknown attack 'aprl'. Did you mean april or spear?"),
        ({"attack": "april"}, "Unknown option 'attack'. Did you mean attacks"),
        ({"gama": 0.3}, "Unknown option 'gama'. Did you mean gamma"),
        ({"batch_size": 0}, "batch_size must be a positive number. Found 0."),
        ({"limit": 0}, "limit must be a positive integer. Found 0."),
        ({"seed": -1}, "seed must be in"),
        ({"device": "gpu"}, "Unknown device 'gpu'."),
        ({"images": []}, "At least one of images is needed. Found none."),
        ({"img_size": 24}, "--img-size 24 does not fit vit_ti: an image is cut into patches of 16×16 pixels"),
    ],
)
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match="^" + message.replace("?", r"\?")):
        privlab.attack("vit_ti", out=tmp_path / "run", **(OPTIONS | options))
    assert not (tmp_path / "run").exists()


def test_own_model_keeps_its_size(own: VisionTransformer) -> None:
    with pytest.raises(PrivlabError, match=r"--img-size.*64.*vit_tiny_patch16_224.*32×32"):
        privlab.attack(own, img_size=64)
