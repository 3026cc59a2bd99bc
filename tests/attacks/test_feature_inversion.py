"""White-box inversion of the embedding: closed forms against exact answers, Gaussian and photographic."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks.features.feature_inversion import FeatureOptimisation, LeastSquares
from privlab.attacks.solvers import invert_rows, patch_statistics
from privlab.attacks.solvers.embedding_inverse import MOST_IMAGES
from privlab.base import PrivlabError
from privlab.defenses import GaussianNoise
from privlab.evaluation import batches
from privlab.images import open_images
from privlab.metrics import placement_accuracy, psnr
from privlab.release import observe_features, send
from privlab.threat import Capability, Draws, FeatureObservation, Sent, Stack
from privlab.victims import VictimModel, victim

Make = Callable[..., VictimModel]
Photographs = Callable[[int, int], Tensor]
Parts = tuple


def rows_of(model: VictimModel, images: Tensor) -> Tensor:
    """Return W x + β."""
    return model.vit.patch_embed.proj(model.normalise(images)).flatten(2).mT


def seen_of(
    model: VictimModel, images: Tensor, public: Tensor, defense: Parts = (), seed: int = 0
) -> tuple[FeatureObservation, Sent]:
    stack, generators = Stack(defense), [Generator().manual_seed(seed + i) for i in range(len(images) + 2)]
    draws = Draws(images=generators[2:], batch=generators[0], model=generators[1])
    sent = send(model, stack.feed(images, model.patch, draws.images), stack, draws)
    return observe_features(model, sent, stack, public), sent


@pytest.mark.parametrize("prior", ["ridge", "wiener"])
def test_a_square_projection_is_inverted_exactly(tiny_model: Make, photographs: Photographs, prior: str) -> None:
    """D = K = 48, as in ViT-B/16, whatever is assumed of patches."""
    model = tiny_model(embed_dim=48)
    private, public = photographs(6, 16).double().split(3)
    seen, sent = seen_of(model, private, public)
    reconstruction = LeastSquares(prior)(seen)
    assert psnr(reconstruction.images, private).min() > 100
    accuracy = placement_accuracy(sent, reconstruction)
    assert accuracy is not None
    assert accuracy.tolist() == [1, 1, 1]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), noise=st.sampled_from([0.1, 1.0]))
def test_wiener_is_the_mean_of_a_gaussian_given_its_rows(tiny_model: Make, seed: int, noise: float) -> None:
    """E[x | y] = μ + S Wᵀ (W S Wᵀ + σ² I)⁻¹ (y − β − W μ), by the covariance of the joint (x, y)."""
    model = tiny_model(embed_dim=32)
    rng = Generator().manual_seed(seed)
    public = torch.rand(5, 3, 16, 16, generator=rng, dtype=torch.float64)
    y = torch.randn(2, 16, 32, generator=rng, dtype=torch.float64)
    μ, S = patch_statistics(model, public)
    proj = model.vit.patch_embed.proj
    W = proj.weight.flatten(1)
    joint = W @ S @ W.mT + noise**2 * torch.eye(32, dtype=torch.float64)
    naive = μ + (S @ W.mT @ torch.linalg.inv(joint) @ (y - proj.bias - W @ μ).mT).mT
    assert_close(invert_rows(model, y, public, noise=noise), naive, atol=1e-7, rtol=1e-7)


def test_wiener_beats_ridge_on_photographs(tiny_model: Make, photographs: Photographs) -> None:
    """A thin projection keeps 16 of 48 dimensions; public photographs, none of them private, tell of the others."""
    model = tiny_model(embed_dim=32)
    private, public = photographs(6, 64).double().unfold(2, 16, 16).unfold(3, 16, 16).split(3)
    private, public = (x.permute(0, 2, 3, 1, 4, 5).flatten(0, 2) for x in (private, public))
    seen, _ = seen_of(model, private, public)
    ridge, wiener = (psnr(LeastSquares(prior)(seen).images, private).mean() for prior in ("ridge", "wiener"))
    assert wiener > ridge + 5


def test_knowing_the_noise_helps_who_may_know_it(tiny_model: Make, crops: Tensor) -> None:
    """Two noises of 0.3 and 0.4 are one of 0.5."""
    model, private, public = tiny_model(embed_dim=64), crops[:32].double(), crops[32:].double()
    seen, _ = seen_of(model, private, public, (GaussianNoise(0.3), GaussianNoise(0.4)))
    blind = replace(seen, grants=seen.grants - {Capability.KNOWS_DEFENSE})
    aware, unaware = (LeastSquares()(s).images for s in (seen, blind))
    assert psnr(aware, private).mean() > psnr(unaware, private).mean() + 5
    rows = seen.features[:, 1:] - model.vit.pos_embed[:, 1:]
    assert_close(aware, model.to_images(invert_rows(model, rows, public, noise=0.5)))


def test_patch_statistics_are_those_of_all_windows_and_their_mirror_images(tiny_model: Make, crops: Tensor) -> None:
    model, public = tiny_model(), crops[:3].double()
    windows = [
        model.normalise(image[None])[0, :, y : y + 4, x : x + 4].flatten()
        for image in (*public, *public.flip(3))
        for y in range(0, 13, 2)
        for x in range(0, 13, 2)
    ]
    X = torch.stack(windows)
    μ, S = patch_statistics(model, public)
    assert_close(μ, X.mean(0))
    off = S - S.diagonal().diag()
    naive = torch.cov(X.mT, correction=0)
    shrunk = off[0, 1] / naive[0, 1]
    assert 0.9 < shrunk <= 1
    assert_close(off, (naive - naive.diagonal().diag()) * shrunk)
    assert_close(S.trace(), naive.trace(), rtol=1e-9, atol=0)
    mirror = torch.arange(48).view(3, 4, 4).flip(2).flatten()
    assert_close(S[mirror][:, mirror], S)


@pytest.mark.parametrize("public", [torch.full((1, 3, 16, 16), 0.5), torch.rand(1, 3, 16, 16, generator=Generator())])
def test_patch_statistics_have_full_rank_for_any_images(tiny_model: Make, public: Tensor) -> None:
    """One grey image has no variance at all, and one image fewer windows than a patch has values."""
    for model in (tiny_model(), tiny_model().float()):
        _, S = patch_statistics(model, public)
        torch.linalg.cholesky(S)


def test_patch_statistics_of_many_windows_have_full_rank_in_single_precision(tiny_model: Make) -> None:
    """Of flat images S has rank one, and the more windows there are, the less is added to it."""
    grey = torch.linspace(0, 1, MOST_IMAGES)[:, None, None, None].expand(-1, 3, 64, 64)
    S = patch_statistics(tiny_model(img_size=64, patch_size=2).float(), grey)[1].double()
    assert torch.linalg.cholesky_ex(S).info == 0


def test_patch_statistics_of_many_images_are_those_of_the_first(tiny_model: Make, crops: Tensor) -> None:
    model = tiny_model()
    assert_close(patch_statistics(model, crops), patch_statistics(model, crops[:MOST_IMAGES]))


def test_what_is_kept_of_public_images_is_of_them_as_they_are(tiny_model: Make, crops: Tensor) -> None:
    """Batch after batch is attacked with the same ones; others, and the same after a change in place, are others."""
    model, rows = tiny_model(embed_dim=32), torch.randn(2, 16, 32, generator=Generator().manual_seed(0)).double()
    one, other = crops[:4].double(), crops[4:8].double()
    before = invert_rows(model, rows, one)
    assert torch.equal(invert_rows(model, rows, one), before)
    assert not torch.equal(invert_rows(model, rows, other), before)
    one.copy_(other)
    assert torch.equal(invert_rows(model, rows, one), invert_rows(model, rows, other))


@pytest.mark.slow
def test_neither_victim_nor_public_images_outlive_an_attack(tiny_model: Make, crops: Tensor) -> None:
    model, public = tiny_model(embed_dim=32), crops[:4].double()
    invert_rows(model, torch.zeros(2, 16, 32, dtype=torch.float64), public)
    left = ref(model), ref(public)
    del model, public
    gc.collect()
    assert [one() for one in left] == [None, None]


def test_bad_priors_are_refused(tiny_model: Make) -> None:
    model = tiny_model()
    rows, none = torch.zeros(1, 16, 64, dtype=torch.float64), torch.zeros(0, 3, 16, 16)
    with pytest.raises(PrivlabError, match="wiener prior needs public images"):
        invert_rows(model, rows, none)
    with pytest.raises(PrivlabError, match="'winer'"):
        invert_rows(model, rows, none, prior="winer")
    with pytest.raises(PrivlabError, match="Unknown prior"):
        LeastSquares("flat")


def test_optimisation_beats_the_linear_inversion_that_it_starts_from(tiny_model: Make, crops: Tensor) -> None:
    """What W does not see is filled in smoothly, and pixels stay in range."""
    model, private = tiny_model(embed_dim=32), crops[:8].double()
    seen, _ = seen_of(model, private, crops[8:].double())
    start, end = FeatureOptimisation(steps=0)(seen).images, FeatureOptimisation()(seen).images
    misfits = [(rows_of(model, x) - rows_of(model, private)).square().mean() for x in (start, end)]
    assert misfits[1] < 0.1 * misfits[0]
    assert psnr(end, private).mean() > psnr(start, private).mean() + 3
    assert end.min() >= 0
    assert end.max() <= 1


@pytest.mark.parametrize(("width", "noise", "least"), [(32, 0.0, 30), (64, 0.0, 52), (32, 1.0, 22.5)])
def test_the_defaults_of_the_optimisation_suit_what_is_open_what_is_known_and_noise(
    width: int, noise: float, least: float, tiny_model: Make, crops: Tensor
) -> None:
    """With a tenth or ten times of an option one of these is worse by decibels.

    Of what W leaves open total variation says much, of what W determines nothing, and of noise as much as there is.
    """
    model, private = tiny_model(embed_dim=width), crops[::48].double()
    seen, _ = seen_of(model, private, crops[1:2].double(), (GaussianNoise(noise),) if noise else ())
    assert psnr(FeatureOptimisation()(seen).images, private).mean() > least


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("channels", [1, 3])
def test_optimisation_takes_the_steps_of_its_objective(
    noise: float, channels: int, tiny_vit: Callable[..., VisionTransformer], crops: Tensor
) -> None:
    """The slopes are those that autograd finds of the objective as it is written."""
    vit = tiny_vit(embed_dim=32, in_chans=channels)
    model = VictimModel(vit, (0.4, 0.5, 0.6)[:channels], (0.2, 0.25, 0.3)[:channels]).double().requires_grad_(False)
    draw = Generator().manual_seed(0)  # no two pixels are alike, at an end or elsewhere: |x| has no slope at zero
    private = 0.4 + 0.2 * torch.rand(3, channels, 16, 16, generator=draw, dtype=torch.float64)
    seen, _ = seen_of(model, private, crops[8:, :channels].double(), (GaussianNoise(noise),) if noise else ())
    attack = FeatureOptimisation(steps=7, tv=0.02, tv_noise=300.0)
    u = replace(attack, steps=0)(seen).images.logit().requires_grad_()
    adam = torch.optim.Adam([u], lr=attack.learning_rate)
    for _ in range(attack.steps):
        x = u.sigmoid()
        misfit = (model.embed(x) - seen.features)[:, 1:]
        across, down = x[..., 1:] - x[..., :-1], x[:, :, 1:] - x[:, :, :-1]
        variation = across.abs().mean((1, 2, 3)) + down.abs().mean((1, 2, 3))
        adam.zero_grad()
        (misfit.square().mean((1, 2)) + (0.02 + 300.0 * noise**2) * variation).sum().backward()
        adam.step()
    assert_close(attack(seen).images, u.detach().sigmoid())


def test_optimisation_solves_images_one_by_one(tiny_model: Make, crops: Tensor) -> None:
    """Neighbours in a batch change nothing."""
    model, attack = tiny_model(), FeatureOptimisation(steps=20)
    seen, _ = seen_of(model, crops[:3].double(), crops[8:].double())
    alone = attack(replace(seen, features=seen.features[1:2])).images
    assert_close(attack(seen).images[1:2], alone)


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"tv": float("nan")}, {"learning_rate": -0.1}])
def test_impossible_optimisations_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PrivlabError, match=f"{next(iter(wrong))} of feature-optimisation must be"):
        FeatureOptimisation(**wrong)  # pyright: ignore[reportArgumentType]


def test_trained_embeddings_of_photographs_are_inverted(shared: Callable[[str], Path]) -> None:
    """ViT-Ti keeps 192 of 768 dimensions of a patch: 32 dB by Wiener's estimate, 21 dB by least norm."""
    vit_ti = victim("vit_ti", weights=shared("weights/vit_tiny_patch16_224.safetensors"))
    files = sorted(shared("data/imagenet_samples").glob("*.JPEG"))[::62]
    images = next(batches(open_images(files), vit_ti.preprocessing, 9)).images
    seen, _ = seen_of(vit_ti.model, images[:5], images[5:])
    wiener, ridge = (psnr(LeastSquares(prior)(seen).images, images[:5]).mean() for prior in ("wiener", "ridge"))
    assert wiener > 28
    assert 17 < ridge < wiener - 6
