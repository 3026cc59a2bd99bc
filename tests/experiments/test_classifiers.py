"""Swin with absolute PEs and ResNet: naive twins, and MJP in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError
from privlab.experiments.methods.consistency import consistency_by_gamma, measure_consistency
from privlab.experiments.training.classifiers import SwinModel, TimmClassifier, classifier
from privlab.experiments.training.examples import Augmentation, Examples
from privlab.experiments.training.loop import _optimiser, train
from privlab.experiments.training.objectives import DALS, Classify, ObjectiveRecipe, TrainMjp
from privlab.experiments.training.plan import Compute, Plan
from privlab.patches import patchify
from privlab.training import TrainingProgress

STILL = Augmentation(flip=False, shift=0)
COLOURS: tuple[Any, Any] = ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 2, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
SHUFFLE = TrainMjp(gamma=0.5, unknown=False, dal="none")


def swin(*, unknown: bool = True, **options: Any) -> SwinModel:
    """Return a Swin of 16 × 16 patches, four of which make a piece of the jigsaw."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = TINY | {"window_size": 4, "num_classes": 3, "drop_path_rate": 0.1} | options
        net = timm.create_model("swin_tiny_patch4_window7_224", **sizes)
        made = SwinModel(net, *COLOURS, unknown=unknown)
        for parameter in made.parameters():  # biases start at zero, which would hide mistakes
            nn.init.normal_(parameter, std=0.2)
    return made.double().eval().requires_grad_(False)


def resnet() -> TimmClassifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = timm.create_model("resnet18", channels=(4, 4, 8, 8), num_classes=3)
    return TimmClassifier(net, (3, 32, 32), *COLOURS).double().eval().requires_grad_(False)


def pictures(n: int = 6) -> Examples:
    images = torch.randint(256, (n, 3, 32, 32), generator=Generator().manual_seed(0), dtype=torch.uint8)
    return Examples(images, torch.arange(n) % 3, 3, "toy")


def shades(n: int, seed: int) -> Examples:
    labels = torch.arange(n) % 3
    noise = torch.randint(60, (n, 3, 32, 32), generator=Generator().manual_seed(seed))
    return Examples((noise + 90 * labels[:, None, None, None]).byte(), labels, 3, f"shades {seed}")


def seen(model: TimmClassifier, n: int = 2) -> Tensor:
    return pictures(n).images.to(model.mean) / 255


def normalised(model: TimmClassifier, images: Tensor) -> Tensor:
    return (images - model.mean) / model.std


# The networks


def test_e_unk_stands_at_every_patch_of_a_masked_piece() -> None:
    """The embedding is that of a naive loop over Swin's patches, two by two of which a piece covers."""
    model = swin()
    images, masked = seen(model), torch.rand(2, 64, generator=Generator().manual_seed(1)) < 0.3
    assert (model.patch, model.grid) == (4, (16, 16))
    assert model.unk_embed is not None
    assert model.pos_embed is not None
    tokens = model.net.patch_embed(normalised(model, images))
    for b in range(2):
        for i in range(16):
            for j in range(16):
                hidden = masked[b, i // 2 * 8 + j // 2]
                tokens[b, i, j] += model.unk_embed[0, 0] if hidden else model.pos_embed[0, 16 * i + j]
    expected = model.net.head(model.net.norm(model.net.layers(tokens)))
    torch.testing.assert_close(model(images, masked), expected)
    assert not torch.allclose(model(images), expected)


@pytest.mark.parametrize("make", [lambda: swin(unknown=False), resnet])
def test_without_position_embeddings_it_is_timms(make: Callable[[], TimmClassifier]) -> None:
    model = make()
    images = seen(model)
    torch.testing.assert_close(model(images), model.net(normalised(model, images)))
    assert model.slot_pe is None
    assert model.unk_embed is None
    with pytest.raises(PrivlabError, match="MJP"):
        model(images, torch.zeros(2, 64, dtype=torch.bool))


def test_what_the_classifier_reads_is_pooled() -> None:
    model = swin()
    images = seen(model)
    torch.testing.assert_close(model.features(images), model.maps(images).mean((1, 2)))
    torch.testing.assert_close(model.logits(model.features(images)), model(images))


@pytest.mark.parametrize(("side", "patch"), [(32, 4), (124, 4), (128, 16), (224, 16)])
def test_pieces_are_of_16_pixels_where_an_image_has_enough(side: int, patch: int) -> None:
    net = timm.create_model("resnet18", channels=(4, 4, 8, 8), num_classes=3)
    assert TimmClassifier(net, (3, side, side), *COLOURS).patch == patch


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_sides_that_pieces_do_not_fill() -> None:
    with pytest.raises(PrivlabError, match=r"16.*200×200"):
        classifier("resnet50", weights="random", img_size=200)


# MJP in them


def test_a_resnet_is_shuffled_and_no_more() -> None:
    """The masked pieces hold their own pixels in another order; the loss is the cross-entropy of that image."""
    model, data = resnet(), pictures()
    recipe = ObjectiveRecipe(model, data, SHUFFLE, STILL)
    images, labels, masked, order = recipe.batch(torch.arange(6), Generator().manual_seed(3))
    before, after = patchify(data.images.float() / 255, 4), patchify(images, 4)
    assert (masked.sum(1) == 32).all()
    assert torch.equal(after[~masked], before[~masked])
    assert not torch.equal(after, before)
    for i in range(6):
        assert sorted(after[i, masked[i]].sum(1).tolist()) == sorted(before[i, masked[i]].sum(1).tolist())
    found = recipe.loss(recipe.model, (images.double(), labels.double(), masked, order), Generator())
    logits = model.net(normalised(model, images.double()))
    torch.testing.assert_close(found, nn.functional.cross_entropy(logits, labels.double(), label_smoothing=0.1))


def test_a_swin_is_trained_on_masked_pieces() -> None:
    model = swin()
    recipe = ObjectiveRecipe(model, pictures(), TrainMjp(gamma=0.5), STILL)
    images, _, masked, order = recipe.batch(torch.arange(6), Generator().manual_seed(3))
    assert masked.shape == (6, 64)
    logits, dal = recipe.model.double()(images.double(), masked, order, True)
    assert torch.equal(logits, model(images.double(), masked))
    assert dal > 0


@pytest.mark.parametrize("kind", DALS)
def test_dal_reaches_only_the_unmasked_position_embeddings_of_a_swin(kind: str) -> None:
    recipe = ObjectiveRecipe(model := swin(), pictures(), TrainMjp(gamma=0.5, dal=kind), STILL)
    masked = torch.zeros(2, 64, dtype=torch.bool)
    masked[0, :40], masked[1, :24] = True, True
    _, loss = recipe.model.double()(seen(model), masked, torch.arange(64).expand(2, -1), True)
    loss.backward()
    assert model.pos_embed is not None
    assert model.pos_embed.grad is not None
    shares = model.pos_embed.grad[0]
    hidden = torch.arange(256) < 96  # 24 pieces are masked in both: three rows of eight, six rows of sixteen PEs
    if kind == "pca":  # its centre is the mean of all
        shares = shares - shares[hidden].mean(0)
    assert torch.equal(shares.abs().sum(1) > 1e-12, ~hidden)


def orderless() -> SwinModel:
    """Return a Swin of one stage whose tokens do not see one another, without position embeddings' help."""
    model = swin(depths=(1,), num_heads=(1,))
    proj = model.net.layers[0].blocks[0].attn.proj
    for silent in (proj.weight, proj.bias, model.pos_embed, model.unk_embed):
        assert isinstance(silent, Tensor)
        silent.zero_()
    return model


def test_a_model_that_ignores_order_is_consistent() -> None:
    found = measure_consistency(orderless(), pictures(30), gamma=0.9)
    assert found.consistency == 1
    assert found.shuffled_accuracy == found.accuracy
    assert found.diff_norm < 1e-20


def test_an_unknown_embedding_moves_features() -> None:
    model = orderless()
    assert model.unk_embed is not None
    model.unk_embed.copy_(torch.linspace(-1, 1, 8))
    still, moved = consistency_by_gamma(model, [(torch.arange(6), seen(model, 6), torch.arange(6) % 3)], (0.0, 0.5))
    assert still.diff_norm == 0
    assert moved.diff_norm > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("make", "objective"), [(swin, TrainMjp(gamma=0.3)), (resnet, SHUFFLE)])
