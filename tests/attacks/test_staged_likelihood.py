"""`staged-likelihood`: the gradients of the first blocks against released ones, its steps against dense algebra."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import PatchGradientAdaptive, StagedLikelihood
from privlab.attacks.published.staged_likelihood import _stages
from privlab.attacks.solvers import Likelihood, Smoothness, Stage, distance, photograph_gradients
from privlab.attacks.solvers.stages import Point, _Gram
from privlab.base import PrivlabError, draw_for
from privlab.defenses import BinaryWeights, GradientNoise, GradientPruning, GradientQuantisation, GradientSign, Mjp
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.release import observe, released_parameters
from privlab.threat import GradientDefense, Observation
from privlab.victims import VictimModel

Make = Callable[..., VictimModel]
LABELS = torch.tensor([3, 5])


def under(model: VictimModel, images: Tensor, *defense: GradientDefense) -> Observation:
    draws = [draw_for(0, str(i), "release") for i in range(len(images))]
    return observe(model, images, LABELS[: len(images)], sorted(released_parameters(model)), defense, draws)


def stage_of(seen: Observation, blocks: int) -> Stage:
    prior = Smoothness(seen.model.image_shape, photograph_gradients(seen.model))
    return Stage.of(seen.model, blocks, Likelihood.of(seen, seen.gradients), prior, 0.1)


def rows_of(model: VictimModel, images: Tensor) -> Tensor:
    return patchify(model.normalise(images), model.patch)


def behind(model: VictimModel, images: Tensor, blocks: int) -> Tensor:
    """Return the gradient of the loss behind the first blocks."""
    z = model.client_blocks(model.embed(images), blocks).detach().requires_grad_()
    logits = model.head(model.backbone(z, blocks))
    return torch.autograd.grad(F.cross_entropy(logits, LABELS[: len(images)], reduction="sum"), z)[0]


@pytest.fixture
def images(crops: Tensor) -> Tensor:
    return crops[:2].double()


# What a stage explains


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_true_image_and_gradient_give_what_was_released(tiny_model: Make, images: Tensor, blocks: int) -> None:
    """Of the embedding and these blocks, and of nothing behind them."""
    model = tiny_model()
    seen = under(model, images)
    stage = stage_of(seen, blocks)
    names = {name.removeprefix("model.vit.") for name in stage.parameters}
    assert {name.split(".")[1] for name in names if name.startswith("blocks.")} == {str(i) for i in range(blocks)}
    assert names >= {"pos_embed", "cls_token", "patch_embed.proj.bias"}
    assert not any(name.startswith(("norm.", "head")) for name in names)
    Δ = behind(model, images, blocks) / stage.size
    assert_close(stage._gradients(rows_of(model, images), Δ), stage.released, rtol=1e-9, atol=1e-12)
    assert not any(p.requires_grad for p in model.parameters())


def test_logits_depend_on_the_class_token_alone_behind_the_last_block(tiny_model: Make, images: Tensor) -> None:
    model = tiny_model()
    seen = under(model, images)
    depth = len(model.vit.blocks)
    assert stage_of(seen, 1).heard.all()
    last = stage_of(seen, depth)
    assert last.heard[:, 0].all()
    assert not last.heard[:, 1:].any()
    assert (stage_of(seen, 1).jointly, last.jointly) == (True, False)
    pooled = under(tiny_model(global_pool="avg", fc_norm=False), images)
    averaged = stage_of(pooled, depth)
    assert averaged.jointly
    assert averaged.heard[:, 1:].all()
    assert not averaged.heard[:, 0].any()


@pytest.mark.parametrize("blocks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stage_begins_with_the_gradient_that_explains_the_image(
    tiny_model: Make, images: Tensor, blocks: int
) -> None:
    model = tiny_model()
    seen = under(model, images)
    stage = stage_of(seen, blocks)
    point = stage.start(rows_of(model, images), 200)
    true = behind(model, images, blocks) / stage.size
    assert (point.Δ - true * stage.heard).norm() < 0.05 * true.norm()


def test_an_entry_that_is_missing_counts_beyond_its_interval_alone(tiny_model: Make, images: Tensor) -> None:
    seen = under(tiny_model(), images, GradientPruning(keep=0.3))
    stage = stage_of(seen, 1)
    missing = stage.edge > 0
    assert torch.equal(missing, stage.released == 0)
    off = {share: distance(share * stage.edge, stage.released, stage.edge) for share in (0.9, -1.5)}
    assert not off[0.9][missing].any()
    assert_close(off[-1.5][missing], -0.5 * stage.edge[missing])
    exact = distance(stage.released + 1, stage.released, stage.edge)
    assert_close(exact[~missing], torch.ones_like(stage.released)[~missing])


def test_an_entry_that_is_missing_at_random_is_not_bounded(tiny_model: Make, images: Tensor) -> None:
    """It may be larger than all that were released; a pruned one is smaller, though its parameter be pruned whole."""
    stage = stage_of(under(tiny_model(), images, BinaryWeights()), 1)
    missing = stage.released == 0
    assert 0.4 < missing.double().mean() < 0.6
    assert stage.edge[missing].isinf().all()
    assert not distance(1e9 * torch.ones_like(stage.released), stage.released, stage.edge)[missing].any()
    seen = under(tiny_model(), images, GradientPruning(keep=1e-3))
    whole = [name for name, g in seen.gradients.items() if not g.any()]
    edge = Likelihood.of(seen, seen.gradients).edge
    assert whole
    assert all(edge[name].isfinite().all() and edge[name].all() for name in whole)


def test_signs_are_compared_with_rows_of_any_size(tiny_model: Make, images: Tensor) -> None:
    """At the true point only entries below 0.6 of their row's root mean square are off, whatever the loss's factor."""
    model = tiny_model()
    seen = under(model, images, GradientSign())
    stage, X = stage_of(seen, 1), rows_of(model, images)
    Δ = behind(model, images, 1) / stage.size
    assert stage.signs
    assert not stage_of(under(model, images, GradientQuantisation()), 1).signs
    for factor in (1.0, 1e-3):
        true = factor * stage._gradients(X, Δ)
        here = stage._scaled(Point(X, factor * Δ, torch.ones(2)))
        off = distance(true, here.released, here.edge)
        small = torch.zeros_like(true, dtype=torch.bool)
        least = 1e-3 * true.square().mean(1).sqrt()[:, None, None]
        at = 0
        for name, parameter in stage.parameters.items():
            part = true[:, at : at + parameter.numel()]
            # A row is an output of a matrix, a token of the position embeddings, or a whole vector.
            rows = part.unflatten(1, (-1, parameter.shape[-1])) if "pos_embed" in name else part[:, None]
            if parameter.ndim in (2, 4):
                rows = part.unflatten(1, (len(parameter), -1))
            size = rows.square().mean(2, keepdim=True).sqrt().maximum(least)
            below = rows.abs() < 0.6 * size
            small[:, at : at + parameter.numel()] = below.flatten(1)
            at += parameter.numel()
        known = here.released != 0
        assert torch.equal(off != 0, small & known)
        assert (here.weight[~known] == 0).all()


def test_entries_weigh_by_the_error_that_the_defense_states(tiny_model: Make, images: Tensor) -> None:
    """Exact ones by a hundredth of their root mean square; the gradient of the embedding is taken without noise."""
    noisy = stage_of(under(tiny_model(), images, GradientNoise(multiplier=0.25)), 1)
    assert_close(noisy.weight, torch.full_like(noisy.weight, 4))
    exact = stage_of(under(tiny_model(), images), 1)
    rms = exact.released.square().mean(1).sqrt()
    assert_close(exact.weight, (100 / rms)[:, None].expand_as(exact.weight))
    seen = under(tiny_model(), images, GradientNoise(multiplier=0.01))
    pe = seen.gradients["pos_embed"].flatten(1).square().mean(1)
    assert_close(stage_of(seen, 1).size.flatten(), 0.3 * (pe - 0.01**2).sqrt())


# A step


@pytest.mark.slow
def test_steps_lower_the_objective_and_find_the_image(tiny_model: Make, images: Tensor) -> None:
    """From an image with noise of 20 dB, by exact gradients; each image by itself."""
    model = tiny_model()
    X = rows_of(model, images)
    stage = stage_of(under(model, images), 1)
    noise = torch.randn(X.shape, generator=Generator().manual_seed(0), dtype=X.dtype)
    point = stage.start(X + 0.2 * noise, 30)
    misfits = []
    for number in range(4):
        off = distance(stage._gradients(point.X, point.Δ), stage.released, stage.edge)
        misfits.append((stage.weight * off).square().sum(1))
        point = stage.step(point, 40, draw_for(0, "", "probes", number))
    assert all((later < before).all() for before, later in pairwise(misfits))
    before, after = (psnr(model.to_images(each), images) for each in (X + 0.2 * noise, point.X))
    assert (after > before + 4).all()


def test_a_step_that_finds_nothing_better_moves_nothing_and_raises_the_damping(
    tiny_model: Make, images: Tensor
) -> None:
    model = tiny_model()
    stage = stage_of(under(model, images, GradientNoise(multiplier=1e-3)), 1)
    point = stage.start(rows_of(model, images), 10)
    object.__setattr__(stage, "_objective", lambda X, Δ, T: (X - point.X).square().sum((1, 2)))
    again = stage.step(point, 5, draw_for(0, "", "probes", 0))
    assert torch.equal(again.X, point.X)
    assert torch.equal(again.Δ, point.Δ)
    assert_close(again.damping, 6 * point.damping)


def test_the_preconditioner_is_exact_where_the_curvature_is_a_product() -> None:
    """(C ⊗ E / mean + (damping + 1/1000) mean + more)⁻¹, against a dense solution."""
    draw = Generator().manual_seed(0)
    R = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    Q = torch.randn(5, 2, 3, 4, generator=draw, dtype=torch.float64)
    gram = _Gram.of(Q)
    damping, more = torch.tensor([0.1, 2.0]).double(), torch.tensor([0.0, 3.0]).double()
    found = gram.solve(R, damping, more)
    for i in range(2):
        rows = sum(Q[p, i] @ Q[p, i].T for p in range(5)) / 20
        columns = sum(Q[p, i].T @ Q[p, i] for p in range(5)) / 15
        mean = rows.trace() / 3
        assert_close(columns.trace() / 4, mean)
        whole = torch.kron(rows, columns) / mean
        whole += ((damping[i] + 1e-3) * mean + more[i]) * torch.eye(12, dtype=torch.float64)
        assert_close(found[i].flatten(), torch.linalg.solve(whole, R[i].flatten()))


# The attack


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defense", "gain"),
    [(GradientNoise(multiplier=1e-3), 3), (GradientQuantisation(), 3), (GradientSign(), 1.5)],
    ids=str,
)
def test_it_comes_nearer_than_its_start(
    tiny_model: Make, images: Tensor, defense: GradientDefense, gain: float
) -> None:
    seen = under(tiny_model(), images, defense)
    start = psnr(PatchGradientAdaptive()(seen), images)
    made = StagedLikelihood(rounds=3, last_rounds=3, steps=30)(seen)
    assert (psnr(made, images) > start + gain).all()
    assert made.min() >= 0
    assert made.max() <= 1


@pytest.mark.slow
def test_images_are_found_each_by_itself(tiny_model: Make, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory holds one image at a time the result is the same."""
    seen = under(tiny_model(), images, GradientPruning(keep=0.5))
    short = StagedLikelihood(rounds=1, last_rounds=1, steps=5)
    both = short(seen)
    monkeypatch.setattr("privlab.attacks.published.staged_likelihood._MOST_ENTRIES", 1)
    assert_close(short(seen), both, rtol=0, atol=1e-6)


