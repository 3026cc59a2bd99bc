"""`adaptive-clipping`: one factor on all entries, by a bound that moves as the paper's and as Flower's do."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.defenses import AdaptiveClipping, GradientNoise


def some() -> dict[str, Tensor]:
    draw = Generator().manual_seed(0)
    return {name: torch.randn(2, *shape, generator=draw).double() for name, shape in {"w": (4, 6), "e": (1, 9)}.items()}


def draws() -> list[Generator]:
    return [Generator().manual_seed(i) for i in range(2)]


def norms(of: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in of.values()], 1).norm(dim=1)


def test_the_first_round_is_clipping_by_the_first_bound() -> None:
    g = some()
    for bound in (0.3, 100.0):
        released = AdaptiveClipping(bound).release(g, draws())
        fixed = GradientNoise(clip=bound, multiplier=0.0).release(g, draws())
        for name, value in released.items():
            assert_close(value, fixed[name], rtol=1e-12, atol=0)
        assert not any(v.any() for v in AdaptiveClipping(bound).variance(released).values())


def test_the_bound_goes_to_the_norm_in_the_paper_and_away_from_it_in_flower() -> None:
    """Of clients of one norm: the paper's bound comes within a step of it; Flower's shrinks below and grows above."""
    g = some()
    for start in (0.01, 1e3):
        within = AdaptiveClipping(start, std=0.0, rounds=300)
        assert (norms(within.expected(g)) / norms(g) > math.exp(-0.11)).all()
        for norm in norms(g).tolist():
            assert abs(math.log(within._bound(norm, None) / norm)) < 0.11
            away = AdaptiveClipping(start, std=0.0, rounds=300, bit="clipped")._bound(norm, None)
            assert away == pytest.approx(start * math.exp(30 if start > norm else -30))


def test_noise_of_the_bits_changes_the_factor_alone() -> None:
    g = some()
    noisy = AdaptiveClipping(0.1, std=0.5, rounds=5)
    one, two = (noisy.release(g, [Generator().manual_seed(s)] * 2) for s in (1, 2))
    ratio = torch.cat([(one[name] / g[name]).flatten(1) for name in g], 1)
    assert_close(ratio, ratio[:, :1].expand_as(ratio))
    assert not torch.allclose(one["w"], two["w"])


@pytest.mark.parametrize("side", ["ClientSide", "ServerSide"])
def test_the_update_of_the_bound_is_flowers(side: str) -> None:
    """Clients of several norms, without noise: Flower's own strategy has the bound of `bit="clipped"`."""
    strategies = pytest.importorskip("flwr.server.strategy", reason="needs flwr")
    from flwr.compat.common.parameter import ndarrays_to_parameters

    inner = SimpleNamespace(aggregate_fit=lambda *_: (None, {}))
    kind = getattr(strategies, f"DifferentialPrivacy{side}AdaptiveClipping")
    flower = kind(inner, noise_multiplier=0.0, num_sampled_clients=3, clipped_count_stddev=0.0)
    ours = AdaptiveClipping(std=0.0, bit="clipped")
    updates, bound = [torch.full((4,), size) for size in (0.01, 0.02, 3.0)], ours.bound
    assert (flower.target_clipped_quantile, flower.clip_norm_lr) == (ours.quantile, ours.lr)
    flower.current_round_params = [torch.zeros(4).numpy()]
    for _ in range(3):
        assert flower.clipping_norm == pytest.approx(bound, rel=1e-12)
        clipped = [float(u.norm() > bound) for u in updates]
        results = [
            (
                SimpleNamespace(cid="0"),
                SimpleNamespace(metrics={"norm_bit": bit}, parameters=ndarrays_to_parameters([u.numpy()])),
            )
            for u, bit in zip(updates, clipped, strict=True)
        ]
        if side == "ClientSide":
            flower._update_clip_norm(results)
        else:
            flower.aggregate_fit(1, results, [])
        bound = ours.next_bound(bound, sum(clipped) / 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound": 0.0}, "bound of adaptive-clipping must be above 0 and finite. Found 0"),
        ({"quantile": 1.5}, r"quantile of adaptive-clipping must be in \[0, 1\]. Found 1.5"),
        ({"lr": 0.0}, "lr of adaptive-clipping must be above 0 and finite. Found 0"),
        ({"std": -1.0}, "std of adaptive-clipping must be at least 0 and finite. Found -1"),
        ({"rounds": -1}, "rounds of adaptive-clipping must be at least 0. Found -1"),
        ({"bit": "cliped"}, r"Unknown bit of adaptive-clipping 'cliped'. Did you mean clipped\?"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        AdaptiveClipping(**options)  # pyright: ignore[reportArgumentType]
