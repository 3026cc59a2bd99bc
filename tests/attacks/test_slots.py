"""From tokens to slots and patches: what is asked of a token, and what is not enough."""

from collections.abc import Callable

import pytest
import torch
from timm.models.vision_transformer import Block, LayerScale
from torch import Generator, Tensor, nn
from torch.nn.functional import pad
from torch.testing import assert_close

from privlab.attacks.gradients.token_separation import TokenSeparation
from privlab.attacks.tokens import (
    Mlp,
    Reads,
    Slots,
    embeddings_of_tokens,
    normalise,
    sharpening,
    slots_of_tokens,
)
from privlab.attacks.tokens.sharpening import sharpen_coordinates
from privlab.attacks.tokens.slots import _assign, _equations
from privlab.patches import patchify
from privlab.release import observe
from privlab.threat import Observation
from privlab.victims import PreNormBlock, VictimModel, first_block

Model = Callable[..., VictimModel]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=Generator().manual_seed(seed))


def orthonormal(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(drawn(width, rows, seed=seed)).Q.mT


def image() -> Tensor:
    return torch.rand(1, 3, 16, 16, dtype=torch.float64, generator=Generator().manual_seed(0))


def seen_of(model: VictimModel) -> tuple[Observation, Tensor, Tensor]:
    """Return an observation of one image, its patches and its tokens."""
    private, block = image(), first_block(model)
    z = model.embed(private)
    u = block.norm2(z + block.ls1(block.attn(block.norm1(z))))
    seen = observe(model, private, torch.zeros(1).long(), TokenSeparation.parameters)
    return seen, patchify(model.normalise(private), model.patch)[0], u[0]


def slots_in(model: VictimModel, x: Tensor, Y: Tensor) -> Slots:
    """Return slots whose patches x are known but for their components along Y."""
    assert model.vit.pos_embed is not None
    alike = torch.zeros(len(x), dtype=torch.bool)
    return Slots(x - (x @ Y.mT) @ Y, Y, model.vit.pos_embed[0, 1:], alike)


def test_a_token_is_put_where_it_is_parallel_and_nowhere_where_it_is_not() -> None:
    """Beyond the columns of Q: of a cosine of 0.92 it is its slot's, of 0.88 it is of none that is known."""
    axes = torch.eye(5, dtype=torch.float64)
    base, Q = torch.tensor([1.0, 2.0, 3.0]).double()[:, None] * axes[:3], axes[4:].mT
    t = torch.stack([0.92 * axes[2] + (1 - 0.92**2) ** 0.5 * axes[3], 0.88 * axes[1] + (1 - 0.88**2) ** 0.5 * axes[3]])
    rows, columns = _assign(t + 100 * axes[4], base, Q)
    assert (rows.tolist(), columns.tolist()) == ([0], [2])


def test_slots_take_their_own_tokens_and_those_that_are_alike_take_the_likeliest(tiny_model: Model) -> None:
    """Slots whose token was not found stay empty; a sum of two tokens, which is none, is left out."""
    model, alike = tiny_model(), torch.arange(16) >= 11
    assert model.vit.pos_embed is not None
    model.vit.pos_embed[0, 12:] = model.vit.pos_embed[0, 12]
    seen, x, u = seen_of(model)
    Y = torch.linalg.svd(x[alike], full_matrices=False).Vh
    block, slots = first_block(model), slots_in(model, x, Y)._replace(alike=alike)
    given = torch.tensor([12, 17, 0, 3, 14, 5, 13, 9, 15, 16])
    u = torch.cat([u, (u[1:2] + u[2:3]) / 2])
    linear = slots_of_tokens(slots, u[given], Reads.of(seen, 0, block, 17))
    found = dict(zip(given[linear.token].tolist(), linear.slot.tolist(), strict=True))
    assert {token: slot for token, slot in found.items() if slot < 12} == {0: 0, 3: 3, 5: 5, 9: 9}
    assert found.keys() == {0, 3, 5, 9, 12, 13, 14, 15, 16}
    patch = given[linear.token] > 0
    assert_close(linear.c[patch], (x @ Y.mT)[given[linear.token][patch] - 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("open_", "asked"), [(37, 64), (38, 128)])
def test_tokens_fulfil_what_is_asked_of_them(open_: int, asked: int, tiny_model: Model) -> None:
    """Some (c, o, m) and s have base + M (c, o, m) = s t' for each token; D equations, where an eighth is to spare."""
    model = tiny_model(init_values=0.3)
    seen, x, u = seen_of(model)
    block = first_block(model)
    reads = Reads.of(seen, 0, block, 17)
    equations = _equations(slots_in(model, x, orthonormal(open_, 48)), reads)
    assert equations is not None
    base, M = equations
    assert (M.shape, len(reads.mixed)) == ((asked, open_ + 17 + 1), 17)
    for right, t in zip(base, pad(normalise(Mlp.of(block), u[1:]), (0, asked - 64)), strict=True):
        A = torch.cat([M, -t[:, None]], 1)
        x = torch.linalg.lstsq(A, -right[:, None], driver="gelsd").solution
        assert (A @ x + right[:, None]).norm() < 1e-6 * right.norm()
        wrong = t.roll(7)
        A = torch.cat([M, -wrong[:, None]], 1)
        x = torch.linalg.lstsq(A, -right[:, None], driver="gelsd").solution
        assert (A @ x + right[:, None]).norm() > 1e-3 * right.norm()


def test_what_leaves_no_equation_over_is_not_asked(tiny_model: Model) -> None:
    """Of 2 D equations those that were heard hold for anything: 128 − 64, for 44 + 17 + 1 unknowns and a scale."""
    model = tiny_model()
    _, x, _ = seen_of(model)
    reads = Reads(model, first_block(model), torch.eye(64).double(), orthonormal(17, 64))
    assert _equations(slots_in(model, x, orthonormal(44, 48)), reads) is not None
    assert _equations(slots_in(model, x, orthonormal(45, 48)), reads) is None


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conjugate gradients without a preconditioner: their first step is one of steepest descent."""
    monkeypatch.setattr(sharpening, "_inverse_of_own", lambda *_: lambda r: r)


def least_squares(target: Tensor, guesses: list[Tensor], steps: int) -> Tensor:
    """Return B of B diag(1, 1e-4) ≈ target, by steps of steepest descent from the best guess."""
    block = Block(2, 1)
    for name in ("norm1", "attn", "norm2"):
        setattr(block, name, nn.Identity())
    block = PreNormBlock(block)
    block.ls1 = LayerScale(2, init_values=0.0).double().requires_grad_(False)
    base, basis = torch.zeros(1, 2).double(), torch.tensor([[1.0, 0.0], [0.0, 1e-4]]).double()
    return sharpen_coordinates(base[:0], block, base, basis, target, torch.tensor([0]), guesses, steps, 1)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("gain", "taken"), [(0.12, True), (0.08, False)])
def test_a_step_is_taken_that_gains_a_tenth(gain: float, *, taken: bool) -> None:
    """One of steepest descent, which brings all of the one direction, of that share, and next to nothing else."""
    target = torch.tensor([[gain**0.5, (1 - gain) ** 0.5]]).double()
    B = least_squares(target, [torch.zeros(1, 2).double()], 1)
    assert_close(B[0, 0], torch.tensor(gain**0.5 if taken else 0.0).double(), atol=1e-3, rtol=0)


def test_the_better_guess_is_where_it_starts() -> None:
    target = torch.tensor([[1.0, 0.0]]).double()
    for guesses in ([target / 4, target / 2, target / 3], [target / 2, target / 4]):
        assert_close(least_squares(target, guesses, 0), target / 2)


def test_embeddings_are_exact_before_they_are_sharpened(tiny_model: Model) -> None:
    """The length of each is told by what attention adds, which depends on it a little by LayerNorm's ε."""
    model = tiny_model(embed_dim=48)
    seen, _, u = seen_of(model)
    block = first_block(model)
    wanted = model.embed(image())[0, 1:]
    z = embeddings_of_tokens(u, Reads.of(seen, 0, block, 17), 0, 1)
    wanted, z = (rows - rows.mean(1, keepdim=True) for rows in (wanted, z))
    assert_close(z, wanted, atol=1e-9, rtol=1e-9)
