"""What attacks on features estimate, by naive algebra: drift of embeddings, keys of columns, rows of class tokens."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from privlab.attacks.features import row_alignment
from privlab.attacks.features.class_token_key import _prefix_rows
from privlab.attacks.features.column_statistics import ColumnStatistics, _by_moments, _by_products
from privlab.attacks.features.pe_assignment import PEAssignment
from privlab.attacks.features.row_alignment import RowAlignment, _drift, _posterior
from privlab.attacks.rows import known_tokens, patch_law
from privlab.attacks.solvers import patch_statistics
from privlab.defenses import RowPermutation
from privlab.metrics import placement_accuracy, psnr
from privlab.release import feature_capabilities
from privlab.threat import Draws, FeatureDefense, FeatureObservation, Sent
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
SQUARE = {"img_size": 32, "patch_size": 8, "embed_dim": 208}
"""16 patches of 192 values in width 208: rows invert exactly."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=Generator().manual_seed(seed))


def covariance(d: int, seed: int = 0) -> Tensor:
    Q = torch.linalg.qr(drawn(d, d, seed=seed)).Q
    return (Q * torch.logspace(-2, 1, d, dtype=torch.float64)) @ Q.mT


def drifted(model: VictimModel, std: float) -> VictimModel:
    client = copy.deepcopy(model)
    assert client.vit.pos_embed is not None
    pe = client.vit.pos_embed
    pe += std * pe.std() * drawn(*pe.shape, seed=7)
    return client


def sent_by(client: VictimModel, images: Tensor, *parts: FeatureDefense) -> Sent:
    made = [Generator().manual_seed(i) for i in range(len(images) + 2)]
    sent = Sent.plain(client.embed(images), client.vit.num_prefix_tokens)
    for part in parts:
        sent = part.send(sent, Draws(made[2:], made[0], made[1]))
    return sent


def seen_of(model: VictimModel, sent: Sent, public: Tensor, *parts: FeatureDefense) -> FeatureObservation:
    return FeatureObservation(model, sent.features, parts, public, feature_capabilities(model, len(public)))


