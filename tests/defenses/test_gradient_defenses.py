"""What defenses release of a gradient, against their own algebra; and how they stack."""

import math
from collections.abc import Callable
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError, draw_for
from privlab.defenses import (
    BinaryWeights,
    EncryptedEmbedding,
    GradientNoise,
    GradientPruning,
    GradientQuantisation,
    GradientSign,
    Mjp,
    Undefended,
)
from privlab.release import observe, released_gradients, released_parameters, releases
from privlab.threat import Capability, Draws, Feed, GradientDefense, Stack
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
EVERY = [GradientNoise(), GradientPruning(), *(GradientQuantisation(dtype=d) for d in ("bf16", "fp16", "int8"))]


def some(seed: int = 0, b: int = 3, scale: float = 1.0) -> dict[str, Tensor]:
    draw = Generator().manual_seed(seed)
    shapes = {"w": (b, 40, 60), "e": (b, 1, 7, 20), "b": (b, 90)}
    return {name: scale * torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def draws(b: int = 3, seed: int = 0) -> list[Generator]:
    return [Generator().manual_seed(seed + i) for i in range(b)]


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten(1) for name in sorted(gradients)], 1)


@given(st.floats(0.01, 1000), st.floats(0.01, 1000))
def test_clipping_is_of_all_parameters_together(clip: float, scale: float) -> None:
    g = some(scale=scale)
    clipped = flat(GradientNoise(clip=clip, multiplier=0.0).release(g, draws()))
    norm = flat(g).norm(dim=1)
    assert_close(clipped.norm(dim=1), norm.clamp(max=clip))
    assert_close(clipped / clipped.norm(dim=1)[:, None], flat(g) / norm[:, None])


def test_noise_has_mean_zero_and_the_stated_deviation() -> None:
    g, defense = some(), GradientNoise(clip=0.5, multiplier=0.3)
    noise = flat(defense.release(g, draws())) - flat(GradientNoise(clip=0.5, multiplier=0.0).release(g, draws()))
    n = noise.numel()
    assert abs(noise.mean().item()) < 4 * 0.15 / math.sqrt(n)
    assert noise.std().item() == pytest.approx(0.15, rel=4 / math.sqrt(2 * n))
    assert (noise.square().mean() * n / noise.square().sum()).item() == pytest.approx(1)
    for value in defense.variance(g).values():
        assert (value == 0.15**2).all()


@pytest.mark.parametrize("K", [2, 5])
def test_the_mean_of_releases_has_the_law_of_less_noise(K: int) -> None:
    """Single releases, each with fresh noise, have a mean of the same deviation, σ C / √K."""
    g, many = some(), GradientNoise(clip=0.5, multiplier=0.3, releases=K)
    one, again = GradientNoise(clip=0.5, multiplier=0.3), draws()
    singles = [flat(one.release(g, again)) for _ in range(K)]
    wanted = 0.15 / math.sqrt(K)
    for mean in (flat(many.release(g, draws())), torch.stack(singles).mean(0)):
        noise = mean - flat(many.expected(g))
        assert noise.std().item() == pytest.approx(wanted, rel=4 / math.sqrt(2 * noise.numel()))
        assert abs(noise.mean().item()) < 4 * wanted / math.sqrt(noise.numel())
    for value in many.variance(g).values():
        assert_close(value, torch.full_like(value, wanted**2))
    assert not torch.equal(singles[0], singles[1])


@pytest.mark.parametrize("K", [1, 3, 100])
def test_epsilon_of_several_releases_is_that_of_the_accountant(K: int) -> None:
    """As many steps of Opacus's accountant at its own orders; and, of Gaussians, one release with the noise over √K."""
    accountants = pytest.importorskip("opacus.accountants", reason="needs privlab[privacy]")
    for σ in (1.0, 4.0, 20.0):
        accountant = accountants.RDPAccountant()
        for _ in range(K):
            accountant.step(noise_multiplier=σ, sample_rate=1.0)
        several = GradientNoise(multiplier=σ, releases=K)
        orders = [1 + x / 50 for x in range(1, 5000)]
        assert several.epsilon() == pytest.approx(accountant.get_epsilon(1e-5, alphas=orders), rel=0.02)
        assert several.epsilon() == pytest.approx(GradientNoise(multiplier=σ / math.sqrt(K)).epsilon(), rel=1e-6)
        assert several.epsilon(replaced=True) > several.epsilon()
    assert (f"{K} releases of the same gradient, δ" in several.remark()) == (K > 1)


