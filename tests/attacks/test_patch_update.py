"""`patch-update`: the image from what SGD sends, exactly where no weight is rounded, and nearly so where each is."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.testing import assert_close

from privlab.attacks import PatchGradient, PatchUpdate
from privlab.attacks.gradients.patch_update import _Candidate, _mixture, _rises
from privlab.attacks.solvers import (
    fit_decay,
    patches_of_levels,
    photograph_gradients,
    rounding_of_embedding,
    unmix,
    weighted_patches,
)
from privlab.base import PrivlabError, PrivlabWarning
from privlab.defenses import AdaptiveClipping, ExcludeVars, GradientNoise
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.release import observe, observe_updates
from privlab.threat import Capability, Client, ClientData, GradientDefense, Observation, check_capabilities
from privlab.victims import VictimModel, victim

Model = Callable[..., VictimModel]
DECAYED = Client(lr=0.01, momentum=0.9, weight_decay=0.05, steps=5)


def sent(model: VictimModel, images: Tensor, client: Client) -> Observation:
    """Return the updates of clients with one image each."""
    clients = [
        ClientData(image[None].to(model.mean), torch.tensor([i % 7]), torch.Generator().manual_seed(i))
        for i, image in enumerate(images)
    ]
    return observe_updates(model, client, clients)


def score(attack: Any, seen: Observation, images: Tensor) -> list[float]:
    return psnr(attack(seen), images.to(seen.model.mean)).tolist()


@pytest.fixture(scope="module")
def stored(tiny_model: Model) -> VictimModel:
    """Return a small victim with weights of float32 whose magnitudes differ, as those of trained models do."""
    model = tiny_model().float()
    draw = torch.Generator().manual_seed(0)
    for weights in (model.vit.get_parameter("pos_embed"), model.vit.get_parameter("patch_embed.proj.weight")):
        weights.mul_(10 ** (-3 * torch.rand(weights.shape, generator=draw)))
    return model


SGD: dict[str, dict[str, Any]] = {
    "one step": {},
    "five steps": {"steps": 5},
    "momentum": {"steps": 5, "momentum": 0.9},
    "dampening": {"steps": 5, "momentum": 0.9, "dampening": 0.4},
    "nesterov": {"steps": 5, "momentum": 0.9, "nesterov": True},
    "cosine": {"steps": 5, "schedule": "cosine", "momentum": 0.9},
    "steps": {"steps": 5, "schedule": "step", "lr_every": 2, "momentum": 0.9},
    "clipped": {"steps": 5, "clip": 1.0},
    "smoothed": {"steps": 5, "label_smoothing": 0.2},
    "dropout": {"steps": 5, "dropout": 0.2, "drop_path": 0.2},
}


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.05], ids=["", "decay"])
@pytest.mark.parametrize("name", SGD)
def test_what_sgd_sends_is_exact_but_for_float32_in_the_release(
    tiny_model: Model, crops: Tensor, name: str, decay: float
) -> None:
    """Weights of float64 are sent as a difference in float32: what is left of the error is that of 24 bits."""
    client = Client(weight_decay=decay, **SGD[name])
    assert min(score(PatchUpdate(rounds=0), sent(tiny_model(), crops[:260:130], client), crops[:260:130])) > 90


@pytest.mark.parametrize("client", [DECAYED, replace(DECAYED, nesterov=True)], ids=["momentum", "nesterov"])
def test_decay_hides_the_image_from_an_attack_that_forgets_it_alone(
    tiny_model: Model, crops: Tensor, client: Client
) -> None:
    images = crops[:260:130]
    seen = sent(tiny_model(), images, client)
    assert max(score(PatchGradient(), seen, images)) < 30
    assert min(score(PatchUpdate(rounds=0), seen, images)) > 90
    assert min(score(PatchUpdate(decay="fitted"), seen, images)) > 80


@pytest.mark.parametrize("hidden", [(), ("head.weight",)], ids=["all", "no head"])
def test_fitted_decay_is_what_decay_took(tiny_model: Model, crops: Tensor, hidden: tuple[str, ...]) -> None:
    model = tiny_model()
    seen = sent(model, crops[:1], DECAYED)
    update = {name: u[0] for name, u in seen.gradients.items() if name not in hidden}
    E = model.vit.get_parameter("pos_embed")[0, 1:]
    found = fit_decay(model, update, update["pos_embed"][0, 1:], E)
    assert found == pytest.approx(1 - DECAYED.kept_share, rel=1e-5)


def test_fitted_decay_does_not_look_at_the_client(tiny_model: Model, crops: Tensor) -> None:
    seen = sent(tiny_model(), crops[:1], DECAYED)
    other = replace(seen, client=replace(DECAYED, weight_decay=0.3, momentum=0.0))
    attack = PatchUpdate(decay="fitted")
    torch.testing.assert_close(attack(seen), attack(other), rtol=0, atol=1e-3)


def test_weighing_by_rounding_is_generalised_least_squares() -> None:
    """Exact without errors; with errors of unequal size far nearer than equal weights, and near the expected error."""
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(10, 30, generator=draw, dtype=torch.float64)
    A = torch.randn(10, 60, generator=draw, dtype=torch.float64)
    dA = 10 ** (4 * torch.rand(A.shape, generator=draw, dtype=torch.float64) - 7)
    dG = 10 ** (4 * torch.rand(60, 30, generator=draw, dtype=torch.float64) - 7)
    torch.testing.assert_close(weighted_patches(A, A.mT @ X, dA, dG), X, rtol=1e-9, atol=1e-9)
    noisy = A + dA * torch.randn(A.shape, generator=draw, dtype=torch.float64)
    G = A.mT @ X + dG * torch.randn(dG.shape, generator=draw, dtype=torch.float64)
    weighed = (weighted_patches(noisy, G, dA, dG) - X).square().mean().sqrt()
    equal = (weighted_patches(noisy, G, dA, dG, rounds=0) - X).square().mean().sqrt()
    variance = dG.square() + dA.square().mT @ X.square()
    expected = torch.stack([((A / v) @ A.mT).inverse().diagonal().mean() for v in variance.mT]).mean().sqrt()
    assert weighed < equal / 2
    assert weighed / expected == pytest.approx(1, abs=0.2)


@pytest.mark.slow
def test_stored_weights_cost_less_where_their_rounding_is_weighed_and_foreseen(stored: VictimModel) -> None:
    """Rounding is all of the error; each part of the attack takes some of it away."""
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = sent(stored, images, Client(lr=0.03, steps=5))
    plain, weighed, foreseen = (
        sum(score(attack, seen, images)) / len(images)
        for attack in (PatchGradient(), PatchUpdate(rounds=0), PatchUpdate(rounds=6))
    )
    assert weighed > plain + 3
    assert foreseen > weighed + 0.5


def test_grey_levels_are_found_where_rounding_each_entry_goes_wrong(tiny_model: Model, crops: Tensor) -> None:
    """Exact without errors, whatever the weights; with them, nearest-plane rounding beats rounding entry by entry."""
    model = tiny_model()
    image = (crops[:1].to(model.mean) * 255).round() / 255
    X = patchify(model.normalise(image), model.patch)[0].double()
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(1, 64, generator=draw, dtype=torch.float64)
    A = common + 0.1 * torch.randn(len(X), 64, generator=draw, dtype=torch.float64)  # nearly parallel rows
    weights = torch.rand(64, generator=draw, dtype=torch.float64) + 0.1
    torch.testing.assert_close(patches_of_levels(model, A, A.mT @ X, weights, 255), X)
    G = A.mT @ X + 2e-3 * torch.randn(64, X.shape[1], generator=draw, dtype=torch.float64)
    levels, plain = (
        (model.to_images(found[None]) * 255).round()
        for found in (
            patches_of_levels(model, A, G, torch.ones_like(weights), 255),
            torch.linalg.lstsq(A.mT, G).solution,
        )
    )
    wrong_levels, wrong_plain = (float((found != image * 255).double().mean()) for found in (levels, plain))
    assert wrong_levels < wrong_plain / 2


def test_one_patch_has_the_levels_of_least_squared_error(tiny_model: Model) -> None:
    """Naive twin: of one patch, each entry's nearest of four levels, tried one by one."""
    model = tiny_model()
    draw = torch.Generator().manual_seed(1)
    A = torch.randn(1, 64, generator=draw, dtype=torch.float64)
    k = model.patch**2 * 3
    G = torch.randn(64, k, generator=draw, dtype=torch.float64)
    weights = torch.rand(64, generator=draw, dtype=torch.float64)
    pixels = torch.arange(4, dtype=model.mean.dtype) / 3
    flat = torch.stack([model.mean.new_ones(model.image_shape) * pixel for pixel in pixels])
    values = patchify(model.normalise(flat), model.patch)[:, 0].double()  # 4 × k
    errors = (weights[:, None] * (G - A.mT * values[:, None]).square()).sum(1)
    expected = values.gather(0, errors.argmin(0, keepdim=True))
    torch.testing.assert_close(patches_of_levels(model, A, G, weights, 3), expected)


