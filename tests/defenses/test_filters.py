"""What filters of federated clients release, against naive twins, and against the originals if installed."""

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError, draw_for
from privlab.defenses import ExcludeVars, GradientNoise, GradientPruning, PercentilePrivacy, SvtPrivacy
from privlab.release import gradient_capabilities, observe, observe_updates, run_client, update_capabilities
from privlab.threat import Capability, Client, ClientData, GradientDefense
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
Arrays = dict[str, np.ndarray[Any, Any]]


def some(seed: int = 0, b: int = 2, scale: float = 0.01) -> dict[str, Tensor]:
    draw = Generator().manual_seed(seed)
    shapes = {"w": (b, 40, 60), "e": (b, 1, 7, 20), "b": (b, 90)}
    return {name: scale * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def draws(b: int = 2) -> list[Generator]:
    return [Generator().manual_seed(i) for i in range(b)]


def of_image(gradients: dict[str, Tensor], i: int) -> Arrays:
    return {name: g[i].numpy().copy() for name, g in gradients.items()}


def nvflare(kind: str, name: str, given: Arrays, steps: int | None = None, **options: object) -> Arrays:
    """Return what a filter of NVFlare makes of one client's update; the test is skipped where it is not installed."""
    module = pytest.importorskip(f"nvflare.app_common.filters.{kind}", reason="needs nvflare")
    from nvflare.apis.dxo import DXO, DataKind, from_shareable
    from nvflare.apis.fl_context import FLContext

    logging.disable()
    dxo = DXO(DataKind.WEIGHT_DIFF, data=given, meta={} if steps is None else {"NUM_STEPS_CURRENT_ROUND": steps})
    sent = getattr(module, name)(**options).process(dxo.to_shareable(), FLContext())
    logging.disable(logging.NOTSET)
    return from_shareable(sent).data


def percentile_twin(given: Arrays, percentile: float, gamma: float, steps: int) -> Arrays:
    """Return the filter's release, entry by entry."""
    ordered = sorted(abs(float(v)) / steps for g in given.values() for v in g.ravel())
    at = (len(ordered) - 1) * percentile / 100
    low, share = math.floor(at), at - math.floor(at)
    cutoff = ordered[low] + share * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])

    def sent(v: float) -> float:
        return 0.0 if abs(v / steps) < cutoff else max(-gamma, min(gamma, v / steps)) * steps

    return {name: np.vectorize(sent)(g.astype(float)) for name, g in given.items()}


@pytest.mark.parametrize(("percentile", "steps"), [(10.0, 1), (33.3, 4), (0.0, 1), (100.0, 1)])
def test_percentile_privacy_is_its_definition(percentile: float, steps: int) -> None:
    g = some()
    released = PercentilePrivacy(percentile, 0.01, steps).release(g, draws())
    for i in range(2):
        for name, wanted in percentile_twin(of_image(g, i), percentile, 0.01, steps).items():
            assert_close(released[name][i].double(), torch.as_tensor(wanted).double(), rtol=1e-6, atol=1e-9)


@given(st.floats(0, 100), st.floats(1e-4, 1), st.integers(1, 9))
def test_percentile_privacy_is_nvflares(percentile: float, gamma: float, steps: int) -> None:
    g = some()
    released = PercentilePrivacy(percentile, gamma, steps).release(g, draws())
    for i in range(2):
        original = nvflare(
            "percentile_privacy", "PercentilePrivacy", of_image(g, i), steps, percentile=percentile, gamma=gamma
        )
        for name, wanted in original.items():
            assert_close(released[name][i], torch.as_tensor(wanted).float(), rtol=3e-7, atol=0)


def test_percentile_privacy_states_what_it_took() -> None:
    """Exact entries have no variance; missing ones that of their interval; those at the bound that of the bound."""
    g, defense = {name: v.double() for name, v in some().items()}, PercentilePrivacy(20.0, 0.015, 3)
    released = defense.release(g, draws())
    cut = defense.at_bound(released)
    for name, variance in defense.variance(released).items():
        assert torch.equal(cut[name], g[name].abs() >= 0.045)
        missing, sent = released[name] == 0, released[name]
        bound = g[name].abs() > 0.045
        exact = ~missing & ~bound
        assert (variance[exact] == 0).all()
        assert_close(sent[exact], g[name][exact])
        assert_close(variance[bound], torch.full_like(variance[bound], 0.045**2))
        assert (variance[missing] > 0).all()
        assert (g[name].abs() <= (3 * variance).sqrt())[missing].all()
    whole = PercentilePrivacy(0.0, 1.0).variance({"w": torch.zeros(1, 3)})["w"]
    assert not whole.any()  # at percentile 0 a zero is a zero