def test_noise_goes_with_the_image_and_not_with_the_batch() -> None:
    g, defense = some(), GradientNoise()
    together = defense.release(g, draws())
    alone = defense.release({name: v[1:2] for name, v in reversed(g.items())}, [Generator().manual_seed(1)])
    for name, value in alone.items():
        assert_close(value, together[name][1:2], rtol=1e-12, atol=0)


@given(st.floats(0.001, 1))
def test_pruning_keeps_the_largest_entries_over_all_parameters(keep: float) -> None:
    g, defense = some(), GradientPruning(keep=keep)
    released = defense.release(g, draws())
    sent, true = flat(released), flat(g)
    count = max(1, round(keep * true.shape[1]))
    assert ((sent != 0).sum(1) == count).all()
    assert torch.equal(sent[sent != 0], true[sent != 0])
    smallest = sent.abs().where(sent != 0, torch.inf).amin(1)
    assert (true.abs().where(sent == 0, 0).amax(1) <= smallest).all()
    edge = (3 * flat(defense.variance(released))).sqrt()
    assert (edge[sent != 0] == 0).all()
    assert_close(edge, torch.where(sent == 0, smallest[:, None].expand_as(sent), 0))


@given(st.integers(-20, 20))
def test_int8_is_within_half_a_step_of_each_parameter(power: int) -> None:
    g, defense = some(scale=2.0**power), GradientQuantisation(dtype="int8")
    released = defense.release(g, draws())
    for name, true in g.items():
        step = true.flatten(1).abs().amax(1).view(-1, *[1] * (true.ndim - 1)) / 127
        assert ((released[name] - true).abs() <= step / 2 * (1 + 1e-9)).all()
        levels = released[name] / step
        assert_close(levels, levels.round())
        assert levels.abs().max() <= 127 + 1e-9
        assert_close(defense.variance(released)[name], (step.square() / 12).expand_as(true))


def test_int8_of_zeros_is_exact() -> None:
    zeros = {"w": torch.zeros(2, 3)}
    released = GradientQuantisation().release(zeros, draws())
    assert torch.equal(released["w"], zeros["w"])
    assert torch.equal(GradientQuantisation().variance(released)["w"], zeros["w"])


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 8), ("fp16", 11)])
def test_half_precision_is_within_half_a_unit(dtype: str, bits: int) -> None:
    g, defense = some(), GradientQuantisation(dtype=dtype)
    released = defense.release(g, draws())
    for name, true in g.items():
        spacing = (12 * defense.variance(released)[name]).sqrt()
        assert ((released[name] - true).abs() <= spacing / 2 * (1 + 1e-9)).all()
        assert ((released[name] - true).abs() <= 2.0**-bits * true.abs()).all()
        assert released[name].dtype == true.dtype


def test_half_precision_takes_tiny_entries_for_zero_and_huge_ones_for_the_largest() -> None:
    g = {"w": torch.tensor([[1e-9, -1e9, 0.0]])}
    released = GradientQuantisation(dtype="fp16").release(g, draws(1))["w"]
    assert released.tolist() == [[0.0, -65504.0, 0.0]]
    assert (12 * GradientQuantisation(dtype="fp16").variance({"w": released})["w"]).sqrt()[0, 0] == 2.0**-24


def test_sign_is_the_sign() -> None:
    g = some() | {"z": torch.tensor([[0.0], [-3.0], [1e-30]])}
    for name, sign in GradientSign().release(g, draws()).items():
        assert torch.equal(sign, torch.sign(g[name]))
    normal = torch.randn(100_000, generator=Generator().manual_seed(0))
    gain = math.sqrt(2 / math.pi)
    left = (normal.sign() - gain * normal).var().item()
    assert left == pytest.approx(GradientSign().variance({"n": normal[None]})["n"][0, 0].item(), rel=0.02)


@pytest.mark.parametrize("defense", [*EVERY, GradientSign()], ids=repr)
def test_zero_stays_finite_and_nothing_is_changed_in_place(defense: GradientDefense) -> None:
    zero = {"w": torch.zeros(2, 5), "b": torch.zeros(2, 3)}
    released = defense.release(zero, draws(2))
    assert all(value.isfinite().all() for value in released.values())
    assert all(value.isfinite().all() for value in defense.variance(released).values())
    g, before = some(), some()
    defense.variance(defense.release(g, draws()))
    assert all(torch.equal(g[name], before[name]) for name in g)


