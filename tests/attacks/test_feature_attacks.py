"""Attacks that know the permutation: exact where W is invertible, and as good as claimed on trained weights."""

import copy
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from privlab.attacks.features.border_jigsaw import BorderJigsaw
from privlab.attacks.features.class_token_key import ClassTokenKey
from privlab.attacks.features.column_statistics import ColumnStatistics, _by_swaps
from privlab.attacks.features.pe_assignment import PEAssignment
from privlab.attacks.features.row_alignment import RowAlignment
from privlab.attacks.rows import effects, known_tokens, patch_law, place_rows, row_costs
from privlab.base import PrivlabError
from privlab.defenses import BatchShuffle, ColumnPermutation, GaussianNoise, RowPermutation
from privlab.images import Preprocessing, open_images
from privlab.metrics import key_recovered, neighbour_accuracy, placement_accuracy
from privlab.release import feature_capabilities
from privlab.threat import Capability, Draws, FeatureAttack, FeatureDefense, FeatureObservation, Reconstruction, Sent
from privlab.victims import VictimModel, victim

Model = Callable[..., VictimModel]
Photographs = Callable[[int, int], Tensor]

EACH, SHARED = RowPermutation(per="image"), RowPermutation(per="batch")
ATTACKS = [PEAssignment, ClassTokenKey, ColumnStatistics, RowAlignment, BorderJigsaw]
SQUARE = {"img_size": 32, "patch_size": 8, "embed_dim": 208}
"""16 patches of 192 values in width 208: rows invert exactly."""


def draws(b: int, seed: int = 0) -> Draws:
    made = [torch.Generator().manual_seed(1000 * seed + i) for i in range(b + 2)]
    return Draws(made[2:], made[0], made[1])


def sent_by(client: VictimModel, images: Tensor, parts: Iterable[FeatureDefense], seed: int = 0) -> Sent:
    sent = Sent.plain(client.embed(images), client.vit.num_prefix_tokens)
    for part in parts:
        sent = part.send(sent, draws(len(images), seed))
    return sent


def seen_of(
    model: VictimModel, sent: Sent, parts: tuple[FeatureDefense, ...], public: Tensor, *, without: Iterable = ()
) -> FeatureObservation:
    grants = feature_capabilities(model, len(public)) - set(without)
    return FeatureObservation(model, sent.features, parts, public, grants)


def without_pe(model: VictimModel) -> VictimModel:
    bare = copy.deepcopy(model)
    bare.vit.pos_embed = None
    return bare


def drifted(model: VictimModel, std: float) -> VictimModel:
    """Return a client whose embeddings have moved by Gaussian noise of `std` times their own deviation."""
    client = copy.deepcopy(model)
    assert client.vit.pos_embed is not None
    pe = client.vit.pos_embed.data
    pe += std * pe.std() * torch.randn(pe.shape, generator=torch.Generator().manual_seed(7), dtype=pe.dtype)
    return client


def placed(sent: Sent, reconstruction: Reconstruction) -> float:
    accuracy = placement_accuracy(sent, reconstruction)
    assert accuracy is not None
    return float(accuracy.mean())


def psnr(reconstruction: Reconstruction, images: Tensor) -> float:
    return float(-10 * (reconstruction.images - images).square().mean((1, 2, 3)).clamp_min(1e-20).log10().mean())


@pytest.fixture(scope="module")
def exact(tiny_model: Model, photographs: Photographs) -> tuple[VictimModel, Tensor, Tensor]:
    """Return a model whose rows invert exactly, private and public photographs."""
    pictures = photographs(14, 32).double()
    return tiny_model(**SQUARE), pictures[:5], pictures[5:]


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_fulfils_the_protocol(attack: type[FeatureAttack]) -> None:
    assert isinstance(attack(), FeatureAttack)
    needed = {Capability.RELEASED_FEATURES, Capability.KNOWS_WEIGHTS, Capability.AUXILIARY_IMAGES}
    assert needed <= attack.requires
    assert Capability.QUERIES not in attack.requires


