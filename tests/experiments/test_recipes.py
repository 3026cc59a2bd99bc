"""The objectives: their losses against naive loops, and where gradients go."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor

from privlab.base import PrivlabError
from privlab.experiments.training.classifiers import Classifier, IndexedViT
from privlab.experiments.training.examples import Augmentation, Examples
from privlab.experiments.training.loop import train
from privlab.experiments.training.objectives import DALS, Classify, Dal, ObjectiveRecipe, TrainMjp
from privlab.experiments.training.plan import Plan
from privlab.patches import blockwise_mask, patchify, shuffle_within
from privlab.victims import VictimModel

STILL = Augmentation(flip=False, shift=0)


def pictures(n: int = 6, side: int = 16) -> Examples:
    draw = Generator().manual_seed(0)
    images = torch.randint(256, (n, 3, side, side), generator=draw, dtype=torch.uint8)
    return Examples(images, torch.arange(n) % 3, 3, "toy")


def as_doubles(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.double() if each.is_floating_point() else each for each in batch)


def test_cross_entropy_is_that_of_a_naive_loop(tiny_model: Callable[..., VictimModel]) -> None:
    model, data, eps = tiny_model(), pictures(), 0.2
    recipe = ObjectiveRecipe(model, data, Classify(smoothing=eps), STILL)
    batch = as_doubles(recipe.batch(torch.arange(6), Generator()))
    found = recipe.loss(recipe.model, batch, Generator())
    p = model(data.images.double() / 255).log_softmax(1)
    naive = [-(1 - eps) * p[i, int(y)] - eps / 7 * p[i].sum() for i, y in enumerate(data.labels)]
    torch.testing.assert_close(found, sum(naive, torch.zeros((), dtype=torch.float64)) / 6)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixed_labels_are_shares_of_two(tiny_model: Callable[..., VictimModel], kind: str) -> None:
    objective = Classify(**{kind: 1.0})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        images, labels = objective.mix(torch.rand(6, 3, 16, 16), torch.eye(7)[:6], Generator().manual_seed(0))
    assert images.shape == (6, 3, 16, 16)
    torch.testing.assert_close(labels.sum(1), torch.ones(6))
    assert (labels > 0).sum() > 6


@pytest.mark.parametrize("per", ["batch", "image"])
def test_mjp_feeds_what_its_algorithm_says(tiny_model: Callable[..., VictimModel], per: str) -> None:
    """The masked slots hold their own patches in another order, and E_unk; the rest is untouched."""
    model, data = tiny_model(), pictures()
    recipe = ObjectiveRecipe(model, data, TrainMjp(gamma=0.6, per=per), STILL)
    images, _, masked, order = recipe.batch(torch.arange(6), Generator().manual_seed(3))
    assert (len(masked.unique(dim=0)) == 1) == (len(order.unique(dim=0)) == 1) == (per == "batch")
    alone = [
        TrainMjp(gamma=0.6, per=kind).batch(images[:1], torch.zeros(1).long(), model, Generator().manual_seed(3))
        for kind in ("batch", per)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*alone, strict=True))  # of one image they agree
    assert (masked.sum(1) == int(0.6 * 16)).all()
    before, after = patchify(data.images.float() / 255, 4), patchify(images, 4)
    assert torch.equal(after[~masked], before[~masked])
    assert not torch.equal(after, before)
    for i in range(6):
        assert sorted(after[i, masked[i]].sum(1).tolist()) == sorted(before[i, masked[i]].sum(1).tolist())
    logits, _ = recipe.model.double()(images.double(), masked, order, True)
    assert torch.equal(logits, model(images.double(), masked))


@pytest.mark.parametrize("kind", DALS)
def test_dal_reaches_only_unmasked_position_embeddings(kind: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dal, pe = Dal(kind, 8, (3, 4)).double(), torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
    masked = torch.zeros(2, 12, dtype=torch.bool)
    masked[0, :5], masked[1, :3] = True, True
    dal(pe, ~masked).backward()
    reached = pe.grad.abs().sum(1) > 0 if pe.grad is not None else torch.zeros(12)
    both = masked.all(0)
    if kind == "pca":  # its centre is the mean of all
        shares = pe.grad - pe.grad[both].mean(0) if pe.grad is not None else torch.zeros(12)
        reached = shares.abs().sum(1) > 1e-12
    assert reached.tolist() == (~both).tolist()


def naive_dal(dal: Dal, pe: Tensor, unmasked: Tensor, columns: int) -> Tensor:
    """Equations 1 and 2 by a loop over images and slots, (i, j) counted from 1."""
    places = torch.tensor([[s // columns + 1.0, s % columns + 1.0] for s in range(len(pe))], dtype=pe.dtype)
    still = (pe - pe.mean(0)).detach()
    axes = torch.linalg.eigh(still.mT @ still).eigenvectors[:, -2:]  # the two of greatest variance
    seen = still @ axes
    fit = torch.linalg.solve(seen.mT @ seen, seen.mT @ (places - places.mean(0)))
    terms = []
    for mask in unmasked:
        for slot in range(len(pe)):
            if mask[slot] and dal.kind == "pca":
                found = (pe[slot] - pe.mean(0)) @ axes @ fit + places.mean(0)
                terms.append((found - places[slot]).abs().sum())
            elif mask[slot]:
                terms.append((dal.regressor(pe[slot]) - places[slot]).abs().sum())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("kind", DALS)
def test_dal_and_its_gradient_are_those_of_a_naive_loop(kind: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dal, pe = Dal(kind, 8, (2, 3)).double(), torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    unmasked = torch.tensor([[True, True, False, True, False, True], [False, True, True, True, True, True]])
    wanted, found = naive_dal(dal, pe, unmasked, 3), dal(pe, unmasked)
    torch.testing.assert_close(found, wanted)
    learnt = [pe, *dal.parameters()]
    slopes = (torch.autograd.grad(value, learnt) for value in (found, wanted))
    for got, want in zip(*slopes, strict=True):
        torch.testing.assert_close(got, want)


def test_places_are_raw_grid_coordinates() -> None:
    """A regressor that says nothing is off by i + j, on average, as in Eq. 2: not by a share of the side."""
    dal = Dal("linear", 8, (4, 6))
    assert isinstance(dal.regressor, torch.nn.Linear)
    torch.nn.init.zeros_(dal.regressor.weight)
    torch.nn.init.zeros_(dal.regressor.bias)
    with torch.no_grad():
        assert float(dal(torch.randn(24, 8), torch.ones(1, 24, dtype=torch.bool))) == 2.5 + 3.5


# Table 4 of MJP

TABLE_4: dict[str, Classify] = {
    "A": Classify(),
    "B": Classify(),
    "C": TrainMjp(gamma=1.0, spp=True, unknown=False, dal="none"),
    "D": TrainMjp(gamma=0.0, unknown=False),
    "E": TrainMjp(gamma=0.4, unknown=False, dal="none"),
    "F": TrainMjp(gamma=0.4, unknown=False, dal="none"),
    "G": TrainMjp(gamma=0.4, dal="none"),
    "H": TrainMjp(gamma=0.4, dal="pca"),
    "I": TrainMjp(gamma=0.4, dal="linear"),
    "J": TrainMjp(gamma=0.4),
}


def naive_loss(objective: Classify, model: Classifier, dal: Dal | None, images: Tensor, labels: Tensor) -> Tensor:
    """Return L_CE + λ L_DAL, slot by slot, after Equations 1 to 5; the draws are those of one draw for the batch."""
    vit: Any = model.vit if isinstance(model, VictimModel) else model.net
    draw, order, pixels = Generator().manual_seed(3), torch.arange(16), torch.arange(16)
    masked = torch.zeros(16, dtype=torch.bool)
    if isinstance(objective, TrainMjp):
        masked = blockwise_mask((4, 4), objective.gamma, draw)
        order = shuffle_within(masked, draw)
        pixels = torch.randperm(16, generator=draw) if objective.spp else pixels
    unknown, total = getattr(objective, "unknown", False), torch.zeros((), dtype=torch.float64)
    pe = torch.zeros(17, 64, dtype=torch.float64) if vit.pos_embed is None else vit.pos_embed[0]
    for image, label in zip(images, labels.tolist(), strict=True):
        x, z = (image - model.mean) / model.std, [vit.cls_token[0, 0] + pe[0]]
        for n in range(16):
            row, column = divmod(int(order[n]), 4)
            patch = x[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].flatten(1)
            patch = patch[:, pixels] if masked[n] else patch
            token = vit.patch_embed.proj.weight.flatten(1) @ patch.flatten() + vit.patch_embed.proj.bias
            own = model.unk_embed[0, 0] if unknown and masked[n] and model.unk_embed is not None else pe[1 + n]
            index = vit.idx_embed[0, order[n]] if isinstance(model, IndexedViT) else 0.0
            z.append(token + own + index)
        logits = vit.head(vit.norm(vit.blocks(torch.stack(z)[None]))[0, 0])
        wanted = torch.full((7,), 0.1 / 7).double().index_fill(0, torch.tensor(label), 0.9 + 0.1 / 7)
        total = total - (wanted * logits.log_softmax(0)).sum() / len(images)
    if dal is None or not isinstance(objective, TrainMjp):
        return total
    return total + objective.weight * naive_dal(dal, pe[1:], ~masked.expand(len(images), -1), 4)


@pytest.mark.parametrize("letter", TABLE_4)
def test_a_step_of_each_variant_is_a_naive_one(
    letter: str, tiny_model: Callable[..., VictimModel], tiny_vit: Callable[..., VisionTransformer]
) -> None:
    """Loss and gradient of all that is trained, by the letters of Table 4."""
    objective, data = TABLE_4[letter], pictures(3)
    model: Classifier = tiny_model(unknown=letter in "GHIJ", pos_embed="none" if letter == "B" else "learn")
    if letter == "F":
        model = IndexedViT(tiny_vit(), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)).double()
    recipe = ObjectiveRecipe(model, data, objective, STILL)
    recipe.model.double()
    images, labels = data.images.double() / 255, data.labels
    batch = as_doubles(objective.batch(images, labels, model, Generator().manual_seed(3)))
    dal = getattr(recipe.model, "dal", None)
    assert (dal is not None) == (letter in "DHIJ")
    found, wanted = recipe.loss(recipe.model, batch, Generator()), naive_loss(objective, model, dal, images, labels)
    torch.testing.assert_close(found, wanted)
    learnt = dict(recipe.model.named_parameters())
    slopes = [torch.autograd.grad(value, [*learnt.values()], allow_unused=True) for value in (found, wanted)]
    for name, got, want in zip(learnt, *slopes, strict=True):
        assert (got is None) == (want is None), name
        if got is not None:
            torch.testing.assert_close(got, want, msg=name)


def test_pca_finds_embeddings_that_are_places() -> None:
    """Position embeddings that are an affine image of the places are placed exactly."""
    dal = Dal("pca", 8, (4, 4)).double()
    pe = dal.places @ torch.randn(2, 8, dtype=torch.float64, generator=Generator().manual_seed(0)) + 0.3
    assert dal(pe, torch.ones(1, 16, dtype=torch.bool)) < 1e-10


def test_a_batch_that_is_all_masked_has_no_dal() -> None:
    dal = Dal("linear", 8, (2, 2))
    assert dal(torch.randn(4, 8), torch.zeros(3, 4, dtype=torch.bool)) == 0


def test_the_regressor_is_trained_and_left_behind(tiny_model: Callable[..., VictimModel]) -> None:
    model = tiny_model().float()
    names = set(model.state_dict())
    recipe = ObjectiveRecipe(model, pictures(), TrainMjp(gamma=0.3, weight=1.0), STILL)
    before = {name: each.clone() for name, each in recipe.model.state_dict().items()}
    train(recipe, Plan(steps=3, batch_size=6))
    moved = {name for name, each in recipe.model.state_dict().items() if not torch.equal(each, before[name])}
    assert {"victim.unk_embed", "victim.vit.pos_embed", "dal.regressor.0.weight"} <= moved
    assert set(model.state_dict()) == names


def test_a_recipe_is_told_by_all_that_shapes_it(tiny_model: Callable[..., VictimModel]) -> None:
    recipes = [
        ObjectiveRecipe(tiny_model(), pictures(), Classify(), STILL),
        ObjectiveRecipe(tiny_model(1), pictures(), Classify(), STILL),
        ObjectiveRecipe(tiny_model(), pictures(), Classify(smoothing=0.0), STILL),
        ObjectiveRecipe(tiny_model(), pictures(), TrainMjp(), STILL),
        ObjectiveRecipe(tiny_model(), pictures(), TrainMjp(dal="linear"), STILL),
        ObjectiveRecipe(tiny_model(), pictures(), Classify(), Augmentation()),
    ]
    assert len({each.identity for each in recipes}) == len(recipes)
    assert ObjectiveRecipe(tiny_model(), pictures(), Classify(), STILL).identity == recipes[0].identity


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, r"γ.* in \[0, 1\]. Found 1.5"),
        ({"dal": "cubic"}, "Unknown DAL regressor 'cubic'"),
        ({"weight": -1.0}, "λ.* at least 0. Found -1"),
        ({"per": "picture"}, "Unknown per 'picture'"),
        ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\)"),
        ({"mixup": -0.1}, "mixup must be at least 0"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        TrainMjp(**options)  # pyright: ignore[reportArgumentType]


def test_mjp_needs_the_unknown_embedding_and_dal_needs_embeddings(tiny_model: Callable[..., VictimModel]) -> None:
    with pytest.raises(PrivlabError, match=r"MJP.*E_unk"):
        ObjectiveRecipe(tiny_model(unknown=False), pictures(), TrainMjp(), STILL)
    with pytest.raises(PrivlabError, match=r"--set.*dal=none"):
        ObjectiveRecipe(tiny_model(unknown=False, pos_embed="none"), pictures(), TrainMjp(unknown=False), STILL)