def test_epsilon_bounds_that_of_the_gaussian_mechanism_from_above() -> None:
    """Exactly (Balle and Wang 2018), δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ); RDP may be a little looser."""
    pytest.importorskip("opacus.accountants", reason="needs privlab[privacy]")
    Φ = NormalDist().cdf
    for σ in (0.3, 1.0, 2.0, 10.0):
        ε = GradientNoise(multiplier=σ).epsilon()
        δ = Φ(1 / (2 * σ) - ε * σ) - math.exp(ε) * Φ(-1 / (2 * σ) - ε * σ)
        assert 0 < δ <= 1e-5
        loose = 0.85 * ε
        assert Φ(1 / (2 * σ) - loose * σ) - math.exp(loose) * Φ(-1 / (2 * σ) - loose * σ) > 1e-5
        assert GradientNoise(multiplier=2 * σ).epsilon(replaced=True) == pytest.approx(ε)
    assert GradientNoise(multiplier=0.0).epsilon() == math.inf
    assert GradientNoise(multiplier=1e-4).epsilon() == pytest.approx(0.5e8, rel=0.01)
    assert "ε ≤ 4.7" in repr(Stack((Mjp(), GradientNoise())))


def test_epsilon_is_not_available_without_an_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opacus.accountants", None)
    assert repr(Stack((GradientNoise(),))).endswith("(ε n/a: no accountant: pip install 'privlab[privacy]')")