@pytest.mark.parametrize(
    ("parts", "kind", "noise"),
    [
        ((), "kept", 0),
        ((ColumnPermutation(), GaussianNoise(std=0.3)), "kept", 0.3),
        ((SHARED,), "shared", 0),
        ((SHARED, SHARED), "shared", 0),
        ((SHARED, GaussianNoise(std=3.0), EACH, GaussianNoise(std=4.0)), "own", 5),
        ((EACH, BatchShuffle()), "mixed", 0),
    ],
)
def test_what_the_defenses_do_is_read_off_them(
    parts: tuple[FeatureDefense, ...], kind: str, noise: float, tiny_model: Model
) -> None:
    model, pictures = tiny_model(), torch.rand(1, 3, 16, 16, dtype=torch.float64)
    seen = seen_of(model, sent_by(model, pictures, ()), parts, pictures)
    assert effects(seen).rows == kind
    assert effects(seen).noise_std == pytest.approx(noise)


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_row_costs_are_twice_the_negative_log_likelihood(noise: float, tiny_model: Model) -> None:
    """−2 log N(z; μ + e_s, Σ) − d log 2π for every row and slot, by torch's own density."""
    model = tiny_model()
    public = torch.rand(8, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    features = model.embed(public[:2])
    prefix, pe = known_tokens(model)
    mean, covariance = patch_law(model, public, noise)
    costs = row_costs(features, prefix, pe, (mean, covariance), noise)
    for s, e in enumerate(pe):
        density = MultivariateNormal(mean + e, covariance, validate_args=False).log_prob(features)
        assert_close(
            costs[:, :, 1 + s], -2 * density - features.shape[-1] * math.log(2 * math.pi), rtol=1e-8, atol=1e-6
        )
    assert costs[:, 0, 0].max() < costs[:, 1:, 0].min()


def test_known_tokens_are_what_is_sent_less_the_patches(tiny_model: Model) -> None:
    for options in ({}, {"reg_tokens": 2}, {"reg_tokens": 2, "no_embed_class": True}):
        model = tiny_model(**options)
        images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
        prefix, pe = known_tokens(model)
        tokens = model.embed(images)
        assert_close(tokens[:, : len(prefix)], prefix.expand(2, -1, -1))
        patches = model.vit.patch_embed.proj(model.normalise(images)).flatten(2).mT
        assert_close(tokens[:, len(prefix) :], patches + pe)


@given(seed=st.integers(0, 2**31), kind=st.sampled_from(["kept", "shared", "own", "mixed"]))
@settings(max_examples=40)
def test_every_row_gets_one_place(seed: int, kind: str) -> None:
    costs = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(seed))
    rows = place_rows(costs, kind)  # type: ignore[arg-type]
    assert_close(rows.flatten().sort().values, torch.arange(15))
    if kind != "mixed":
        assert_close(rows // 5, torch.arange(3)[:, None].expand(3, 5))
    if kind == "shared":
        assert_close(rows % 5, (rows[:1] % 5).expand(3, 5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", [(EACH,), (SHARED,), (RowPermutation(per="image", class_token=False),), (EACH, SHARED), ()]
)
@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}])
def test_pe_assignment_is_exact(
    parts: tuple[FeatureDefense, ...], options: dict[str, object], tiny_model: Model, photographs: Photographs
) -> None:
    """Every row in its slot, and the image to the last digits, where W is invertible."""
    model, pictures = tiny_model(**SQUARE, **options), photographs(14, 32).double()
    sent = sent_by(model, pictures[:4], parts)
    seen = seen_of(model, sent, parts, pictures[4:])
    reconstruction = PEAssignment()(seen)
    assert reconstruction.rows is not None
    assert placed(sent, reconstruction) == 1
    assert_close(reconstruction.images, pictures[:4], rtol=0, atol=1e-6)
    assert_close(PEAssignment().rows(seen), reconstruction.rows)


def test_pe_assignment_takes_single_and_half_precision(exact: tuple[VictimModel, Tensor, Tensor]) -> None:
    model, private, public = exact
    sent = sent_by(model, private, (EACH,))
    for dtype in (torch.float32, torch.float16):
        seen = FeatureObservation(
            model, sent.features.to(dtype), (EACH,), public, feature_capabilities(model, len(public))
        )
        assert placed(sent, PEAssignment()(seen)) == 1


def test_known_noise_widens_the_law(exact: tuple[VictimModel, Tensor, Tensor]) -> None:
    """Noise that is known places more rows than the same noise unknown, and a shared order averages it away."""
    model, private, public = exact
    noisy = GaussianNoise(std=1.0)

    def share(parts: tuple[FeatureDefense, ...], known: tuple[FeatureDefense, ...]) -> float:
        runs = [sent_by(model, private, parts, seed) for seed in range(4)]
        return sum(placed(sent, PEAssignment()(seen_of(model, sent, known, public))) for sent in runs) / len(runs)

    aware, unaware = share((noisy, EACH), (noisy, EACH)), share((noisy, EACH), (EACH,))
    assert unaware < aware < share((noisy, SHARED), (noisy, SHARED))


