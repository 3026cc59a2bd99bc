"""The pipeline: what a record says is what was run, and no image answers for another."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import privlab
from privlab.attacks import MjpSubspace, PatchGradient
from privlab.defenses import Jigsaw
from privlab.evaluation import CONTROLS, GEOMETRIES, Batch, Scorer
from privlab.metrics import MIRRORED, STRUCTURE
from privlab.report.tables import SINGLE, WORST, Facts, Flag, attack_label, red_flags, results_of
from privlab.threat import Capability, Feed, Observation, Reconstruction, Sent
from privlab.victims import victim

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
SMALL = {"weights": "random", "img_size": 32, "limit": 3, "metrics": "psnr,ssim"}


def attack(model: str = "vit_ti_mjp", setting: str = "a,b,c", attack: Any = None, **options: object) -> pd.DataFrame:
    """Return the records of a small run."""
    given: dict[str, Any] = SMALL | {"gamma": 0.75} | options
    return privlab.attack(model, settings=setting, attacks=attack, **given).records


@pytest.mark.slow
def test_no_defense_is_at_work_in_setting_a() -> None:
    records = attack()
    assert dict(records.groupby("setting").defense.first()) == {"a": "none", "b": "mjp", "c": "mjp"}
    plain = attack("vit_ti")
    assert dict(plain.groupby("setting").defense.first()) == {"a": "none", "b": "jigsaw", "c": "jigsaw"}


def test_settings_differ_in_what_is_fed_and_in_the_reference() -> None:
    """B scores against what was fed, so its geometries agree; in c, putting patches home restores the match."""
    records = attack(attack="patch-gradient", defense="jigsaw", model="vit_ti")
    psnr = records.groupby(["setting", "attack", "geometry"]).psnr.min()
    for setting in "ab":
        assert psnr[setting, "patch-gradient", "in_place"] > 60
        assert psnr[setting, "patch-gradient", "oracle"] == psnr[setting, "patch-gradient", "in_place"]
    assert psnr["c", "patch-gradient", "in_place"] < 40  # the least: a draw of four patches may move none
    assert psnr["c", "patch-gradient", "oracle"] > 60


@pytest.mark.slow
def test_regions_are_scored_under_a_mask_only() -> None:
    records = attack(attack="patch-gradient", model="vit_ti", defense="jigsaw", setting="a,c")
    attacked = records[records.attack == "patch-gradient"]
    assert attacked[attacked.setting == "a"][["psnr_masked", "psnr_unmasked"]].isna().all(axis=None)
    shuffled = attacked[(attacked.setting == "c") & (attacked.geometry == "in_place")]
    assert (shuffled.psnr_unmasked > shuffled.psnr_masked).all()
    assert attack(model="vit_ti", setting="c", gamma=0.0).psnr_unmasked.isna().all()


def test_an_image_of_which_nothing_moved_has_no_regions() -> None:
    scorer = Scorer(victim("vit_ti", weights="random", img_size=32).model, ["psnr"], {})
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    scores = scorer.score(images.flip(0), images, torch.tensor([[True, False, False, True], [False] * 4]))
    for region in ("psnr_masked", "psnr_unmasked"):
        assert [value is None for value in scores[region]] == [False, True]


@pytest.mark.slow
def test_controls_stand_in_every_table() -> None:
    records = attack(setting="c")
    for geometry in GEOMETRIES:
        rows = results_of(records, ["psnr"], geometry).rows
        ours = {"patch-gradient", "patch-gradient-prior", "mjp-subspace", "mjp-full"}
        left = {CONTROLS[2]} if geometry == "oracle" else set()  # shuffled patches would be the image itself
        controls = {*CONTROLS} - left
        assert {row.attack for row in rows} == {"april", WORST, SINGLE, *ours, *controls}


@pytest.mark.slow
def test_the_worst_case_is_taken_image_by_image() -> None:
    records = attack(setting="c")
    paper, worst = results_of(records, ["psnr", "ssim"]).rows[:2]
    inside = records[(records.geometry != "oracle") & ~records.attack.isin(CONTROLS)]
    inside = inside.reset_index(drop=True)
    best = inside.groupby("image_sha256")
    assert (paper.attack, paper.kind, paper.leakiest) == ("april", "paper", {})
    assert (worst.attack, worst.kind, worst.images) == (WORST, "worst", 3)
    assert worst.scores["psnr"].mean == pytest.approx(best.psnr.max().mean())
    assert worst.scores["ssim"].mean == pytest.approx(best.ssim.max().mean())
    reached = inside[inside.psnr == best.psnr.transform("max")].drop_duplicates(["image_sha256", "attack"])
    whose = Counter(map(attack_label, reached.attack, reached.geometry))
    assert worst.leakiest["psnr"] == dict(whose)


@pytest.mark.slow
def test_one_rule_orders_patches_for_every_attack_and_control_under_the_oracle() -> None:
    """Of least squared error within the moved slots: no attack is given the true order, and none less than the rest.

    Nothing moved, nothing is ordered; a control has a row of its own where something was.
    """
    records = attack(setting="a,b,c", gamma=0.75, metrics="psnr", attack="april,patch-gradient,mjp-subspace")
    made = records[records.attack != CONTROLS[2]]
    psnr = made.pivot_table(index=["setting", "attack", "image"], columns="geometry", values="psnr")
    assert (psnr.oracle >= psnr.in_place - 1e-9)[["b", "c"]].all()  # an order of least error is never worse
    unmoved = psnr.loc["a"].drop(index=[name for name in CONTROLS if name != CONTROLS[2]])
    assert unmoved.oracle.tolist() == unmoved.in_place.tolist()
    assert (psnr.loc[("c", CONTROLS[0])].oracle > psnr.loc[("c", CONTROLS[0])].in_place).any()
    controls = records[records.attack.isin(CONTROLS)]
    assert set(controls[controls.setting == "a"].geometry) == {"in_place"}
    assert set(controls[controls.attack == CONTROLS[2]].geometry) == {"in_place"}
    assert (controls[controls.setting == "c"].groupby(["attack", "geometry"]).size() == 3).all()


def test_the_oracle_gives_loose_and_other_results_the_same_order() -> None:
    """Two results of the same pixels have the same score there, whatever they say of places; all slots without PEs."""
    base = victim("vit_ti", weights="random", img_size=32)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    shuffle = Jigsaw(gamma=0.75)
    feed = shuffle(images, 16, [torch.Generator().manual_seed(i) for i in (1, 2)])
    batch, scorer = Batch([], images, feed=feed), Scorer(base.model, ["psnr"], {})
    noisy = (feed.images + 0.1 * torch.randn(feed.images.shape, generator=torch.Generator().manual_seed(3))).clamp(0, 1)
    plain, loose = (
        scorer.laid(Reconstruction(noisy, loose=of), batch)[0][1]["psnr"] for of in (None, torch.ones_like(feed.moved))
    )
    assert plain == loose
    assert torch.equal(scorer.moved(batch), feed.moved)
    unmoved = replace(batch, feed=Feed.undefended(images, 16))
    assert scorer.oracle(noisy, unmoved) is None
    sent = Sent.plain(torch.zeros(2, 5, 8), prefix=1)
    rows = replace(sent, source=sent.source[:, [0, 1, 2, 4, 3]].where(torch.tensor([[True], [False]]), sent.source))
    assert torch.equal(scorer.moved(replace(batch, sent=sent)), feed.moved)
    assert torch.equal(scorer.moved(replace(unmoved, sent=rows)), torch.tensor([[True] * 4, [False] * 4]))
    nope = Scorer(victim("deit_s_nope", weights="random", img_size=32).model, ["psnr"], {})
    assert nope.moved(unmoved).all()


def test_what_knows_nothing_scores_the_same_on_the_mirrored_image() -> None:
    """Exchanging image and mirrored image exchanges the scores; a copy of the image has less against its mirror.

    In every geometry, and not where places among images come from the references themselves.
    """
    base = victim("vit_ti", weights="random", img_size=32)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    feed = Jigsaw(gamma=0.75)(images, 16, [torch.Generator().manual_seed(i) for i in (1, 2)])
    scorer = Scorer(base.model, [*STRUCTURE], {})
    image = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    plain, away = (
        scorer.laid(Reconstruction(image), Batch([], reference, feed=feed), GEOMETRIES)[0]
        for reference in (images, images.flip(-1))
    )
    for one, other in zip(plain, away, strict=True):
        for name, mirrored in MIRRORED.items():
            assert one[name] == other[mirrored]
            assert one[mirrored] == other[name]
            assert one[name] != one[mirrored]
    (own, _), _ = scorer.laid(Reconstruction(images), Batch([], images, feed=feed))
    assert min(own["correlation"]) > 0.99 > 0.3 > max(own["correlation_mirrored"])
    matched = replace(scorer, several=True).laid(Reconstruction(image), Batch([], images, feed=feed))[0][0]
    assert not matched.keys() & {*MIRRORED.values()}


def flags(records: pd.DataFrame, metric: str) -> list[Flag]:
    return red_flags(Facts.of(results_of(records, [metric])))


@pytest.mark.slow
def test_an_attack_no_better_than_a_control_is_named() -> None:
    """Under MJP both fail; without it neither is named."""
    found = flags(attack(setting="a,c", attack="patch-gradient", gamma=1.0), "psnr")
    (line,) = next(flag.items for flag in found if flag.head == "No better than a control")
    assert line.startswith("vit_ti_mjp, setting c, mjp: patch-gradient ")
    assert "does not beat control:" in line
    plain = [flag.head for flag in flags(attack(setting="a", gamma=None, metrics="ssim"), "ssim")]
    assert plain == ["Random weights", "Predicted labels", "Few images"]


@pytest.mark.slow
def test_each_image_has_all_draws_of_a_random_defense() -> None:
    """The table has their mean, the worst case the leakiest."""
    records = attack(setting="c", attack="patch-gradient", metrics="psnr", draws=3)
    assert sorted(records.draw.unique()) == [0, 1, 2]
    adversary = records[(records.attack == "patch-gradient") & (records.geometry != "oracle")]
    inside = adversary[adversary.geometry == "in_place"]
    assert len(inside) == 3 * 3
    of_image = inside.groupby("image_sha256").psnr
    assert (of_image.nunique() > 1).all()
    results = results_of(records, ["psnr"])
    assert results.score(0, "attack", "psnr").mean == pytest.approx(of_image.mean().mean())
    assert results.score(0, "worst", "psnr").mean == pytest.approx(adversary.groupby("image_sha256").psnr.max().mean())
    assert {row.images for row in results.rows} == {3}
    assert "One draw" not in [flag.head for flag in flags(records, "psnr")]
    alone = attack(setting="c", attack="patch-gradient", metrics="psnr", draw=2)
    assert alone.psnr.tolist() == records[records.draw == 2].psnr.tolist()


@pytest.mark.slow
def test_each_setting_stands_with_its_own_controls() -> None:
    results = results_of(attack("vit_ti,vit_ti_mjp", setting="a,c"), ["psnr"])
    options = [results.cases[row.case].options for row in results.rows]
    cells = [(of_case["victim"], of_case["setting"]) for of_case in options]
    assert list(dict.fromkeys(cells)) == [(v, s) for v in ("vit_ti", "vit_ti_mjp") for s in "ac"]
    assert sum(one != two for one, two in pairwise(cells)) == 3


@dataclass(frozen=True)
class Odd:
    """Reconstruct grey, spoilt in the way that `kind` names wherever the gradient is that of the first image."""

    name: ClassVar[str] = "odd"
    paper: ClassVar[str] = "made for this test"
    requires: ClassVar[frozenset[Capability]] = frozenset()
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed",)
    kind: ClassVar[str] = "nan"
    first: ClassVar[list[float]] = []

    def __call__(self, seen: Observation) -> Tensor:
        """Return the images."""
        norms = [round(float(g.norm()), 6) for g in seen.gradients["pos_embed"]]
        if not self.first:
            self.first.append(norms[0])
        spoilt = torch.tensor([norm == self.first[0] for norm in norms])
        if self.kind == "raise" and spoilt.any():
            raise RuntimeError("no inverse")
        images = torch.full((len(norms), *seen.model.image_shape), 0.5)
        images[spoilt] = {"nan": torch.nan, "high": 1.5, "raise": 0.0}[self.kind]
        return images


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("nan", "odd: the attack returned values that are not finite"), ("high", r"odd: .* \[1.5, 1.5\] instead of"),
     ("raise", "odd: RuntimeError: no inverse")],
)  # fmt: skip
def test_one_bad_image_does_not_fail_its_neighbours(monkeypatch: pytest.MonkeyPatch, kind: str, reason: str) -> None:
    monkeypatch.setitem(privlab.attacks.ATTACKS, "odd", Odd)
    monkeypatch.setattr(Odd, "kind", kind)
    Odd.first.clear()
    records = attack("vit_ti", "a", attack="odd", batch_size=3, gamma=None)
    rows = records[records.attack == "odd"]
    assert rows.groupby("image").status.first().tolist().count("failed") == 1
    assert rows.reason.dropna().str.match(reason).all()
    assert rows[rows.status == "ok"].psnr.notna().all()


def test_everything_masked_leaves_grey(monkeypatch: pytest.MonkeyPatch) -> None:
    """γ = 1 under MJP: no row of ∂ℓ/∂E_pos is left, and patch-gradient has nothing to solve."""
    records = attack(attack="patch-gradient", setting="c", gamma=1.0)
    assert set(records.status) == {"ok"}
    assert records[records.attack == "patch-gradient"].psnr.max() < 25


@pytest.mark.slow
def test_another_attack_changes_no_draw() -> None:
    """The others search, so that images run one at a time: their rows come in another order."""
    order = ["image", "attack", "geometry"]
    one, both = (attack(setting="c", **which).sort_values(order) for which in ({"attack": PatchGradient.name}, {}))
    both = both[both.attack.isin(set(one.attack))]
    assert one[order].to_numpy().tolist() == both[order].to_numpy().tolist()
    assert one.psnr.tolist() == pytest.approx(both.psnr.tolist(), nan_ok=True)


class Gathered(TorchDispatchMode):
    """Counts the tensors of a shape that are made."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.count += isinstance(made, Tensor) and made.shape == self.shape
        return made


