"""What a defense makes of a batch is what it makes of each image alone, by that image's own draw."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.defenses import DEFENSES, CutMix, Jigsaw, LowPass, defenses
from privlab.release import observe, observe_updates, released_parameters
from privlab.report.tables import DETERMINISTIC
from privlab.threat import Client, ClientData, Draws, FeatureDefense, GradientDefense, Sent, Stack
from privlab.threat.declarations import defense_declarations
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
B = 4


def draws(first: int = 0, count: int = B) -> list[Generator]:
    """Return generators that differ from each other."""
    return [Generator().manual_seed(1000 + first + i) for i in range(count)]


def of_kind(kind: type) -> list[str]:
    """Return the names of the shipped defenses that act on gradients or on features."""
    return [name for name in DEFENSES if isinstance(defenses()[name](), kind)]


ON_GRADIENTS, ON_FEATURES = of_kind(GradientDefense), of_kind(FeatureDefense)
ON_IMAGES = [name for name in DEFENSES if name not in {*ON_GRADIENTS, *ON_FEATURES}]


def private(crops: Tensor) -> Tensor:
    """Return four different images."""
    return crops[[0, 100, 200, 300]].double()


@pytest.mark.parametrize("name", ON_IMAGES)
def test_images_are_changed_one_by_one(crops: Tensor, name: str) -> None:
    stack, images = Stack((defenses()[name](),)), private(crops)
    if stack.mixes_images:
        pytest.skip("it mixes the images of a batch, by declaration")
    key = Generator().manual_seed(5)
    whole = stack.feed(images, 4, draws(), key=key)
    for i in range(B):
        alone = stack.feed(images[i : i + 1], 4, draws(i, 1), key=key.manual_seed(5))
        assert_close(alone.images[0], whole.images[i])
        assert torch.equal(alone.order[0], whole.order[i])
        assert torch.equal(alone.moved[0], whole.moved[i])


@pytest.mark.parametrize("name", ON_GRADIENTS)
def test_gradients_are_changed_release_by_release(tiny_model: Model, crops: Tensor, name: str) -> None:
    model, labels = tiny_model(), torch.tensor([0, 2, 5, 1])
    defense = defenses()[name]()
    seen = observe(model, private(crops), labels, sorted(released_parameters(model) - {"unk_embed"}))
    whole = defense.release(dict(seen.gradients), draws())
    for i in range(B):
        alone = defense.release({n: g[i : i + 1] for n, g in seen.gradients.items()}, draws(i, 1))
        assert alone.keys() == whole.keys()
        for parameter, g in alone.items():
            assert_close(g[0], whole[parameter][i])


@pytest.mark.parametrize("name", ON_GRADIENTS)
def test_a_defense_that_draws_does_so_for_each_release(tiny_model: Model, crops: Tensor, name: str) -> None:
    """The same image twice has two releases, unless nothing is drawn, and the benchmark knows which defenses draw."""
    model = tiny_model()
    defense = defenses()[name]()
    one = observe(model, private(crops)[:1], torch.tensor([3]), sorted(released_parameters(model) - {"unk_embed"}))
    twice = {n: g.repeat(2, *[1] * (g.ndim - 1)) for n, g in one.gradients.items()}
    own, shared = defense.release(twice, draws(count=2)), defense.release(twice, [*draws(count=1), *draws(count=1)])
    assert all(torch.equal(*g) for g in shared.values())
    state = draws(count=1)[0]
    before = state.get_state()
    defense.release(dict(one.gradients), [state])
    drawn = not torch.equal(before, state.get_state())
    assert any(not torch.equal(*g) for g in own.values()) == drawn
    assert not (drawn and name in DETERMINISTIC)


@pytest.mark.parametrize("name", ON_FEATURES)
def test_features_keep_their_images(tiny_model: Model, crops: Tensor, name: str) -> None:
    """Where no row crosses images, those of an image follow from it and from the draws of the batch alone."""
    model, images = tiny_model(), private(crops)
    defense = defenses()[name]()
    tokens = model.vit._pos_embed(model.vit.patch_embed(model.normalise(images)))

    def of(rows: Tensor, first: int) -> Sent:
        made = Draws(draws(first, len(rows)), Generator().manual_seed(7), Generator().manual_seed(8))
        return defense.send(Sent.plain(rows, 1), made)

    whole = of(tokens, 0)
    if defense_declarations(defense).acts_as.rows == "mixed":
        assert sorted(whole.source.flatten().tolist()) == list(range(tokens.shape[0] * tokens.shape[1]))
        return
    changed = tokens.clone()
    changed[1:] = changed[1:].flip(0)
    assert torch.equal(of(changed, 0).features[0], whole.features[0])


def test_every_client_of_a_mean_draws_for_itself(tiny_model: Model, crops: Tensor) -> None:
    """The mean of two clients with the same image under the jigsaw is that of the two alone, each in its own order."""
    model, images = tiny_model(), private(crops)

    def sent(of: Sequence[int], together: int) -> dict[str, Tensor]:
        data = [ClientData(images[:1], torch.tensor([3]), Generator().manual_seed(i)) for i in of]
        seen = observe_updates(model, Client(lr=0.1, clients=together), data, None, [Jigsaw(gamma=1.0)])
        return {name: u[0] for name, u in seen.gradients.items()}

    both, alone = sent([0, 1], 2), [sent([0], 1), sent([1], 1)]
    for name, u in both.items():
        assert_close(u, (alone[0][name] + alone[1][name]) / 2)
    assert any(not torch.equal(u, alone[1][name]) for name, u in alone[0].items())


@pytest.mark.parametrize("side", [16, 15])
def test_low_pass_keeps_a_disc_of_frequencies(side: int) -> None:
    """A wave along the diagonal is cut where one along an axis, of the same frequency in each direction, passes."""
    place = torch.arange(side, dtype=torch.float64)
    down, across = place[:, None].expand(side, side), place[None].expand(side, side)
    for k in range(1, side // 2):
        axis, diagonal = (
            (0.5 + 0.4 * torch.cos(2 * torch.pi * k * along / side)).expand(1, 3, side, side)
            for along in (down, down + across)
        )
        between = LowPass(radius=min(1.2 * k / side, 1.0))  # k < radius · side < √2 k
        assert_close(between(axis, 4, []).images, axis.contiguous())
        assert_close(between(diagonal, 4, []).images, torch.full_like(diagonal, 0.5))
        assert_close(LowPass(radius=min(1.5 * k / side, 1.0))(diagonal, 4, []).images, diagonal.contiguous())


@pytest.mark.parametrize(("alpha", "spread"), [(0.05, (0.4, 0.5)), (1.0, (0.2, 0.3)), (100.0, (0.0, 0.05))])
def test_cutmix_draws_its_share_by_alpha(alpha: float, spread: tuple[float, float]) -> None:
    """The mean of |λ − ½| of Beta(α, α) is near ½ for a small α, ¼ for α = 1, and near 0 for a large one."""
    defense, shares = CutMix(alpha=alpha), []
    for i, draw in enumerate(draws(count=60)):
        other, share, _, _ = defense._draw(i % 2, 2, draw)
        assert other == 1 - i % 2
        shares.append(share)
    assert spread[0] <= float((torch.tensor(shares) - 0.5).abs().mean()) <= spread[1]


def test_cutmix_covers_the_share_that_it_drew() -> None:
    """Black images get white rectangles of an area of 1 − λ, less what the border cuts off."""
    images = torch.stack([torch.zeros(3, 32, 32), torch.ones(3, 32, 32)])
    for seed in range(10):
        own = [Generator().manual_seed(seed), Generator().manual_seed(seed + 50)]
        _, share, down, across = CutMix()._draw(0, 2, Generator().manual_seed(seed))
        half = share**0.5 / 2
        sides = [min(1, at + half) - max(0, at - half) for at in (down, across)]
        area = float(CutMix()(images, 4, own).images[0].mean())
        assert area == pytest.approx(sides[0] * sides[1], abs=0.07)