def test_svt_privacy_without_noise_is_its_test() -> None:
    """With budgets without end, those entries are sent, clipped, that are above τ: NVFlare sends the same."""
    g = {name: v.flatten(1) for name, v in some(scale=1.0).items()}
    flat = torch.cat([g[name] for name in sorted(g)], 1)
    above = (flat.abs() >= 0.5).sum(1)
    options = {"epsilon": 1e12, "gamma": 0.8, "tau": 0.5, "replace": False, "fraction": 0.5}
    defense = SvtPrivacy(noise=1e12, **options)
    released = defense.release(g, draws())
    sent = torch.cat([released[name] for name in sorted(g)], 1)
    assert ((sent != 0).sum(1) == math.ceil(0.5 * flat.shape[1])).all()
    assert (above >= math.ceil(0.5 * flat.shape[1])).all()
    assert_close(sent[sent != 0], flat.clamp(-0.8, 0.8)[sent != 0])
    assert (flat[sent != 0].abs() >= 0.5).all()
    every = SvtPrivacy(noise=1e12, **{**options, "tau": 0.0, "fraction": 1.0}).release(g, draws())
    for name, wanted in nvflare(
        "svt_privacy",
        "SVTPrivacy",
        of_image(g, 1),
        noise_var=1e12,
        **{**options, "tau": 0.0, "fraction": 1.0},
    ).items():
        assert_close(every[name][1], torch.as_tensor(wanted).view_as(every[name][1]), rtol=1e-6, atol=1e-9)


def svt_of(update: Tensor, draw: Generator, **options: Any) -> Tensor:
    return SvtPrivacy(**options).release({"w": update[None]}, [draw])["w"][0]


def svt_of_nvflare(update: Tensor, draw: Generator, **options: Any) -> Tensor:
    np.random.seed(int(torch.randint(2**31, (), generator=draw)))
    options = {("noise_var" if name == "noise" else name): value for name, value in options.items() if name != "steps"}
    steps = {"steps": 4} if "steps" not in options else {}
    return torch.as_tensor(nvflare("svt_privacy", "SVTPrivacy", {"w": update.numpy().copy()}, **steps, **options)["w"])


