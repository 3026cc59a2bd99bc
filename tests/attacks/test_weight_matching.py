"""Weight matching recovers keys: exactly from untouched models, and from what tampering leaves of trained ones."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy.optimize import linear_sum_assignment
from timm.layers import GluMlp, SwiGLU
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Generator, Tensor

from privlab.attacks.weights import weight_matching
from privlab.attacks.weights.weight_matching import WeightMatching, WeightObservation, recovered_fraction
from privlab.base import PrivlabError
from privlab.keys import ModelKey, ModelShape, apply_key, new_key

State = dict[str, Tensor]
attack = WeightMatching()
NEAR = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(scope="session")
def trained(shared: Callable[[str], object]) -> State:
    """Return the trained ViT-Ti."""
    return load_file(shared("weights/vit_tiny_patch16_224.safetensors"))


def add_noise(state: State, ratio: float, draw: Generator) -> State:
    """Return W + ratio · std(W) · ε for every tensor, ε ~ N(0, 1)."""
    return {
        name: W + ratio * W.std(correction=0) * torch.randn(W.shape, generator=draw, dtype=W.dtype)
        for name, W in state.items()
    }


def prune(state: State, share: float) -> State:
    """Return the weights with the smallest `share` of each tensor's magnitudes set to zero."""

    def pruned(W: Tensor) -> Tensor:
        flat = W.flatten().clone()
        flat[flat.abs().argsort()[: round(share * W.numel())]] = 0
        return flat.view_as(W)

    return {name: pruned(W) for name, W in state.items()}


def quantise(state: State) -> State:
    """Return weights rounded to integers in ±127 (int8), one scale per tensor, and back: s · round(W / s)."""
    scales = {name: (W.abs().max() / 127).clamp_min(torch.finfo(W.dtype).tiny) for name, W in state.items()}
    return {name: (W / scales[name]).round() * scales[name] for name, W in state.items()}


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def encrypted(state: State, space: str = "full") -> tuple[ModelKey, WeightObservation]:
    shape = ModelShape.of_state(state, 3)
    key = new_key(shape, space)
    return key, WeightObservation(apply_key(state, key, shape), state, shape)


def same(found: ModelKey, key: ModelKey) -> bool:
    return all(torch.equal(order, key.orders()[name]) for name, order in found.orders().items())


@pytest.mark.parametrize(
    "options",
    [{}, {"qk_norm": True}, {"mlp_layer": GluMlp}, {"mlp_layer": SwiGLU}, {"init_values": 0.1}, {"pre_norm": True},
     {"block_fn": ResPostBlock}, {"qkv_bias": False, "proj_bias": False}, {"scale_attn_norm": True}],
)  # fmt: skip
@pytest.mark.parametrize("space", ["full", "paper", "residual"])
def test_every_order_of_an_untouched_model_is_recovered(
    tiny_vit: Callable[..., VisionTransformer], options: dict[str, object], space: str
) -> None:
    vit = tiny_vit(embed_dim=48, num_heads=3, **options)
    shape, base = ModelShape.of(vit), vit.state_dict()
    key = new_key(shape, space)
    seen = WeightObservation(apply_key(base, key, shape), base, shape)
    found = attack(seen)
    assert torch.equal(found.residual, key.residual)
    assert same(attack.whole_key(seen, found.residual), key)


def test_neither_embedding_nor_head_is_needed(trained: State) -> None:
    key, seen = encrypted(trained)
    blocks = {name: tensor for name, tensor in seen.encrypted.items() if name.startswith("blocks.")}
    assert torch.equal(attack(replace(seen, encrypted=blocks)).residual, key.residual)


@pytest.mark.parametrize("space", ["full", "paper"])
def test_the_key_of_an_untouched_trained_model_is_recovered_whole(trained: State, space: str) -> None:
    key, seen = encrypted(trained, space)
    found = attack(seen)
    assert torch.equal(found.residual, key.residual)
    assert (found.rounds, found.agreement, found.confidence.min()) == (0, pytest.approx(1), pytest.approx(1))
    assert same(attack.whole_key(seen, found.residual), key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tamper", "agreement"),
    [
        (lambda state: add_noise(state, 1.0, draw()), (0.6, 0.7)),
        (lambda state: add_noise(state, 5.0, draw()), (0.1, 0.2)),
        (lambda state: prune(state, 0.5), (0.9, 1)),
        (lambda state: prune(state, 0.9), (0.6, 0.9)),
        (quantise, (0.99, 1)),
    ],
    ids=["noise of 1 std", "noise of 5 std", "half pruned", "nine tenths pruned", "int8"],
)
def test_tampering_does_not_hide_the_stream(
    trained: State, tamper: Callable[[State], State], agreement: tuple[float, float]
) -> None:
    key, seen = encrypted(trained)
    found = attack(replace(seen, encrypted=tamper(dict(seen.encrypted))))
    assert recovered_fraction(found.residual, key.residual) == 1
    assert found.confidence.mean() > 0.99
    assert agreement[0] <= found.agreement <= agreement[1]


