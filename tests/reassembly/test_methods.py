"""Re-assembly: slots that are read off the release, patches put in order by it, and what the records say of that."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Generator, Tensor
from torch.testing import assert_close

import privlab
from privlab.attacks import MjpFull
from privlab.base import PrivlabError
from privlab.defenses import GradientNoise, GradientPruning, Jigsaw, LowPass, Mjp
from privlab.evaluation import (
    GEOMETRIES,
    Batch,
    Case,
    Evaluator,
    Rows,
    Scorer,
    batches,
    check_geometry,
    known_slots,
    plan,
)
from privlab.grids import specify
from privlab.images import Others, Preprocessing, open_images
from privlab.metrics import adjacent_share, neighbour_accuracy, placed_share, placement_accuracy
from privlab.patches import patchify
from privlab.reassembly import REASSEMBLIES, Borders, Reassembly, standing_slots
from privlab.reassembly.border_costs import border_costs, exact_costs
from privlab.release import observe
from privlab.threat import Defense, Feed, GradientDefense, Reconstruction, Sent, Stack
from privlab.victims import Victim, VictimModel, victim

Photographs = Callable[[int, int], Tensor]
Model = Callable[..., VictimModel]


def seeded(*seeds: int) -> list[Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def tiles(images: Tensor, patch: int) -> Tensor:
    return patchify(images, patch).unflatten(2, (3, patch, patch))


def fed(defense: Defense, images: Tensor, patch: int) -> Feed:
    return defense(images, patch, seeded(*range(len(images))))


# The solver


def test_the_solver_is_known_by_its_name() -> None:
    assert REASSEMBLIES["border"] is Borders
    assert isinstance(Borders(), Reassembly)
    with pytest.raises(PrivlabError, match=r"at least 0\. Found -1\."):
        Borders(rounds=-1)


@pytest.mark.parametrize("told", [True, False])
def test_photographs_come_back_whether_or_not_the_mask_is_known(photographs: Photographs, *, told: bool) -> None:
    images = photographs(6, 160)
    feed = fed(Jigsaw(gamma=0.27), images, 16)
    known = ~feed.moved if told else torch.zeros_like(feed.moved)
    order = Borders()(tiles(feed.images, 16), (10, 10), known)
    assert placed_share(feed.order.gather(1, order), feed.moved).mean() > 0.92
    if told:
        assert_close(order[known], torch.arange(100).expand(6, -1)[known])


def test_photographs_come_back_at_224_pixels_with_no_mask_known(shared: Callable[[str], Path]) -> None:
    """The issue wants 92 % of exact patches placed at γ = 0.27; `test_jigsaw` has the case of a known mask."""
    cut = Preprocessing(size=(224, 224), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9, interpolation="bicubic")
    files = sorted(shared("data/imagenet_samples").glob("*.JPEG"))[::120]
    images = torch.stack([cut(image.pixels) for image in open_images(files) if image.pixels])
    feed = fed(Jigsaw(gamma=0.27), images, 16)
    order = Borders()(tiles(feed.images, 16), (14, 14), torch.zeros_like(feed.moved))
    assert placed_share(feed.order.gather(1, order), feed.moved).mean() >= 0.92


def test_a_shuffle_of_everything_leaves_nothing_standing(photographs: Photographs) -> None:
    for patches, order in zip(tiles(photographs(4, 160), 16), map(torch.randperm, [100] * 4), strict=True):
        assert standing_slots(border_costs(patches), (10, 10)).sum() > 30
        assert standing_slots(border_costs(patches[order]), (10, 10)).sum() == 0


def test_groups_of_chance_are_not_taken_for_standing() -> None:
    """In a row of patches whose costs make the first ones each other's best neighbours."""
    for size in (3, 4):
        costs = 1 + torch.rand(2, 8, 8, generator=seeded(0)[0])
        costs[0] += 5 * torch.eye(8).roll(1, 1)  # no true neighbours but the planted ones
        for i in range(size - 1):
            costs[0, i, i + 1] = 0
        marked = standing_slots(costs, (1, 8))
        assert marked.tolist() == [size == 4 and i < 4 for i in range(8)]


