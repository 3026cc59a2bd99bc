"""Fine-tuning and probes: rates by layer, what starts anew, a backbone that stays, and heads that are folded."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.layers import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor

from privlab.backbones import RelativeViT, classifier
from privlab.errors import PrivlabError
from privlab.lessons import Course, _set_up, teach
from privlab.model import VictimModel
from privlab.recipes import Classify, Finetune, Lesson, Probe, TrainMjp
from privlab.recipes.probe import Head, probe_accuracy
from privlab.threat import PrivlabWarning
from privlab.training import Augmentation, Compute, Examples, Plan, train
from privlab.training.loop import _optimiser
from privlab.victims import victim
from privlab.weights import hash_of, own_layout, save

STILL = Augmentation(flip=False, shift=0)
quiet = pytest.mark.filterwarnings("ignore::privlab.threat.PrivlabWarning")


def small(**options: Any) -> VictimModel:
    sizes: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = VisionTransformer(**(sizes | {"num_classes": 3} | options))
        if vit.pos_embed is not None:
            torch.nn.init.normal_(vit.pos_embed)
    return VictimModel(vit.eval(), (0.5,) * 3, (0.25,) * 3).requires_grad_(False)


def colours(n: int, seed: int = 0) -> Examples:
    """Return noisy pictures of which the class is the brightest colour."""
    draw = Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    images = 0.3 + 0.3 * torch.eye(3)[labels][:, :, None, None] + 0.1 * torch.randn(n, 3, 16, 16, generator=draw)
    return Examples((images.clamp(0, 1) * 255).byte(), labels, 3, f"colours {n} {seed}")


def grey(n: int) -> Examples:
    return Examples(torch.full((n, 3, 16, 16), 128, dtype=torch.uint8), torch.full((n,), -1), 0, "grey")


# Fine-tuning


def rates(recipe: Lesson, plan: Plan) -> dict[str, float]:
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
    lesson = Lesson(small(), colours(6), Finetune(), STILL)
    plan = Plan(steps=1000, layer_decay=0.5, schedule=schedule)
    for name, rate in rates(lesson, plan).items():
        depth = int(name.split(".")[2]) + 1 if name.startswith("vit.blocks.") else 0
        expected = 1.0 if name.startswith(("vit.head.", "vit.norm.")) else 0.5 ** (4 - depth)
        assert rate == pytest.approx(expected, rel=1e-4), name
    assert set(rates(lesson, plan)) == {name for name, _ in lesson.model.named_parameters()}
    assert set(rates(lesson, replace(plan, layer_decay=1.0)).values()) == {1.0}


def test_biases_and_norms_stay_without_weight_decay() -> None:
    lesson = Lesson(small(), colours(6), Finetune(), STILL)
    optimizer, _ = _optimiser(lesson, Plan(steps=1, layer_decay=0.5, weight_decay=0.1))
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    for group in optimizer.param_groups:
        assert all((each.ndim > 1) == (group["weight_decay"] == 0.1) for each in group["params"])


def test_layers_are_told_of_a_plain_model_alone() -> None:
    lesson = Lesson(small(), colours(6), TrainMjp(unknown=False), STILL)
    with pytest.raises(PrivlabError, match="layer_decay needs a model that knows its layers"):
        train(lesson, Plan(steps=1, layer_decay=0.5))


@pytest.mark.parametrize("wrong", [0.0, 1.5])
def test_a_rate_over_that_of_the_next_layer(wrong: float) -> None:
    with pytest.raises(PrivlabError, match=r"layer_decay of a training must be in \(0, 1\]"):
        Plan(steps=1, layer_decay=wrong)


def test_checkpoints_from_before_there_was_a_layer_decay_go_on(tmp_path: Path) -> None:
    """Their identity does not name it; another rate is another training."""
    plan, often = Plan(steps=4, batch_size=3), Compute(save_every=2)
    train(Lesson(small(), colours(6), Classify(), STILL), plan, compute=often, out=tmp_path)
    card = tmp_path / "checkpoints" / "step-00000004" / "checkpoint.json"
    assert set(json.loads(card.read_text())["identity"]) == {
        *("recipe", "steps", "batch_size", "accumulate", "optimiser", "learning_rate", "weight_decay"),
        *("schedule", "warmup", "clip", "ema", "precision", "seed"),
    }
    with pytest.raises(PrivlabError, match=r"its layer_decay is None, not 0\.5"):
        train(Lesson(small(), colours(6), Classify(), STILL), replace(plan, layer_decay=0.5), out=tmp_path)


def test_stochastic_depth_grows_over_the_blocks() -> None:
    model = small()
    Lesson(model, colours(6), Finetune(drop_path=0.2), STILL)
    found = [(block.drop_path1, block.drop_path2) for block in model.vit.blocks]
    assert all(isinstance(part, DropPath) for pair in found for part in pair)
    assert [[getattr(part, "drop_prob") for part in pair] for pair in found] == [[0, 0], [0.1, 0.1], [0.2, 0.2]]  # noqa: B009


def test_it_learns_and_its_loss_is_that_of_classify() -> None:
    lesson, losses = Lesson(small(), colours(60), Finetune(smoothing=0.0), STILL), list[float]()
    batch = lesson.batch(torch.arange(6), Generator())
    with torch.no_grad():
        p = lesson.model(batch[0]).softmax(1)
        naive = -sum(float(p[i, i % 3].log()) for i in range(6)) / 6
        assert float(lesson.loss(lesson.model, batch, Generator())) == pytest.approx(naive, rel=1e-5)
    plan = Plan(steps=60, batch_size=30, learning_rate=3e-3, layer_decay=0.7)
    train(lesson, plan, progress=lambda now: losses.append(now.loss))
    assert losses[-1] < 0.2 * losses[0]


# Probes


def frozen(model: VictimModel, data: Examples, probe: Probe, steps: int, rate: float = 0.05) -> tuple[Lesson, Head]:
    """Train a probe; the backbone is the same, bit by bit."""
    before = {name: each.clone() for name, each in model.state_dict().items()}
    lesson = Lesson(model, data, probe, STILL)
    train(lesson, Plan(steps=steps, batch_size=16, learning_rate=rate, weight_decay=0.0))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert not any(part.training for part in model.modules())
    assert isinstance(lesson.model, Head)
    return lesson, lesson.model


@pytest.mark.parametrize("options", [{}, {"mean": True}, {"layer": 1}, {"mean": True, "batch_norm": False}])
def test_classes_are_learnt_and_the_backbone_is_frozen(options: dict[str, Any]) -> None:
    model, probe = small(), Probe(**options)
    _, head = frozen(model, colours(96), probe, steps=60)
    assert probe_accuracy(probe, head, model, colours(30, seed=1)) > 0.9


@torch.no_grad()
def test_the_folded_head_is_the_unfolded_one() -> None:
    model, probe = small(), Probe()
    lesson, head = frozen(model, colours(48), probe, steps=20)
    features, _ = lesson.batch(torch.arange(48), Generator())
    torch.testing.assert_close(head.folded()(features), head.eval()(features), rtol=1e-4, atol=1e-5)
    model.vit.head.load_state_dict(head.folded().state_dict())
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


def test_nothing_tells_places_on_constant_pictures_without_embeddings() -> None:
    model, probe = small(pos_embed="none"), Probe(target="position")
    _, head = frozen(model, grey(32), probe, steps=30)
    assert probe_accuracy(probe, head, model, grey(8)) == pytest.approx(1 / 16)


def test_a_probe_that_goes_on_ends_with_the_same_bits(tmp_path: Path) -> None:
    plan, probe = Plan(steps=6, batch_size=8), Probe(target="position")
    whole = Lesson(small(), colours(24), probe, STILL)
    train(whole, plan)

    class Stopped(Exception):
        pass

    def stop(now: object) -> None:
        if getattr(now, "step") == 4:  # noqa: B009
            raise Stopped

    often = Compute(log_every=2, save_every=2)
    with pytest.raises(Stopped):
        train(Lesson(small(), colours(24), probe, STILL), plan, compute=often, out=tmp_path, progress=stop)
    parts = Lesson(small(), colours(24), probe, STILL)
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
    with pytest.raises(PrivlabError, match="batch_norm needs two pictures at a time"):
        train(Lesson(small(), colours(6), Probe(), STILL), Plan(steps=1, batch_size=1))


# Relative position embeddings


def relative(weights: str | Path = "random") -> RelativeViT:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivlabWarning)
        made = classifier("cifar_vit_relpos", weights=weights).model
    assert isinstance(made, RelativeViT)
    return made


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
def test_biases_are_added_by_how_far_slots_are_apart(fused: bool) -> None:
    """Against a loop over pairs: 15 × 15 offsets of the 8 × 8 slots, then the class token's row, column and corner."""
    block = relative().net.blocks[0]
    block.attn.fused_attn = fused
    table = torch.nn.init.normal_(block.rel_pos.relative_position_bias_table)
    x = torch.randn(1, 65, 128, generator=Generator().manual_seed(0))
    bias = torch.zeros(4, 65, 65)
    for i in range(65):
        for j in range(65):
            row = (i - 1) // 8 - (j - 1) // 8 + 7, (i - 1) % 8 - (j - 1) % 8 + 7
            place = 15 * row[0] + row[1] if i and j else 227 if i == j == 0 else 225 if i == 0 else 226
            bias[:, i, j] = table[place]
    q, k, v = block.attn.qkv(block.norm1(x)).reshape(1, 65, 3, 4, 32).permute(2, 0, 3, 1, 4)
    y = x + block.attn.proj(((q @ k.mT / 32**0.5 + bias).softmax(3) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(block(x), y + block.mlp(block.norm2(y)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@quiet
def test_at_the_start_they_change_nothing(tmp_path: Path) -> None:
    path, images = start("cifar_vit_nope", tmp_path), torch.rand(2, 3, 32, 32, generator=Generator().manual_seed(0))
    with pytest.warns(PrivlabWarning, match="hold no relative position biases; they begin at zero"):
        model = classifier("cifar_vit_relpos", weights=path).model
    bare = victim("cifar_vit_nope", weights=path).model
    torch.testing.assert_close(model(images), bare(images), rtol=1e-4, atol=1e-5)
    before = model(images)
    torch.nn.init.normal_(model.net.blocks[0].rel_pos.relative_position_bias_table)
    assert not torch.allclose(model(images), before)


@quiet
def test_fine_tuning_with_relative_embeddings(data: Path, tmp_path: Path) -> None:
    """From weights with absolute ones, which are left out; the biases learn, and come back from the file."""
    path, out = start("cifar_vit", tmp_path), tmp_path / "out"
    card = card_of(data, out, "finetune", model="cifar_vit_relpos", weights=str(path), options=("drop_path=0.1",))
    said = " ".join(card["start"]["notes"])
    assert "absolute position embeddings, which are left out here" in said
    assert "they begin at zero" in said
    assert "the weights' head is for 10 classes, the data have 3" in said
    assert card["plan"]["layer_decay"] == 0.8
    state = load_file(out / "model.safetensors")
    assert len([name for name in state if name.endswith("rel_pos.relative_position_bias_table")]) == 4
    assert all(bool(each.abs().sum() > 0) for name, each in state.items() if "rel_pos" in name)
    again = relative(out / "model.safetensors")
    assert hash_of(own_layout(again)) == card["sha256"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: victim("cifar_vit_relpos", weights="random"),
        lambda: teach(Course(recipe="mp3", model="cifar_vit_relpos", data="samples"), Path("out")),
    ],
)
def test_attacks_and_predictors_refuse_them(call: Callable[[], object]) -> None:
    with pytest.raises(
        PrivlabError, match=r"This needs a plain ViT, timm's VisionTransformer\. Found cifar_vit_relpos"
    ):
        call()


def test_layers_of_relative_models_are_told() -> None:
    lesson = Lesson(relative(), colours(6), Finetune(), STILL)
    found = rates(lesson, Plan(steps=1000, layer_decay=0.5))
    table = "net.blocks.{}.rel_pos.relative_position_bias_table"
    assert [
        found[name] for name in ("net.patch_embed.proj.weight", table.format(0), table.format(3), "net.head.bias")
    ] == [pytest.approx(0.5**depth, rel=1e-4) for depth in (5, 4, 1, 0)]


# Courses


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 9 + 6 pictures of three classes, by their colour."""
    root = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    for split, count in (("train", 3), ("test", 2)):
        for name, colour in (("black", 20), ("grey", 110), ("white", 200)):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = colour + draw.integers(0, 40, (32, 32, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(root / split / name / f"{i}.png")
    return root


def start(model: str, folder: Path, name: str = "start") -> Path:
    """Write random weights as those of a training."""
    save(victim(model, weights="random").model.vit.state_dict(), folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def card_of(data: Path, out: Path, recipe: str, **options: Any) -> dict[str, Any]:
    few = {"preset": "small", "batch_size": 6, "epochs": 1.0, "warmup": 0.0, "precision": "32-true"}
    card = teach(Course(recipe=recipe, data=str(data), **(few | options)), out)
    assert card is not None
    return card


@quiet
def test_fine_tuning_without_embeddings_and_with_new_ones(data: Path, tmp_path: Path) -> None:
    """From weights without PEs: new PEs; from weights with PEs: none; always a head for the classes of the data."""
    bare, full = start("cifar_vit_nope", tmp_path, "bare"), start("cifar_vit", tmp_path, "full")
    still: dict[str, Any] = {"learning_rate": 0.0, "test": None}
    card = card_of(data, tmp_path / "a", "finetune", model="cifar_vit", weights=str(bare), **still)
    head, pe = "the weights' head is for 10 classes, the data have 3", "the weights hold no position embeddings"
    assert [any(note in each for each in card["start"]["notes"]) for note in (head, pe)] == [True, True]
    made, before = load_file(tmp_path / "a" / "model.safetensors"), load_file(bare)
    assert all(torch.equal(made[name], each) for name, each in before.items() if not name.startswith("head"))
    assert 0.015 < float(made["pos_embed"].std()) < 0.025
    assert made["head.weight"].shape == (3, 128)
    assert victim("cifar_vit", weights=tmp_path / "a" / "model.safetensors").model.vit.num_classes == 3
    card = card_of(data, tmp_path / "b", "finetune", model="cifar_vit_nope", weights=str(full), **still)
    assert "trained with position embeddings, which are left out here" in card["start"]["notes"][0]
    assert "pos_embed" not in load_file(tmp_path / "b" / "model.safetensors")


@quiet
def test_embeddings_that_are_lacking_are_an_error_elsewhere(data: Path, tmp_path: Path) -> None:
    bare = start("cifar_vit_nope", tmp_path)
    for recipe in ("classify", "probe"):
        with pytest.raises(PrivlabError, match=r"do not fit this model\. missing: pos_embed"):
            card_of(data, tmp_path / "out", recipe, model="cifar_vit", weights=str(bare))


@quiet
def test_a_probe_of_classes_makes_weights_of_a_victim(data: Path, tmp_path: Path) -> None:
    weights = start("cifar_vit", tmp_path)
    card = card_of(data, tmp_path / "a", "probe", model="cifar_vit", weights=str(weights), epochs=40.0)
    made, before = load_file(tmp_path / "a" / "model.safetensors"), load_file(weights)
    assert all(torch.equal(made[name], each) for name, each in before.items() if not name.startswith("head"))
    again = victim("cifar_vit", weights=tmp_path / "a" / "model.safetensors")
    assert again.weights.sha256 == card["sha256"]
    layer = load_file(tmp_path / "a" / "probe.safetensors")
    assert card["probe_sha256"] == hash_of(layer)
    assert torch.equal(layer["weight"], made["head.weight"])
    right = []
    for label, name in enumerate(("black", "grey", "white")):
        for path in sorted((data / "test" / name).iterdir()):
            pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None] / 255
            right.append(int(again.model(pixels).argmax()) == label)
    assert card["test"]["accuracy"] == sum(right) / 6 > 0.5


@quiet
@pytest.mark.parametrize("option", ["target=position", "mean=true", "layer=2"])
def test_heads_that_no_victim_has_stand_alone(data: Path, tmp_path: Path, option: str) -> None:
    weights = start("cifar_vit", tmp_path)
    out = tmp_path / "out"
    card = card_of(data, out, "probe", model="cifar_vit", weights=str(weights), options=(option,), half=True)
    assert card["sha256"] is None
    assert not (out / "model.safetensors").exists()
    layer = load_file(out / "probe.safetensors")
    assert {each.dtype for each in layer.values()} == {torch.float16}
    assert len(layer["bias"]) == (64 if option == "target=position" else 3)
    assert card["probe_sha256"] == hash_of({name: each.float() for name, each in layer.items()})
    assert 0 <= card["test"]["accuracy"] <= 1


@quiet
def test_places_need_no_labels(data: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        for i, path in enumerate((data / split).rglob("*.png")):
            (tmp_path / "data" / split / f"{i}.png").write_bytes(path.read_bytes())
    told: dict[str, Any] = {"options": ("target=position", "gamma_pos=0"), "epochs": 30.0, "learning_rate": 0.03}
    card = card_of(tmp_path / "data", tmp_path / "out", "probe", model="cifar_vit", **told)
    assert card["test"]["accuracy"] > 0.3  # chance is 1/64
    with pytest.raises(PrivlabError, match="have no label"):
        card_of(tmp_path / "data", tmp_path / "other", "probe", model="cifar_vit")


@quiet
@pytest.mark.parametrize("weights", ["random", "auto"])
def test_random_weights_are_not_fine_tuned(
    data: Path, tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlab.victims.shipped", lambda _: None)  # a package without trained weights
    model = "cifar_vit_nope"
    with pytest.raises(PrivlabError, match="finetune starts from trained weights, and cifar_vit_nope has random ones"):
        card_of(data, tmp_path / "out", "finetune", model=model, weights=weights)


def test_the_published_fine_tuning_is_supplement_a() -> None:
    course = Course(recipe="finetune", model="vit_b", weights="x", data="x")
    objective, augmentation, plan = _set_up(course, 1_281_167)
    assert (plan.optimiser, plan.batch_size, plan.weight_decay, plan.schedule) == ("adamw", 1024, 0.05, "cosine")
    assert plan.learning_rate == pytest.approx(1e-3 * 1024 / 256)
    assert plan.layer_decay == 0.8
    assert abs(plan.steps - 100 * 1_281_167 / 1024) < 1
    assert abs(plan.warmup - 5 * 1_281_167 / 1024) < 1
    assert (objective.smoothing, objective.mixup, objective.cutmix, objective.drop_path) == (0.1, 0.8, 1.0, 0.1)
    assert augmentation.randaugment == 9
