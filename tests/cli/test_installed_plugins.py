"""Attacks, defenses and a victim of a separately installed distribution, as `pip install` leaves it, by command."""

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from privlab.base import plugins as registry
from privlab.images import open_images

ROWS = (Path(__file__).parents[2] / "defenses" / "features" / "row_permutation.py").read_text(encoding="utf-8")

CODE = '''
from dataclasses import dataclass
from typing import ClassVar

import timm
import torch

from privlab.attacks import PatchGradient
from privlab.defenses import RowPermutation
from privlab.patches import permute
from privlab.threat import Capability, Feed

class BareRows(RowPermutation):
    name = "bare-rows"

@dataclass(frozen=True)
class PatchMix:
    name: ClassVar[str] = "patch-mix"
    paper: ClassVar[str] = "none"

    def __call__(self, images, patch, draws):
        n = (images.shape[-2] // patch) * (images.shape[-1] // patch)
        orders = [torch.randperm(n, generator=draw).to(images.device) for draw in draws]
        order = torch.stack([orders[0]] * len(images) if len(orders) == 1 else orders)
        moved = order != torch.arange(n, device=images.device)
        return Feed(images=permute(images, order, patch), order=order, moved=moved)

@dataclass(frozen=True)
class Solve:
    """What patch-gradient finds, handed on in its own way."""

    paper: ClassVar[str] = "none"
    requires: ClassVar[frozenset] = frozenset({Capability.LEARNABLE_PE_GRADIENT, Capability.BATCH_SIZE_ONE})
    parameters: ClassVar[tuple] = ("pos_embed", "patch_embed.proj.weight")

    def __call__(self, seen):
        return self.handed(PatchGradient()(seen))

class Counted(Solve):
    name = "counted"
    seen: ClassVar[list] = []

    def __call__(self, seen):
        self.seen.append(seen)
        return super().__call__(seen)

    def handed(self, images):
        return images

class Faded(Solve):
    name = "faded"

    def handed(self, images):
        return 0.5 + 0.02 * (images - 0.5)

class Misshapen(Solve):
    name = "misshapen"

    def handed(self, images):
        return images[..., :-1]

def headless():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return timm.create_model("vit_tiny_patch16_224", img_size=48, in_chans=1, num_classes=0, depth=2)
'''
"""A module of another package: none of its defenses declares what it does."""

POINTS = """
[privlab.attacks]
counted = outside.parts:Counted
faded = outside.parts:Faded
misshapen = outside.parts:Misshapen

[privlab.defenses]
copied-rows = outside.rows:RowPermutation
bare-rows = outside.parts:BareRows
patch-mix = outside.parts:PatchMix

[privlab.victims]
headless = outside.parts:headless
"""


@pytest.fixture(scope="module", autouse=True)
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lay the distribution out where Python finds it: a package and its metadata, with entry points."""
    site = tmp_path_factory.mktemp("site")
    package, info = site / "outside", site / "outside-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    copied = ROWS.replace('"row-permutation"', '"copied-rows"').replace("acts_as", "_unsaid")
    assert copied.count("copied-rows") == copied.count("_unsaid") == 1
    for name, text in (("__init__", ""), ("parts", CODE), ("rows", copied)):
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(POINTS, encoding="utf-8")
    sys.path.insert(0, str(site))
    registry.installed_plugins.cache_clear()
    assert version("outside") == "1.0"
    yield
    sys.path.remove(str(site))
    registry.installed_plugins.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "outside"]:
        del sys.modules[name]


@pytest.fixture
def run(cli: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Attack the trained `cifar_vit` or another victim on three photographs; return what `--json` says and records."""

    def attack(*arguments: object, model: str = "cifar_vit") -> tuple[dict[str, Any], pd.DataFrame]:
        options = ("--model", model, "--limit", 3, "--no-strips", "--out", tmp_path / "run", "--overwrite")
        done = cli("attack", *options, *arguments, "--json")
        assert done.status == 0, done.err
        return json.loads(done.out), pd.read_parquet(tmp_path / "run" / "records")

    return attack


@pytest.mark.slow
@pytest.mark.parametrize("name", ["row-permutation", "copied-rows", "bare-rows"])
def test_rows_in_secret_order_are_put_back_whoever_permutes_them(run: Callable[..., Any], name: str) -> None:
    told, frame = run("--defense", name, "--attack", "pe-assignment", "--metrics", "psnr")
    rows = frame[(frame.attack == "pe-assignment") & (frame.geometry == "in_place")]
    assert rows.placement_accuracy.tolist() == [1, 1, 1]
    assert rows.psnr.min() > 25  # of 5 dB where rows are taken for unmoved
    assert not any("No adaptive attack" in flag["head"] for flag in told["flags"])
    named = [f"privlab admit {name}" in line for line in told["admit"]]
    assert named == ([] if name == "row-permutation" else [True])