def test_neighbours_that_prefer_each_other_one_way_alone_do_not_stand() -> None:
    """Each piece's best right neighbour is its own; every one's best left neighbour is the piece at the end."""
    costs = 1 + torch.rand(2, 8, 8, generator=seeded(0)[0])
    costs[0, torch.arange(7), torch.arange(1, 8)] = 0.5
    assert standing_slots(costs, (1, 8)).all()
    costs[0, 7, :7] = 0.1
    assert not standing_slots(costs, (1, 8)).any()


@pytest.mark.parametrize("known", [0, 5, 16])
def test_patches_that_are_alike_stay(known: int) -> None:
    patches = torch.rand(1, 16, 3, 4, 4, generator=seeded(1)[0])
    slots = torch.arange(16)[None] < known
    patches[~slots] = 0.5
    assert_close(Borders()(patches, (4, 4), slots), torch.arange(16)[None])


def test_some_grey_patches_are_no_obstacle(photographs: Photographs) -> None:
    feed = fed(Jigsaw(gamma=0.5), photographs(1, 96), 16)
    patches = tiles(feed.images, 16)
    patches[0, feed.moved[0].nonzero()[::2, 0]] = 0.5
    order = Borders()(patches, (6, 6), ~feed.moved)
    assert_close(order.sort(1).values, torch.arange(36)[None])
    assert_close(order[~feed.moved], torch.arange(36)[None][~feed.moved])


@given(seed=st.integers(0, 2**31), known=st.booleans())
@settings(max_examples=4)
def test_an_order_depends_on_no_other_image_no_thread_and_no_rounding_error(
    photographs: Photographs, seed: int, *, known: bool
) -> None:
    """Grey levels with an error of less than half a level, in any company, come into the same order."""
    draw = seeded(seed)[0]
    levels = (photographs(3, 80) * 255).round() / 255
    feed = fed(Jigsaw(gamma=0.4), levels, 16)
    slots = ~feed.moved if known else torch.zeros_like(feed.moved)
    patches = tiles(feed.images, 16)
    together = Borders()(patches, (5, 5), slots)
    some = torch.randperm(3, generator=draw)[: 1 + seed % 3]
    noisy = patches + (torch.rand(patches.shape, generator=draw) - 0.5) * 0.98 / 255
    assert torch.equal(Borders()(noisy[some], (5, 5), slots[some]), together[some])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(Borders()(patches[some], (5, 5), slots[some]), together[some])
    finally:
        torch.set_num_threads(threads)


def test_small_patches_come_back_where_most_of_them_stayed(photographs: Photographs) -> None:
    """64 patches of 4 × 4 pixels: a search that is anchored on the few whose borders fit puts 69 % right."""
    images = photographs(6, 32)
    feed = fed(Jigsaw(gamma=0.27), images, 4)
    order = Borders()(tiles(feed.images, 4), (8, 8), torch.zeros_like(feed.moved))
    right = feed.order.gather(1, order) == torch.arange(64)
    assert right.double().mean() > 0.9


def test_costs_of_a_jigsaw_add_up_exactly_in_any_order(photographs: Photographs) -> None:
    costs = exact_costs(tiles(photographs(1, 96), 16)[0])
    assert costs.dtype == torch.float64
    assert torch.equal(costs * 1024, (costs * 1024).round())
    assert costs.sum() == costs.flatten().flip(0).cumsum(0)[-1]


# What the adversary knows


@pytest.mark.parametrize(
    ("defense", "told"),
    [
        ((Mjp(gamma=0.5),), True),
        ((Mjp(gamma=0.5, masked_pe="none"),), True),
        ((LowPass(), Mjp(gamma=0.5)), True),
        ((Mjp(gamma=0.5), GradientNoise(multiplier=1e-6)), True),
        ((Mjp(gamma=0.5), GradientPruning(keep=0.9)), True),
        ((Mjp(gamma=0.5, masked_pe="slot"),), False),
        ((Jigsaw(gamma=0.5),), False),
        ((Jigsaw(gamma=0.5), Mjp(gamma=0.5)), False),
        ((), False),
    ],
)
def test_what_the_release_says_of_the_mask(
    tiny_model: Model, crops: Tensor, defense: tuple[Defense | GradientDefense, ...], *, told: bool
) -> None:
    model = tiny_model()
    feed = Stack(defense).feed(crops[:2].double(), 4, seeded(0, 1))
    names = ("pos_embed", "patch_embed.proj.weight")
    seen = observe(model, feed, torch.tensor([1, 2]), names, defense, seeded(2, 3))
    known = known_slots(seen)
    assert (known is not None) == told
    if known is not None:
        assert_close(known, ~feed.moved)
        assert known_slots(observe(model, feed, torch.tensor([1, 2]), names[1:], defense, seeded(2, 3))) is None


