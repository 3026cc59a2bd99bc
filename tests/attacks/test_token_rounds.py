"""The rounds of token separation, told what each of them finds: what is asked of a token, and what is one already."""

import pytest
import torch
from torch import Generator, Tensor
from torch.nn.functional import gelu, normalize
from torch.testing import assert_close

from privlab.attacks.tokens import Mlp, Spans, separate
from privlab.attacks.tokens import equations as tokens
from privlab.attacks.tokens import spans as terms
from privlab.attacks.tokens.equations import _start, backward, outside, refine, settle

D, M, COUNT = 24, 96, 20


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def planted() -> tuple[Mlp, Tensor, Tensor, Tensor]:
    """Return an MLP, tokens, and the gradients that they make."""
    W1, b1, W2 = drawn(M, D, seed=1) / D**0.5, 0.1 * drawn(M, seed=2), drawn(D, M, seed=3)
    mlp = Mlp(1 + 0.3 * drawn(D), drawn(D), W1, b1, W2, gelu)
    t = drawn(COUNT, D, seed=4)
    t = t - t.mean(1, keepdim=True)
    u = mlp.γ * t / t.square().mean(1, keepdim=True).sqrt() + mlp.β
    ε, (h, slope) = drawn(COUNT, D, seed=5), mlp.hidden(u)
    return mlp, u, (slope * (ε @ W2)).mT @ u, ε.mT @ h


def run(planted: tuple[Mlp, Tensor, Tensor, Tensor], tolerance: float, count: int = COUNT) -> Tensor:
    mlp, _, G1, G2 = planted
    options = {"starts": 16, "rounds": 60, "steps": 1, "tolerance": tolerance}
    return separate(mlp, G1[None], G2[None], count, [Generator().manual_seed(0)], **options)[0].u


