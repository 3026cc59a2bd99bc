"""`privlab attack` on released features: the same records and strips, places and keys scored, recordings audited."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
import torch
from PIL import Image

from privlab.attacks import ATTACKS
from privlab.threat import Capability, FeatureObservation, Reconstruction

LARGE = ("--img-size", "64")


@pytest.mark.slow
def test_row_permutation_is_attacked_scored_and_shown(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], tmp_path: Path
) -> None:
    result = attack(*LARGE, "--defense", "row-permutation", "--attack", "pe-assignment", "--strips", "--details")
    assert result.status == 0
    made = records().query("attack == 'pe-assignment'")
    assert len(made) == 2 * 3
    assert set(made.release) == {"features"}
    assert made.block.isna().all()
    assert made.grad_norm.isna().all()
    assert made.placement_accuracy.between(0, 1).all()
    assert made.neighbour_accuracy.between(0, 1).all()
    assert made.key_recovered.isna().all()
    assert made.key_bits.iloc[0] == pytest.approx(48.34, abs=0.01)  # log2 17!
    assert made.correct.isna().all()  # the labels are predictions
    at_home = made[made.geometry == "oracle"].set_index("image").psnr
    in_place = made[made.geometry == "in_place"].set_index("image").psnr
    assert (at_home >= in_place - 1e-9).all()
    assert all(word in result.out for word in ("placed", "neighbours", "RowPermutation(per='batch'"))
    with Image.open(next((tmp_path / "run" / "strips").iterdir())) as strip:
        assert strip.width > 4 * 224  # image, fed, as sent, attack


@pytest.mark.slow
@pytest.mark.parametrize("name", ["column-statistics", "pe-assignment"])
def test_public_images_that_are_all_attacked_are_none(
    cli: Callable[..., Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bundled photographs are one batch: an attack that needs others says so, and none dies in its numbers."""
    monkeypatch.chdir(tmp_path)
    result = cli("attack", "--model", "cifar_vit", "--attack", name, "--metrics", "psnr", "--json")
    failed = json.loads(result.out)["failed"]
    assert len(failed) == 14
    assert all("needs what this observation does not grant: auxiliary_images" in reason for reason in failed.values())


@pytest.mark.slow
def test_a_column_key_is_recovered(attack: Callable[..., Any], records: Callable[..., pd.DataFrame]) -> None:
    assert attack(*LARGE, "--defense", "column-permutation", "--attack", "class-token-key").status == 0
    made = records().query("attack == 'class-token-key'")
    assert (made.key_recovered == 1).all()
    assert (made.psnr > 15).all()


@pytest.mark.slow
def test_known_labels_show_what_the_defense_costs(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], photos: Path, tmp_path: Path
) -> None:
    """Row permutation changes no prediction (Theorem 4.1): with predictions as labels, all of them are right."""
    attack(*LARGE, "--defense", "row-permutation", "--attack", "pe-assignment")
    labels = tmp_path / "labels.csv"
    predicted = records().drop_duplicates("image")[["image", "label"]].set_axis(["file", "label"], axis=1)
    predicted.to_csv(labels, index=False)
    options = ("--attack", "pe-assignment", "--labels", labels, "--overwrite")
    assert attack(*LARGE, "--defense", "row-permutation+column-permutation", *options).status == 0
    assert (records().query("attack == 'pe-assignment'").correct == 1).all()


@pytest.mark.slow
def test_features_without_a_defense_are_setting_a(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame]
) -> None:
    assert attack(*LARGE, "--attack", "pe-assignment").status == 0
    made = records().query("attack == 'pe-assignment'")
    assert set(zip(made.defense, made.setting, made.key_bits, strict=True)) == {("none", "a", 0.0)}


@pytest.mark.slow
def test_a_batch_is_the_client_s_whatever_the_speed(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame]
) -> None:
    """--batch-size changes no draw; --client-batch does, for it is part of the science."""
    options = (*LARGE, "--defense", "batch-shuffle", "--attack", "pe-assignment", "--metrics", "psnr", "--overwrite")
    psnr = {}
    for name, extra in {"one": ("--batch-size", 1), "two": ("--batch-size", 2), "other": ("--client-batch", 1)}.items():
        assert attack(*options, *extra).status == 0
        psnr[name] = records().query("attack == 'pe-assignment'").psnr.tolist()
    assert psnr["one"] == psnr["two"]
    assert psnr["one"] != psnr["other"]


@pytest.mark.slow
def test_attacks_that_need_rows_of_their_own_image_are_left_out_under_batch_shuffle(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame]
) -> None:
    done = attack(*LARGE, "--defense", "batch-shuffle", "--metrics", "psnr")
    assert done.status == 0
    for name in ("border-jigsaw", "row-alignment"):
        assert f"Left out. vit_ti: Attack '{name}' needs what this observation does not grant: own_rows (" in done.err
    assert set(records().status) == {"ok"}
    refused = attack(*LARGE, "--defense", "batch-shuffle", "--attack", "row-alignment", "--overwrite")
    assert "own_rows (every row stays with its image (no batch-shuffle))" in refused.error


