"""An audit leaves what every other run leaves: records, `run.json`, a page; and it goes on where it was killed."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from privlab.attacks import ATTACKS, PatchGradient
from privlab.evaluation import COLUMNS
from privlab.images import open_images
from privlab.metrics import METRICS
from privlab.report.tables import load_results
from privlab.stores import Store, pngs
from privlab.threat import Capability, FeatureObservation, Reconstruction

Cli = Callable[..., Any]
NAMES = [f"alice/step-{step:08d}/{i}" for step in (1, 2) for i in range(3)] + [
    f"alice/infer-00000001/{i}" for i in (0, 1)
]
UNSCORED = "No private image is known, so nothing could be scored: look at the reconstructions."

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


@dataclass(frozen=True)
class Tones:
    """Return one grey image for each image, lighter by a tenth each; `stops` at the calls that it names."""

    name: ClassVar[str] = "tones"
    paper: ClassVar[str] = "made for this test"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.RELEASED_FEATURES})
    calls: ClassVar[list[int]] = []
    stops: ClassVar[dict[int, BaseException]] = {}

    seed: int = field(default=0)

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Return the images."""
        self.calls.append(len(seen.features))
        if (stop := self.stops.get(len(self.calls))) is not None:
            raise stop
        tones = torch.arange(1, len(seen.features) + 1).view(-1, 1, 1, 1) / 10
        return Reconstruction(tones.expand(-1, *seen.model.image_shape).to(seen.features))


@pytest.fixture
def tones(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Tones]]:
    """Return the attack, which counts its calls from none."""
    monkeypatch.setitem(ATTACKS, "tones", Tones)
    Tones.calls.clear()
    yield Tones
    Tones.stops.clear()


@pytest.fixture
def recorded(cli: Cli, recording: Path, tmp_path: Path, photos: Path) -> Cli:
    """Audit the recording; later options win."""

    def run(*arguments: object) -> Any:
        base = ("--model", "vit_ti", "--weights", "random", "--img-size", 64, "--defense", "row-permutation")
        options = ("--attack", "tones", "--public", photos, "--out", tmp_path / "audit")
        return cli("audit", "features", recording, *base, *options, *arguments)

    return run


def facts(path: Path) -> dict[str, Any]:
    return json.loads((path / "run.json").read_text(encoding="utf-8"))


def page(cli: Cli, path: Path) -> tuple[str, dict[str, Any], dict[int, Any]]:
    """Return the page of a run as text without line breaks, its data, and its albums by the number of the image."""
    assert cli("report", path).status == 0
    html = (path / "report.html").read_text(encoding="utf-8")
    scripts = dict(re.findall(r'<script type="application/json" id="([^"]*)">(.*?)</script>', html, re.DOTALL))
    data = json.loads(scripts.pop("data", "{}"))
    books = {int(key.removeprefix("album-")): json.loads(text) for key, text in scripts.items()}
    return " ".join(html.split()), data, books


def pixels(path: Path, image: str, attack: str) -> np.ndarray:
    """Return the image of a run that the page shows."""
    results = load_results(path)
    (sha,) = results.records.image_sha256[results.records.image == image].unique()
    place = results.picture(0, sha, attack)
    assert place is not None
    (path / "cut.png").write_bytes(pngs([place])[0])
    with Image.open(path / "cut.png") as cut:
        return np.asarray(cut)


# Recorded features


