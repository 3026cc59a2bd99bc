"""`privlab attack --update BEFORE AFTER`: a client's round audited from two files, and every pair that cannot be."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from privlab import capture_update
from privlab.base import PrivlabError
from privlab.defenses import PercentilePrivacy
from privlab.images import open_images
from privlab.victims import victim

State = dict[str, Tensor]
SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.05}
STATED = tuple(w for name, value in {**SGD, "steps": 5}.items() for w in ("--set", f"client.{name}={value}"))


@pytest.fixture
def trained(state: State, photos: Path, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Train with plain PyTorch on the first photo, of label 7, and return the files of the weights before and after."""

    def train(steps: int = 5, images: int = 1, mean: Any = 0.5, std: Any = 0.5, **options: Any) -> tuple[Path, Path]:
        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        assert isinstance(vit, VisionTransformer)
        vit.load_state_dict(state)
        pixels = next(iter(open_images(photos / "a.png"))).pixels
        assert pixels is not None
        x = victim(vit).preprocessing(pixels)[None]
        x = torch.cat([x, torch.rand(images - 1, *x.shape[1:], generator=torch.Generator().manual_seed(0))])
        optimiser = torch.optim.SGD(vit.parameters(), **(SGD | options))
        for _ in range(steps):
            optimiser.zero_grad()
            F.cross_entropy(vit.eval()((x - mean) / std), torch.tensor([7, 2][:images])).backward()
            optimiser.step()
        return capture_update(state, vit, tmp_path / "round")

    return train