@pytest.mark.slow
def test_stored_images_are_exact_and_others_are_no_worse(stored: VictimModel, crops: Tensor) -> None:
    """An image of 256 levels comes back but for float32; one of other values as without levels."""
    client = Client(lr=0.03, steps=5)
    grey = (crops[:260:130].to(stored.mean) * 255).round() / 255
    seen = sent(stored, grey, client)
    assert max(score(PatchUpdate(levels=0), seen, grey)) < 100
    assert min(score(PatchUpdate(), seen, grey)) > 130
    free = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = sent(stored, free, client)
    assert score(PatchUpdate(), seen, free) == pytest.approx(score(PatchUpdate(levels=0), seen, free), abs=0.5)


@pytest.mark.slow
def test_a_filter_that_leaves_parameters_out_costs_nothing(stored: VictimModel, crops: Tensor) -> None:
    """What is released is exact: grey levels and rounding are used as without a filter."""
    client, grey = Client(lr=0.03, steps=5), (crops[:260:130].to(stored.mean) * 255).round() / 255
    seen = sent(stored, grey, client)
    behind = replace(seen, defense=(ExcludeVars("norm"),))
    assert torch.equal(PatchUpdate()(behind), PatchUpdate()(seen))


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.05], ids=["", "decay"])
@pytest.mark.parametrize(
    "filters",
    [
        (GradientNoise(clip=0.01, multiplier=0.0),),
        (AdaptiveClipping(0.01, rounds=3),),
        (ExcludeVars("^head"),),
        (GradientNoise(clip=0.01, multiplier=0.0), ExcludeVars("^head")),
    ],
    ids=["clipping", "adaptive", "no head", "both"],
)
def test_what_takes_nothing_costs_nothing(
    stored: VictimModel, crops: Tensor, filters: tuple[GradientDefense, ...], decay: float
) -> None:
    """One unknown factor, or a label that is not told: an image of 256 levels is exact as without a filter."""
    client, grey = Client(lr=0.03, steps=5, weight_decay=decay), (crops[:260:130].to(stored.mean) * 255).round() / 255
    data = [ClientData(x[None], torch.tensor([i % 7]), torch.Generator().manual_seed(i)) for i, x in enumerate(grey)]
    seen = observe_updates(stored, client, data, [*PatchUpdate.parameters, *PatchUpdate.if_released], filters)
    assert min(score(PatchUpdate(), seen, grey)) > 130