@pytest.mark.slow
def test_a_shuffle_of_patches_is_re_assembled_and_leaks_as_what_was_put_together(run: Callable[..., Any]) -> None:
    """`jigsaw --gamma 1` does the same under privlab's own name."""
    told, frame = run("--defense", "patch-mix", "--attack", "patch-gradient", "--metrics", "psnr", "--setting", "c")
    means = frame[frame.attack == "patch-gradient"].groupby("geometry").psnr.mean()
    assert set(means.index) == {"in_place", "oracle", "reassembled"}
    assert means["oracle"] > 100
    assert means["reassembled"] > means["in_place"] + 10
    worst = next(row for row in told["rows"] if row["kind"] == "worst")
    best = frame[frame.attack.eq("patch-gradient") & frame.geometry.ne("oracle")].groupby("image").psnr.max()
    assert worst["scores"]["psnr"]["mean"] == pytest.approx(best.mean())
    assert "patch-gradient (reassembled)" in worst["leakiest"]["psnr"]
    assert told["verdicts"][0]["word"] == ("leaks" if worst["exact"] else "no evidence")  # of three images
    assert "patch-gradient" in told["verdicts"][0]["why"]
    assert not any("not scored" in item for flag in told["flags"] for item in flag["items"])


@pytest.mark.slow
def test_settings_b_and_c_share_what_an_attack_sees_and_finds(run: Callable[..., Any]) -> None:
    counted = next(point for point in registry.installed_plugins("privlab.attacks") if point.name == "counted").load()
    counted.seen.clear()
    _, frame = run("--defense", "jigsaw", "--attack", "counted", "--metrics", "psnr", "--setting", "b,c")
    assert sum(len(seen.gradients["pos_embed"]) for seen in counted.seen) == 3
    rows = frame[(frame.attack == "counted") & (frame.geometry == "in_place")]
    means = rows.groupby("setting").psnr.mean()
    assert means["b"] > 100 > 40 > means["c"]  # the same reconstruction, scored by x̃ and by x
    counted.seen.clear()
    run("--defense", "jigsaw", "--attack", "counted", "--metrics", "psnr", "--setting", "a,c")
    assert sum(len(seen.gradients["pos_embed"]) for seen in counted.seen) == 6


@pytest.mark.slow
def test_an_attack_that_returns_no_picture_spares_the_others_of_an_audit(
    audit: Callable[..., Any], step: Callable[..., Path]
) -> None:
    options = ("--attack", "misshapen,patch-gradient")
    done = audit(step(), *options, "--json")
    assert done.status == 2
    ours, exact = json.loads(done.out)["attacks"]
    reason = "misshapen: the attack returned (1, 3, 32, 31) instead of (1, 3, 32, 32)"
    assert (ours["status"], ours["reason"]) == ("failed", reason)
    assert (exact["status"], exact["explained"]) == ("ok", True)
    shown = audit(step(), *options, "--overwrite")
    assert shown.status == 2
    assert [line for line in shown.err.splitlines() if "misshapen" in line] == [f"Failed: {reason}"]


@pytest.mark.slow
def test_what_is_there_without_its_scale_is_no_failure(run: Callable[..., Any], tmp_path: Path) -> None:
    """By PSNR the picture is as grey as grey is; after a gain and an offset it is the private one."""
    folder = tmp_path / "crops"
    folder.mkdir()
    for i, image in enumerate(open_images("samples", limit=10)):
        assert image.pixels is not None
        width, height = image.pixels.size
        image.pixels.crop((0, 0, width // 2, height)).save(folder / f"{i}-left.png")
        image.pixels.crop((width // 2, 0, width, height)).save(folder / f"{i}-right.png")
    given = ("--images", folder, "--limit", 20)  # a verdict that is not of exactness needs as many
    told, frame = run("--defense", "none", "--attack", "faded", "--setting", "a", *given)
    rows = frame[(frame.attack == "faded") & (frame.geometry == "in_place")]
    assert rows.psnr.max() < frame[frame.attack == "control:mean"].psnr.max() + 3
    assert rows.psnr_affine.min() > 60
    assert rows.correlation.min() > 0.999
    heads = {flag["head"]: " ".join(flag["items"]) for flag in told["flags"]}
    assert "faded" in heads["Structure without its scale"]
    assert "No better than a control" not in heads
    assert told["verdicts"][0]["measure"]["metric"] == "psnr_affine"
    assert "by faded (20 of 20 images" in told["verdicts"][0]["why"]


@pytest.mark.slow
def test_a_victim_of_one_channel_without_classifier_is_given_a_head(
    run: Callable[..., Any], cli: Callable[..., Any], tmp_path: Path
) -> None:
    bare = cli("attack", "--model", "headless", "--limit", 1, "--out", tmp_path / "bare")
    assert "without classifier" in bare.error
    assert "--classes N" in bare.error
    _, frame = run("--classes", 5, "--attack", "patch-gradient", "--metrics", "psnr", model="headless")
    rows = frame[frame.attack == "patch-gradient"]
    assert rows.psnr.min() > 60
    assert json.loads(rows.victim_params.iloc[0])["input"] == [1, 48, 48]
    assert set(rows.victim) == {"headless"}