def test_more_is_allowed_after_two_rounds_of_few_and_the_search_ends_after_two_of_none(
    planted: tuple[Mlp, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of 16 starts are few as long as more can be allowed, three are not; at the tolerance one is enough."""
    finds, asked = iter([3, 2, 2, 3, 1, 0, 0, 0, 1, 0, 0, 5]), []
    left = iter(planted[1])

    def distinct(_: Mlp, __: Spans, α: Tensor, limit: Tensor | float, ___: Tensor) -> Tensor:
        asked.append(float(limit))
        new = [next(left) for _ in range(next(finds, 0) if len(asked) % 2 == 0 else 0)]
        return torch.stack(new)[None] if new else α.new_zeros(1, 0, D)

    monkeypatch.setattr(tokens, "_distinct", distinct)
    monkeypatch.setattr(
        tokens, "_start", lambda _, spans, number, __: torch.zeros(1, number, spans.u.shape[1]).double()
    )
    monkeypatch.setattr(tokens, "refine", lambda _, __, α, *___: α)
    monkeypatch.setattr(tokens, "settle", lambda _, __, α, *___: α)
    assert len(run(planted, 5e-3)) == 12
    assert set(asked[::2]) == {5e-3}  # a first look takes what may be one at all
    assert asked[1::2] == pytest.approx([1e-5] * 3 + [1e-4] * 3 + [1e-3] * 2 + [5e-3] * 3)


@pytest.mark.parametrize(
    ("idle", "apart", "found"),
    [(0, 2e-5, 1), (0, 5e-5, 2), (2, 2e-4, 1), (2, 5e-4, 2), (4, 2e-3, 1), (6, 2e-3, 1), (6, 5e-3, 2)],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_solutions_are_one_token_within_three_times_what_is_allowed(
    idle: int, apart: float, found: int, *, at_once: bool,
    planted: tuple[Mlp, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """1 − cosine, and never more than 3e-3, as more is allowed after idle rounds; of one round, or of two."""
    _, u, _, _ = planted
    unit, way = normalize(u[0], dim=0), u[1] - (u[1] @ normalize(u[0], dim=0)) * normalize(u[0], dim=0)
    copy = (1 - apart) * unit + (1 - (1 - apart) ** 2) ** 0.5 * normalize(way, dim=0)
    pair = torch.stack([u[0], copy * u[0].norm()])
    come = iter([*[pair[:0]] * idle, *([pair] if at_once else [pair[:1], pair[1:]]), *[pair[:0]] * 20])
    due = [pair]

    def lead(_: Mlp, spans: Spans, α: Tensor, __: int) -> Tensor:
        if α.dtype == torch.float32:  # the rough search of a round
            due[0] = next(come)
        return (due[0][None] @ spans.u.mT.double()).to(α)

    monkeypatch.setattr(tokens, "refine", lead)
    monkeypatch.setattr(tokens, "settle", lead)
    monkeypatch.setattr(tokens, "outside", lambda _, __, α: torch.full(α.shape[:2], 1e-9).double())
    monkeypatch.setattr(
        tokens, "backward", lambda _, whole, some: (whole.ε[:, : some.shape[1]], whole.δ[:, : some.shape[1]])
    )
    monkeypatch.setattr(terms, "UNIT_ROUNDOFF", 0.0)
    assert len(run(planted, 1e-2)) == found


def test_releases_of_different_ranks_are_searched_together_as_alone(
    planted: tuple[Mlp, Tensor, Tensor, Tensor],
) -> None:
    """Of six, three and nine tokens: what is padded with zeros, or with starts of NaN, changes nothing."""
    mlp, u, _, _ = planted
    counts, ε = (6, 3, 9), drawn(COUNT, D, seed=5)
    h, slope = mlp.hidden(u)
    G1 = torch.stack([(slope[:n] * (ε[:n] @ mlp.W2)).mT @ u[:n] for n in counts])
    G2 = torch.stack([ε[:n].mT @ h[:n] for n in counts])

    def draws() -> list[Generator]:
        return [Generator().manual_seed(i) for i in range(3)]

    spans = Spans.of(G1, G2, COUNT)
    assert spans.real().sum(1).tolist() == list(counts)
    α = _start(mlp, spans, 10, draws())
    cut = torch.cat([α[:, :8], torch.full_like(α[:, :2], torch.nan)], 1)
    near, settled = refine(mlp, spans, cut, 40), settle(mlp, spans, cut, 40)
    padded = torch.stack([torch.cat([u[:n], torch.full_like(u[n:], torch.nan)]) for n in counts])
    back = backward(mlp, spans, padded)
    found = separate(mlp, G1, G2, COUNT, draws(), starts=8, rounds=20, steps=40, tolerance=1e-2)
    for i, n in enumerate(counts):
        own = Spans.of(G1[i], G2[i], COUNT)
        assert_close(_start(mlp, own.take(None), 10, draws()[i : i + 1])[0], α[i, :, :n])
        for search, together in ((refine, near), (settle, settled)):
            alone = search(mlp, own, α[i, :8, :n], 40)
            assert_close(together[i, :8, :n], alone, atol=1e-4, rtol=0)
            assert not together[i, :8, n:].any()
            assert together[i, 8:].isnan().all()
        for together, alone in zip(back, backward(mlp, own, u[:n]), strict=True):
            assert_close(together[i, :n], alone)
        assert found[i].wanted == n
        cosine = normalize(found[i].u, dim=1) @ normalize(u[:n], dim=1).mT
        assert sorted(cosine.argmax(1).tolist()) == list(range(n))
        assert found[i].residual.max() < 1e-5  # the search ends at rounding, or a few steps before it


def of_six(planted: tuple[Mlp, Tensor, Tensor, Tensor]) -> tuple[Mlp, Spans, Tensor]:
    """Return the spans of the first six tokens alone, and 64 starts."""
    mlp, u, _, _ = planted
    ε, (h, slope) = drawn(6, D, seed=5), mlp.hidden(u[:6])
    spans = Spans.of((slope * (ε @ mlp.W2)).mT @ u[:6], ε.mT @ h, 6)
    return mlp, spans, _start(mlp, spans.take(None), 64, [Generator().manual_seed(0)])[0]


def test_no_start_is_led_farther_off(planted: tuple[Mlp, Tensor, Tensor, Tensor]) -> None:
    """Step by step, under the cost as it is written down."""
    mlp, spans, α = of_six(planted)
    size, costs = mlp.hidden(α @ spans.u)[0].norm(dim=1).median(), []
    for steps in range(8):
        u = refine(mlp, spans, α, steps) @ spans.u
        h, t = mlp.hidden(u)[0], (u - mlp.β) / mlp.γ
        off = ((h - (h @ spans.h.mT) @ spans.h) / size).square().sum(1)
        costs.append(off + t.mean(1).square() + (t.square().mean(1) - 1).square())
    falls = torch.stack(costs).diff(dim=0)
    assert falls.max() < 1e-20
    assert (falls < 0).any(1).all()


def test_a_search_is_as_fast_as_gauss_and_newtons_method_and_goes_around_what_that_does_not_solve(
    planted: tuple[Mlp, Tensor, Tensor, Tensor],
) -> None:
    """Of 64 starts half are exact to 1e-12 within ten steps, and nearly all find a token within forty."""
    mlp, spans, α = of_six(planted)
    soon, late = (outside(mlp, spans, refine(mlp, spans, α, steps)) for steps in (10, 40))
    assert soon.median() < 1e-12
    assert (late < 1e-10).sum() >= 60
