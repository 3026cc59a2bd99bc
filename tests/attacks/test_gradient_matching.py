"""Gradient matching on small ViTs: what it recovers, what it leaves exact, and how it goes on after an interrupt."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from privlab.attacks import GradientMatching, MjpSubspace, PatchGradient
from privlab.attacks.breaching.wrapper import Classifier, contain_breaching
from privlab.attacks.gradients.gradient_matching import Match, mismatch
from privlab.attacks.solvers import OPTIMISERS, Lbfgs, photograph_gradients
from privlab.base import PrivlabError, PrivlabWarning, configure, draw_for, read_options
from privlab.cli.common import progress_bar
from privlab.defenses import GradientPruning, Mjp
from privlab.metrics import psnr, psnr_region
from privlab.patches import patchify, slots_to_pixels
from privlab.release import observe, released_gradients, released_parameters
from privlab.threat import Defense, Feed, GradientDefense, Observation, Reconstruction, Stack
from privlab.training import TrainingProgress, listening, tell
from privlab.victims import VictimModel

pytestmark = pytest.mark.usefixtures("cache")

SMALL = {"img_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
"""N = 4 patches of K = 48 values."""

ONE = SMALL | {"img_size": 4}
"""One patch: the objective has no other minima in the way."""


@pytest.fixture
def small(tiny_model: Callable[..., VictimModel]) -> VictimModel:
    return tiny_model(**SMALL)


def pictures(n: int, side: int = 8) -> Tensor:
    return torch.rand(n, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def seen_of(
    model: VictimModel, images: Tensor, defense: Sequence[Defense | GradientDefense] = (), B: int = 1
) -> tuple[Feed, Observation]:
    """Return what clients with these defenses feed and release: label i for image i."""
    feed, parameters = Feed.undefended(images, model.patch), released_parameters(model)
    for part in defense:
        if not isinstance(part, GradientDefense):
            feed = part(images, model.patch, [draw_for(0, str(i), "defense") for i in range(len(images))])
    draws = [draw_for(0, str(i), "release") for i in range(len(images) // B)]
    return feed, observe(model, feed, torch.arange(len(images)), parameters, defense, draws, B)


def steps_of(attack: GradientMatching, seen: Observation) -> tuple[Reconstruction, list[TrainingProgress]]:
    heard: list[TrainingProgress] = []
    with listening(heard.append):
        return attack(seen), heard


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["cosine", "l2"])
@pytest.mark.parametrize("start", ["noise", "grey"])
def test_an_image_comes_back_from_nothing(objective: str, start: str, tiny_model: Callable[..., VictimModel]) -> None:
    """One patch exactly (148 dB and more)."""
    feed, seen = seen_of(tiny_model(**ONE), pictures(2, 4))
    attack = GradientMatching(objective=objective, start=start, steps=150)
    assert psnr(attack(seen).images, feed.images).min() > 100
    assert psnr(replace(attack, steps=3)(seen).images, feed.images).max() < 50


@pytest.mark.slow
def test_an_image_comes_back_with_the_default_options(tiny_model: Callable[..., VictimModel]) -> None:
    feed, seen = seen_of(tiny_model(**ONE), pictures(2, 4))
    assert psnr(GradientMatching(start="grey")(seen).images, feed.images).min() > 100


def test_no_factor_of_the_release_matters_to_the_default_objective(small: VictimModel) -> None:
    """As of a server that does not know by how much a client has clipped."""
    _, seen = seen_of(small, pictures(2))
    half = replace(seen, gradients={name: g / 2 for name, g in seen.gradients.items()})
    attack = GradientMatching(start="grey", steps=6)
    assert_close(attack(half).images, attack(seen).images)


@pytest.mark.slow
def test_a_photograph_comes_back_from_grey(crops: Tensor, tiny_model: Callable[..., VictimModel]) -> None:
    """Four patches of 2 × 2 pixels (53 and 62 dB)."""
    feed, seen = seen_of(tiny_model(**ONE, patch_size=2), crops[[3, 100], :, 4:8, 4:8].double())
    assert psnr(GradientMatching(start="grey", steps=200)(seen).images, feed.images).min() > 45


@pytest.mark.slow
def test_adam_goes_there_too(tiny_model: Callable[..., VictimModel]) -> None:
    feed, seen = seen_of(tiny_model(**ONE), pictures(2, 4))
    attack = GradientMatching(optimiser="adam", start="grey", steps=150)
    before, after = (psnr(each(seen).images, feed.images) for each in (replace(attack, steps=0), attack))
    assert (after > before + 5).all()


@pytest.mark.slow
def test_images_of_one_gradient_come_apart(tiny_model: Callable[..., VictimModel]) -> None:
    feed, seen = seen_of(tiny_model(**ONE), pictures(2, 4), B=2)
    reconstruction = GradientMatching(steps=250, restarts=2)(seen).images
    errors = (reconstruction[:, None] - feed.images).square().mean((2, 3, 4))
    assert sorted(errors.argmin(1).tolist()) == [0, 1]
    assert errors.amin(1).max() < 1e-5


def test_lbfgs_never_goes_up_and_says_how_long_it_takes(small: VictimModel) -> None:
    _, seen = seen_of(small, pictures(2))
    _, heard = steps_of(GradientMatching(start="grey", steps=12, tv=1e-3), seen)
    losses = [now.loss for now in heard]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    assert [(now.step, now.steps) for now in heard] == [(i, 12) for i in range(1, 13)]
    assert all(now.seconds_left >= 0 for now in heard)
    assert heard[-1].seconds_left == 0


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_an_exact_start_is_not_left(optimiser: str, small: VictimModel) -> None:
    feed, seen = seen_of(small, pictures(2))
    exact = PatchGradient()(seen)
    reconstruction = GradientMatching(optimiser=optimiser, start="patch-gradient", steps=15)(seen).images
    assert psnr(exact, feed.images).min() > 100
    assert (psnr(reconstruction, feed.images) > psnr(exact, feed.images) - 1).all()
    assert_close(GradientMatching(steps=0)(seen).images, exact)  # it is what "auto" starts from


@pytest.mark.parametrize("options", [{}, {"global_pool": "avg"}, {"class_token": False, "global_pool": "avg"}])
def test_the_cosine_is_breachings(tiny_model: Callable[..., VictimModel], options: dict[str, Any]) -> None:
    """Value and slope, at another image than the client's; both optimise normalised pixels."""
    model = tiny_model(unknown=False, **SMALL, **options)
    _, seen = seen_of(model, pictures(1))
    match = Match.of(seen, "cosine", 0.0)
    candidate = model.normalise(pictures(2)[1:])
    with contain_breaching():
        from breaching.attacks.auxiliaries.objectives import CosineSimilarity
        from omegaconf import OmegaConf

        theirs = CosineSimilarity()
        theirs.initialize(nn.CrossEntropyLoss(), OmegaConf.create({"mixed_precision": False}))
        classifier = Classifier(match.model.vit).requires_grad_(True)
        x = candidate.clone().requires_grad_()
        shared = [seen.gradients[name][0] for name, _ in classifier.model.named_parameters()]
        value, _ = theirs(classifier, shared, x, torch.tensor([0]))
        (slope,) = torch.autograd.grad(value.sum(), x)
        match.model.requires_grad_(False)
    points = patchify(candidate, model.patch).flatten(1)
    ours, our_slope = match(points, torch.tensor([0]))
    assert_close(ours, value.detach())
    assert_close(our_slope, patchify(slope, model.patch).flatten(1))