@pytest.mark.parametrize("drift", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("known", [False, True])
def test_drift_is_what_is_left_of_second_moments(drift: float, *, known: bool) -> None:
    """Of ten thousand slots; along directions of a small variance most precisely, which makes it that near."""
    Σ, e, n = covariance(8), drawn(10000, 8, seed=1), 10000
    u = (e if known else 0) + drift**0.5 * drawn(n, 8, seed=2) + drawn(n, 8, seed=3) @ torch.linalg.cholesky(Σ).mT
    found = _drift(u, e if known else None, Σ)
    assert found == pytest.approx(drift, rel=0.1, abs=5e-3)


def test_drift_is_weighted_by_the_precision_of_second_moments() -> None:
    """Σ w (excess − τ²) = 0 with w = 1 / (τ² + λ)², which a plain mean does not fulfil."""
    Σ, e = covariance(8), drawn(40, 8, seed=1)
    u = e + drawn(40, 8, seed=2) + drawn(40, 8, seed=3) @ torch.linalg.cholesky(Σ).mT
    found = _drift(u, e, Σ)
    λ, V = torch.linalg.eigh(Σ)
    excess = torch.stack([((u @ v) ** 2).mean() - ((e @ v) ** 2).mean() for v in V.mT]) - λ
    assert ((excess - found) / (found + λ) ** 2).sum().abs() < 1e-9
    assert abs(found - excess.mean()) > 0.05


@pytest.mark.parametrize("known", [False, True])
def test_embeddings_are_estimated_by_the_joint_law(*, known: bool) -> None:
    """E[e' | u] by the covariance of (e', u): τ² I, and τ² I + Σ."""
    Σ, e, u = covariance(8), drawn(5, 8, seed=1), drawn(5, 8, seed=2)
    prior = e if known else torch.zeros_like(e)
    eye = torch.eye(8, dtype=torch.float64)
    expected = prior + (u - prior) @ torch.linalg.inv(0.3 * eye + Σ) @ (0.3 * eye)
    assert_close(_posterior(u, e if known else None, Σ, 0.3), expected)


def test_slots_are_placed_by_how_likely_their_mean_is(
    tiny_model: Model, photographs: Callable[[int, int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """−log N(u; e_s, τ² I + Σ / b) of every slot and row, by torch's own density, but for a constant."""
    model, pictures, given = tiny_model(**SQUARE), photographs(9, 32).double(), []

    def assemble(_: Tensor, __: object, *, places: Tensor, rounds: int) -> Tensor:
        assert rounds > 0
        given.append(places)
        return torch.arange(len(places))

    monkeypatch.setattr(row_alignment, "assemble", assemble)
    part = RowPermutation(per="batch", class_token=False)
    sent = sent_by(drifted(model, 1), pictures[:4], part)
    RowAlignment()(seen_of(model, sent, pictures[4:], part))
    (mean, Σ), e = patch_law(model, pictures[4:], 0.0), known_tokens(model)[1]
    u = sent.features[:, 1:].mean(0) - mean
    spread = Σ / 4 + _drift(u, e, Σ / 4) * torch.eye(208, dtype=torch.float64)
    expected = torch.stack([-MultivariateNormal(slot, spread, validate_args=False).log_prob(u) for slot in e])
    (places,) = given
    assert_close(places - places.mean(), expected - expected.mean(), rtol=1e-6, atol=1e-6)


def test_public_embeddings_place_what_has_no_borders(tiny_model: Model) -> None:
    """Images of noise, in an order that they share."""
    model, part = tiny_model(**SQUARE), RowPermutation(per="batch")
    assert model.vit.pos_embed is not None
    model.vit.pos_embed *= 10
    pictures = torch.rand(8, 3, 32, 32, dtype=torch.float64, generator=Generator().manual_seed(0))
    sent = sent_by(model, pictures[:4], part)
    accuracy = placement_accuracy(sent, RowAlignment()(seen_of(model, sent, pictures[4:], part)))
    assert accuracy is not None
    assert accuracy.min() == 1


def test_embeddings_that_drifted_are_taken_off(tiny_model: Model, photographs: Callable[[int, int], Tensor]) -> None:
    """Rows stay in their slots: with the public embeddings taken off in their stead, images are far worse."""
    model, pictures = tiny_model(**SQUARE), photographs(14, 32).double()
    seen = seen_of(model, sent_by(drifted(model, 3), pictures[:8]), pictures[8:])
    aligned, assigned = (psnr(attack(seen).images, pictures[:8]).mean() for attack in (RowAlignment(), PEAssignment()))
    assert aligned > assigned + 3


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_no_two_columns_can_change_places_and_be_likelier(seed: int, noise: float) -> None:
    """Under f = tr(Λ R_c) − 2 μᵀ Λ m_c computed anew, Λ with the noise and a tenth of the mean variance."""
    rows, public = drawn(30, 9, seed=seed) + 1, drawn(40, 9, seed=100 + seed) * torch.linspace(0.3, 2, 9).double() - 0.5
    key = ColumnStatistics().columns(rows, public, noise)
    μ, S0 = public.mean(0), (public - public.mean(0)).mT @ (public - public.mean(0)) / 40
    S0 = S0 + noise**2 * torch.eye(9).double()
    Λ = torch.linalg.inv(S0 + 0.1 * S0.trace() / 9 * torch.eye(9).double())

    def f(p: Tensor) -> float:
        back = rows[:, p]
        return float((Λ * (back.mT @ back / 30)).sum() - 2 * μ @ Λ @ back.mean(0))

    best = key.argsort()
    assert_close(best.sort().values, torch.arange(9))
    for i in range(9):
        for j in range(i):
            p = best.clone()
            p[[i, j]] = best[[j, i]]
            assert f(p) > f(best) - 1e-8


def test_embeddings_of_a_batch_are_estimated_by_the_law_of_its_mean(
    tiny_model: Model, photographs: Callable[[int, int], Tensor]
) -> None:
    """E[e' | u] with the covariance Σ / b of b images, taken off the rows; what is left is solved for patches."""
    model, pictures = tiny_model(**SQUARE), photographs(9, 32).double()
    sent = sent_by(drifted(model, 1), pictures[:4])
    (mean, Σ), e = patch_law(model, pictures[4:], 0.0), known_tokens(model)[1]
    rows = sent.features[:, 1:]
    u, eye = rows.mean(0) - mean, torch.eye(208, dtype=torch.float64)
    drift = _drift(u, e, Σ / 4)
    pe = e + (u - e) @ torch.linalg.inv(drift * eye + Σ / 4) * drift
    proj = model.vit.patch_embed.proj
    patches = (rows - proj.bias - pe) @ torch.linalg.pinv(proj.weight.flatten(1)).mT
    stolen = RowAlignment()(seen_of(model, sent, pictures[4:]))
    assert_close(stolen.images, model.to_images(patches), rtol=0, atol=1e-5)


def likeliest(gain: Tensor) -> list[int]:
    """Return the order of the greatest sum of gains, of all there are."""
    orders = itertools.permutations(range(len(gain)))
    return list(max(orders, key=lambda order: sum(float(gain[j, k]) for j, k in enumerate(order))))


@pytest.mark.parametrize("seed", range(5))
def test_the_first_key_is_that_of_means_and_logarithms_of_variances(seed: int) -> None:
    m, μ = drawn(2, 5, seed=seed)
    v, v0 = (2 * drawn(2, 5, seed=50 + seed)).exp()
    apart = ((m[:, None] - μ) / (μ - μ.mean()).square().mean().sqrt()) ** 2 + (v[:, None].log() - v0.log()) ** 2
    assert _by_moments(m, v.diag(), μ, v0.diag()).tolist() == likeliest(-apart)


@pytest.mark.parametrize("seed", range(5))
def test_the_key_by_products_is_the_likeliest_beside_itself(seed: int) -> None:
    """Of the products R R₀ with what it says itself of the other columns."""
    m, μ = 5 * drawn(2, 5, seed=seed)
    S, S0 = (drawn(5, 5, seed=50 + seed + i) for i in range(2))
    S, S0 = S @ S.mT, S0 @ S0.mT
    key = _by_products(m, S, μ, S0, torch.arange(5))
    assert key.tolist() == likeliest(S @ S0[key] + m[:, None] * μ)


def test_a_key_is_found_by_five_photographs(tiny_model: Model, photographs: Callable[[int, int], Tensor]) -> None:
    model, pictures = tiny_model(img_size=32, patch_size=8), photographs(14, 32).double()
    public, rows = model.embed(pictures[5:]).flatten(0, 1), model.embed(pictures[:5]).flatten(0, 1)
    for seed in range(4):
        key = torch.randperm(64, generator=Generator().manual_seed(seed))
        assert torch.equal(ColumnStatistics().columns(rows[:, key], public), key)


def test_class_tokens_among_permuted_rows_are_averaged(tiny_model: Model) -> None:
    """The mean of 64 rows with noise is eight times as near as each."""
    prefix, noise = drawn(2, 60), 0.05 * drawn(64, 5, 60, seed=1)
    features = torch.cat([prefix.expand(64, -1, -1), 3 * drawn(64, 3, 60, seed=2)], 1) + noise
    draw = Generator().manual_seed(0)
    moved = torch.stack([each[torch.randperm(5, generator=draw)] for each in features])
    public, parts = torch.zeros(1, 3, 16, 16).double(), (RowPermutation(per="image"),)
    seen = FeatureObservation(tiny_model(), moved, parts, public, frozenset())
    found = _prefix_rows(moved, prefix, seen)
    assert (found - prefix).square().mean().sqrt() < 0.05 / 6


def test_patch_statistics_are_shrunk_as_published(tiny_model: Model) -> None:
    """By Equation 23 of Chen et al. (2010), written out."""
    model = tiny_model()
    public = torch.rand(2, 3, 16, 16, dtype=torch.float64, generator=Generator().manual_seed(0))
    images = model.normalise(public)
    X = F.unfold(torch.cat([images, images.flip(3)]), 4, stride=2).mT.flatten(0, 1)
    n, p = X.shape
    S = torch.cov(X.mT, correction=0)
    above = (1 - 2 / p) * (S @ S).trace() + S.trace() ** 2
    below = (n + 1 - 2 / p) * ((S @ S).trace() - S.trace() ** 2 / p)
    ρ = float(above / below)
    assert 0.05 < ρ < 0.95
    expected = (1 - ρ) * S + ρ * S.trace() / p * torch.eye(p, dtype=torch.float64)
    assert_close(patch_statistics(model, public)[1], expected, rtol=1e-9, atol=1e-9)