@pytest.mark.parametrize(("sends", "sent_as"), [("weights", "float32"), ("weights", "bf16"), ("difference", "fp16")])
def test_fewer_bits_cost_quality(stored: VictimModel, crops: Tensor, sends: str, sent_as: str) -> None:
    client = Client(lr=0.1, steps=2)
    whole, fewer = (
        score(PatchUpdate(rounds=0), sent(stored, crops[:1], given), crops[:1])[0]
        for given in (client, replace(client, sends=sends, sent_as=sent_as))
    )
    assert math.isclose(whole, fewer) == (sent_as == "float32")
    assert fewer <= whole


def in_int8(side: int, images: Tensor, sends: str) -> Observation:
    """Return the updates, in int8, of clients with the trained victim of the package."""
    model = victim("cifar_vit", img_size=side).model
    return sent(model, images[..., :side, :side], Client(lr=0.01, sends=sends, sent_as="int8"))


def test_rounding_to_int8_is_foreseen_by_an_exact_image_alone(crops: Tensor) -> None:
    images = (crops[:3] * 255).round() / 255
    few = in_int8(8, images[:1], "difference")
    assert score(PatchUpdate(), few, images[:1, :, :8, :8])[0] > 120
    assert score(PatchUpdate(rounds=0), few, images[:1, :, :8, :8])[0] < 70
    other = in_int8(8, images[2:], "difference")  # its errors are a little too large
    assert torch.equal(PatchUpdate()(other), PatchUpdate(rounds=0)(other))


@pytest.mark.slow
def test_an_update_in_weights_of_int8_is_mostly_lost(crops: Tensor) -> None:
    """It is less than half a step of most weights, so that few of them change their level."""
    images = crops[:1]
    seen = in_int8(16, images, "weights")
    for name in PatchUpdate.parameters:
        before = seen.model.vit.get_parameter(name).detach()
        step = before.abs().max() / 127
        kept = ((before - seen.gradients[name]) / step).round() == (before / step).round()
        assert kept.float().mean() > 0.8
    assert score(PatchUpdate(), seen, images)[0] < 20
    assert score(PatchUpdate(), in_int8(16, images, "difference"), images)[0] > 40