def test_mismatch_is_what_it_says() -> None:
    draw = torch.Generator().manual_seed(0)
    g, G = ({n: torch.randn(2, *s, generator=draw).double() for n, s in (("a", (3, 2)), ("b", (4,)))} for _ in "12")
    flat_g, flat_G = (torch.cat([t.flatten(1) for t in each.values()], 1) for each in (g, G))
    norm = flat_G.norm(dim=1)
    target = {name: t / norm.view(-1, *[1] * (t.ndim - 1)) for name, t in G.items()}
    assert_close(mismatch(g, target), 1 - nn.functional.cosine_similarity(flat_g, flat_G))
    assert_close(mismatch(g, target, norm), (flat_g - flat_G).square().sum(1) / (2 * norm**2))


def test_the_prior_is_total_variation_in_standard_deviations_of_photographs(small: VictimModel) -> None:
    """The weight times the mean over pixels of √(0.07² + δᵀ Γ⁻¹ δ), across and down."""
    _, seen = seen_of(small, pictures(1))
    image = small.normalise(pictures(2)[1:])
    points, one = patchify(image, small.patch).flatten(1), torch.tensor([0])
    without, smooth = (Match.of(seen, "cosine", tv)(points, one)[0] for tv in (0.0, 0.5))
    precision = torch.linalg.inv(photograph_gradients(small))
    steps = torch.cat([image.diff(dim=dim).transpose(0, 1).flatten(1) for dim in (3, 2)], 1)
    total = (0.07**2 + (steps * (precision @ steps)).sum(0)).sqrt().sum()
    assert_close(smooth - without, 0.5 * total.view(1) / 64)