@pytest.fixture
def audit(cli: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Audit a pair of files with the client's model and the settings that it states; later options win."""

    def run(files: tuple[Path, Path], *arguments: object, stated: tuple[str, ...] = STATED) -> Any:
        base = ("--model", "vit_ti", "--img-size", "32", "--client", "sgd", *stated, "--out", tmp_path / "audit")
        return cli("attack", "--update", *files, *base, *arguments)

    return run


@pytest.mark.slow
def test_a_round_is_audited_and_scored_by_its_reference(
    audit: Callable[..., Any], trained: Callable[..., tuple[Path, Path]], photos: Path, tmp_path: Path
) -> None:
    told = audit(trained(), "--reference", photos / "a.png", "--metrics", "psnr", "--json").json
    rows = {row["attack"]: row for row in told["attacks"]}
    assert told["labels"] == [7]
    assert rows["patch-update"]["explained"] is True
    assert rows["patch-update"]["psnr"] > 80
    assert rows["patch-gradient"]["explained"] is False
    assert rows["patch-gradient"]["beyond_range"] == "weight decay 0.05 in the update"
    assert rows["patch-gradient"]["psnr"] < rows["patch-update"]["psnr"] - 30
    frame = pd.read_parquet(tmp_path / "audit" / "records")
    assert set(frame.release) == {"update"}
    assert set(frame.setting) == {"a"}
    assert frame[frame.attack == "patch-update"].explained.min() > 0.9999
    assert frame[frame.attack == "patch-gradient"].explained.max() < 0.9975
    assert json.loads(frame.conditions[0])["client"]["momentum"] == 0.9
    assert frame[frame.psnr.notna() & (frame.attack == "patch-update")].psnr.item() == rows["patch-update"]["psnr"]
    assert "patch-update-0.png" in {path.name for path in (tmp_path / "audit" / "pictures").iterdir()}
    facts = json.loads((tmp_path / "audit" / "run.json").read_text())
    assert facts["specification"]["client"] == "sgd"
    assert facts["status"] == "finished"


@pytest.mark.slow
def test_a_round_is_audited_without_a_reference(
    audit: Callable[..., Any], trained: Callable[..., tuple[Path, Path]]
) -> None:
    shown = audit(trained(momentum=0.0, weight_decay=0.0), stated=("--set", "client.steps=5"))
    assert shown.status == 0
    assert "the private image: it gives the released update" in shown.out
    assert "residual: of the update that the reconstruction itself gives" in shown.out


def test_a_head_that_did_not_move_is_said_to_tell_no_label(
    audit: Callable[..., Any], trained: Callable[..., tuple[Path, Path]]
) -> None:
    before, after = trained(1)
    bias = load_file(before)["head.bias"]
    files = before, edited(after, lambda tensors: tensors.update({"head.bias": bias}))
    plain = ("--set", "client.lr=0.01", "--set", "client.momentum=0.9")
    done = audit(files, "--attack", "patch-gradient", stated=plain)
    assert done.status == 0
    assert "have equal biases of the head, so that the update tells no label" in " ".join(done.err.split())


@pytest.mark.parametrize("stated", ["imagenet", "0.485,0.456,0.406/0.229,0.224,0.225"])
def test_a_normalisation_is_stated(
    audit: Callable[..., Any], trained: Callable[..., tuple[Path, Path]], photos: Path, tmp_path: Path, stated: str
) -> None:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    files = trained(1, mean=mean, std=std, weight_decay=0.0)
    options = ("--attack", "patch-gradient", "--metrics", "psnr", "--reference", photos / "a.png", "--json")
    told = audit(files, "--normalisation", stated, *options, stated=("--set", "client.momentum=0.9")).json
    (row,) = (each for each in told["attacks"] if each["attack"] == "patch-gradient")
    assert (row["psnr"] > 60, row["explained"]) == (True, True)
    victim_params = json.loads(pd.read_parquet(tmp_path / "audit" / "records").victim_params[0])
    assert victim_params["mean"] == list(IMAGENET_DEFAULT_MEAN)


def edited(path: Path, change: Callable[[State], object]) -> Path:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


@pytest.mark.slow
def test_other_settings_are_found_and_said(audit: Callable[..., Any], trained: Callable[..., Any]) -> None:
    files = trained()
    for right, wrong in (("client.lr=0.01", "client.lr=0.1"), ("client.weight_decay=0.05", "client.weight_decay=0")):
        said = audit(files, "--set", wrong).error  # the later of two holds
        assert f"does not match {wrong}: its size is that of {right}." in said
    said = audit(files, "--set", "client.lr=0.002", "--set", "client.weight_decay=0.3").error
    assert "its size is that of client.lr=0.01 and client.weight_decay=0.05. Other steps or another momentum" in said
    said = audit(files, "--set", "client.momentum=0").error
    assert said.endswith("does not match client.momentum=0: its size is that of client.momentum=0.9.")
    adam = ("--set", "client.steps=5", "--set", "client.lr=0.01")
    said = audit(trained(momentum=0.0, weight_decay=0.0), "--client", "adamw", stated=adam).error
    assert said.endswith("client.lr=0.01, client.momentum=0, client.weight_decay=0. State client.optimiser=sgd.")


@pytest.mark.slow
def test_what_no_setting_explains_is_said_and_goes_on(audit: Callable[..., Any], trained: Callable[..., Any]) -> None:
    """An update of two images, said to be of one: each attack runs, and nothing explains it."""
    done = audit(trained(images=2), "--json")
    assert done.status == 0
    assert not any(row.get("explained") for row in json.loads(done.out)["attacks"])
    assert any("no image explains it with these settings" in line for line in json.loads(done.out)["warnings"])


COUNTER = "bn.num_batches_tracked"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((3, 8), f"before.safetensors: {COUNTER} (torch.int64) is left aside: this model has no such tensor, and "),
        (
            (None, 8),
            f"after.safetensors: {COUNTER} is left aside: integers, such as the counters of BatchNorm, are no ",
        ),
        ((3, None), f"before.safetensors: {COUNTER} (torch.int64) is left aside: this model has no such tensor, and "),
    ],
)
def test_integers_that_the_model_does_not_have_are_left_aside_and_said_so_once(
    audit: Callable[..., Any], trained: Callable[..., Any], counts: tuple[int | None, int | None], said: str
) -> None:
    files = trained(steps=1, momentum=0.0, weight_decay=0.0)
    for path, count in zip(files, counts, strict=True):
        if count is not None:
            edited(path, lambda tensors, count=count: tensors.update({COUNTER: torch.tensor(count)}))
    done = audit(files, "--attack", "patch-update", "--json", stated=())
    assert done.status == 0
    assert json.loads(done.out)["attacks"][0]["explained"] is True
    warned = json.loads(done.out)["warnings"]
    assert [COUNTER in line for line in warned] == [True]
    assert warned[0].startswith(said)


@pytest.mark.slow
def test_a_decay_that_is_not_known_is_fitted_to_the_files(
    audit: Callable[..., Any], trained: Callable[..., Any], tmp_path: Path
) -> None:
    """As `client.weight_decay=unknown` says: it is left out, and the audit takes what the update shows."""
    left_out = ("--set", "client.lr=0.01", "--set", "client.momentum=0.9", "--set", "client.steps=2")
    fitted = ("--attack", "patch-update", "--set", "patch-update.decay=fitted")
    files = trained(steps=2)
    assert "does not match client.weight_decay=0: " in audit(files, "--attack", "patch-update", stated=left_out).error
    told = audit(files, *fitted, "--json", stated=left_out).json
    assert told["attacks"][0]["explained"] is True
    assert "client.weight_decay=0.05 is fitted to the update, and taken in place of" in told["warnings"][0]
    frame = pd.read_parquet(tmp_path / "audit" / "records")
    assert json.loads(frame.conditions[0])["client"]["weight_decay"] == pytest.approx(0.05, rel=1e-3)
    said = audit(files, *fitted, "--set", "client.lr=0.1", stated=left_out).error
    assert "does not match client.lr=0.1" in said