def test_a_recording_leaves_a_record_of_each_image_and_attack(
    recorded: Cli, recording: Path, tones: type[Tones], tmp_path: Path
) -> None:
    assert recorded("--attack", "tones,pe-assignment").status == 0
    found = pd.read_parquet(tmp_path / "audit" / "records")
    assert list(found.columns) == COLUMNS.names
    assert found.groupby("attack").image.agg(list).to_dict() == {"tones": NAMES, "pe-assignment": NAMES}
    assert found[list(METRICS)].isna().to_numpy().all()
    assert (set(found.metrics), set(found.status), set(found.label_origin)) == ({""}, {"ok"}, {"none"})
    assert found.label.isna().all()
    assert (found.seconds_attack > 0).all()
    assert set(zip(found.defense, found.setting, found.release, found.geometry, strict=True)) == {
        ("row-permutation", "c", "features", "in_place")
    }
    sizes = [3] * 6 + [2] * 2
    alone = found[found.attack == "tones"]
    assert alone.batch_images.tolist() == sizes == [json.loads(text)["client_batch"] for text in alone.conditions]
    assert [len(rows) for _, rows in alone.groupby("batch", sort=False)] == [3, 3, 2]
    assert found.cell.nunique() == 4  # two attacks, on batches of two sizes
    features = load_file(recording / "alice" / "step-00000002.safetensors")["features"]
    own = hashlib.sha256(b"alice/step-00000002/1\0" + features.numpy().tobytes()).hexdigest()
    assert alone.image_sha256.tolist()[4] == own
    assert alone.image_sha256.is_unique


def test_run_json_states_the_audit_as_a_case(
    recorded: Cli, recording: Path, tones: type[Tones], tmp_path: Path
) -> None:
    told = json.loads(recorded("--json").out)
    run = facts(tmp_path / "audit")
    assert (run["status"], run["batches"], run["unscored"]) == ("finished", told["batches"], UNSCORED)
    assert run["experiment"]["title"] == f"Audit of {recording}: vit_ti with row-permutation"
    (case,) = run["cases"]
    assert case["label"] == "vit_ti, setting c, row-permutation"
    found = Store(tmp_path / "audit").frame()
    assert [{*job["cells"]} for job in case["jobs"]] == [{"tones"}, {"tones"}]
    assert {job["specification"]["client_batch"]: job["cells"]["tones"] for job in case["jobs"]} == dict(
        zip(found.batch_images, found.cell, strict=True)
    )
    listed = [sha for job in case["jobs"] for sha in run["image_lists"][job["images"]]]
    assert sorted(listed) == sorted(found.image_sha256)
    assert run["specification"]["images"] == [str(recording)]
    assert run["images"]["count"] == 8
    assert {"victim", "victims", "defenses", "recording", "versions", "hardware", "commit", "command"} <= run.keys()


@pytest.mark.slow
def test_the_page_of_a_recording_shows_reconstructions_and_says_that_there_are_no_scores(
    cli: Cli, recorded: Cli, tones: type[Tones], tmp_path: Path
) -> None:
    assert recorded().status == 0
    text, data, books = page(cli, tmp_path / "audit")
    assert UNSCORED in text
    for flag in ("Random weights", "One draw", "No score", "Warnings of the run"):
        assert f"<dt>{flag}</dt>" in text
    assert data["private"] is False
    assert [name for name, _ in data["images"]] == NAMES
    assert all(book["of"].keys() == {"0/tones"} for book in books.values())
    assert len(books) == 8
    for image, tone in ((NAMES[0], 0.1), (NAMES[5], 0.3), (NAMES[7], 0.2)):
        shown = pixels(tmp_path / "audit", image, "tones")
        assert shown.shape == (64, 64, 3)
        assert abs(shown / 255 - tone).max() < 0.5 / 255 + 1e-6
    assert "asks for no figures" in cli("figures", tmp_path / "audit").err
    assert "alice/step-00000001/0" in cli("store", "show", tmp_path / "audit").out
    error = cli("table", "quick", "--compare", tmp_path / "audit", "--out", tmp_path / "table").error
    assert error == f"--compare needs a run with scores. '{tmp_path}/audit' is an audit without a private image."