def test_classes_are_learnt_from_shuffled_images(make: Callable[[], TimmClassifier], objective: TrainMjp) -> None:
    """Dark, grey and light images, each with noise, are told apart, others than those of the training too."""
    model = make().float()
    train(ObjectiveRecipe(model, shades(24, 0), objective, STILL), Plan(steps=40, batch_size=12, learning_rate=1e-2))
    found = measure_consistency(model, shades(30, 1), gamma=0.5)
    assert found.accuracy == 1
    assert found.consistency == 1


@pytest.mark.parametrize(
    ("objective", "outer"), [(Classify(), ""), (TrainMjp(gamma=0.5), "victim."), (SHUFFLE, "victim.")]
)
def test_relative_position_biases_of_a_swin_are_spared_weight_decay(objective: Classify, outer: str) -> None:
    """As in Swin's own recipe; all other weights of two dimensions decay."""
    recipe = ObjectiveRecipe(swin(), pictures(), objective, STILL)
    optimizer, _ = _optimiser(recipe, Plan(steps=1, weight_decay=0.1))
    spared = {id(each) for group in optimizer.param_groups if not group["weight_decay"] for each in group["params"]}
    tables = [f"{outer}net.layers.{i}.blocks.0.attn.relative_position_bias_table" for i in range(2)]
    several = {name: each for name, each in recipe.model.named_parameters() if each.ndim > 1}
    assert [name for name, each in several.items() if id(each) in spared] == tables


@pytest.mark.parametrize(("make", "objective"), [(swin, TrainMjp(gamma=0.3)), (resnet, SHUFFLE)])
def test_a_training_goes_on_to_the_same_bits(
    make: Callable[[], TimmClassifier], objective: TrainMjp, tmp_path: Path
) -> None:
    """What BatchNorm has counted included; stochastic depth is at work."""
    plan = Plan(steps=6, batch_size=4, learning_rate=1e-2)

    class StoppedError(Exception):
        pass

    def stop(now: TrainingProgress) -> None:
        if now.step == 4:
            raise StoppedError

    def recipe() -> ObjectiveRecipe:
        return ObjectiveRecipe(make().float(), pictures(), objective, STILL)

    train(whole := recipe(), plan)
    often = Compute(log_every=2, save_every=3)
    with pytest.raises(StoppedError):
        train(recipe(), plan, compute=often, out=tmp_path, progress=stop)
    train(resumed := recipe(), plan, compute=often, out=tmp_path)
    ends, begin = (each.model.state_dict() for each in (whole, resumed)), recipe().model.state_dict()
    for (name, tensor), again in zip(next(ends).items(), next(ends).values(), strict=True):
        assert torch.equal(tensor, again), name
        assert not torch.equal(tensor, begin[name]), name