@pytest.mark.slow
def test_weights_of_two_models_are_called_that(audit: Callable[..., Any], trained: Callable[..., Any]) -> None:
    """A model of the same shape, whose head alone goes on as a training would."""

    def other(tensors: State) -> None:
        for name, tensor in tensors.items():
            if name != "head.bias":
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))

    before, after = trained(steps=1)
    done = audit((before, edited(after, other)), "--attack", "patch-gradient", "--json")
    assert done.status == 0
    found = [line for line in json.loads(done.out)["warnings"] if "look like weights of two models" in line]
    assert len(found) == 1
    assert "Give the weights that this client began with" in found[0]


ALL = ("--defense", "percentile-privacy", "--set", "percentile-privacy.percentile=100")
"""A filter that keeps the largest entry alone."""


def test_a_filter_that_left_nothing_in_the_files_is_one_line(
    audit: Callable[..., Any], trained: Callable[..., Any], tmp_path: Path
) -> None:
    before, after = trained(steps=1)
    θ, moved = load_file(before), load_file(after)
    save_file(θ | {"head.bias": moved["head.bias"]}, filtered := tmp_path / "filtered.safetensors")
    said = audit((before, filtered), *ALL).error
    assert (
        "the filter left nothing of what the attacks read, patch_embed.proj.weight, pos_embed. Found Percentile" in said
    )