@pytest.mark.parametrize("sends", ["difference", "weights"])
def test_each_parameter_has_the_step_of_what_was_sent_of_it(stored: VictimModel, crops: Tensor, sends: str) -> None:
    client = Client(sends=sends, sent_as="int8")
    update = {name: u[0] for name, u in sent(stored, crops[:1], client).gradients.items()}
    found = rounding_of_embedding(stored, client, {n: u / 3 for n, u in update.items()}, update)
    for name, deviation in found.items():
        before = stored.vit.get_parameter(name).detach()
        of = update[name] if sends == "difference" else before - update[name] / 3
        torch.testing.assert_close(deviation, torch.full_like(deviation, float(of.abs().max()) / 127 / 12**0.5))


def test_what_is_refused_is_one_line(stored: VictimModel, crops: Tensor) -> None:
    with pytest.raises(PrivlabError, match=r"client.optimiser=adamw"):
        PatchUpdate()(sent(stored, crops[:1], Client(optimiser="adamw")))
    gradient = observe(stored, crops[:1].float(), torch.tensor([0]), PatchUpdate.parameters)
    with pytest.raises(PrivlabError, match="trains"):
        PatchUpdate()(gradient)
    with pytest.raises(PrivlabError, match=r"client_update.*\(the"):
        check_capabilities(PatchUpdate(), gradient.grants)
    check_capabilities(PatchUpdate(), sent(stored, crops[:1], Client()).grants)
    with pytest.raises(PrivlabError, match=r"'fited'.*fitted\?"):
        PatchUpdate(decay="fited")
    with pytest.raises(PrivlabError, match=r"rounds of patch-update must be at least 0. Found -1."):
        PatchUpdate(rounds=-1)
    with pytest.raises(PrivlabError, match=r"levels of patch-update must be at least 0. Found -1."):
        PatchUpdate(levels=-1)
    assert Capability.CLIENT_UPDATE not in gradient.grants


def test_it_says_where_it_is_not_exact(tiny_model: Model, crops: Tensor) -> None:
    wide, as_wide, narrow = tiny_model(), tiny_model(embed_dim=16, num_heads=2), tiny_model(embed_dim=8, num_heads=2)
    assert PatchUpdate().beyond(sent(wide, crops[:1], Client())) is None
    assert PatchUpdate().beyond(sent(as_wide, crops[:1], Client())) is None
    with pytest.warns(UserWarning, match=r"patch-update.*16.*16.*15"):
        PatchUpdate(rounds=0, levels=0)(sent(as_wide, crops[:1], Client()))
    seen = sent(narrow, crops[:1], Client())
    assert PatchUpdate().beyond(seen) == "N = 16 > D + 4 = 12"
    with pytest.warns(UserWarning, match=r"patch-update.*16.*8.*12"):
        PatchUpdate(rounds=0)(seen)


@pytest.mark.parametrize("channels", [1, 3])
def test_as_many_patches_as_the_width_run(
    tiny_vit: Callable[..., VisionTransformer], photographs: Callable[[int, int], Tensor], channels: int
) -> None:
    model = VictimModel(tiny_vit(0, img_size=32, in_chans=channels), (0.5,) * channels, (0.25,) * channels)
    image = photographs(1, 32)[:, :channels]
    seen = sent(model, image, Client(lr=0.01))
    attack = PatchUpdate()
    assert attack.beyond(seen) is None
    assert attack(seen).shape == image.shape
    A = torch.ones(64, 64, dtype=torch.float64)
    with pytest.raises(PrivlabError, match="below the width 64"):
        patches_of_levels(model, A, A, torch.ones(64), 255)


def small_vit(side: int, width: int) -> VictimModel:
    """Return a ViT of patches of 8 × 8 in float32, as timm initialises it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = VisionTransformer(img_size=side, patch_size=8, embed_dim=width, depth=2, num_heads=2, num_classes=7)
    return VictimModel(vit, (0.5,) * 3, (0.5,) * 3)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_grey_levels_replace_missing_equations(photographs: Callable[[int, int], Tensor], steps: int) -> None:
    """Of 49 patches and a width of 48, in float32, whose weights were rounded in each step."""
    model, image = small_vit(56, 48), photographs(1, 56).float()
    seen = sent(model, image, Client(lr=1.0, steps=steps))
    assert min(score(PatchUpdate(), seen, image)) > 140
    with pytest.warns(PrivlabWarning, match="determine at most 47"):
        assert min(score(PatchUpdate(levels=0), seen, image)) < 60


@pytest.mark.slow
@pytest.mark.parametrize("favour", [0.0, 4.0])
def test_a_mixture_of_two_images_is_not_rounded_to_grey_levels(
    favour: float, photographs: Callable[[int, int], Tensor]
) -> None:
    """MixUp's shares follow from its soft label, also where the model is surer of a class than its share is large."""
    model, pair = small_vit(32, 48), (photographs(2, 32) * 255).round().float() / 255
    with torch.no_grad():
        model.vit.head.bias[2] = favour  # 4 gives a probability of about 0.9, above the share of 0.7
    mixed, label = 0.7 * pair[:1] + 0.3 * pair[1:], torch.zeros(1, 7)
    label[0, 2], label[0, 5] = 0.7, 0.3
    data = ClientData(mixed, label, torch.Generator().manual_seed(0))
    seen = observe_updates(model, Client(lr=1.0), [data])
    assert min(score(PatchUpdate(), seen, mixed)) > 120