@pytest.mark.slow
def test_a_failing_attack_has_rows_with_its_reason(recorded: Cli, tones: type[Tones], tmp_path: Path) -> None:
    tones.stops[2] = RuntimeError("no memory\nis left")
    done = recorded("--attack", "tones,pe-assignment")
    assert done.status == 2
    found = pd.read_parquet(tmp_path / "audit" / "records")
    failed = found[found.status == "failed"]
    assert failed.image.tolist() == NAMES[3:6]
    assert set(failed.attack) == {"tones"}
    (reason,) = set(failed.reason)
    assert reason.startswith("tones: RuntimeError: no memory is left (test_audit_runs.py, line ")
    assert failed.metrics.isna().all()
    assert (found.status == "ok").sum() == 13
    assert recorded("--attack", "tones,pe-assignment").status == 2  # a failure stays one
    assert tones.calls == [3, 3, 2]


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_an_interrupted_audit_goes_on_with_the_same_command(
    cli: Cli, recorded: Cli, tones: type[Tones], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    tones.stops[3] = KeyboardInterrupt()

    def audit(*more: object) -> Any:
        if named:
            return recorded(*more)
        base = ("--model", "vit_ti", "--weights", "random", "--img-size", 64, "--defense", "row-permutation")
        own = ("--attack", "tones", "--public", tmp_path / "photos")
        return cli("audit", "features", tmp_path / "recorded", *base, *own, *more)

    done = audit("--json")
    assert (done.status, done.out) == (130, "")
    (path,) = [tmp_path / "audit"] if named else (tmp_path / "runs").iterdir()
    shown = path if named else path.relative_to(tmp_path)
    said = f"'{shown}' keeps the records of 6 images, which `privlab report {shown}` shows."
    assert done.err.endswith(f"Interrupted. {said} The same command goes on where it was.\n")
    assert pd.read_parquet(path / "records").image.tolist() == NAMES[:6]
    assert facts(path)["status"] == "interrupted"
    text, _, books = page(cli, path)
    assert "<dt>Not finished</dt>" in text
    assert len(books) == 6
    before = {file: file.stat().st_mtime_ns for file in path.glob("strips/*.png")}
    tones.calls.clear()
    tones.stops.clear()
    done = audit("--json")
    assert done.status == 0
    assert tones.calls == [2]
    rows = json.loads(done.out)["batches"]
    assert [(row["kind"], row["number"], row["images"]) for row in rows] == [
        ("step", 1, 3),
        ("step", 2, 3),
        ("infer", 1, 2),
    ]
    assert all((path / "strips" / row["sheet"]).exists() for row in rows)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert pd.read_parquet(path / "records").image.tolist() == NAMES
    assert (facts(path)["status"], facts(path)["batches"]) == ("finished", rows)
    assert named or [*(tmp_path / "runs").iterdir()] == [path]


@pytest.mark.slow
def test_a_finished_audit_goes_on_with_what_was_recorded_since(
    recorded: Cli, recording: Path, tones: type[Tones], tmp_path: Path
) -> None:
    assert recorded("--limit", 1).status == 0
    assert tones.calls == [3, 2]
    assert recorded().status == 0
    assert tones.calls == [3, 2, 3]
    later = recording / "alice" / "infer-00000002.safetensors"
    later.write_bytes((recording / "alice" / "infer-00000001.safetensors").read_bytes())
    assert len(json.loads(recorded("--json").out)["batches"]) == 4
    assert tones.calls == [3, 2, 3, 2]
    assert len(Store(tmp_path / "audit").frame()) == 10
    assert recorded("--overwrite").status == 0
    assert tones.calls == [3, 2, 3, 2, 3, 3, 2, 2]


def test_a_batch_that_is_recorded_anew_while_the_audit_runs_is_left_out(
    recorded: Cli, recording: Path, tones: type[Tones], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, other = (recording / "alice" / f"step-0000000{n}.safetensors" for n in (2, 1))
    called = tones.__call__

    def replacing(self: Tones, seen: FeatureObservation) -> Reconstruction:
        second.write_bytes(other.read_bytes())
        return called(self, seen)

    monkeypatch.setattr(tones, "__call__", replacing)
    done = recorded()
    assert "'alice/step-00000002' was recorded while the audit ran. Left out: the same command attacks it." in done.err
    assert pd.read_parquet(tmp_path / "audit" / "records").image.tolist() == NAMES[:3] + NAMES[6:]
    assert recorded().status == 0
    assert tones.calls == [3, 2, 3]


@pytest.mark.slow
def test_what_another_run_left_is_not_touched(
    cli: Cli, recorded: Cli, attack: Cli, tones: type[Tones], tmp_path: Path, recording: Path
) -> None:
    assert recorded().status == 0
    before = (tmp_path / "audit" / "run.json").read_bytes()
    for options in (("--seed", 1), ("--defense", "column-permutation"), ("--attack", "pe-assignment")):
        assert (
            recorded(*options).error
            == f"'{tmp_path}/audit' holds another run. Overwrite it (--overwrite) or give another directory."
        )
    assert "holds another run" in attack("--out", tmp_path / "audit", "--metrics", "psnr").error
    assert (tmp_path / "audit" / "run.json").read_bytes() == before
    for file in recording.rglob("*.safetensors"):
        file.unlink()
    assert recorded("--out", tmp_path / "none", "--json").status == 0  # a recording without a batch
    assert facts(tmp_path / "none")["image_lists"] == {"0": []}
    assert cli("store", "show", tmp_path / "none").error == f"'{tmp_path}/none' holds no records yet."
    assert UNSCORED in page(cli, tmp_path / "none")[0]


# A gradient file


@pytest.mark.slow
def test_a_step_leaves_records_without_scores(cli: Cli, audit: Cli, step: Cli, tmp_path: Path) -> None:
    path, attacks = step(), "patch-gradient,mjp-subspace"
    assert audit(path, "--attack", attacks).status == 0
    found = pd.read_parquet(tmp_path / "audit" / "records")
    assert found.attack.tolist() == attacks.split(",")
    assert found[list(METRICS)].isna().to_numpy().all()
    assert set(zip(found.label, found.label_origin, found.metrics, found.block, strict=True)) == {
        (7, "released", "", "stock")
    }
    own = hashlib.sha256(b"update.safetensors/0\0" + path.read_bytes()).hexdigest()
    assert set(zip(found.image, found.image_sha256, strict=True)) == {("update.safetensors/0", own)}
    assert found.batch.isna().all()
    run = facts(tmp_path / "audit")
    assert (run["status"], run["image_lists"]) == ("finished", {"0": [own]})
    assert "april_block" in run["cases"][0]["refused"].get("april", "april_block")
    text, data, _ = page(cli, tmp_path / "audit")
    found = re.search(
        rf"{UNSCORED} What gives the released gradient \(residual (\S+)\) was reconstructed by (.*?)\.", text
    )
    assert found is not None
    assert (float(found[1]) < 1e-3, found[2]) == (True, "patch-gradient, mjp-subspace")
    assert "<dt>What was released</dt> <dd>labels given away by the gradient of the head: 7</dd>" in text
    assert data["private"] is False
    with Image.open(tmp_path / "audit" / "pictures" / "mjp-subspace-0.png") as kept:
        assert np.array_equal(pixels(tmp_path / "audit", "update.safetensors/0", "mjp-subspace"), np.asarray(kept))


@pytest.mark.slow
def test_a_reference_leaves_the_scores_that_are_printed(
    cli: Cli, audit: Cli, step: Cli, photos: Path, tmp_path: Path
) -> None:
    options = ("--metrics", "psnr,ssim", "--attack", "patch-gradient", "--public", photos)
    told = json.loads(audit(step(), *options, "--reference", photos / "a.png", "--json").out)
    found = Store(tmp_path / "audit").frame().set_index("attack")
    assert {name: found.psnr[name] for name in found.index} == {row["attack"]: row["psnr"] for row in told["attacks"]}
    assert set(found.metrics) == {"psnr ssim"}
    private = hashlib.sha256((photos / "a.png").read_bytes()).hexdigest()
    assert set(zip(found.image.map(lambda name: Path(name).name), found.image_sha256, strict=True)) == {
        ("a.png", private)
    }
    assert found.seconds_attack.notna().to_dict() == {"patch-gradient": True, "control:mean": False}
    run = facts(tmp_path / "audit")
    assert run["cases"][0]["jobs"][0]["cells"] == found.cell.to_dict()
    assert "unscored" not in run
    text, data, books = page(cli, tmp_path / "audit")
    assert data["private"] is True
    assert books[0]["of"].keys() == {"0/private", "0/patch-gradient"}
    assert "leaks by patch-gradient (1 of 1 image, 1 exactly; " in text
    public = pd.read_parquet(tmp_path / "audit" / "records").conditions.map(json.loads).map(lambda each: each["public"])
    hashes = [picture.sha256 for picture in open_images(photos)]
    assert set(public) == {hashlib.sha256("/".join(hashes).encode()).hexdigest()[:16]}
    other = ("table", "quick", "--compare", tmp_path / "audit", "--plan", "--limit", 1, "--out", tmp_path / "table")
    assert cli(*other).status == 0


@pytest.mark.slow
def test_a_reference_that_does_not_fit_is_said_on_the_page(
    cli: Cli, audit: Cli, step: Cli, photos: Path, tmp_path: Path
) -> None:
    options = ("--metrics", "psnr", "--attack", "patch-gradient", "--public", photos)
    audit(step(), *options, "--reference", photos / "b.png")
    assert "<dt>The reference</dt> <dd>the client preprocessed it otherwise" in page(cli, tmp_path / "audit")[0]


@pytest.mark.slow
def test_the_images_of_one_gradient_have_rows_of_their_own(audit: Cli, step: Cli, photos: Path, tmp_path: Path) -> None:
    path = step((7, 3))
    search = ("--attack", "gradient-matching", "--set", "steps=1")
    assert audit(path, *search).status == 0
    found = pd.read_parquet(tmp_path / "audit" / "records")
    assert found.image.tolist() == ["update.safetensors/0", "update.safetensors/1"]
    assert found.label.isna().all()  # which image has which label is not known
    assert (set(found.batch_images), found.batch.nunique()) == ({2}, 1)
    assert json.loads(found.conditions[0])["gradient_batch"] == 2
    scored = (*search, "--reference", photos / "a.png", "--metrics", "psnr", "--public", photos, "--overwrite")
    (mean, matched) = json.loads(audit(path, *scored, "--json").out)["attacks"]
    found = Store(tmp_path / "audit").frame()
    own = found[found.attack == "gradient-matching"]
    assert own.image.map(lambda name: Path(name).name).tolist() == ["a.png", "1"]
    assert own.psnr.tolist() == pytest.approx([matched["psnr"], np.nan], nan_ok=True)
    assert found[found.attack == "control:mean"].psnr.tolist() == [mean["psnr"]]
    forced = ("--attack", "patch-gradient", "--block", "stock", "--force", "--overwrite")
    assert audit(path, *forced).status == 0
    found = pd.read_parquet(tmp_path / "audit" / "records")
    assert found.beyond_range.tolist() == ["forced without batch_size_one"] * 2


@pytest.mark.slow
def test_attacks_that_fail_leave_their_reason(
    cli: Cli, audit: Cli, step: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(self: PatchGradient, seen: object) -> torch.Tensor:
        return torch.full((1, 3, 32, 32), torch.nan)

    monkeypatch.setattr(PatchGradient, "__call__", nothing)
    assert audit(step(), "--attack", "patch-gradient,mjp-subspace").status == 2
    found = pd.read_parquet(tmp_path / "audit" / "records").set_index("attack")
    assert found.status.to_dict() == {"patch-gradient": "failed", "mjp-subspace": "ok"}
    reason = "patch-gradient: the attack returned values that are not finite"
    assert found.reason["patch-gradient"] == reason
    text = page(cli, tmp_path / "audit")[0]
    assert f"<dt>Failed</dt> <dd>vit_ti, setting c, none: 1 image, {reason}</dd>" in text


@pytest.mark.slow
def test_an_interrupted_audit_of_a_step_keeps_the_attacks_that_were_finished(
    audit: Cli, step: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from privlab.attacks import MjpSubspace

    def stop(self: MjpSubspace, seen: object) -> torch.Tensor:
        assert pd.read_parquet(tmp_path / "audit" / "records").attack.tolist() == ["patch-gradient"]
        assert (tmp_path / "audit" / "pictures" / "patch-gradient-0.png").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(MjpSubspace, "__call__", stop)
    done = audit(step(), "--attack", "patch-gradient,mjp-subspace")
    assert done.status == 130
    assert "keeps the records of 1 image, " in done.err
    assert done.err.endswith("With --overwrite, the same command starts again.\n")
    assert facts(tmp_path / "audit")["status"] == "interrupted"
    assert "holds another run" in audit(step(), "--attack", "patch-gradient,mjp-subspace").error
