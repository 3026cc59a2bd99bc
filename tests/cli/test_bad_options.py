"""Names and values that are not there, and attacks that cannot run: one clear line, exit status 2, nothing written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from privlab import cli as command_line

UNKNOWN = [
    (("--model", "diet_s"), "Unknown model 'diet_s'. Did you mean deit_s"),
    (("--model", "vit_ti,vit_tiny"), "Unknown model 'vit_tiny'. Did you mean vit_ti"),
    (("--model", "timm:vit_tny_patch16_224"), "Unknown timm model 'vit_tny_patch16_224'. Did you mean vit_tiny_patch1"),
    (("--attack", "aprl"), "Unknown attack 'aprl'. Did you mean april or spear?"),
    (("--attack", "april,patch-gradients"), "Unknown attack 'patch-gradients'. Did you mean patch-gradient"),
    (("--attack", "dager"), "Unknown attack 'dager'."),
    (("--setting", "d"), "Unknown setting 'd'. Choose from: a, b, c."),
    (("--setting", "a,bc"), "Unknown setting 'bc'. Did you mean "),
    (("--metrics", "psnr,sim"), "Unknown metric 'sim'. Did you mean ssim"),
    (("--metrics", "lpip"), "Unknown metric 'lpip'. Did you mean lpips"),
    (("--block", "aprl"), "Unknown block 'aprl'. Did you mean april?"),
    (("--defense", "mpj"), "Unknown defense 'mpj'. Did you mean mjp"),
    (("--geometry", "inplace"), "Unknown geometry 'inplace'. Did you mean in_place or "),
    (("--masked-pe", "unknwon"), "Unknown masked_pe 'unknwon'. Did you mean unknown or "),
    (("--set", "per=images"), "Unknown per of mjp 'images'. Did you mean image"),
    (
        ("--setting", "c", "--defense", "jigsaw", "--set", "jigsaw.per=batches"),
        "Unknown per of jigsaw 'batches'. Did you mean batch",
    ),
    (("surplus",), "Got unexpected extra argument (surplus)"),
]

NONSENSE = [
    (("--batch-size", "many"), "--batch-size must be auto or a positive number. Found 'many'."),
    (("--batch-size", "0"), "--batch-size must be auto or a positive number. Found '0'."),
    (("--batch-size", "-3"), "--batch-size must be auto or a positive number. Found '-3'."),
    (("--batch-size", "2.5"), "--batch-size must be auto or a positive number. Found '2.5'."),
    (("--gamma", "1.5"), "gamma (γ) must be in [0, 1]. Found 1.5."),
    (("--gamma", "nan"), "gamma (γ) must be in [0, 1]. Found nan."),
    (
        ("--gamma", "0.1"),
        "gamma applies only to defenses that shuffle patches, in settings b and c. Found gamma=0.1, setting a",
    ),
    (("--masked-pe", "slot"), "masked_pe applies only to defenses that shuffle patches"),
    (
        ("--gamma", "0.1", "--defense", "gaussian-noise"),
        "Found gamma=0.1, setting c and defense gaussian-noise.",
    ),
    (("--gamma", "much"), "Invalid value for '--gamma': 'much' is not a valid float."),
    (("--limit", "0"), "Invalid value for '--limit': 0 is not in the range x>=1."),
    (("--seed", "-1"), "Invalid value for '--seed': -1 is not in the range"),
    (("--seed", "9223372036854775808"), "seed must be in [0, 2^63 − 1]. Found 9223372036854775808."),
    (("--img-size", "8"), "Invalid value for '--img-size': 8 is not in the range x>=16."),
    (
        ("--img-size", "40"),
        "--img-size 40 does not fit vit_ti: an image is cut into patches of 16×16 pixels, so give a",
    ),
    (("--model", ""), "At least one of models is needed. Found none."),
    (("--setting", ","), "At least one of settings is needed. Found none."),
    (("--metrics", ","), "At least one of metrics is needed. Found none."),
    (("--attack", ","), "At least one of attacks is needed. Found none."),
    (("--device", "tpu"), "Unknown device 'tpu'. Use auto, cpu, cuda or cuda:N."),
    (("--device", "cuda:x"), "Unknown device 'cuda:x'. Use auto, cpu, cuda or cuda:N."),
    (("--device", "cuda:999"), "Device 'cuda:999' is not there: torch sees "),
    (("--split", "val", "--images", "samples"), "split is for folders and datasets. Found split 'val' with samples."),
    (("--split", "val"), "for split 'val'"),
    (("--lpips-weights", "/nowhere/alexnet.pth"), "found no file /nowhere/alexnet.pth"),
    (("--weights", "pretrained"), "--weights pretrained: timm/vit_tiny_patch16_224"),
]

INCAPABLE = [
    (
        ("--block", "stock", "--attack", "april"),
        "vit_ti: Attack 'april' needs what this observation does not grant: april_block (the first block has neither",
    ),
    (
        ("--model", "deit_ti_nope", "--attack", "april"),
        "deit_ti_nope: Attack 'april' needs what this observation does not grant: learnable_pe_gradient (",
    ),
    (("--model", "deit_ti_nope", "--attack", "april", "--block", "stock", "--force"), ": learnable_pe_gradient ("),
    (
        ("--attack", "mjp-full", "--gradient-batch", "2"),  # and no plain_block, which the stock block would grant
        "vit_ti: Attack 'mjp-full' needs what this observation does not grant: batch_size_one (each released gradient "
        "belongs to one image).",
    ),
    (("--attack", "april", "--force"), "force runs attacks on a block that is named. Found block auto:"),
    (("--defense", "mjp", "--setting", "c"), "Defense 'mjp' puts E_unk at the masked slots, and vit_ti has none."),
    (("--model", "timm:resnet18"), "timm cannot build resnet18 with {'img_size': 32}: "),
    (("--model", "timm:vit_small_r26_s32_224"), "A victim embeds square patches that do not overlap linearly"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "message"), UNKNOWN + NONSENSE + INCAPABLE)
def test_refused(attack: Callable[..., Any], tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert message in attack(*options).error
    assert not (tmp_path / "run").exists()


def test_few_names_are_listed_where_none_is_near(attack: Callable[..., Any]) -> None:
    """More than a thousand models, as timm has them, are not one clear line."""
    error = attack("--model", "timm:%%%").error
    assert error.startswith("Unknown timm model '%%%'. Choose from: ")
    assert " more." in error
    assert len(error) < 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attack",), "Missing option '--model'."),
        (("atack",), "No such command 'atack'."),
        (("list", "victim"), "'victim' is not one of 'victims', 'attacks', 'defenses', 'metrics'"),
        (("list",), "Missing argument"),
        (("bench", "atack"), "Unknown bench 'atack'. Did you mean attack"),
        (("bench", "attack", "--images", "1"), "Invalid value for '--images': 1 is not in the range x>=2."),
        (("bench", "attack", "--model", "diet_s"), "Unknown model 'diet_s'. Did you mean deit_s"),
        (("bench", "attack", "--device", "cuda:999"), "Device 'cuda:999' is not there: torch sees "),
    ],
)
def test_commands_refuse_too(cli: Callable[..., Any], arguments: tuple[str, ...], message: str) -> None:
    assert message in cli(*arguments).error


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (("attack", "--imags", "x"), "--images"),
        (("doctor", "--jsn"), "--json"),
        (("bench", "attack", "--model"), "--model"),
    ],
)
def test_unknown_options(cli: Callable[..., Any], arguments: tuple[str, ...], near: str) -> None:
    """The words are click's, which change with its version."""
    error = cli(*arguments).error
    assert next(word for word in arguments if word.startswith("--")) in error
    assert near in error