def _mixed(pair: Tensor, λ: float, classes: tuple[int, int]) -> ClientData:
    """Return what MixUp makes of two images of grey levels."""
    label = torch.zeros(1, 7)
    label[0, classes[0]], label[0, classes[1]] = label[0, classes[0]] + λ, label[0, classes[1]] + 1 - λ
    return ClientData(λ * pair[:1] + (1 - λ) * pair[1:], label, torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_both_photographs_of_a_mixture_come_back(photographs: Callable[[int, int], Tensor]) -> None:
    model, pair = small_vit(32, 48), (photographs(2, 32) * 255).round().float() / 255
    seen = observe_updates(model, Client(lr=1.0), [_mixed(pair, 0.6763, (2, 5))])
    (found,) = PatchUpdate().unmix(seen)
    assert ((found - pair).abs() < 1e-3).all(0).float().mean() > 0.95
    for refused in (
        observe_updates(model, Client(lr=1.0), [_mixed(pair, 0.6763, (2, 2))]),
        observe_updates(model, Client(optimiser="adamw"), [_mixed(pair, 0.6763, (2, 5))]),
        observe_updates(small_vit(32, 16), Client(lr=1.0), [_mixed(pair, 0.6763, (2, 5))]),
    ):
        with pytest.raises(PrivlabError, match="Unmixing needs"):
            PatchUpdate().unmix(refused)


def test_the_classes_of_a_soft_label_are_those_whose_biases_rise() -> None:
    model = small_vit(32, 48)
    bias = torch.tensor([0.1, 0.2, -0.2, 0.1, 0.1, -0.3, 0.0], dtype=torch.float64)
    assert _rises(model, Client(), {"head.bias": bias.float()}, bias) == 2
    assert _rises(model, Client(label_smoothing=0.1), {"head.bias": bias.float()}, bias) == 1


def test_a_mixture_has_the_nearest_pixels_that_two_grey_levels_mix() -> None:
    model, λ = small_vit(32, 48), 0.625
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randint(0, 256, (2, 1, *model.image_shape), generator=draw).double() / 255
    mixed, label = λ * a + (1 - λ) * b, torch.tensor([[0.625, 0.375]], dtype=torch.float64)
    off = mixed + 1e-4 * torch.rand(mixed.shape, generator=draw, dtype=torch.float64)  # a fortieth of a level
    (found,) = _mixture(model, _Candidate(torch.zeros(16, 192), off), label, 255)
    assert_close(found.image, mixed)
    assert_close(model.to_images(found.X[None]), mixed.float())
    assert _mixture(model, found, 3, 255) == []


@pytest.mark.parametrize(("share", "least", "most"), [(0.6763, 0.98, 1.0), (0.7, 0.0, 0.5)])
def test_pairs_of_a_mixture_need_a_share_that_is_no_small_fraction(
    share: float, least: float, most: float, photographs: Callable[[int, int], Tensor]
) -> None:
    """At 0.7 up to 36 pairs have one value, and the smoothest photographs are not always the right ones."""
    pair = (photographs(2, 16) * 255).round().double()
    std = torch.tensor([58.4, 57.1, 57.4], dtype=torch.float64)  # of ImageNet, in levels
    Γ = photograph_gradients(victim("cifar_vit").model).double() * std[:, None] * std
    error = 1e-3 * torch.randn(pair.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    precision = 1e6 * torch.eye(16, dtype=torch.float64).expand(48, -1, -1)
    found = unmix(share * pair[0] + (1 - share) * pair[1] + error, precision, share + 2e-6, Γ)
    right = float(((found.first == pair[0]) & (found.second == pair[1])).double().mean())
    assert least <= right <= most


def test_equations_of_zeros_give_zeros() -> None:
    A, G = torch.zeros(4, 64, dtype=torch.float64), torch.rand(64, 12, dtype=torch.float64)
    assert not weighted_patches(A, G, A, torch.ones_like(G)).any()