def test_a_filter_that_leaves_nothing_is_one_line_in_place_of_a_table(attack: Callable[..., Any]) -> None:
    own = (
        "--model",
        "cifar_vit",
        "--weights",
        "auto",
        "--client",
        "sgd",
        "--attack",
        "patch-update",
        "--images",
        "samples",
    )
    ran = attack(*own, *ALL, "--limit", "1", "--metrics", "psnr", "--quiet")
    assert ran.status == 2
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith(
        "Error: Nothing could be attacked of 1 image: what is released is zero or not finite: percent"
    )
    assert "options percentile-privacy.percentile=100: let it leave more" in line


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
        "must be weights of one model. Found of other shapes: head.bias (10,) and (11,).",
    ),
    "missing": (_of("missing"), (), "must be weights of one model. Found missing in after.safetensors: head.bias."),
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
    "head alone": (lambda files: files, ("--set", "client.trains=head"), "client.trains=head leaves"),
    "no rate": (
        lambda files: files,
        ("--set", "client.lr=unknown"),
        "Found client.lr=unknown: state the likeliest rate; an audit of one image by --update refuses one that can",
    ),
    "no decay": (
        lambda files: files,
        ("--set", "client.weight_decay=unknown"),
        "with --update leave it out, and give --attack patch-update --set patch-update.decay=fitted",
    ),
    "no decay of AdamW": (
        lambda files: files,
        ("--client", "adamw", "--set", "client.momentum=0", "--set", "client.weight_decay=unknown"),
        "no attack fits the decay of adamw, so state the likeliest (torch's default is 0.01)",
    ),
    "no dropout": (
        lambda files: files,
        ("--set", "client.dropout=private"),
        "a client sets is public here: an attack knows it. Found client.dropout=private: state the likeliest value",
    ),
    "weights": (lambda files: files, ("--weights", "random"), "--weights has no meaning with --update"),
    "normalisation": (lambda files: files, ("--normalisation", "half"), "Found 'half'."),
    "gamma": (lambda files: files, ("--setting", "c"), "--setting has no meaning with --update"),
    "metrics": (lambda files: files, ("--metrics", "psnr"), "--metrics has no meaning with --update without a --ref"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(audit: Callable[..., Any], trained: Callable[..., tuple[Path, Path]], name: str) -> None:
    change, arguments, said = MISTAKES[name]
    assert said in audit(change(trained(steps=2)), *arguments).error


def test_a_client_must_be_named(cli: Callable[..., Any], weights: Path) -> None:
    said = cli("attack", "--update", weights, weights, "--model", "vit_ti", "--img-size", "32").error
    assert said.startswith("--update needs --client: what the server knows of the training. Found none")


def test_a_capture_that_is_no_copy_or_of_another_model_is_refused(state: State, tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    before = vit.state_dict()
    with torch.no_grad():
        vit.get_parameter("head.bias").add_(1)
    with pytest.raises(PrivlabError, match=r"Nothing was trained: before and after are the same weights. Take a copy"):
        capture_update(before, vit, tmp_path)
    with pytest.raises(PrivlabError, match=r"must be weights of one model. Found other names or shapes: head.bias."):
        capture_update({name: value for name, value in state.items() if name != "head.bias"}, vit, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PrivlabError, match=r"The folder .* cannot be made"):
        capture_update(state, vit, tmp_path / "file" / "round")
    held = copy.deepcopy(state)
    paths = capture_update(state, {f"module.{name}": value for name, value in vit.state_dict().items()}, tmp_path)
    assert [path.name for path in paths] == ["before.safetensors", "after.safetensors"]
    assert all(torch.equal(value, held[name]) for name, value in load_file(paths[0]).items())
    assert load_file(paths[1])["head.bias"].equal(vit.state_dict()["head.bias"])


def test_a_round_of_several_images_is_no_evidence_of_privacy(
    audit: Callable[..., Any], trained: Callable[..., tuple[Path, Path]]
) -> None:
    shown = audit(trained(images=2), "--set", "client.images=2", "--set", "client.batch_size=2")
    assert shown.status == 0
    assert "flag: no attack ran on this file, which is no evidence of privacy" in shown.out
    assert "which this attack does not separate. That is no evidence of privacy" in shown.err


@pytest.mark.slow
def test_one_step_on_several_images_is_audited_as_the_gradient_that_it_is(
    audit: Callable[..., Any], trained: Callable[..., tuple[Path, Path]], photos: Path
) -> None:
    stated = ("client.lr=0.1", "client.steps=1", "client.images=2", "client.batch_size=2")
    given = [part for setting in stated for part in ("--set", setting)]
    files = trained(steps=1, images=2, lr=0.1, momentum=0.0, weight_decay=0.0)
    shown = audit(files, *given, "--reference", photos / "a.png", "--metrics", "psnr", stated=())
    assert shown.status == 0
    assert "labels given away by the gradient of the head: 2, 7" in shown.out
    assert "token-separation" in shown.out


@pytest.mark.slow
def test_an_audit_knows_the_filter_that_it_is_told(
    audit: Callable[..., Any], trained: Callable[..., tuple[Path, Path]], photos: Path, tmp_path: Path
) -> None:
    before, after = trained()
    θ, moved = load_file(before), load_file(after)
    whole = {name: (moved[name] - θ[name])[None] for name in θ}
    kept = PercentilePrivacy().release(whole, [torch.Generator()])
    save_file({name: θ[name] + kept[name][0] for name in θ}, filtered := tmp_path / "filtered.safetensors")
    given = ("--reference", photos / "a.png", "--metrics", "psnr", "--overwrite", "--json")
    found = [
        next(row for row in audit((before, filtered), *told, *given).json["attacks"] if row["attack"] == "patch-update")
        for told in ((), ("--defense", "percentile-privacy"))
    ]
    assert found[1]["psnr"] > found[0]["psnr"] + 10
    assert json.loads((tmp_path / "audit" / "run.json").read_text())["specification"]["settings"] == ["c"]


def test_an_update_of_adam_is_audited(audit: Callable[..., Any], state: State, tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    vit.load_state_dict(state)
    optimiser = torch.optim.AdamW(vit.parameters(), lr=1e-3)
    F.cross_entropy(vit.eval()(torch.rand(1, 3, 32, 32)), torch.tensor([3])).backward()
    optimiser.step()
    files = capture_update(state, vit, tmp_path / "round")
    lone = ("--client", "adamw", "--set", "client.lr=0.001", "--attack", "adam-update")
    said = audit(files, *lone, stated=()).error
    assert "does not match client.weight_decay=0: " in said
    assert said.endswith("it is that of client.weight_decay=0.01.")
    stated = ("--set", "client.lr=0.001", "--set", "client.weight_decay=0.01", "--json")
    told = audit(files, "--set", "adam-update.steps=1", "--client", "adamw", stated=stated).json
    assert {row["attack"] for row in told["attacks"]} == {"patch-gradient", "adam-update"}
    assert not any(row["explained"] for row in told["attacks"])
    assert told["labels"] == [3]