@pytest.mark.slow
def test_public_images_are_not_gathered_for_each_private_one(tmp_path: Path) -> None:
    """They may be thousands: 5000 of 64 × 64 pixels, for each of 32 private ones, are 8 GB."""
    for i, image in enumerate(np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    counts = []
    for private in (2, 6):
        with Gathered(13, 3, 32, 32) as gathered:
            given = {"images": tmp_path, "limit": private, "public_limit": 13, "batch_size": 6}
            attack("vit_ti", "a", attack="patch-gradient", gamma=None, **given)
        counts.append(gathered.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.gpu
def test_a_run_on_a_gpu_gives_the_records_of_the_cpu() -> None:
    keys = ["setting", "attack", "geometry", "image"]
    cpu, gpu = (attack(device=device).set_index(keys).sort_index() for device in ("cpu", "cuda"))
    assert set(gpu.device) == {"cuda:0"}
    low = cpu.psnr < 50  # beyond that, rounding decides
    assert (cpu.psnr[low] - gpu.psnr[low]).abs().max() < 0.5


@pytest.mark.slow
def test_settings_b_and_c_are_attacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their release is the same: together they give what each gives alone, for half the calls of the attack."""
    calls = []
    run = MjpSubspace.__call__
    monkeypatch.setattr(MjpSubspace, "__call__", lambda self, seen: calls.append(seen) or run(self, seen))
    alone = [attack(setting=setting, attack="mjp-subspace") for setting in "bc"]
    twice = len(calls)
    both = attack(setting="b,c", attack="mjp-subspace")
    assert len(calls) - twice == twice / 2 > 0
    scores = ["cell", "image_sha256", "geometry", "psnr", "ssim", "psnr_masked"]
    pd.testing.assert_frame_equal(both[scores], pd.concat(alone, ignore_index=True)[scores])
