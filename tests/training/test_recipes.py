"""The objectives: their losses against naive loops, and where gradients go."""

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor

from privlab.errors import PrivlabError
from privlab.model import VictimModel
from privlab.patches import patchify
from privlab.recipes import DALS, Classify, Dal, Lesson, TrainMjp
from privlab.training import Augmentation, Examples, Plan, train

STILL = Augmentation(flip=False, shift=0)


def pictures(n: int = 6, side: int = 16) -> Examples:
    draw = Generator().manual_seed(0)
    images = torch.randint(256, (n, 3, side, side), generator=draw, dtype=torch.uint8)
    return Examples(images, torch.arange(n) % 3, 3, "toy")


def as_doubles(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.double() if each.is_floating_point() else each for each in batch)


def test_cross_entropy_is_that_of_a_naive_loop(tiny_model: Callable[..., VictimModel]) -> None:
    model, data, eps = tiny_model(), pictures(), 0.2
    lesson = Lesson(model, data, Classify(smoothing=eps), STILL)
    batch = as_doubles(lesson.batch(torch.arange(6), Generator()))
    found = lesson.loss(lesson.model, batch, Generator())
    p = model(data.images.double() / 255).log_softmax(1)
    naive = [-(1 - eps) * p[i, int(y)] - eps / 7 * p[i].sum() for i, y in enumerate(data.labels)]
    torch.testing.assert_close(found, sum(naive, torch.zeros((), dtype=torch.float64)) / 6)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixed_labels_are_shares_of_two(tiny_model: Callable[..., VictimModel], kind: str) -> None:
    objective = Classify(**{kind: 1.0})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        images, labels = objective.mixed(torch.rand(6, 3, 16, 16), torch.eye(7)[:6], Generator().manual_seed(0))
    assert images.shape == (6, 3, 16, 16)
    torch.testing.assert_close(labels.sum(1), torch.ones(6))
    assert (labels > 0).sum() > 6


def test_mjp_feeds_what_its_algorithm_says(tiny_model: Callable[..., VictimModel]) -> None:
    """The masked slots hold their own patches in another order, and E_unk; the rest is untouched."""
    model, data = tiny_model(), pictures()
    lesson = Lesson(model, data, TrainMjp(gamma=0.6), STILL)
    images, _, masked = lesson.batch(torch.arange(6), Generator().manual_seed(3))
    assert (masked.sum(1) == int(0.6 * 16)).all()
    before, after = patchify(data.images.float() / 255, 4), patchify(images, 4)
    assert torch.equal(after[~masked], before[~masked])
    assert not torch.equal(after, before)
    for i in range(6):
        assert sorted(after[i, masked[i]].sum(1).tolist()) == sorted(before[i, masked[i]].sum(1).tolist())
    logits, _ = lesson.model.double()(images.double(), masked, True)
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


@pytest.mark.parametrize("kind", ["linear", "nonlinear"])
def test_dal_is_that_of_a_naive_loop(kind: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dal, pe = Dal(kind, 8, (2, 3)).double(), torch.randn(6, 8, dtype=torch.float64)
    unmasked = torch.tensor([[True, True, False, True, False, True], [False, True, True, True, True, True]])
    terms = []
    for mask in unmasked:
        for slot in mask.nonzero().flatten().tolist():
            place = torch.tensor([slot // 3 / 1, slot % 3 / 2])
            terms.append((dal.regressor(pe[slot]) - place).abs().sum())
    torch.testing.assert_close(dal(pe, unmasked), torch.stack(terms).mean())


def test_pca_finds_embeddings_that_are_places() -> None:
    """Position embeddings that are an affine picture of the places are placed exactly."""
    dal = Dal("pca", 8, (4, 4)).double()
    pe = dal.places @ torch.randn(2, 8, dtype=torch.float64, generator=Generator().manual_seed(0)) + 0.3
    assert dal(pe, torch.ones(1, 16, dtype=torch.bool)) < 1e-10


def test_a_batch_that_is_all_masked_has_no_dal() -> None:
    dal = Dal("linear", 8, (2, 2))
    assert dal(torch.randn(4, 8), torch.zeros(3, 4, dtype=torch.bool)) == 0


def test_the_regressor_is_trained_and_left_behind(tiny_model: Callable[..., VictimModel]) -> None:
    model = tiny_model().float()
    names = set(model.state_dict())
    lesson = Lesson(model, pictures(), TrainMjp(gamma=0.3, weight=1.0), STILL)
    before = {name: each.clone() for name, each in lesson.model.state_dict().items()}
    train(lesson, Plan(steps=3, batch_size=6))
    moved = {name for name, each in lesson.model.state_dict().items() if not torch.equal(each, before[name])}
    assert {"victim.unk_embed", "victim.vit.pos_embed", "dal.regressor.0.weight"} <= moved
    assert set(model.state_dict()) == names


def test_a_lesson_is_told_by_all_that_shapes_it(tiny_model: Callable[..., VictimModel]) -> None:
    lessons = [
        Lesson(tiny_model(), pictures(), Classify(), STILL),
        Lesson(tiny_model(1), pictures(), Classify(), STILL),
        Lesson(tiny_model(), pictures(), Classify(smoothing=0.0), STILL),
        Lesson(tiny_model(), pictures(), TrainMjp(), STILL),
        Lesson(tiny_model(), pictures(), TrainMjp(dal="linear"), STILL),
        Lesson(tiny_model(), pictures(), Classify(), Augmentation()),
    ]
    assert len({each.identity for each in lessons}) == len(lessons)
    assert Lesson(tiny_model(), pictures(), Classify(), STILL).identity == lessons[0].identity


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, r"γ.* in \[0, 1\]. Found 1.5"),
        ({"dal": "cubic"}, "Unknown DAL regressor 'cubic'"),
        ({"weight": -1.0}, "λ.* at least 0. Found -1"),
        ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\)"),
        ({"mixup": -0.1}, "mixup must be at least 0"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        TrainMjp(**options)  # pyright: ignore[reportArgumentType]


def test_mjp_needs_the_unknown_embedding_and_dal_needs_embeddings(tiny_model: Callable[..., VictimModel]) -> None:
    with pytest.raises(PrivlabError, match="MJP trains E_unk, and this model has none"):
        Lesson(tiny_model(unknown=False), pictures(), TrainMjp(), STILL)
    with pytest.raises(PrivlabError, match="this model has none: --set dal=none"):
        Lesson(tiny_model(unknown=False, pos_embed="none"), pictures(), TrainMjp(unknown=False), STILL)