@pytest.mark.parametrize("release", [svt_of, svt_of_nvflare], ids=["ours", "nvflare"])
def test_svt_privacy_and_nvflares_have_one_distribution(release: Callable[..., Tensor]) -> None:
    """The share that is sent, by magnitude; and the noise, by its mean, deviation and tails, of T = 4 steps."""
    n, γ = 40_000, 0.01
    update = 4 * torch.cat([torch.full((n // 2,), 3 * γ), torch.full((n // 2,), -γ / 2)])
    options = {"fraction": 0.2, "epsilon": 50.0, "noise": 2.0, "gamma": γ, "tau": 0.001, "steps": 4}
    sent = release(update, Generator().manual_seed(3), **options) / 4
    large, small = sent[: n // 2], sent[n // 2 :]
    m = 0.2 * n
    λ = γ * 2 * m / (50.0 * (1 - 1 / (1 + (2 * m) ** (2 / 3))))

    def accepts(size: float) -> float:
        off = (0.001 - size) / λ
        return 1 - 0.5 * math.exp(off) if off < 0 else 0.5 * math.exp(-off)

    accepted = (accepts(γ) + accepts(γ / 2)) * n / 2
    for part, size in ((large, γ), (small, γ / 2)):
        wanted = accepts(size) * (1 - (1 - 1 / accepted) ** m)  # drawn at least once of m times, with replacement
        assert (part != 0).double().mean().item() == pytest.approx(wanted, abs=0.02)
    noise = large[large != 0] - γ
    assert noise.mean().item() == pytest.approx(0, abs=5 * γ * 2**0.5 / len(noise) ** 0.5)
    assert noise.std().item() == pytest.approx(2**0.5 * γ, rel=0.1)
    assert noise.abs().median().item() == pytest.approx(math.log(2) * γ, rel=0.1)  # Laplace, and not Gaussian
    stated = SvtPrivacy(**options).variance({"w": sent[None] * 4})["w"][0]
    assert_close(stated[sent != 0].mean().item(), 16 * (γ**2 + 2 * γ**2), rtol=1e-3, atol=0)


def test_svt_privacy_goes_with_the_image_and_says_when_it_cannot_end() -> None:
    g = some()
    together = SvtPrivacy().release(g, draws())
    alone = SvtPrivacy().release({name: v[1:] for name, v in reversed(g.items())}, [Generator().manual_seed(1)])
    for name, value in alone.items():
        assert_close(value, together[name][1:], rtol=1e-12, atol=0)
    with pytest.raises(PrivlabError, match=r"263.*2630"):
        SvtPrivacy(epsilon=1e12, tau=1.0).release(g, draws())


@pytest.mark.parametrize("pattern", ["", "^w$", "e|b", "nothing"])
def test_exclude_vars_leaves_out_what_matches(pattern: str) -> None:
    g = some()
    released = ExcludeVars(pattern).release(g, draws())
    wanted = {"": "web", "^w$": "eb", "e|b": "w", "nothing": "web"}[pattern]
    assert set(released) == set(wanted)
    assert all(torch.equal(released[name], g[name]) for name in released)
    assert not any(v.any() for v in ExcludeVars(pattern).variance(released).values())
    original = nvflare("exclude_vars", "ExcludeVars", of_image(g, 0), exclude_vars=pattern)
    assert set(original) == set(released)


def test_flowers_clipping_and_noise_are_gradient_noise() -> None:
    """`LocalDpMod(C, s, ε, δ)` is a clip of C, and a multiplier of s √(2 ln(1.25/δ)) / (ε C)."""
    flower = pytest.importorskip("flwr.supercore.differential_privacy", reason="needs flwr")
    g = {name: v.double() for name, v in some().items()}
    before = {name: np.full(v.shape[1:], 3.0) for name, v in g.items()}
    for C in (0.1, 10.0):
        clipped = GradientNoise(clip=C, multiplier=0.0).release(g, draws())
        after = [before[name] + g[name][0].numpy() for name in g]
        flower.compute_clip_model_update(after, [before[name] for name in g], C)
        for name, sent in zip(g, after, strict=True):
            assert_close(torch.as_tensor(sent - before[name]), clipped[name][0], rtol=1e-9, atol=1e-12)


CLIENT = Client(lr=0.1, steps=2)


def clients(images: Tensor) -> list[ClientData]:
    return [ClientData(x[None], torch.tensor([i]), draw_for(0, str(i), "c")) for i, x in enumerate(images)]


@pytest.mark.parametrize("defense", [PercentilePrivacy(30.0, 1e-3), SvtPrivacy(gamma=0.1), GradientPruning()], ids=repr)
def test_a_filter_acts_on_the_whole_update(tiny_model: Model, defense: GradientDefense) -> None:
    """Over all trained parameters, whatever the attacks read, and with draws that follow those of the training."""
    model = tiny_model()
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64, generator=Generator().manual_seed(0))
    seen = observe_updates(model, CLIENT, clients(images), ["pos_embed", "head.bias"], (defense,))
    assert set(seen.gradients) == {"pos_embed", "head.bias"}
    assert seen.defense == (defense,)
    assert {Capability.GRADIENT_DEFENSE, Capability.CLIENT_UPDATE, Capability.KNOWS_DEFENSE} <= seen.grants
    for i, data in enumerate(clients(images)):
        update = {name: -u[None] for name, u in run_client(model, CLIENT, data).items()}
        wanted = defense.release(update, [data.draw])
        for name, value in seen.gradients.items():
            assert_close(value[i], wanted[name][0], rtol=0, atol=0)
    plain = observe_updates(model, CLIENT, clients(images), ["pos_embed"])
    assert Capability.GRADIENT_DEFENSE not in plain.grants
    assert not torch.equal(plain.gradients["pos_embed"], seen.gradients["pos_embed"])


def test_what_is_excluded_is_neither_seen_nor_granted(tiny_model: Model) -> None:
    model, hides = tiny_model(), ExcludeVars("pos_embed")
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64, generator=Generator().manual_seed(0))
    names = ["pos_embed", "head.bias"]
    update = observe_updates(model, CLIENT, clients(images), names, (hides,))
    gradient = observe(model, images, torch.arange(2), names, (hides,), draws())
    for seen in (update, gradient):
        assert set(seen.gradients) == {"head.bias"}
        assert Capability.LEARNABLE_PE_GRADIENT not in seen.grants
    assert Capability.LEARNABLE_PE_GRADIENT in update_capabilities(model, CLIENT, (ExcludeVars(),))
    assert Capability.PLAIN_BLOCK not in gradient_capabilities(model, (ExcludeVars("qkv"),))
    with pytest.raises(PrivlabError, match="'exclude-vars'"):
        observe_updates(model, CLIENT, clients(images), names, (ExcludeVars("."),))
    with pytest.raises(PrivlabError, match=r"'exclude-vars' removes everything"):
        gradient_capabilities(model, (ExcludeVars("[a-m]"), ExcludeVars("[n-z]")))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            PercentilePrivacy,
            {"percentile": 101.0},
            r"percentile-privacy must be in \[0, 100\]. Found 101",
        ),
        (PercentilePrivacy, {"gamma": 0.0}, "gamma of percentile-privacy must be above 0 and finite. Found 0"),
        (PercentilePrivacy, {"steps": 0}, "steps of percentile-privacy must be at least 1. Found 0"),
        (SvtPrivacy, {"fraction": 0.0}, r"fraction of svt-privacy must be in \(0, 1\]. Found 0"),
        (SvtPrivacy, {"epsilon": -1.0}, "epsilon of svt-privacy must be above 0 and finite. Found -1"),
        (SvtPrivacy, {"noise": 0.0}, "noise of svt-privacy must be above 0"),
        (SvtPrivacy, {"tau": -1.0}, "tau of svt-privacy must be at least 0"),
        (SvtPrivacy, {"steps": 0}, "steps of svt-privacy must be at least 1"),
        (ExcludeVars, {"pattern": "("}, r"must be a regular expression. Found '\(': missing \)"),
    ],
)
def test_bad_options(kind: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        kind(**options)