def test_stages_double_up_to_all_blocks() -> None:
    assert [_stages(depth) for depth in (1, 2, 3, 4, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8, 12]]


# What it refuses


@pytest.mark.parametrize("given", [{"rounds": -1}, {"steps": 0}, {"epsilon": 0.0}])
def test_it_refuses_options_out_of_range(given: dict[str, float]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(PrivlabError, match=rf"{name} of staged-likelihood must be .*\. Found {value}\."):
        StagedLikelihood(**given)  # pyright: ignore[reportArgumentType]


def test_it_refuses_a_start_that_there_is_not() -> None:
    with pytest.raises(PrivlabError, match=r"start of staged-likelihood"):
        StagedLikelihood(start="grey")


def test_a_trained_start_needs_images_of_the_adversarys_own(tiny_model: Make, images: Tensor) -> None:
    seen = under(tiny_model(), images, GradientPruning(keep=0.5))
    with pytest.raises(PrivlabError, match="auxiliary_images"):
        StagedLikelihood(start="learning-to-invert")(seen)


def test_masked_position_embeddings_are_beyond_it(tiny_model: Make, images: Tensor) -> None:
    model, defense = tiny_model(), (Mjp(gamma=0.5), GradientPruning(keep=0.5))
    seen = observe(model, images, LABELS, sorted(released_parameters(model)), defense, [Generator(), Generator()])
    assert StagedLikelihood().beyond(seen) == "position embeddings are masked"
    assert StagedLikelihood().beyond(under(model, images, GradientPruning(keep=0.5))) is None