def test_rows_mixed_among_images_are_sorted_and_grouped(exact: tuple[VictimModel, Tensor, Tensor]) -> None:
    """Every row in its slot, next to rows of its own image; which image is which is not to be known."""
    model, private, public = exact
    parts = (BatchShuffle(),)
    sent = sent_by(model, private, parts)
    reconstruction = PEAssignment()(seen_of(model, sent, parts, public))
    assert reconstruction.rows is not None
    t = sent.source.shape[1]
    found = sent.source.flatten()[reconstruction.rows]
    assert_close(found % t, torch.arange(1, t).expand_as(found))
    neighbours = neighbour_accuracy(sent, reconstruction, model.grid)
    assert neighbours is not None
    assert neighbours.mean() > 0.85


def test_groups_take_the_number_of_the_image_that_most_rows_came_with(
    exact: tuple[VictimModel, Tensor, Tensor],
) -> None:
    model, private, public = exact
    parts = (BatchShuffle(share=0.4),)
    sent = sent_by(model, private, parts)
    assert placed(sent, PEAssignment()(seen_of(model, sent, parts, public))) > 0.85


KEYED = [(ColumnPermutation(),), (EACH, ColumnPermutation()), (ColumnPermutation(), SHARED)]


@pytest.mark.parametrize("parts", KEYED)
@pytest.mark.parametrize("attack", [ClassTokenKey(), ColumnStatistics()])
def test_column_keys_are_recovered(
    parts: tuple[FeatureDefense, ...], attack: FeatureAttack, exact: tuple[VictimModel, Tensor, Tensor]
) -> None:
    """The whole key, then every row, then the image."""
    model, private, public = exact
    sent = sent_by(model, private, parts)
    reconstruction = attack(seen_of(model, sent, parts, public))
    assert key_recovered(sent, reconstruction) == 1
    assert placed(sent, reconstruction) == 1
    assert_close(reconstruction.images, private, rtol=0, atol=1e-5)


def test_class_and_register_tokens_tell_equal_values_apart(tiny_model: Model, photographs: Photographs) -> None:
    """Entries that are equal in the class token, and differ in a register, are still matched."""
    model, pictures = tiny_model(**SQUARE, reg_tokens=1), photographs(6, 32).double()
    assert model.vit.cls_token is not None
    assert model.vit.pos_embed is not None
    model.vit.cls_token.data[..., :50] = 0
    model.vit.pos_embed.data[:, 0, :50] = 0
    parts = (ColumnPermutation(),)
    sent = sent_by(model, pictures[:1], parts)
    assert key_recovered(sent, ClassTokenKey()(seen_of(model, sent, parts, pictures[1:]))) == 1


def test_averaging_the_batch_takes_noise_off_the_class_token(tiny_model: Model) -> None:
    model, parts = tiny_model(), (GaussianNoise(std=0.02), ColumnPermutation())
    pictures = torch.rand(64, 3, 16, 16, dtype=torch.float64)

    def key(b: int) -> float:
        found = key_recovered(
            sent := sent_by(model, pictures[:b], parts), ClassTokenKey()(seen_of(model, sent, parts, pictures[:4]))
        )
        assert found is not None
        return found

    assert key(1) < key(64)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=20)
def test_no_swap_of_two_columns_is_left_that_helps(seed: int) -> None:
    """The result of the descent, whose sums are updated by rank one, is a local optimum of f computed anew."""
    draw = torch.Generator().manual_seed(seed)
    A, R = (torch.randn(7, 7, generator=draw, dtype=torch.float64) for _ in range(2))
    A, R = A + A.mT, R + R.mT
    v, m = torch.randn(2, 7, generator=draw, dtype=torch.float64)
    p = _by_swaps(A, v, R, m, torch.randperm(7, generator=draw))

    def f(order: Tensor) -> float:
        return float((A * R[order][:, order]).sum() - 2 * v @ m[order])

    assert_close(p.sort().values, torch.arange(7))
    for i in range(7):
        for j in range(i):
            swapped = p.clone()
            swapped[[i, j]] = p[[j, i]]
            assert f(swapped) > f(p) - 1e-7