def test_no_arguments_show_five_commands_to_start_with(cli: Callable[..., Any]) -> None:
    done = cli()
    assert done.status == 0
    assert done.out.count("\n  privlab ") == 5
    assert done.err == ""


def test_gpu_that_is_not_there(attack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    expected = "Device 'cuda' is not there: torch sees 0 GPUs. Use --device cpu."
    assert attack("--device", "cuda").error == expected


def test_debug_shows_the_traceback(attack: Callable[..., Any]) -> None:
    done = attack("--attack", "aprl", "--debug")
    assert done.status == 2
    assert "Traceback (most recent call last)" in done.err
    assert done.err.endswith("Error: Unknown attack 'aprl'. Did you mean april or spear?\n")


@pytest.mark.parametrize("debug", [False, True])
def test_our_own_faults_are_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    def broken(what: str) -> None:
        raise KeyError(f"no\n{what}")

    monkeypatch.setattr("privlab.inventory.catalogue.catalogue", broken)
    assert command_line._status(["list", "victims", *["--debug"] * debug]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1].startswith("Error: KeyError: ")
    assert told.err.endswith("(a fault of privlab, not yours; --debug shows where)\n")
    assert ("Traceback" in told.err) == debug
    assert debug or len(told.err.splitlines()) == 1


def test_a_full_gpu_is_one_line_and_no_fault_of_privlab(
    attack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79 GiB.\nSee the notes."
        )

    monkeypatch.setattr("timm.models.vision_transformer.Block.forward", full)
    message = attack("--attack", "patch-gradient").error
    assert "memory" in message
    assert "2.50 GiB" in message
    assert "batch" in message


@pytest.mark.slow
def test_forced_attack_runs_on_the_block_that_it_does_not_hold_for(
    attack: Callable[..., Any], records: Callable[..., Any]
) -> None:
    assert attack("--block", "stock", "--attack", "april", "--force").status == 0
    made = records()
    assert set(made[made.attack == "april"].block) == {"stock"}
