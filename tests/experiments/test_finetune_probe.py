"""Fine-tuning and probes: rates by layer, a backbone that stays, and heads that are folded."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.layers import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor

from privlab.base import PrivlabError, PrivlabWarning
from privlab.experiments.training.classifiers import RelativeViT, classifier
from privlab.experiments.training.examples import Augmentation, Examples
from privlab.experiments.training.loop import _optimiser, train
from privlab.experiments.training.objectives import Classify, Finetune, ObjectiveRecipe, Probe, TrainMjp
from privlab.experiments.training.objectives.probe import Head, probe_accuracy
from privlab.experiments.training.plan import Compute, Plan
from privlab.victims import VictimModel

STILL = Augmentation(flip=False, shift=0)


def small(**options: Any) -> VictimModel:
    sizes: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = VisionTransformer(**(sizes | {"num_classes": 3} | options))
        if vit.pos_embed is not None:
            torch.nn.init.normal_(vit.pos_embed)
    return VictimModel(vit.eval(), (0.5,) * 3, (0.25,) * 3).requires_grad_(False)


def colours(n: int, seed: int = 0) -> Examples:
    """Return noisy images of which the class is the brightest colour."""
    draw = Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    images = 0.3 + 0.3 * torch.eye(3)[labels][:, :, None, None] + 0.1 * torch.randn(n, 3, 16, 16, generator=draw)
    return Examples((images.clamp(0, 1) * 255).byte(), labels, 3, f"colours {n} {seed}")


def grey(n: int) -> Examples:
    return Examples(torch.full((n, 3, 16, 16), 128, dtype=torch.uint8), torch.full((n,), -1), 0, "grey")


# Fine-tuning


def rates(recipe: ObjectiveRecipe, plan: Plan) -> dict[str, float]:
    """Return the learning rate of each parameter, over that of the plan, when warm-up is over."""
    optimizer, scheduler = _optimiser(recipe, plan)
    if scheduler is not None:
        scheduler.step_update(plan.warmup)
    named = {id(each): name for name, each in recipe.model.named_parameters()}
    return {
        named[id(each)]: group["lr"] / plan.learning_rate
        for group in optimizer.param_groups
        for each in group["params"]
    }


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_each_layer_learns_at_its_rate(schedule: str) -> None:
    """The head and the final norm at 1, block i of L at d^(L − i), the embedding at d^(L + 1)."""
    recipe = ObjectiveRecipe(small(), colours(6), Finetune(), STILL)
    plan = Plan(steps=1000, layer_decay=0.5, schedule=schedule)
    for name, rate in rates(recipe, plan).items():
        depth = int(name.split(".")[2]) + 1 if name.startswith("vit.blocks.") else 0
        expected = 1.0 if name.startswith(("vit.head.", "vit.norm.")) else 0.5 ** (4 - depth)
        assert rate == pytest.approx(expected, rel=1e-4), name
    assert set(rates(recipe, plan)) == {name for name, _ in recipe.model.named_parameters()}
    assert set(rates(recipe, replace(plan, layer_decay=1.0)).values()) == {1.0}


def test_biases_and_norms_stay_without_weight_decay() -> None:
    recipe = ObjectiveRecipe(small(), colours(6), Finetune(), STILL)
    optimizer, _ = _optimiser(recipe, Plan(steps=1, layer_decay=0.5, weight_decay=0.1))
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    for group in optimizer.param_groups:
        assert all((each.ndim > 1) == (group["weight_decay"] == 0.1) for each in group["params"])


def test_layers_are_told_of_a_plain_model_alone() -> None:
    recipe = ObjectiveRecipe(small(), colours(6), TrainMjp(unknown=False), STILL)
    with pytest.raises(PrivlabError, match="layer_decay"):
        train(recipe, Plan(steps=1, layer_decay=0.5))


@pytest.mark.parametrize("wrong", [0.0, 1.5])
def test_a_rate_over_that_of_the_next_layer(wrong: float) -> None:
    with pytest.raises(PrivlabError, match=r"layer_decay.*\(0.*1\]"):
        Plan(steps=1, layer_decay=wrong)


def test_checkpoints_from_before_there_was_a_layer_decay_go_on(tmp_path: Path) -> None:
    """Their identity does not name it; another rate is another training."""
    plan, often = Plan(steps=4, batch_size=3), Compute(save_every=2)
    train(ObjectiveRecipe(small(), colours(6), Classify(), STILL), plan, compute=often, out=tmp_path)
    card = tmp_path / "checkpoints" / "step-00000004" / "checkpoint.json"
    assert set(json.loads(card.read_text())["identity"]) == {
        *("recipe", "steps", "batch_size", "accumulate", "optimiser", "learning_rate", "weight_decay"),
        *("schedule", "warmup", "clip", "ema", "precision", "seed"),
    }
    with pytest.raises(PrivlabError, match=r"layer_decay.*0\.5"):
        train(ObjectiveRecipe(small(), colours(6), Classify(), STILL), replace(plan, layer_decay=0.5), out=tmp_path)


def test_stochastic_depth_grows_over_the_blocks() -> None:
    model = small()
    ObjectiveRecipe(model, colours(6), Finetune(drop_path=0.2), STILL)
    found = [(block.drop_path1, block.drop_path2) for block in model.vit.blocks]
    assert all(isinstance(part, DropPath) for pair in found for part in pair)
    assert [[getattr(part, "drop_prob") for part in pair] for pair in found] == [[0, 0], [0.1, 0.1], [0.2, 0.2]]  # noqa: B009


@pytest.mark.slow
def test_it_learns_and_its_loss_is_that_of_classify() -> None:
    recipe, losses = ObjectiveRecipe(small(), colours(60), Finetune(smoothing=0.0), STILL), list[float]()
    batch = recipe.batch(torch.arange(6), Generator())
    with torch.no_grad():
        p = recipe.model(batch[0]).softmax(1)
        naive = -sum(float(p[i, i % 3].log()) for i in range(6)) / 6
        assert float(recipe.loss(recipe.model, batch, Generator())) == pytest.approx(naive, rel=1e-5)
    plan = Plan(steps=60, batch_size=30, learning_rate=3e-3, layer_decay=0.7)
    train(recipe, plan, progress=lambda now: losses.append(now.loss))
    assert losses[-1] < 0.2 * losses[0]


def relative() -> RelativeViT:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivlabWarning)
        made = classifier("cifar_vit_relpos", weights="random").model
    assert isinstance(made, RelativeViT)
    return made


def test_layers_of_relative_models_are_told() -> None:
    recipe = ObjectiveRecipe(relative(), colours(6), Finetune(), STILL)
    found = rates(recipe, Plan(steps=1000, layer_decay=0.5))
    table = "net.blocks.{}.rel_pos.relative_position_bias_table"
    assert [
        found[name] for name in ("net.patch_embed.proj.weight", table.format(0), table.format(3), "net.head.bias")
    ] == [pytest.approx(0.5**depth, rel=1e-4) for depth in (5, 4, 1, 0)]


# Probes


def frozen(
    model: VictimModel, data: Examples, probe: Probe, steps: int, rate: float = 0.05
) -> tuple[ObjectiveRecipe, Head]:
    """Train a probe; the backbone is the same, bit by bit."""
    before = {name: each.clone() for name, each in model.state_dict().items()}
    recipe = ObjectiveRecipe(model, data, probe, STILL)
    train(recipe, Plan(steps=steps, batch_size=16, learning_rate=rate, weight_decay=0.0))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert not any(part.training for part in model.modules())
    assert isinstance(recipe.model, Head)
    return recipe, recipe.model


@pytest.mark.parametrize("options", [{}, {"mean": True}, {"layer": 1}, {"mean": True, "batch_norm": False}])
def test_classes_are_learnt_and_the_backbone_is_frozen(options: dict[str, Any]) -> None:
    model, probe = small(), Probe(**options)
    _, head = frozen(model, colours(96), probe, steps=60)
    assert probe_accuracy(probe, head, model, colours(30, seed=1)) > 0.9


@torch.no_grad()
def test_the_folded_head_is_the_unfolded_one() -> None:
    model, probe = small(), Probe()
    recipe, head = frozen(model, colours(48), probe, steps=20)
    features, _ = recipe.batch(torch.arange(48), Generator())
    torch.testing.assert_close(head.fold()(features), head.eval()(features), rtol=1e-4, atol=1e-5)
    model.vit.head.load_state_dict(head.fold().state_dict())
    torch.testing.assert_close(model(colours(48).pixels(torch.arange(48))), head(features), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_batch_norm_is_that_of_mae() -> None:
    """(x − μ)/√(σ² + 1e-6) of the batch in training, and nothing to learn in it."""
    head, x = Head(4, 3, batch_norm=True), torch.randn(10, 4, generator=Generator().manual_seed(0))
    torch.nn.init.normal_(head.linear.weight)
    expected = head.linear((x - x.mean(0)) / (x.var(0, correction=0) + 1e-6).sqrt())
    torch.testing.assert_close(head(x), expected)
    assert {name for name, _ in head.named_parameters()} == {"linear.weight", "linear.bias"}


@torch.no_grad()
@pytest.mark.parametrize(("layer", "mean"), [(None, False), (None, True), (2, False), (2, True)])
def test_what_classes_are_told_from(layer: int | None, mean: bool) -> None:
    model, data = small(), colours(4)
    seen: list[Tensor] = []
    part = model.vit.norm if layer is None else model.vit.blocks[layer - 1]
    with part.register_forward_hook(lambda *all: seen.append(all[2])):
        features, labels = Probe(layer=layer, mean=mean).batch(
            data.pixels(torch.arange(4)), data.labels, model, Generator()
        )
    torch.testing.assert_close(features, seen[0][:, 1:].mean(1) if mean else seen[0][:, 0])
    assert torch.equal(labels, data.labels)


@torch.no_grad()
def test_the_loss_over_places_is_that_of_a_naive_loop() -> None:
    """Over the patches without their PE alone: 12 of 16, which are fed with zeros for it."""
    model, data, probe = small(), colours(3), Probe(target="position", batch_norm=False)
    head = probe.module(model)
    torch.nn.init.normal_(head.linear.weight, std=0.2)
    features, slots = probe.batch(data.pixels(torch.arange(3)), data.labels, model, Generator().manual_seed(4))
    assert features.shape == (36, 32)
    total = 0.0
    for b in range(3):
        lost = slots[12 * b : 12 * b + 12]
        assert len(set(lost.tolist())) == 12
        z = model.embed(data.pixels(torch.tensor([b])))
        assert model.vit.pos_embed is not None
        z[0, 1 + lost] -= model.vit.pos_embed[0, 1 + lost]
        p = head(model.vit.norm(model.vit.blocks(z))[0]).softmax(1)
        total -= sum(float(p[1 + slot, slot].log()) for slot in lost)
    assert float(probe.loss(head, (features, slots))) == pytest.approx(total / 36, rel=1e-4)


def test_lost_embeddings_are_replaced_by_the_unknown_one(tiny_model: Callable[..., VictimModel]) -> None:
    model, probe = tiny_model(), Probe(target="position", gamma_pos=1.0)
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    features, _ = probe.batch(images, torch.zeros(2, dtype=torch.int64), model, Generator())
    with torch.no_grad():
        tokens = model.vit.norm(model.backbone(model.embed(images, torch.ones(2, 16, dtype=torch.bool))))
    torch.testing.assert_close(features, tokens[:, 1:].flatten(0, 1))


def test_tokens_that_carry_their_embeddings_tell_their_places() -> None:
    model, probe = small(), Probe(target="position", gamma_pos=0.0)
    _, head = frozen(model, colours(48), probe, steps=60)
    assert probe_accuracy(probe, head, model, colours(10, seed=1)) == 1.0


def test_nothing_tells_places_on_constant_images_without_embeddings() -> None:
    model, probe = small(pos_embed="none"), Probe(target="position")
    _, head = frozen(model, grey(32), probe, steps=30)
    assert probe_accuracy(probe, head, model, grey(8)) == pytest.approx(1 / 16)


@pytest.mark.slow
def test_a_probe_that_goes_on_ends_with_the_same_bits(tmp_path: Path) -> None:
    plan, probe = Plan(steps=6, batch_size=8), Probe(target="position")
    whole = ObjectiveRecipe(small(), colours(24), probe, STILL)
    train(whole, plan)

    class Stopped(Exception):
        pass

    def stop(now: object) -> None:
        if getattr(now, "step") == 4:  # noqa: B009
            raise Stopped

    often = Compute(log_every=2, save_every=2)
    with pytest.raises(Stopped):
        train(ObjectiveRecipe(small(), colours(24), probe, STILL), plan, compute=often, out=tmp_path, progress=stop)
    parts = ObjectiveRecipe(small(), colours(24), probe, STILL)
    train(parts, plan, compute=often, out=tmp_path)
    assert all(torch.equal(each, parts.model.state_dict()[name]) for name, each in whole.model.state_dict().items())
    (_, *more) = load_file(tmp_path / "checkpoints" / "step-00000006" / "model.safetensors")
    assert not any(name.startswith("vit") for name in more)  # the backbone is in no checkpoint


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Probe(target="place"), "Unknown target of a probe 'place'"),
        (lambda: Probe(gamma_pos=1.2), r"gamma_pos \(γ_pos\) must be in \[0, 1\]\. Found 1\.2"),
        (lambda: Probe(layer=0), "layer of a probe must be at least 1, or none for the last. Found 0"),
        (lambda: Probe(layer=4).module(small()), "layer of this probe must be 1 to 3. Found 4"),
        (lambda: Finetune(drop_path=1.0), r"drop_path must be in \[0, 1\)"),
    ],
)
def test_bad_options(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        make()


def test_batch_norm_needs_two() -> None:
    with pytest.raises(PrivlabError, match="batch_norm"):
        train(ObjectiveRecipe(small(), colours(6), Probe(), STILL), Plan(steps=1, batch_size=1))