@pytest.mark.parametrize("parts", [(EACH,), (SHARED,), ()])
def test_without_drift_row_alignment_is_pe_assignment(
    parts: tuple[FeatureDefense, ...], exact: tuple[VictimModel, Tensor, Tensor]
) -> None:
    model, private, public = exact
    sent = sent_by(model, private, parts)
    seen = seen_of(model, sent, parts, public)
    aligned, assigned = RowAlignment()(seen), PEAssignment()(seen)
    assert aligned.rows is not None
    assert assigned.rows is not None
    assert_close(aligned.rows, assigned.rows)
    assert psnr(aligned, private) > 30


@pytest.mark.parametrize("parts", [(EACH,), (SHARED,)])
def test_private_embeddings_do_not_hide_the_order(
    parts: tuple[FeatureDefense, ...], exact: tuple[VictimModel, Tensor, Tensor]
) -> None:
    """With no public embedding to go by, rows line up with one another, and their borders say where."""
    model, private, public = exact
    client = drifted(model, 5)
    sent = sent_by(client, private, parts)
    secret = (Capability.POSITION_EMBEDDINGS, Capability.CLASS_TOKEN)
    reconstruction = RowAlignment()(seen_of(model, sent, parts, public, without=secret))
    neighbours = neighbour_accuracy(sent, reconstruction, model.grid)
    assert neighbours is not None
    assert neighbours.mean() > 0.6
    assert reconstruction.rows is not None  # all images alike: what one has in a slot, all have
    found = sent.source.flatten()[reconstruction.rows] % sent.source.shape[1]
    assert_close(found, found[:1].expand_as(found))


@pytest.mark.parametrize("parts", [(EACH,), (SHARED,), ()])
def test_border_jigsaw_needs_no_embeddings(
    parts: tuple[FeatureDefense, ...], tiny_model: Model, photographs: Photographs
) -> None:
    """Photographs of 6 × 6 exact patches; a shared order is found for certain."""
    model = tiny_model(img_size=48, patch_size=8, embed_dim=208, pos_embed="none")
    pictures = photographs(14, 48).double()
    sent = sent_by(model, pictures[:5], parts)
    reconstruction = BorderJigsaw()(seen_of(model, sent, parts, pictures[5:]))
    if parts == (EACH,):
        neighbours = neighbour_accuracy(sent, reconstruction, model.grid)
        assert neighbours is not None
        assert neighbours.mean() > 0.6
    else:
        assert placed(sent, reconstruction) == 1
        assert_close(reconstruction.images, pictures[:5], rtol=0, atol=1e-6)


def test_keys_without_embeddings_go_on_to_the_borders(tiny_model: Model, photographs: Photographs) -> None:
    model = tiny_model(img_size=48, patch_size=8, embed_dim=208, pos_embed="none")
    pictures, parts = photographs(14, 48).double(), (SHARED, ColumnPermutation())
    sent = sent_by(model, pictures[:5], parts)
    reconstruction = ClassTokenKey()(seen_of(model, sent, parts, pictures[5:]))
    assert key_recovered(sent, reconstruction) == 1
    assert placed(sent, reconstruction) == 1


