"""Training over a real wire is training in one process: the same loss, step by step, whatever is permuted."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

BOUNDS = {"float64": 1e-9, "float32": 1e-4}
DEFENSES = ["none", "row-permutation", "column-permutation", "row-permutation+column-permutation"]


@pytest.fixture
def trained(server: Callable[..., Any], client: Callable[..., Any], tiny: SimpleNamespace, tmp_path: Path) -> Any:
    """Return a trainer over the wire: (defense, contract's options) ↦ the learner after all steps."""

    def train(defense: str, tls: Any = (None, None), **options: Any) -> Any:
        learner = tiny.learner(defense, **options)
        with server(tls=tls[0], checkpoint_every=4) as (running, _):
            tiny.Trainer(learner, client(running, tls=tls[1]), tmp_path).train(tiny.batches(), tiny.STEPS)
        return learner

    return train


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("defense", DEFENSES)
def test_the_loss_is_that_of_one_process_at_every_step(
    defense: str, dtype: str, optimizer: str, trained: Callable[..., Any], alone: Callable[..., list[float]], tiny: Any
) -> None:
    """Theorems 4.1, 4.2, 4.4, 4.5 and Corollaries 4.3, 4.6, over the wire."""
    options = {"dtype": dtype, "optimizer": optimizer, "lr": 0.02, "weight_decay": 0.01}
    learner = trained(defense, **options)
    want = alone(learner.contract, tiny.STEPS)
    assert len(set(want)) == tiny.STEPS
    assert_close(learner.losses.tolist(), want, rtol=0, atol=BOUNDS[dtype])


@pytest.mark.parametrize("defense", DEFENSES)
def test_a_client_that_holds_a_block_trains_the_same_model(
    defense: str, trained: Callable[..., Any], alone: Callable[..., list[float]], tiny: Any
) -> None:
    """Whatever is permuted behind the block, the loss of each step is that of training in one process."""
    learner = trained(defense, dtype="float64", optimizer="sgd", lr=0.02, weight_decay=0.01, cut_layer=1)
    assert_close(learner.losses.tolist(), alone(learner.contract, tiny.STEPS), rtol=0, atol=1e-9)
    before = dict(tiny.tiny().model.vit.blocks.named_parameters())
    after = dict(learner.model.vit.blocks.named_parameters())
    moved = {name[0] for name, parameter in after.items() if not torch.equal(parameter, before[name].double())}
    assert moved == {"0"}


def test_a_fresh_order_for_each_image_changes_nothing_either(
    trained: Callable[..., Any], alone: Callable[..., list[float]], tiny: Any
) -> None:
    learner = trained("row-permutation+column-permutation", dtype="float64", options=("row-permutation.per=image",))
    assert learner.stack.parts[0].per == "image"
    want = alone(learner.contract, tiny.STEPS)
    assert_close(learner.losses.tolist(), want, rtol=0, atol=1e-9)


def test_what_is_sent_is_permuted_afresh_in_every_step(tiny: Any) -> None:
    learner = tiny.learner("row-permutation")
    images, labels = tiny.batches()[1]
    plain = learner.model.embed(images)
    first = learner.begin(images, labels)
    learner.step += 1
    second = learner.begin(images, labels)
    for sent in (first, second):
        assert not torch.equal(sent, plain)
        assert_close(sent.sort(1).values, plain.sort(1).values)
    assert not torch.equal(first, second)


def test_noise_is_sent_and_learnt_through(trained: Callable[..., Any], alone: Any, tiny: Any) -> None:
    learner = trained("row-permutation+gaussian-noise")
    assert (learner.losses - torch.tensor(alone(learner.contract, tiny.STEPS))).abs().max() > 1e-3
    assert learner.losses.isfinite().all()
