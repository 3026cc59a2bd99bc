"""`privlab audit update BEFORE AFTER`: a client's round audited from two files, and every pair that cannot be."""

import json
import re
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
from torch import Tensor

from privlab import capture_update
from privlab.defenses import PercentilePrivacy

State = dict[str, Tensor]


def one_step(
    state: State, folder: Path, loss: Callable[[Tensor], Tensor], optimiser: Any = torch.optim.SGD
) -> tuple[Path, Path]:
    """Return files of the weights before and after a step of plain PyTorch on an image of noise, at a rate of 1e-3."""
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    vit.load_state_dict(state)
    steps = optimiser(vit.parameters(), lr=1e-3)
    loss(vit.eval()(2 * torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)) - 1)).backward()
    steps.step()
    return capture_update(state, vit, folder / "round")


@pytest.mark.slow
def test_a_round_is_audited_and_scored_by_its_reference(
    audit_update: Callable[..., Any], trained: Callable[..., tuple[Path, Path]], photos: Path, tmp_path: Path
) -> None:
    told = audit_update(trained(), "--reference", photos / "a.png", "--metrics", "psnr", "--json").json
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
def test_a_mixed_label_is_fitted_and_stated(
    audit_update: Callable[..., Any], trained: Callable[..., tuple[Path, Path]]
) -> None:
    target = 0.7 * torch.eye(10)[7:8] + 0.3 * torch.eye(10)[2:3]
    files = trained(steps=1, target=target, momentum=0.0, weight_decay=0.0)
    lone = ("--attack", "patch-gradient")
    told = audit_update(files, *lone, "--json", stated=()).json
    (row,) = told["attacks"]
    assert (told["leaks"], row["explained"], row["proof"]) == (True, True, "update")
    assert row["fitted"] == {"label": {"7": pytest.approx(0.7, abs=0.01), "2": pytest.approx(0.3, abs=0.01)}}
    assert "label: 0.70 of class 7, 0.30 of class 2" in told["flags"]
    assert "leaks: yes" in audit_update(files, *lone, "--overwrite", stated=()).out


@pytest.mark.slow
def test_a_round_is_audited_without_a_reference(
    audit_update: Callable[..., Any], trained: Callable[..., tuple[Path, Path]]
) -> None:
    shown = audit_update(trained(momentum=0.0, weight_decay=0.0), stated=("--set", "client.steps=5"))
    assert shown.status == 0
    assert re.search(r"the private image: it gives the released\W+update", shown.out)
    assert "residual: distance between the update of the image and the released one" in shown.out


@pytest.mark.slow
def test_a_normalisation_is_stated(
    audit_update: Callable[..., Any], trained: Callable[..., tuple[Path, Path]], photos: Path, tmp_path: Path
) -> None:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    files = trained(1, mean=mean, std=std, weight_decay=0.0)
    options = ("--attack", "patch-gradient", "--metrics", "psnr", "--reference", photos / "a.png", "--json")
    told = audit_update(files, "--normalisation", "imagenet", *options, stated=("--set", "client.momentum=0.9")).json
    (row,) = (each for each in told["attacks"] if each["attack"] == "patch-gradient")
    assert (row["psnr"] > 60, row["explained"]) == (True, True)
    victim_params = json.loads(pd.read_parquet(tmp_path / "audit" / "records").victim_params[0])
    assert victim_params["mean"] == list(IMAGENET_DEFAULT_MEAN)


@pytest.mark.slow
def test_other_settings_are_fitted_and_said(audit_update: Callable[..., Any], trained: Callable[..., Any]) -> None:
    files = trained()
    lone = ("--attack", "patch-update", "--json", "--overwrite")
    for wrong, right in (
        ({"lr": 0.1}, {"lr": 0.01}),
        ({"weight_decay": 0.0}, {"weight_decay": 0.05}),
        ({"lr": 0.002, "weight_decay": 0.3}, {"lr": 0.01, "weight_decay": 0.05}),
        ({"momentum": 0.0}, {"momentum": 0.9}),
    ):
        given = [part for name, value in wrong.items() for part in ("--set", f"client.{name}={value}")]
        told = audit_update(files, *given, *lone).json  # the later of two holds
        (row,) = told["attacks"]
        assert (told["leaks"], row["explained"], row["proof"]) == (True, True, "update")
        assert row["fitted"] == pytest.approx(right, rel=1e-2)
        assert any("fitted to the update" in line for line in told["warnings"])
    adam = ("--set", "client.steps=5", "--set", "client.lr=0.01")
    told = audit_update(
        trained(momentum=0.0, weight_decay=0.0), "--client", "adamw", "--json", "--overwrite", stated=adam
    ).json
    assert told["leaks"] is True
    assert all(row["fitted"]["optimiser"] == "sgd" for row in told["attacks"] if row["explained"])