@pytest.mark.slow
def test_confidence_says_when_nothing_is_known(trained: State) -> None:
    key, seen = encrypted(trained)
    shuffled = {
        name: t.flatten()[torch.randperm(t.numel(), generator=draw())].view_as(t) for name, t in trained.items()
    }
    found = WeightMatching(rounds=1)(replace(seen, encrypted=shuffled))
    assert recovered_fraction(found.residual, key.residual) < 0.05
    assert found.confidence.mean() < 0.7
    assert found.agreement < 0.2


@pytest.mark.slow
def test_refinement_is_what_finds_a_key_under_heavy_noise(trained: State) -> None:
    key, seen = encrypted(trained)
    seen = replace(seen, encrypted=add_noise(seen.encrypted, 4.0, draw()))
    alone = WeightMatching(rounds=0)(seen)
    assert 0.2 < recovered_fraction(alone.residual, key.residual) < 0.9
    assert abs(alone.confidence.mean() - recovered_fraction(alone.residual, key.residual)) < 0.25
    assert recovered_fraction(attack(seen).residual, key.residual) == 1


# ---- the parts, against naive twins


@given(n=st.integers(1, 9), seed=st.integers(0, 2**32 - 1), certain=st.booleans())
@settings(max_examples=40)
def test_the_assignment_is_the_best_there_is(n: int, seed: int, certain: bool) -> None:
    scores = torch.randn(n, n, generator=draw(seed))
    if certain:
        scores[torch.arange(n), torch.randperm(n, generator=draw(seed))] += 10
    rows, best = linear_sum_assignment(scores.numpy(), maximize=True)
    found = weight_matching._assign(scores)
    assert torch.equal(found.sort().values, torch.arange(n))
    assert scores[rows, found].sum() == pytest.approx(scores[rows, best].sum().item(), rel=1e-5)


@given(n=st.integers(1, 9), seed=st.integers(0, 2**32 - 1), alpha=st.floats(-0.5, 1))
@settings(max_examples=20)
def test_a_posterior_is_a_probability_for_each_row(n: int, seed: int, alpha: float) -> None:
    order = weight_matching._posterior(torch.randn(n, n, generator=draw(seed)), alpha)
    assert (order >= 0).all()
    torch.testing.assert_close(order.sum(1), torch.ones(n))


@pytest.mark.parametrize(("alpha", "weight"), [(-1.0, 0.01), (0.3, 0.3), (0.8, 0.8), (1.0, 0.99)])
def test_the_posterior_of_two_is_a_sigmoid(alpha: float, weight: float) -> None:
    """Of α / (1 − α²) times the scores, α from 0.01 to 0.99: doubly stochastic, and of the same cross ratio."""
    likelihood = weight / (1 - weight**2)
    for each in torch.randn(20, 2, 2, generator=draw(3), dtype=torch.float64) / likelihood:
        cross = each[0, 0] + each[1, 1] - each[0, 1] - each[1, 0]
        share = torch.sigmoid(likelihood * cross / 2)
        found = weight_matching._posterior(each, alpha)
        torch.testing.assert_close(
            found, torch.stack([share, 1 - share, 1 - share, share]).view(2, 2), atol=2e-3, rtol=0
        )


def test_features_do_not_depend_on_the_order_of_units(tiny_vit: Callable[..., VisionTransformer]) -> None:
    vit = tiny_vit(embed_dim=48, num_heads=3)
    shape, base = ModelShape.of(vit), vit.state_dict()
    key = new_key(shape)
    encrypted, public = weight_matching._both(WeightObservation(apply_key(base, key, shape), base, shape))
    found = weight_matching._features(encrypted)
    torch.testing.assert_close(found, weight_matching._features(public)[:, key.residual], rtol=1e-4, atol=1e-4)


def test_features_are_moments_products_and_what_biases_weigh(tiny_vit: Callable[..., VisionTransformer]) -> None:
    """Of each column of all matrices, unit by unit; each over all features of mean 0 and variance 1."""
    vit = tiny_vit(embed_dim=12, num_heads=3, mlp_ratio=2.0)
    shape, base = ModelShape.of(vit), vit.state_dict()
    weights, _ = weight_matching._both(WeightObservation(base, base, shape))
    naive = [*weights.residual]
    for layer in weights.layers:
        for kind, M in layer.matrices.items():
            k, u, _ = M.shape
            naive += [sum(M[i, j] ** power for j in range(u)) / u for power in (1, 2, 3) for i in range(k)]
            naive += [sum(M[i, j] * M[o, j] for j in range(u)) / u for i in range(k) for o in range(i + 1, k)]
            biases = layer.vectors.get(kind, ())
            naive += [sum(bias[j] * M[i, j] for j in range(u)) for i in range(k) for bias in biases]
    found = weight_matching._features(weights)
    assert len(found) == len(naive)
    expected = torch.stack([(row - row.mean()) / row.std(correction=0) for row in naive])
    torch.testing.assert_close(found[:, None].sub(expected).abs().amax(2).amin(1), torch.zeros(len(found)), **NEAR)
    torch.testing.assert_close(found[:, None].sub(expected).abs().amax(2).amin(0), torch.zeros(len(found)), **NEAR)