@pytest.mark.parametrize("masked_pe", ["unknown", "none", "slot"])
@pytest.mark.parametrize("objective", ["cosine", "l2"])
def test_the_fed_image_explains_its_gradient(
    masked_pe: str, objective: str, tiny_model: Callable[..., VictimModel]
) -> None:
    """So the search feeds what the client fed: mask and embeddings are those that the gradient shows."""
    model, defense = tiny_model(), Mjp(gamma=0.5, masked_pe=masked_pe)
    feed, seen = seen_of(model, pictures(2, 16), [defense])
    match = Match.of(seen, objective, 0.0)
    if feed.masked_pe is None:
        assert match.masked is None
    else:
        assert torch.equal(torch.as_tensor(match.masked), feed.masked_pe)
    X = patchify(model.normalise(feed.images), model.patch)[:, None]
    points = match.coordinates(X)
    assert_close(match.patches(points, torch.arange(2)), X, atol=1e-5, rtol=1e-5)
    value, _ = match(points, torch.arange(2))
    blank, _ = match(match.coordinates(torch.zeros_like(X)), torch.arange(2))
    assert (value < 1e-10).all()
    assert (blank > 1e-3).all()


@pytest.mark.parametrize("per", ["batch", "image"])
def test_a_mask_that_images_share_is_fed(per: str, tiny_model: Callable[..., VictimModel]) -> None:
    """With it the fed images explain their gradient; of masks of their own the gradient does not tell."""
    model, defense = tiny_model(), (Mjp(gamma=0.5, per=per),)
    feed = Stack(defense).feed(pictures(2, 16), 4, [torch.Generator().manual_seed(i) for i in range(2)], 2)
    seen = observe(model, feed, torch.arange(2), sorted(released_parameters(model)), defense, (), 2)
    if per == "image":
        with pytest.warns(PrivlabWarning, match="E_unk"):
            match = Match.of(seen, "cosine", 0.0)
        assert match.masked is None
    else:
        match = Match.of(seen, "cosine", 0.0)
        assert torch.equal(torch.as_tensor(match.masked), feed.moved)
        assert match.span is None  # ∂ℓ/∂E_pos is a sum: it spans no image's own rows
    X = patchify(model.normalise(feed.images), model.patch)[None]
    explained = [match(match.coordinates(X[:, [i, 1 - i]]), torch.zeros(1).long())[0] for i in range(2)]
    assert (min(map(float, explained)) < 1e-10) == (per == "batch")


@pytest.mark.slow
def test_what_is_known_under_mjp_stays_exact_and_the_rest_gets_better(
    crops: Tensor, tiny_model: Callable[..., VictimModel]
) -> None:
    model = tiny_model()
    feed, seen = seen_of(model, crops[[3, 100]].double(), [Mjp()])
    match = Match.of(seen, "cosine", 0.0)
    assert match.span is not None
    known, Y = match.span
    X = patchify(model.normalise(feed.images), model.patch)
    anywhere = match.patches(torch.randn(2, known.shape[1] * Y.shape[1]).double(), torch.arange(2))[:, 0]
    open_ = ~feed.moved
    assert_close((anywhere - anywhere @ Y.mT @ Y)[open_], (X - X @ Y.mT @ Y)[open_], atol=1e-5, rtol=1e-5)
    reconstruction = GradientMatching(start="mjp-subspace", steps=40)(seen)
    assert reconstruction.loose is not None
    assert torch.equal(reconstruction.loose, feed.moved)
    region = ~slots_to_pixels(feed.moved, model.grid, model.patch)
    before, after = (psnr_region(each, feed.images, region) for each in (MjpSubspace()(seen), reconstruction.images))
    assert (after > before).all()