@pytest.mark.slow
def test_a_recording_is_audited_without_any_image(
    cli: Callable[..., Any], recording: Path, tmp_path: Path, photos: Path
) -> None:
    victim_options = ("--model", "vit_ti", "--weights", "random", *LARGE, "--defense", "row-permutation")
    options = ("--attack", "pe-assignment", "--out", tmp_path / "audit", "--public", photos)
    result = cli("audit", "features", recording, *victim_options, *options, "--json")
    assert result.status == 0
    told = json.loads(result.out)
    assert [(row["kind"], row["number"], row["images"]) for row in told["batches"]] == [
        ("step", 1, 3),
        ("step", 2, 3),
        ("infer", 1, 2),
    ]
    sheets = {path.name for path in (tmp_path / "audit" / "strips").iterdir()}
    assert sheets == {row["sheet"] for row in told["batches"]}
    facts = json.loads((tmp_path / "audit" / "run.json").read_text())
    assert facts["specification"]["defense"] == "row-permutation"
    assert facts["command"].startswith(f"privlab audit features {recording} --model vit_ti ")
    shown = cli("audit", "features", recording, *victim_options, *options, "--overwrite", "--limit", 1)
    assert shown.status == 0
    assert "leaks: not known" in shown.out
    assert len(list((tmp_path / "audit" / "strips").iterdir())) == 2
    assert cli("report", tmp_path / "audit", "--out", tmp_path / "evidence.md").status == 0
    evidence = (tmp_path / "evidence.md").read_text("utf-8")
    assert "| pe-assignment | 2 |" in evidence
    assert "features have none" in evidence  # no letter of a threat model of gradients
    assert cli("report", tmp_path / "audit").status == 0
    assert (tmp_path / "audit" / "report.html").read_text("utf-8").count("Reconstruction by pe-assignment") == 2


@dataclass(frozen=True)
class Odd:
    """Return grey pictures, spoilt in the way that `kind` names."""

    name: ClassVar[str] = "odd"
    paper: ClassVar[str] = "made for this test"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.RELEASED_FEATURES})

    kind: str = "nan"

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Return the pictures."""
        grey = torch.full((len(seen.features), *seen.model.image_shape), 0.5)
        spoilt = {"nan": grey.where(grey > 1, torch.nan), "high": grey + 1, "shape": grey[:1]}
        return Reconstruction(spoilt[self.kind])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nan", "odd: the attack returned values that are not finite"),
        ("high", "odd: the attack returned values in [1.5, 1.5] instead of [0, 1]"),
        ("shape", "odd: the attack returned (1, 3, 64, 64) instead of (3, 3, 64, 64)"),
    ],
)
def test_what_is_no_picture_is_no_result_of_an_audit(
    cli: Callable[..., Any],
    recording: Path,
    tmp_path: Path,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    reason: str,
) -> None:
    monkeypatch.setitem(ATTACKS, "odd", Odd)
    base = ("--model", "vit_ti", "--weights", "random", *LARGE, "--defense", "row-permutation", "--limit", 1)
    options = ("--attack", "odd,pe-assignment", "--set", f"odd.kind={kind}", "--public", photos)
    done = cli("audit", "features", recording, *base, *options, "--out", tmp_path / "a", "--json")
    assert done.status == 2
    rows = [row for row in json.loads(done.out)["batches"] if row["kind"] == "step"]
    assert [(row["attack"], row["status"]) for row in rows] == [("odd", "failed"), ("pe-assignment", "ok")]
    assert rows[0]["reason"] == reason
    assert not any("-odd." in path.name for path in (tmp_path / "a" / "strips").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--labels", "predicted"), "No such option '--labels'."),
        (("--cut-layer", "1"), "No such option '--cut-layer'."),
        (("--img-size", "32"), "vit_ti sends 5 tokens of width 192. Found 17 of width 192 in the recording"),
        (("--model", "vit_ti,vit_s"), "An audit has one victim. Found 2: vit_ti, vit_s."),
        (("--attack", "april"), "Attack 'april' reads gradients, and this run releases features"),
    ],
)
def test_an_audit_that_cannot_be_is_one_line(
    cli: Callable[..., Any], recording: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    base = ("--model", "vit_ti", "--weights", "random", *LARGE, "--attack", "pe-assignment", "--out", tmp_path / "a")
    assert message in cli("audit", "features", recording, *base, *options).error


def test_no_recording_is_one_line(cli: Callable[..., Any], tmp_path: Path) -> None:
    error = cli("audit", "features", tmp_path, "--model", "vit_ti", "--weights", "random").error
    assert "holds no recording" in error
