"""The labels of a batch, from the gradient of the head: what is certain is right, and a small batch is told whole."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from privlab.base import PrivlabError
from privlab.release import Told, certain_counts, told_labels

seeds = st.integers(0, 2**31)
FORMATS = [torch.float32, torch.float16, torch.bfloat16]


def head_of(seed: int, classes: int, width: int, scale: float) -> nn.Linear:
    """Return a classifier; the greater its scale, the surer it is."""
    draw = torch.Generator().manual_seed(seed)
    head = nn.Linear(width, classes)
    with torch.no_grad():
        head.weight.copy_(scale * torch.randn(classes, width, generator=draw) / width**0.5)
        head.bias.copy_(0.1 * torch.randn(classes, generator=draw))
    return head


def released(
    head: nn.Linear, labels: list[int], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return the head's gradient of the mean cross-entropy, by autograd, for random features."""
    f = torch.randn(len(labels), head.in_features, generator=torch.Generator().manual_seed(seed + 10**6))
    loss = F.cross_entropy(head(f), torch.tensor(labels))
    weight, bias = torch.autograd.grad(loss, [head.weight, head.bias])
    return {"head.weight": weight.to(dtype), "head.bias": bias.to(dtype)}


def counts(labels: tuple[int, ...] | list[int], classes: int) -> Tensor:
    return torch.bincount(torch.tensor(labels, dtype=torch.long), minlength=classes)


@settings(max_examples=40)
@given(seeds, st.integers(1, 8), st.floats(0, 20), st.integers(2, 40), st.sampled_from(FORMATS))
@example(175, 3, 5.0, 15, torch.bfloat16)  # 2 / 3 is rounded up
@example(125, 6, 12.0, 17, torch.bfloat16)  # class 8 is hidden, and class 2 explains as much as its rounding leaves
@example(1096144879, 6, 19.135237731237776, 35, torch.float16)
@example(414056766, 8, 8.826206779326307, 35, torch.bfloat16)
@example(1675297276, 4, 11.073932610425343, 10, torch.float32)  # four images in eight equations each
def test_what_is_certain_is_right(seed: int, B: int, scale: float, classes: int, dtype: torch.dtype) -> None:
    """Whatever the precision, and where there are too few classes for anything but bounds."""
    head = head_of(seed, classes, 24, scale)
    labels = torch.randint(classes, (B,), generator=torch.Generator().manual_seed(seed)).tolist()
    told = told_labels(head, released(head, labels, seed, dtype), B)
    assert told is not None
    assert len(told.labels) == B
    assert list(told.labels) == sorted(told.labels)
    assert (counts(told.certain, classes) <= counts(labels, classes)).all()
    assert (counts(told.certain, classes) <= counts(told.labels, classes)).all()
    assert told.all_certain == (len(told.certain) == B)


@settings(max_examples=100)
@given(seeds, st.integers(1, 64), st.integers(1, 12), st.floats(0, 20), st.sampled_from(FORMATS), st.booleans())
def test_counts_are_bounds_wherever_rounding_takes_place(
    seed: int, B: int, classes: int, scale: float, dtype: torch.dtype, mean_first: bool
) -> None:
    """Each pᵢc − yᵢc, each partial sum in a random order, and the mean before or after it are rounded."""
    draw = torch.Generator().manual_seed(seed)
    p = (scale * torch.randn(B, classes, generator=draw)).softmax(1).to(dtype)
    labels = torch.randint(classes, (B,), generator=draw)
    r = p - F.one_hot(labels, classes).to(dtype)
    h = torch.zeros(classes, dtype=dtype)
    for term in r / B if mean_first else r:
        h = h + term
    h = h if mean_first else h / B
    assert (certain_counts(h.double() * B, B) <= counts(labels.tolist(), classes)).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("B", [3, 15, 100])
def test_a_class_that_all_images_have_is_counted_within_rounding(B: int, dtype: torch.dtype) -> None:
    """A model that is surely wrong releases −1 for each image: 15 of one class are counted, of more nearly all."""
    h = torch.tensor([-1.0, 1.0], dtype=dtype).double() * B
    least, other = certain_counts(h, B).tolist()
    assert other == 0
    assert least == {3: 3, 15: 15, 100: 75}[B]


def test_a_gradient_that_no_batch_has_makes_no_label_certain() -> None:
    """Two entries of −1.9 say two images of each class, of two in all."""
    told = told_labels(head_of(0, 3, 4, 1.0), {"head.bias": torch.tensor([-1.9, -1.9, 3.8]) / 2}, 2)
    assert told == Told((0, 1), ())


@pytest.mark.parametrize("labels", [[5, 5], [1, 2, 2, 2], [0, 1, 1, 7, 7, 7, 30, 39]], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_repeated_labels_are_told_by_the_rank(labels: list[int], seed: int) -> None:
    """A sure model's bias gives bounds alone; its weight gives each image away, images of one class included."""
    head = head_of(seed, 40, 64, 3.0)
    gradients = released(head, labels, seed)
    bias = told_labels(head, {"head.bias": gradients["head.bias"]}, len(labels))
    both = told_labels(head, gradients, len(labels))
    assert both == Told(tuple(labels), tuple(labels))
    assert bias is not None
    assert (counts(bias.certain, 40) <= counts(labels, 40)).all()


def test_an_unsure_model_is_read_from_its_bias_alone() -> None:
    head = head_of(0, 30, 16, 0.0)
    gradients = released(head, [3, 3, 9])
    told = told_labels(head, {"head.bias": gradients["head.bias"]}, 3)
    assert told == Told((3, 3, 9), (3, 3, 9))


@pytest.mark.slow
@pytest.mark.parametrize(("B", "classes"), [(4, 6), (33, 100)])
def test_batches_that_are_too_large_have_bounds_and_a_guess(B: int, classes: int) -> None:
    """With half the classes or more in a batch, pairs are not isolated; beyond 32 images the search takes too long."""
    head, labels = head_of(1, classes, 48, 3.0), [2] * B
    gradients = released(head, labels)
    told = told_labels(head, gradients, B)
    assert told is not None
    bounds = certain_counts(gradients["head.bias"] * B, B)
    assert (counts(told.certain, classes) == bounds).all()
    assert len(told.labels) == B


def test_what_cannot_be_told() -> None:
    head = head_of(0, 8, 16, 1.0)
    gradients = released(head, [1, 2])
    assert told_labels(head, {"head.weight": gradients["head.weight"]}, 2) is None
    assert told_labels(head, {"head.bias": torch.zeros(8)}, 1) == Told((0,), ())
    with pytest.raises(PrivlabError, match=r"positive.*0"):
        told_labels(head, gradients, 0)
    with pytest.raises(PrivlabError, match="must be finite"):
        told_labels(head, gradients | {"head.bias": torch.full((8,), torch.nan)}, 2)
    broken = told_labels(head, gradients | {"head.weight": torch.full((8, 16), torch.nan)}, 2)
    assert broken is not None