@pytest.mark.slow
def test_what_no_setting_explains_is_said_and_goes_on(
    audit_update: Callable[..., Any], trained: Callable[..., Any]
) -> None:
    """An update of two images, said to be of one: each attack runs, and nothing explains it."""
    done = audit_update(trained(images=2), "--json")
    assert done.status == 0
    assert not any(row.get("explained") for row in json.loads(done.out)["attacks"])
    assert json.loads(done.out)["leaks"] is None
    assert any("no image explains it" in line for line in json.loads(done.out)["warnings"])


@pytest.mark.slow
def test_a_decay_that_is_not_known_is_fitted_to_the_files(
    audit_update: Callable[..., Any], trained: Callable[..., Any], tmp_path: Path
) -> None:
    """As `client.weight_decay=unknown` says: it is left out, and the audit takes what the update shows."""
    left_out = ("--set", "client.lr=0.01", "--set", "client.momentum=0.9", "--set", "client.steps=2")
    told = audit_update(trained(steps=2), "--attack", "patch-update", "--json", stated=left_out).json
    assert told["attacks"][0]["explained"] is True
    assert told["attacks"][0]["fitted"] == {"weight_decay": pytest.approx(0.05, rel=1e-3)}
    assert "client.weight_decay=0.05 fitted to the update" in told["warnings"][0]
    frame = pd.read_parquet(tmp_path / "audit" / "records")
    assert json.loads(frame.conditions[0])["client"]["weight_decay"] == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(("stated", "said"), [((), "taken to have trained these"), (("attention",), "contradicts")])
def test_a_client_that_trains_in_part_is_audited(
    audit_update: Callable[..., Any], trained: Callable[..., Any], stated: tuple[str, ...], said: str
) -> None:
    """What moved is stated, the attacks that need more are left out with the reason, and labels are read."""
    before, after = trained(1)
    θ, moved = load_file(before), load_file(after)
    save_file(θ | {name: moved[name] for name in ("head.weight", "head.bias")}, after)
    done = audit_update((before, after), *(f"--set=client.trains={each}" for each in stated), "--json")
    assert done.status == 0
    told = json.loads(done.out)
    assert told["labels"] == [7]
    assert told["attacks"] == []
    assert "2 of 152 parameters moved (head)" in told["warnings"][0]
    assert said in told["warnings"][0]
    assert any("patch-gradient" in line and "which this client did not train" in line for line in told["warnings"])
    assert "no attack ran on this file, which is no evidence of privacy" in told["flags"]


def test_a_head_of_zeros_is_the_reason_why_nothing_else_moved(
    audit_update: Callable[..., Any], state: State, tmp_path: Path
) -> None:
    """Torchvision's ViT begins so: what trains is not known then, and the head shows the label all the same."""
    state = state | {"head.weight": torch.zeros_like(state["head.weight"])}
    files = one_step(state, tmp_path, lambda logits: F.cross_entropy(logits, torch.tensor([7])))
    said = audit_update(files, "--set", "client.lr=0.001", "--json", stated=()).json
    assert said["labels"] == [7]
    assert "2 of 152 parameters moved (head): the head's weights were zero before" in said["warnings"][0]


ALL = ("--defense", "percentile-privacy", "--set", "percentile-privacy.percentile=100")
"""A filter that keeps the largest entry alone."""


def test_a_filter_that_left_nothing_in_the_files_is_one_line(
    audit_update: Callable[..., Any], trained: Callable[..., Any], tmp_path: Path
) -> None:
    before, after = trained(steps=1)
    θ, moved = load_file(before), load_file(after)
    save_file(θ | {"head.bias": moved["head.bias"]}, filtered := tmp_path / "filtered.safetensors")
    ran = audit_update((before, filtered), *ALL, "--json")
    assert ran.status == 0
    told = json.loads(ran.out)
    assert told["attacks"] == []
    assert [flag for flag in told["flags"] if "no attack ran" in flag]
    why = (
        "no evidence: the filter left nothing of what the attacks read, patch_embed.proj.weight, pos_embed. Found Perc"
    )
    assert [message for message in told["warnings"] if why in message]
    assert why in audit_update((before, filtered), *ALL, "--attack", "patch-gradient", "--overwrite").error


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_round_of_several_images_is_no_evidence_of_privacy(
    audit_update: Callable[..., Any], trained: Callable[..., tuple[Path, Path]]
) -> None:
    shown = audit_update(trained(images=2), "--set", "client.images=2", "--set", "client.batch_size=2")
    assert shown.status == 0
    assert "flag: no attack ran on this file, which is no evidence of privacy" in shown.out
    assert "which this attack does not separate. That is no evidence of privacy" in shown.err