def test_pruned_entries_are_missing_not_zero(small: VictimModel) -> None:
    feed, seen = seen_of(small, pictures(2), [GradientPruning(keep=0.3)])
    match = Match.of(seen, "l2", 0.0)
    points = match.coordinates(patchify(small.normalise(feed.images), small.patch)[:, None])
    assert (match(points, torch.arange(2))[0] < 1e-20).all()
    blind = replace(match, compared=None)
    assert (blind(points, torch.arange(2))[0] > 1e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_an_interrupted_search_goes_on_to_the_same_end(
    optimiser: str, small: VictimModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, seen = seen_of(small, pictures(2))
    attack = GradientMatching(optimiser=optimiser, start="noise", steps=14, restarts=2)
    whole, heard = steps_of(attack, seen)
    assert len(heard) == 14
    assert not any(cache.rglob("*.safetensors"))  # nothing is left of a search that is over

    def stop(now: TrainingProgress) -> None:
        if now.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), listening(stop):
        attack(seen)
    assert len([*cache.rglob("*.safetensors")]) == 1
    _, others = steps_of(replace(attack, seed=1), seen)  # other options: another search
    assert others[0].step == 1
    resumed, rest = steps_of(attack, seen)
    assert [now.step for now in rest] == list(range(7, 15))
    assert torch.equal(resumed.images, whole.images)
    assert not any(cache.rglob("*.safetensors"))


def test_a_kill_loses_no_more_than_the_last_seconds(
    small: VictimModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlab.attacks.solvers.descent._SAVE_EVERY", 0.0)
    _, seen = seen_of(small, pictures(1))
    kept = []

    def look(now: TrainingProgress) -> None:
        kept.extend(int(load_file(path)["done"]) for path in cache.rglob("*.safetensors"))

    with listening(look):
        GradientMatching(start="grey", steps=5)(seen)
    assert kept == [1, 2, 3, 4]


def test_a_damaged_state_is_passed_over(small: VictimModel, cache: Path) -> None:
    _, seen = seen_of(small, pictures(1))
    attack = GradientMatching(start="grey", steps=3)

    def stop(now: TrainingProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), listening(stop):
        attack(seen)
    (path,) = cache.rglob("*.safetensors")
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    _, heard = steps_of(attack, seen)
    assert [now.step for now in heard] == [1, 2, 3]


def test_a_cache_that_cannot_be_written_is_no_failure(
    small: VictimModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PRIVLAB_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("privlab.attacks.solvers.descent._SAVE_EVERY", 0.0)
    _, seen = seen_of(small, pictures(1))
    with pytest.warns(PrivlabWarning, match="interrupted"):
        assert GradientMatching(start="grey", steps=2)(seen).images.shape == (1, 3, 8, 8)


def test_restarts_only_help(small: VictimModel) -> None:
    _, seen = seen_of(small, pictures(2))
    match, points = Match.of(seen, "cosine", 0.0), []
    for restarts in (1, 3):
        images = GradientMatching(start="grey", steps=8, restarts=restarts)(seen).images
        points.append(match.coordinates(patchify(small.normalise(images), small.patch)[:, None]))
    one, three = (match(each, torch.arange(2))[0] for each in points)
    assert (three <= one).all()


def test_releases_do_not_meet(small: VictimModel) -> None:
    _, seen = seen_of(small, pictures(2))
    attack = GradientMatching(start="noise", steps=8)
    alone = replace(seen, gradients={name: g[1:] for name, g in seen.gradients.items()})
    assert_close(attack(alone).images[0], attack(seen).images[1])


def test_the_victim_is_left_as_it_is(small: VictimModel) -> None:
    _, seen = seen_of(small, pictures(1))
    before = {name: value.clone() for name, value in small.state_dict().items()}
    fused = [getattr(module, "fused_attn", None) for module in small.modules()]
    GradientMatching(steps=2)(seen)
    assert [getattr(module, "fused_attn", None) for module in small.modules()] == fused
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())


def test_gradients_that_can_be_derived_are_the_released_ones(small: VictimModel) -> None:
    match = Match.of(seen_of(small, pictures(2))[1], "cosine", 0.0)
    feed = Feed.undefended(pictures(2), small.patch)
    names = released_parameters(small)
    plain = released_gradients(small, feed, torch.arange(2), names)
    for name, g in released_gradients(match.model, feed, torch.arange(2), names, create_graph=True).items():
        assert_close(g.detach(), plain[name])


def test_lbfgs_solves_each_problem_by_itself() -> None:
    """Quadratics of different condition: the least, the same alone, and no step once there."""
    curvature = torch.tensor([[1.0, 10.0, 100.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]).double()

    def quadratic(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        off = x - 3.0
        return (curvature[rows] * off.square()).sum(1) / 2, curvature[rows] * off

    def solved(rows: list[int]) -> Tensor:
        state = Lbfgs(0.1).start(torch.zeros(len(rows), 3).double(), lambda x, i: quadratic(x, torch.tensor(rows)[i]))
        for step in range(60):
            state = Lbfgs(0.1)(state, lambda x, i: quadratic(x, torch.tensor(rows)[i]), step, 60)
        assert Lbfgs(0.1).done(state)
        return state["best"]

    together = solved([0, 1, 2])
    assert_close(together[:2], torch.full((2, 3), 3.0).double())
    assert not together[2].any()
    assert_close(solved([0]), together[:1])


@pytest.mark.parametrize("remembered", [1, 4])
def test_lbfgs_steps_by_the_dense_inverse_that_its_pairs_make(remembered: int) -> None:
    """H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ, the oldest pair first, from sᵀy / yᵀy of the newest."""
    draw = torch.Generator().manual_seed(0)
    moves, turns = torch.randn(2, remembered, 3, 7, dtype=torch.float64, generator=draw)
    turns = turns * (moves * turns).sum(2, keepdim=True).sign()  # of positive curvature
    slope, eye = torch.randn(3, 7, dtype=torch.float64, generator=draw), torch.eye(7, dtype=torch.float64)
    found = Lbfgs(0.1)._direction(slope, moves, turns)
    for i in range(3):
        H = eye * (moves[0, i] @ turns[0, i]) / turns[0, i].square().sum()
        for move, turn in zip(moves[:, i].flip(0), turns[:, i].flip(0), strict=True):
            back = eye - move.outer(turn) / (move @ turn)
            H = back @ H @ back.mT + move.outer(move) / (move @ turn)
        assert_close(found[i], -H @ slope[i])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("objective=cosin", "Unknown objective of gradient-matching 'cosin'. Did you mean cosine?"),
        ("optimiser=lbgfs", "Unknown optimiser of gradient-matching 'lbgfs'. Did you mean lbfgs?"),
        ("start=mjp-subspce", "Unknown start of gradient-matching 'mjp-subspce'. Did you mean mjp-subspace"),
        ("steps=-1", "steps of gradient-matching must be at least 0. Found -1."),
        ("restarts=0", "restarts of gradient-matching must be at least 1"),
        ("lr=0", "lr of gradient-matching must be above 0"),
        ("tv=nan", "tv of gradient-matching must be at least 0"),
        ("steps=many", "--set steps=many: the value must be of type int. Found 'many'."),
        ("objectiv=l2", "Unknown option 'objectiv'. Did you mean objective"),
    ],
)
def test_options_that_do_not_fit_are_one_line(option: str, message: str) -> None:
    def made() -> GradientMatching:
        read_options([option], [GradientMatching])
        return configure(GradientMatching, [option])

    with pytest.raises(PrivlabError) as refusal:
        made()
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_a_start_that_is_not_granted_is_refused(small: VictimModel) -> None:
    _, batch = seen_of(small, pictures(2), B=2)
    with pytest.raises(PrivlabError, match=r"'mjp-subspace'.*batch_size_one"):
        GradientMatching(start="mjp-subspace")(batch)
    with pytest.raises(PrivlabError, match=r"start=grey.*2"):
        GradientMatching(start="grey")(batch)


def test_labels_that_nothing_tells_are_one_line(small: VictimModel) -> None:
    _, seen = seen_of(small, pictures(1))
    without = {name: g for name, g in seen.gradients.items() if name != "head.bias"}
    with pytest.raises(PrivlabError, match=r"head\.bias"):
        GradientMatching()(replace(seen, gradients=without))


def test_a_mask_that_does_not_show_is_warned_of(small: VictimModel) -> None:
    _, seen = seen_of(small, pictures(2), [Mjp(gamma=0.5, per="image")], B=2)
    with pytest.warns(PrivlabWarning, match="E_unk"):
        GradientMatching(steps=1)(seen)


def test_the_progress_bar_shows_steps_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("attacking"):
        tell(
            TrainingProgress(
                step=30, steps=300, epoch=0.0, loss=0.1, learning_rate=0.1, seconds=20.0, seconds_left=184.0
            )
        )
    told = " ".join(capsys.readouterr().err.split())
    assert "attacking: step 30 of 300, 0:03:04 left" in told
    assert "?" not in told  # it is not known of how many images


def test_the_progress_bar_counts_what_it_knows_the_number_of(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("attacking") as progress:
        progress(0, None)
        progress(3, 12)
    assert " 3/12 " in capsys.readouterr().err