@pytest.mark.parametrize("noise", [(), (GradientNoise(multiplier=1e-6),)])
@pytest.mark.parametrize("per", ["batch", "image"])
def test_one_gradient_of_several_images_says_which_slots_are_masked_where_they_share_a_mask(
    tiny_model: Model, crops: Tensor, per: str, noise: tuple[GradientNoise, ...]
) -> None:
    defense = (Mjp(gamma=0.5, per=per), *noise)
    feed = Stack(defense).feed(crops[[3, 100, 200, 300]].double(), 4, seeded(0, 1, 2, 3), 2)
    names, labels = ("pos_embed", "patch_embed.proj.weight"), torch.tensor([1, 2, 3, 4])
    known = known_slots(observe(tiny_model(), feed, labels, names, defense, seeded(4, 5), 2))
    if per == "image":
        assert known is None
    else:
        assert known is not None
        assert torch.equal(known, ~feed.moved)
        assert not torch.equal(known[0], known[2])  # another release, another mask


# The scores


def scored(
    model: VictimModel, feed: Feed, images: Tensor, reconstruction: Reconstruction, **options: Any
) -> list[dict[str, Any]]:
    batch = Batch([], images, feed=feed, known=options.pop("known", None))
    return Scorer(model, ["psnr"], {}).laid(reconstruction, batch, GEOMETRIES, **options)[0]


@pytest.fixture(scope="module")
def fine_model() -> VictimModel:
    """Return a model of 96 × 96 images in patches of 16."""
    return victim("vit_ti_mjp", weights="random", img_size=96).model


@pytest.mark.parametrize("told", [True, False])
def test_exact_patches_are_scored_as_the_oracle_scores_them(
    fine_model: VictimModel, photographs: Photographs, *, told: bool
) -> None:
    images = photographs(4, 96)
    feed = fed(Jigsaw(gamma=0.4), images, 16)
    in_place, oracle, own = scored(
        fine_model, feed, images, Reconstruction(feed.images), known=~feed.moved if told else None
    )
    assert max(in_place["psnr"]) < 40
    assert own["psnr"] == oracle["psnr"] == [float("inf")] * 4
    assert own["placement_accuracy"] == own["neighbour_accuracy"] == [1.0] * 4
    assert "placement_accuracy" not in in_place
    assert "placement_accuracy" not in oracle


def test_patches_in_the_adversarys_own_order_are_placed_unless_it_has_done_so(
    fine_model: VictimModel, photographs: Photographs
) -> None:
    """Which patch is which is then not certain, so no share of them is."""
    images = photographs(2, 96)
    feed = fed(Mjp(gamma=0.4), images, 16)
    loose = Reconstruction(
        feed.images, loose=feed.moved, tokens=torch.tensor([37, 37]), tokens_sure=torch.tensor([36, 37])
    )
    in_place, oracle, own = scored(fine_model, feed, images, loose)
    assert own["psnr"] == oracle["psnr"] == [float("inf")] * 2
    assert own["tokens_sure"] == [36.0, 37.0]
    assert "placement_accuracy" not in own
    in_place, _, own = scored(fine_model, feed, images, loose, placed=True)
    assert own is in_place
    assert MjpFull.places


def test_grey_patches_are_scored_as_they_are(fine_model: VictimModel, photographs: Photographs) -> None:
    images = photographs(2, 96)
    feed = fed(Mjp(gamma=0.4), images, 16)
    known = ~feed.moved[:, None].expand(-1, 1, -1).unflatten(2, (6, 6)).repeat_interleave(16, 2).repeat_interleave(
        16, 3
    )
    grey = torch.where(known, feed.images, 0.5)
    in_place, _, own = scored(fine_model, feed, images, Reconstruction(grey), known=~feed.moved)
    assert own["psnr"] == in_place["psnr"]