@pytest.mark.parametrize(
    ("attack", "parts", "change", "message"),
    [
        (PEAssignment(), (EACH,), {"features": torch.full((2, 17, 64), math.nan)}, "must be finite"),
        (
            PEAssignment(),
            (EACH,),
            {"features": torch.zeros(2, 16, 64)},
            "sends 17 × 64 features of an image. Found 16 × 64",
        ),
        (PEAssignment(), (EACH,), {"public": torch.zeros(0, 3, 16, 16)}, "Found none"),
        (RowAlignment(), (EACH,), {"features": torch.zeros(1, 17, 64)}, "Found one image"),
        (RowAlignment(), (BatchShuffle(),), {}, "Found rows mixed"),
        (BorderJigsaw(), (BatchShuffle(),), {}, "Rows mixed among images"),
    ],
)
def test_what_cannot_be_attacked_is_refused(
    attack: FeatureAttack,
    parts: tuple[FeatureDefense, ...],
    change: dict[str, Tensor],
    message: str,
    tiny_model: Model,
) -> None:
    fields = {"features": torch.zeros(2, 17, 64), "public": torch.rand(2, 3, 16, 16)} | change
    seen = FeatureObservation(tiny_model(), fields["features"], parts, fields["public"], frozenset())
    with pytest.raises(PrivlabError, match=message):
        attack(seen)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BorderJigsaw(rounds=-1), "at least 0. Found -1"),
        (lambda: RowAlignment(iterations=0), "iterations of row-alignment must be at least 1. Found 0"),
        (lambda: ColumnStatistics(ridge=0.0), "must be above 0 and finite. Found 0.0"),
    ],
)
def test_bad_options_are_refused(make: Callable[[], FeatureAttack], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        make()


def test_grey_public_images_are_enough_to_fail_on(exact: tuple[VictimModel, Tensor, Tensor]) -> None:
    """Public images that say nothing make a poor attack, not a crash."""
    model, private, _ = exact
    sent = sent_by(model, private, (EACH,))
    reconstruction = PEAssignment()(seen_of(model, sent, (EACH,), torch.full((2, 3, 32, 32), 0.5, dtype=torch.float64)))
    assert reconstruction.images.isfinite().all()


@pytest.fixture(scope="module")
def trained(shared: Callable[[str], Path]) -> tuple[VictimModel, Tensor, Tensor]:
    """Return the trained ViT-Ti, eight ImageNet photographs, and the bundled ones as public."""
    found = victim("vit_ti", weights=shared("weights/vit_tiny_patch16_224.safetensors"))
    files = sorted(shared("data/imagenet_samples").glob("*.JPEG"))[::62][:8]

    def cut(source: object, make: Preprocessing) -> Tensor:
        return torch.stack([make(image.pixels) for image in open_images(source) if image.pixels])

    return found.model, cut(files, found.preprocessing), cut("samples", found.preprocessing)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [(EACH,), (SHARED,), (GaussianNoise(std=0.5), EACH)])
def test_trained_rows_are_all_placed(
    parts: tuple[FeatureDefense, ...], trained: tuple[VictimModel, Tensor, Tensor]
) -> None:
    """At least 99 % of the rows of the trained ViT-Ti, with fourteen photographs of other things as public set."""
    model, private, public = trained
    sent = sent_by(model, private, parts)
    reconstruction = PEAssignment()(seen_of(model, sent, parts, public))
    assert placed(sent, reconstruction) >= 0.99
    assert psnr(reconstruction, private) > (20 if len(parts) > 1 else 28)


@pytest.mark.parametrize("attack", [ClassTokenKey(), ColumnStatistics()])
def test_the_trained_key_is_recovered_whole(attack: FeatureAttack, trained: tuple[VictimModel, Tensor, Tensor]) -> None:
    """All 192 entries, from features whose rows are permuted as well."""
    model, private, public = trained
    parts = (EACH, ColumnPermutation())
    sent = sent_by(model, private, parts)
    reconstruction = attack(seen_of(model, sent, parts, public))
    assert key_recovered(sent, reconstruction) == 1
    assert placed(sent, reconstruction) >= 0.99


@pytest.mark.slow
def test_drift_costs_pe_assignment_rows_and_row_alignment_none(trained: tuple[VictimModel, Tensor, Tensor]) -> None:
    """Embeddings moved by three times their deviation; then secret ones, with nothing public to go by."""
    model, private, public = trained
    sent = sent_by(drifted(model, 3), private, (EACH,))
    seen = seen_of(model, sent, (EACH,), public)
    assert placed(sent, PEAssignment()(seen)) < 0.9
    assert placed(sent, RowAlignment(rounds=3)(seen)) >= 0.99
    secret = seen_of(model, sent, (EACH,), public, without=(Capability.POSITION_EMBEDDINGS, Capability.CLASS_TOKEN))
    assert placed(sent, RowAlignment(rounds=3)(secret)) >= 0.99


@pytest.mark.slow
def test_a_batch_without_embeddings_is_put_together_by_borders(trained: tuple[VictimModel, Tensor, Tensor]) -> None:
    """The paper's own case: no position embeddings, one order for the batch, here of eight images."""
    model, private, public = trained
    bare = without_pe(model)
    sent = sent_by(bare, private, (SHARED,))
    reconstruction = BorderJigsaw()(seen_of(bare, sent, (SHARED,), public))
    assert placed(sent, reconstruction) >= 0.99
    assert psnr(reconstruction, private) > 28