@pytest.mark.slow
def test_one_step_on_several_images_is_audited_as_the_gradient_that_it_is(
    audit_update: Callable[..., Any], trained: Callable[..., tuple[Path, Path]], photos: Path
) -> None:
    stated = ("client.lr=0.1", "client.steps=1", "client.images=2", "client.batch_size=2")
    given = [part for setting in stated for part in ("--set", setting)]
    files = trained(steps=1, images=2, lr=0.1, momentum=0.0, weight_decay=0.0)
    shown = audit_update(files, *given, "--reference", photos / "a.png", "--metrics", "psnr", stated=())
    assert shown.status == 0
    assert "labels given away by the gradient of the head: 2, 7" in shown.out
    assert "token-separation" in shown.out


@pytest.mark.slow
def test_an_audit_knows_the_filter_that_it_is_told(
    audit_update: Callable[..., Any], trained: Callable[..., tuple[Path, Path]], photos: Path, tmp_path: Path
) -> None:
    before, after = trained()
    θ, moved = load_file(before), load_file(after)
    whole = {name: (moved[name] - θ[name])[None] for name in θ}
    kept = PercentilePrivacy().release(whole, [torch.Generator()])
    save_file({name: θ[name] + kept[name][0] for name in θ}, filtered := tmp_path / "filtered.safetensors")
    given = ("--reference", photos / "a.png", "--metrics", "psnr", "--overwrite", "--json")
    found = [
        next(
            row
            for row in audit_update((before, filtered), *told, *given).json["attacks"]
            if row["attack"] == "patch-update"
        )
        for told in ((), ("--defense", "percentile-privacy"))
    ]
    assert found[1]["psnr"] > found[0]["psnr"] + 10
    assert json.loads((tmp_path / "audit" / "run.json").read_text())["specification"]["settings"] == ["c"]


@pytest.mark.slow
@pytest.mark.parametrize(("optimiser", "named"), [(torch.optim.AdamW, True), (torch.optim.SGD, False)])
def test_another_optimiser_than_stated_is_named(
    audit_update: Callable[..., Any], state: State, tmp_path: Path, optimiser: Any, named: bool
) -> None:
    files = one_step(state, tmp_path, lambda logits: F.cross_entropy(logits, torch.tensor([3])), optimiser)
    told = audit_update(files, "--attack", "patch-gradient", "--json", stated=("--set", "client.lr=0.001")).json
    found = [line for line in told["warnings"] if "--client adamw --set client.lr=0.001" in line]
    assert len(found) == named


@pytest.mark.slow
def test_an_image_of_no_class_of_a_binary_loss_is_explained_and_given_no_label(
    audit_update: Callable[..., Any], state: State, tmp_path: Path
) -> None:
    files = one_step(state, tmp_path, lambda z: F.binary_cross_entropy_with_logits(z, torch.zeros_like(z)))
    lone = ("--attack", "patch-gradient", "--json", "--overwrite")
    told = audit_update(files, *lone, stated=()).json
    assert any("--set client.loss=binary" in line for line in told["warnings"])
    told = audit_update(files, *lone, "--set", "client.loss=binary", stated=("--set", "client.lr=0.001")).json
    assert (told["leaks"], told["labels"]) == (True, None)
    assert told["attacks"][0]["proof"] == "update"
    assert not any("labels given away" in flag for flag in told["flags"])


@pytest.mark.slow
def test_an_update_of_adam_is_audited(audit_update: Callable[..., Any], state: State, tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    vit.load_state_dict(state)
    optimiser = torch.optim.AdamW(vit.parameters(), lr=1e-3)
    F.cross_entropy(vit.eval()(torch.rand(1, 3, 32, 32)), torch.tensor([3])).backward()
    optimiser.step()
    files = capture_update(state, vit, tmp_path / "round")
    short = ("--set", "adam-update.steps=1", "--set", "adam-update.rounds=0")
    lone = ("--client", "adamw", "--set", "client.lr=0.001", "--attack", "adam-update")
    said = audit_update(files, *lone, *short, stated=()).err
    assert "does not match client.weight_decay=0: " in " ".join(said.split())
    stated = ("--set", "client.lr=0.001", "--set", "client.weight_decay=0.01", "--json", "--overwrite")
    told = audit_update(files, *short, "--client", "adamw", stated=stated).json
    assert {row["attack"] for row in told["attacks"]} == {"patch-gradient", "adam-update"}
    assert not any(row["explained"] for row in told["attacks"])
    assert told["labels"] == [3]