def test_what_is_the_same_in_all_features_says_nothing() -> None:
    assert not weight_matching._standard(torch.full((2, 5), 0.3)).any()
    assert not weight_matching._scale(torch.zeros(1, 2, 5)).any()
    assert weight_matching._correlation(torch.zeros(2, 5), torch.zeros(2, 5), torch.arange(5)) == 0


def test_what_is_not_certain_is_refined(tiny_vit: Callable[..., VisionTransformer]) -> None:
    """Noise as strong as the weights leaves entries that are likely and no more; of half of it all are certain."""
    vit = tiny_vit(embed_dim=48, num_heads=3)
    shape, base = ModelShape.of(vit), vit.state_dict()
    state = apply_key(base, new_key(shape), shape)
    for ratio, rounds in ((0.5, 0), (1.0, 1)):
        seen = WeightObservation(add_noise(state, ratio, draw()), base, shape)
        alone = WeightMatching(rounds=0)(seen).confidence.min()
        assert (alone > 1 - 1e-6) == (rounds == 0)
        assert alone > 0.6
        assert attack(seen).rounds >= rounds


@pytest.mark.parametrize("told", ["qk", "value"])
def test_heads_are_told_apart_by_either_kind_of_units(told: str, tiny_vit: Callable[..., VisionTransformer]) -> None:
    """Units of the other kind are the same in all heads."""
    vit = tiny_vit(embed_dim=48, num_heads=3)
    for name, tensor in vit.state_dict().items():
        if ".qkv." in name:
            parts = tensor.view(3, 3, 16, -1)  # queries, keys and values; heads
            for part in parts[2:] if told == "qk" else parts[:2]:
                part[1:] = part[:1].clone()
        elif "attn.proj.weight" in name and told == "qk":
            tensor.view(48, 3, 16)[:, 1:] = tensor.view(48, 3, 16)[:, :1].clone()
    shape, base = ModelShape.of(vit), vit.state_dict()
    key = new_key(shape)
    seen = WeightObservation(apply_key(base, key, shape), base, shape)
    assert torch.equal(attack.whole_key(seen, key.residual).heads, key.heads)


def test_biases_match_units_that_weights_leave_open() -> None:
    """Two units, alike but for their biases and what they weigh two features by: these tell the features apart."""
    M = torch.tensor([[[0.0, 2.0, 0.0, 0.0], [0.0, -2.0, 0.0, 0.0]]])  # units × features: odd ones are judged, 1 and 3
    bias = torch.tensor([[1.0, -1.0]])
    base = weight_matching._Layer({"hidden": M}, {"hidden": 3 * bias})
    swapped = weight_matching._Layer({"hidden": M.flip(1)}, {"hidden": 3 * bias.flip(1)})
    scores = weight_matching._feature_scores(swapped, base, "hidden", torch.full((4, 4), 0.25), 0.9)
    assert scores[1, 1] == pytest.approx(8, rel=1e-3)
    assert scores.abs().sum() == pytest.approx(8, rel=1e-3)


def test_soft_orders_hold_no_denormal_numbers() -> None:
    """They say nothing, and are slow."""
    order = weight_matching._posterior(50 * torch.randn(20, 20, generator=draw()) / 0.99 * (1 - 0.99**2), 0.99)
    assert order.min() >= torch.finfo(order.dtype).tiny


def test_noise_lowers_the_agreement(trained: State) -> None:
    _, seen = encrypted(trained)
    plain, noisy = (attack(replace(seen, encrypted=add_noise(seen.encrypted, ratio, draw()))) for ratio in (0.0, 0.5))
    assert plain.agreement > 0.99 > noisy.agreement > 0.8


def test_recovered_fractions_are_counted() -> None:
    assert recovered_fraction(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 3, 2])) == 0.5


# ---- what is refused


def test_models_of_two_architectures_are_refused(tiny_vit: Callable[..., VisionTransformer]) -> None:
    base, other = tiny_vit(embed_dim=48, num_heads=3), tiny_vit(embed_dim=48, num_heads=3, depth=3)
    seen = WeightObservation(other.state_dict(), base.state_dict(), ModelShape.of(base))
    message = r"one architecture\. Found 'blocks.2.attn.proj.bias' of shape \(48,\) and none"
    with pytest.raises(PrivlabError, match=message):
        attack(seen)


def test_weights_that_are_not_finite_are_refused(tiny_vit: Callable[..., VisionTransformer]) -> None:
    vit = tiny_vit(embed_dim=48, num_heads=3)
    state = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    state["blocks.1.norm1.weight"][3] = torch.nan
    with pytest.raises(PrivlabError, match=r"NaN.*'blocks.1.norm1.weight'"):
        attack(WeightObservation(state, vit.state_dict(), ModelShape.of(vit)))