@pytest.mark.slow
@pytest.mark.parametrize("defense", [*EVERY, GradientSign()], ids=repr)
@pytest.mark.parametrize("first", [Undefended(), Mjp(gamma=0.5)], ids=repr)
def test_observation_is_what_the_defense_makes_of_all_released_parameters(
    defense: GradientDefense, first: Mjp | Undefended, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the attacks read, and however few images fit at once."""
    model, stack = tiny_model(), Stack((defense, first))
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64, generator=Generator().manual_seed(0))
    labels = torch.arange(3)

    def fresh() -> list[Generator]:
        return [draw_for(0, str(i), "release") for i in range(3)]

    feed = stack.feed(images, model.patch, draws())
    everything = released_gradients(model, feed, labels, released_parameters(model))
    wanted = defense.release(everything, fresh())
    monkeypatch.setattr(releases, "_MOST_ENTRIES", 1)
    seen = observe(model, feed, labels, ["pos_embed", "cls_token"], stack.parts, fresh())
    assert set(seen.gradients) == {"pos_embed", "cls_token"}
    for name, value in seen.gradients.items():
        assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)
    assert seen.defense == stack.parts
    assert {Capability.KNOWS_DEFENSE, Capability.GRADIENT_DEFENSE} <= seen.grants
    plain = observe(model, feed, labels, ["pos_embed"], (first,))
    assert Capability.GRADIENT_DEFENSE not in plain.grants
    assert torch.equal(plain.gradients["pos_embed"], everything["pos_embed"])


@pytest.mark.parametrize("at_once", [1, 2**26])
@pytest.mark.parametrize("defense", [GradientNoise(), GradientPruning(), GradientQuantisation(), GradientSign()])
def test_a_batch_is_defended_as_one(
    defense: GradientDefense, at_once: int, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defense acts on the gradient of the mean loss, with one draw for each release."""
    model = tiny_model()
    images = torch.rand(6, 3, 16, 16, dtype=torch.float64, generator=Generator().manual_seed(0))
    labels, names = torch.arange(6), released_parameters(model)
    feed = Mjp(gamma=0.5)(images, model.patch, draws(6))
    clean = observe(model, feed, labels, names, images_per_release=2).gradients
    wanted = defense.release(clean, draws(3))
    monkeypatch.setattr(releases, "_MOST_ENTRIES", at_once)
    seen = observe(model, feed, labels, names, (Mjp(), defense), draws(3), images_per_release=2)
    for name in ("pos_embed", "unk_embed", "patch_embed.proj.weight", "head.weight"):  # no sign of rounding among them
        assert_close(seen.gradients[name], wanted[name], rtol=1e-9, atol=1e-12)
    assert Capability.BATCH_SIZE_ONE not in seen.grants


def test_a_stack_tells_its_parts_apart() -> None:
    stack = Stack((GradientNoise(), Mjp(), GradientPruning()))
    assert stack.on_images == (Mjp(),)
    assert stack.on_features == ()
    assert stack.on_gradients == (GradientNoise(), GradientPruning())
    with pytest.raises(PrivlabError, match="gradients"):
        stack.send(torch.zeros(1, 2, 3), 1, Draws(draws(1), draws(1)[0], draws(1)[0]))


def test_a_stack_states_the_sum_of_the_variances_of_its_parts() -> None:
    noise, rounding, released = GradientNoise(), GradientQuantisation(dtype="int8"), some()
    found = Stack((noise, Mjp(), rounding)).variance(released)
    for name, of_noise in noise.variance(released).items():
        assert_close(found[name], of_noise + rounding.variance(released)[name])
    assert all(bool((v == 0).all()) for v in Stack((Mjp(),)).variance(released).values())


def test_some_of_a_feed() -> None:
    feed = Mjp(gamma=0.5)(torch.rand(3, 3, 16, 16), 4, draws())
    taken = feed.take([2, 0])
    assert isinstance(taken, Feed)
    assert torch.equal(taken.images, feed.images[[2, 0]])
    assert torch.equal(taken.order, feed.order[[2, 0]])
    assert feed.masked_pe is not None
    assert taken.masked_pe is not None
    assert torch.equal(taken.masked_pe, feed.masked_pe[[2, 0]])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GradientNoise, {"clip": 0.0}, "clip of gradient-noise must be above 0 and finite. Found 0.0"),
        (GradientNoise, {"clip": math.nan}, "Found nan"),
        (GradientNoise, {"multiplier": -1.0}, "multiplier of gradient-noise must be at least 0 and finite. Found -1.0"),
        (GradientNoise, {"multiplier": math.inf}, "Found inf"),
        (GradientNoise, {"releases": 0}, "releases of gradient-noise must be at least 1. Found 0"),
        (GradientPruning, {"keep": 0.0}, r"keep of gradient-pruning must be in \(0, 1\]. Found 0.0"),
        (GradientPruning, {"keep": 1.5}, "Found 1.5"),
        (GradientQuantisation, {"dtype": "fp61"}, "Unknown dtype of gradient-quantisation 'fp61'. Did you mean fp16"),
    ],
)
def test_bad_options(kind: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        kind(**options)


def test_binary_weights_drop_at_random_and_keep_the_rest() -> None:
    """A release is g or 0 in each entry, in the stated share; a missing entry is bounded by the largest of its kind."""
    g = {"a": torch.randn(2, 40, 50, generator=torch.Generator().manual_seed(1)), "b": torch.ones(2, 7)}
    draws = [torch.Generator().manual_seed(i) for i in range(2)]
    defense = BinaryWeights(keep=0.7)
    released = defense.release(g, draws)
    assert all(bool(((released[name] == g[name]) | (released[name] == 0)).all()) for name in g)
    assert (released["a"] != 0).float().mean().item() == pytest.approx(0.7, abs=0.03)
    assert not torch.equal(released["a"][0] == 0, released["a"][1] == 0)
    variance, largest = defense.variance(released)["a"], released["a"].abs().flatten(1).amax(1)
    assert torch.equal(variance == 0, released["a"] != 0)
    torch.testing.assert_close((3 * variance).sqrt().flatten(1).amax(1), largest)
    whole = BinaryWeights(keep=1.0)
    assert all(torch.equal(each, g[name]) for name, each in whole.release(g, draws).items())
    assert not whole.variance(g)["a"].any()
    with pytest.raises(PrivlabError, match=r"binary-weights.*\(0.*1\].*0\.0"):
        BinaryWeights(keep=0.0)


def test_encrypted_embedding_multiplies_the_embedding_alone() -> None:
    """By secret numbers with mean 0 and variance 1; the stated variance is that of the error on average."""
    draw = torch.Generator().manual_seed(1)
    names = ("pos_embed", "cls_token", "patch_embed.proj.weight", "unk_embed", "blocks.0.norm1.weight", "head.bias")
    g = {name: torch.randn(2, 60, 90, generator=draw) for name in names}
    released = EncryptedEmbedding().release(g, draws(2))
    variance = EncryptedEmbedding().variance(released)
    for name in names[4:]:
        assert torch.equal(released[name], g[name])
        assert not variance[name].any()
    for name in names[:4]:
        factor = released[name] / g[name]
        assert factor.mean().item() == pytest.approx(0, abs=0.05)
        assert factor.var().item() == pytest.approx(1, abs=0.05)
        assert not torch.allclose(factor[0], factor[1])
        error = (released[name] - g[name]).square().mean().item()
        assert variance[name].mean().item() == pytest.approx(error, rel=0.1)
    again = EncryptedEmbedding().release(g, draws(2))
    assert all(torch.equal(each, again[name]) for name, each in released.items())