def test_no_share_of_nothing(fine_model: VictimModel, photographs: Photographs) -> None:
    images = photographs(1, 96)
    own = scored(fine_model, fed(Jigsaw(gamma=0.0), images, 16), images, Reconstruction(images))[2]
    assert (own["placement_accuracy"], own["neighbour_accuracy"]) == ([None], [None])


# The shares


@given(seed=st.integers(0, 2**31), gamma=st.floats(0.1, 1.0))
def test_shares_of_the_moved_slots_are_those_of_a_loop(seed: int, gamma: float) -> None:
    h, w = 3, 4
    draw = seeded(seed)[0]
    held = torch.randperm(12, generator=draw) if seed % 2 else torch.arange(12)
    held[:2] = held[:2].flip(0)
    moved = torch.rand(12, generator=draw) < gamma
    moved[0] = True
    right = [int(held[s]) == s for s in range(12) if moved[s]]
    pairs = [(r * w + c, r * w + c + 1, 1) for r in range(h) for c in range(w - 1)]
    pairs += [(r * w + c, r * w + w + c, w) for r in range(h - 1) for c in range(w)]
    beside = []
    for a, b, step in pairs:
        if moved[a] or moved[b]:
            x, y = int(held[a]), int(held[b])
            beside.append(y - x == step and (step == w or x // w == y // w))
    assert float(placed_share(held[None], moved[None])) == pytest.approx(sum(right) / len(right))
    assert float(adjacent_share(held[None], moved[None], (h, w))) == pytest.approx(sum(beside) / len(beside))


def test_shares_agree_with_those_of_released_features() -> None:
    held = torch.stack([torch.randperm(12, generator=draw) for draw in seeded(0, 1)])
    all_moved = torch.ones_like(held, dtype=torch.bool)
    sent = Sent.plain(torch.zeros(2, 13, 5), prefix=1)
    reconstruction = Reconstruction(torch.zeros(2, 3, 6, 8), rows=held + 1 + 13 * torch.arange(2)[:, None])
    placed, neighbours = placement_accuracy(sent, reconstruction), neighbour_accuracy(sent, reconstruction, (3, 4))
    assert placed is not None
    assert neighbours is not None
    assert_close(placed_share(held, all_moved), placed)
    assert_close(adjacent_share(held, all_moved, (3, 4)), neighbours)


# The records


def records(setting: str = "a,b,c", model: str = "vit_ti", **options: Any) -> pd.DataFrame:
    small: dict[str, Any] = {"weights": "random", "img_size": 64, "limit": 2, "metrics": "psnr", "gamma": 0.4}
    given: dict[str, Any] = small | {"attacks": "patch-gradient"} | options
    return privlab.attack(model, settings=setting, **given).records


pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


def test_only_setting_c_is_re_assembled() -> None:
    """And under the jigsaw, whose mask no gradient shows, an exact reconstruction comes back whole."""
    made = records().query("attack == 'patch-gradient'")
    found = {setting: set(rows.geometry) for setting, rows in made.groupby("setting")}
    assert found == {"a": set(GEOMETRIES[:2]), "b": set(GEOMETRIES[:2]), "c": set(GEOMETRIES)}
    last = made.query("geometry == 'reassembled'")
    assert last.psnr.min() > 60
    assert last.placement_accuracy.tolist() == last.neighbour_accuracy.tolist() == [1.0, 1.0]
    assert made.query("geometry != 'reassembled'").placement_accuracy.isna().all()


@pytest.fixture(scope="module")
def base() -> Victim:
    return victim("vit_ti_mjp", weights="random", img_size=64)


@pytest.mark.parametrize(
    ("setting", "options", "made"),
    [
        ("c", {}, True),
        ("c", {"defense": "low-pass+jigsaw"}, True),
        ("c", {"defense": "mjp+gradient-sign"}, True),
        ("a", {}, False),
        ("b", {}, False),
        ("c", {"defense": "low-pass"}, False),
        ("c", {"defense": "jigsaw", "release": "features"}, False),
    ],
)
def test_only_released_gradients_of_shuffled_patches_are_re_assembled(
    base: Victim, setting: str, options: dict[str, Any], *, made: bool
) -> None:
    spec = specify(model=("vit_ti_mjp",), setting=(setting,), **options)
    assert Rows(spec, base, ()).geometries(setting) == (GEOMETRIES if made else GEOMETRIES[:2])


def test_patches_without_borders_are_not_re_assembled(base: Victim, tiny_model: Model) -> None:
    small = dataclasses.replace(base, model=tiny_model(img_size=8, patch_size=2))
    spec = specify(model=("vit_ti_mjp",), setting=("c",))
    assert Rows(spec, small, ()).geometries("c") == GEOMETRIES[:2]


@pytest.mark.slow
@pytest.mark.parametrize("defense", ["mjp", "mjp+gradient-noise", "jigsaw"])
def test_what_was_kept_is_re_assembled_alike(base: Victim, defense: str) -> None:
    spec = specify(
        model=("vit_ti_mjp",),
        setting=("c",),
        attack=("mjp-subspace",),
        defense=defense,
        gamma=0.4,
        metrics=("psnr",),
        options=("rounds=0", *(("multiplier=1e-6",) if "noise" in defense else ())),
    )
    evaluator = Evaluator(
        spec, base, plan(spec, base), ["psnr"], {}, Others({}), strips=False, controls=False, keep=True
    )
    chunk = next(iter(batches(open_images("samples", limit=2), base.preprocessing, 2)))
    first, _, reconstructions = evaluator(chunk)
    again, _, _ = dataclasses.replace(evaluator, kept=reconstructions, keep=False)(chunk)
    names = ("image", "geometry", "psnr", "placement_accuracy", "neighbour_accuracy", "cell")
    assert [[row.get(n) for n in names] for row in again] == [[row.get(n) for n in names] for row in first]
    assert [row["geometry"] for row in first] == [*GEOMETRIES, *GEOMETRIES]


def test_no_score_of_a_shuffled_image_depends_on_the_others_of_its_batch(tmp_path: Path, crops: Tensor) -> None:
    """Alone, in a batch, and in the batch in another order: the same bits in every geometry, one setting or two."""
    for i, crop in enumerate(crops[[3, 100, 200]]):
        pixels = crop.repeat_interleave(2, 1).repeat_interleave(2, 2).permute(1, 2, 0)
        Image.fromarray((pixels * 255).byte().numpy()).save(tmp_path / f"{i}.png")
    victim_of_cifar = victim("cifar_vit_mjp27")

    def scores(files: tuple[int, ...], settings: str = "c") -> dict[tuple[str, str], Any]:
        paths = [tmp_path / f"{i}.png" for i in files]
        spec = specify(
            model=("cifar_vit_mjp27",),
            setting=tuple(settings),
            attack=("april",),
            defense="jigsaw",
            metrics=("psnr",),
            options=("border.rounds=2",),
        )
        groups = plan(spec, victim_of_cifar)
        evaluator = Evaluator(spec, victim_of_cifar, groups, ["psnr"], {}, Others({}), strips=False, controls=False)
        (chunk,) = batches(open_images(paths), victim_of_cifar.preprocessing, len(paths))
        names = ("psnr", "grad_norm", "placement_accuracy", "neighbour_accuracy", "psnr_masked")
        rows = [row for row in evaluator(chunk)[0] if row["setting"] == "c"]
        return {(row["image_sha256"], row["geometry"]): [row.get(name) for name in names] for row in rows}

    alone = scores((0,)) | scores((1,)) | scores((2,))
    assert len(alone) == 9
    assert scores((0, 1, 2)) == scores((2, 0, 1)) == alone
    assert scores((1, 2), "bc").items() <= alone.items()


def test_geometries_that_no_row_has_are_refused() -> None:
    def spec(settings: tuple[str, ...] = ("c",), **options: Any) -> Case:
        return specify(model=("vit_ti",), setting=settings, **options)

    for fine in (spec(), spec(("a", "c")), spec(defense="low-pass+jigsaw"), spec(defense="mjp")):
        check_geometry("reassembled", fine)
    for wrong in (spec(("a", "b")), spec(release="features"), spec(defense="blur")):
        check_geometry("oracle", wrong)
        with pytest.raises(PrivlabError, match="'reassembled'"):
            check_geometry("reassembled", wrong)
    with pytest.raises(PrivlabError, match="'re-assembled'"):
        check_geometry("re-assembled", spec())
