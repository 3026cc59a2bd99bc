"""Position prediction: masked attention, the losses of MP3 and DropPos against naive loops, and what training makes."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError, draw_for
from privlab.experiments.training.examples import Augmentation, Examples
from privlab.experiments.training.loop import train
from privlab.experiments.training.objectives import ObjectiveRecipe, TrainDropPos, TrainMp3
from privlab.experiments.training.objectives.context import in_context, masked_block
from privlab.experiments.training.objectives.droppos import smoothing
from privlab.experiments.training.plan import Compute, Plan
from privlab.experiments.training.position_accuracy import position_accuracy
from privlab.experiments.training.train_victim import PRESETS, TrainingConfig, train_victim
from privlab.reassembly import (
    DropPosNetwork,
    Mp3Network,
    PositionPredictor,
    load_predictor,
    save_predictor,
    sincos,
    tiles,
)
from privlab.victims import VictimModel, victim

pytestmark = pytest.mark.slow

STILL = Augmentation(flip=False, shift=0)


def small(**options: Any) -> VictimModel:
    sizes: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2}
    sizes |= {"num_heads": 2, "num_classes": 3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = VisionTransformer(**(sizes | options))
    return VictimModel(vit.eval(), (0.5,) * 3, (0.25,) * 3).requires_grad_(False)


def networks() -> tuple[Mp3Network, DropPosNetwork]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = Mp3Network(small()).double(), DropPosNetwork(small(), 16, 2, 4).double()
        for network in made:
            for parameter in network.parameters():  # timm starts biases at zero, which would hide mistakes
                nn.init.normal_(parameter, std=0.2)
    return made


def bag(b: int = 2, m: int = 16) -> Tensor:
    return torch.rand(b, m, 3, 4, 4, generator=Generator().manual_seed(2), dtype=torch.float64)


def ramps(n: int, seed: int = 0, side: int = 16) -> Examples:
    """Return images whose red says how far right a pixel is, and green how far down; both with noise."""
    draw = Generator().manual_seed(seed)
    across = torch.linspace(0.2, 0.8, side).expand(side, side)
    images = torch.stack([across, across.T, torch.full((side, side), 0.5)]).expand(n, -1, -1, -1)
    noisy = images + 0.05 * torch.randn(n, 3, side, side, generator=draw)
    return Examples((noisy.clamp(0, 1) * 255).byte(), torch.full((n,), -1), 0, f"ramps {n} {seed}")


def learnt(objective: TrainMp3 | TrainDropPos, steps: int = 200) -> tuple[PositionPredictor, list[float]]:
    recipe = ObjectiveRecipe(small(), ramps(256), objective, STILL)
    losses: list[float] = []
    plan = Plan(steps=steps, batch_size=32, learning_rate=3e-3, warmup=10)
    train(recipe, plan, progress=lambda now: losses.append(now.loss))
    (found,) = [part for part in recipe.model.modules() if isinstance(part, PositionPredictor)]
    return found, losses


@pytest.fixture(scope="module")
def mp3() -> tuple[PositionPredictor, list[float]]:
    return learnt(TrainMp3(eta=0.5))


@pytest.fixture(scope="module")
def droppos() -> tuple[PositionPredictor, list[float]]:
    small_ones: dict[str, Any] = {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2}
    return learnt(TrainDropPos(gamma=0.25, sigma=0.5, temperature=math.inf, **small_ones))


# The networks


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("m", [1, 3, 7])
def test_masked_attention_is_dense_attention_with_minus_infinity(m: int, *, fused: bool) -> None:
    block: Any = networks()[0].model.vit.blocks[0]
    block.attn.fused_attn = fused
    x = torch.randn(1, 7, 32, generator=Generator().manual_seed(0), dtype=torch.float64)
    attn, normed = block.attn, block.norm1(x)
    q, k, v = attn.qkv(normed).reshape(1, 7, 3, 2, 16).permute(2, 0, 3, 1, 4)
    mask = torch.full((7,), -math.inf, dtype=torch.float64)
    mask[:m] = 0
    dense = (q @ k.mT / 4 + mask).softmax(3) @ v
    y = x + attn.proj(dense.transpose(1, 2).flatten(2))
    torch.testing.assert_close(masked_block(block, x, m), y + block.mlp(block.norm2(y)))


def test_scattered_context_is_dense_attention_with_minus_infinity() -> None:
    """Over all blocks, in the order of the patches, the class token being context."""
    network, context = networks()[0], torch.tensor([[9, 1, 4], [0, 15, 2]])
    vit: Any = network.model.vit
    x = torch.cat([vit.cls_token.expand(2, -1, -1), network.embed(bag())], 1)
    mask = torch.full((2, 1, 1, 17), -math.inf, dtype=torch.float64)
    mask[..., 0] = 0
    for i in range(2):
        mask[i, ..., context[i] + 1] = 0
    for block in vit.blocks:
        q, k, v = block.attn.qkv(block.norm1(x)).reshape(2, 17, 3, 2, 16).permute(2, 0, 3, 1, 4)
        x = x + block.attn.proj(((q @ k.mT / 4 + mask).softmax(3) @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    torch.testing.assert_close(in_context(network, bag(), context), network.head(vit.norm(x[:, 1:])))


def test_all_patches_as_context_are_a_plain_vit() -> None:
    network, _ = networks()
    order = torch.stack([torch.randperm(16), torch.arange(16)])
    torch.testing.assert_close(in_context(network, bag(), order), network(bag()))


def test_only_context_is_looked_at() -> None:
    network, _ = networks()
    context, patches = torch.tensor([[1, 4, 9]] * 2), bag()
    before = in_context(network, patches, context)
    patches[:, 7] = 0
    after = in_context(network, patches, context)
    others = torch.arange(16) != 7
    torch.testing.assert_close(after[:, others], before[:, others])
    assert not torch.allclose(after[:, 7], before[:, 7])


def test_the_order_in_which_patches_come_says_nothing() -> None:
    first, second = networks()
    order, known = torch.randperm(16, generator=Generator().manual_seed(5)), torch.arange(16).expand(2, -1) < 5
    places = torch.arange(16).expand(2, -1)
    torch.testing.assert_close(first(bag()[:, order]), first(bag())[:, order])
    found = second(bag()[:, order], places[:, order], known[:, order])
    torch.testing.assert_close(found, second(bag(), places, known)[:, order])


def test_dropped_places_are_not_read_and_known_ones_are() -> None:
    network, known = networks()[1], torch.arange(16).expand(2, -1) < 5
    places = torch.arange(16).expand(2, -1)
    lied = torch.where(known, places, 0)
    torch.testing.assert_close(network(bag(), lied, known), network(bag(), places, known))
    assert not torch.allclose(network(bag(), places.flip(1), known), network(bag(), places, known))


def test_pixels_are_embedded_as_the_victim_embeds_them() -> None:
    network, images = networks()[0], torch.rand(2, 3, 16, 16, dtype=torch.float64)
    model = network.model
    expected = model.vit.patch_embed.proj(model.normalise(images)).flatten(2).mT
    torch.testing.assert_close(network.embed(tiles(images, 4)), expected)


def test_sincos_embeddings_tell_rows_and_columns_apart() -> None:
    pe = sincos((3, 5), 32)
    assert pe.shape == (15, 32)
    assert torch.pdist(pe).min() > 0.1
    torch.testing.assert_close(pe.norm(dim=1), torch.full((15,), 4.0))


# The losses


@given(sigma=st.floats(0.05, 3), h=st.integers(1, 5), w=st.integers(1, 5))
def test_rows_of_the_smoothing_sum_to_one_and_are_the_formula(sigma: float, h: int, w: int) -> None:
    found = smoothing((h, w), sigma)
    torch.testing.assert_close(found.sum(1), torch.ones(h * w))
    i, j = h * w - 1, 0
    naive = [math.exp(-math.hypot(i // w - k // w, i % w - k % w) / sigma**2) for k in range(h * w)]
    assert float(found[i, j]) == pytest.approx(naive[j] / sum(naive), rel=1e-3, abs=1e-6)


def test_without_smoothing_the_target_is_the_place() -> None:
    assert torch.equal(smoothing((2, 3), 0.0), torch.eye(6))
    torch.testing.assert_close(smoothing((2, 3), 0.01), torch.eye(6))


def test_sigma_falls_with_the_steps() -> None:
    recipe = ObjectiveRecipe(small(), ramps(8), TrainDropPos(sigma=2.0, sigma_end=1.0, decoder_width=16), STILL)
    seen: list[Tensor] = []
    plain = recipe.objective.loss
    watched = lambda module, batch: (seen.append(batch[3]), plain(module, batch))[1]  # noqa: E731
    object.__setattr__(recipe, "objective", _Watched(recipe.objective, watched))
    train(recipe, Plan(steps=4, batch_size=4))
    for target, sigma in zip(seen, (2.0, 1.75, 1.5, 1.25), strict=True):
        torch.testing.assert_close(target, smoothing((4, 4), sigma))


class _Watched:
    """An objective whose loss is watched, at every moment."""

    def __init__(self, objective: object, loss: Callable[..., Tensor]) -> None:
        self.objective, self.loss = objective, loss

    def __getattr__(self, name: str) -> object:
        return getattr(self.objective, name)

    def at(self, share: float) -> "_Watched":
        return _Watched(self.objective.at(share), self.loss)  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def test_the_loss_of_mp3_is_that_of_a_naive_loop() -> None:
    recipe = ObjectiveRecipe(small(), ramps(3), TrainMp3(eta=0.5, drop_path=0.0), STILL)
    patches, context = recipe.batch(torch.arange(3), Generator().manual_seed(0))
    assert context.shape == (3, 8)
    assert all(len(set(row)) == 8 for row in context.tolist())
    p = recipe.model(patches, context).softmax(2)
    naive = -sum(math.log(p[b, i, i]) for b in range(3) for i in range(16)) / 48
    assert float(recipe.loss(recipe.model, (patches, context), Generator())) == pytest.approx(naive, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.1, math.inf])
def test_the_loss_of_droppos_is_that_of_a_naive_loop(temperature: float) -> None:
    objective = TrainDropPos(gamma=0.5, temperature=temperature, sigma=0.8, decoder_width=16)
    recipe = ObjectiveRecipe(small(), ramps(3), objective, STILL)
    patches, visible, known, target = recipe.batch(torch.arange(3), Generator().manual_seed(0))
    assert visible.shape == known.shape == (3, 8)
    assert (known.sum(1) == 2).all()
    predictor = recipe.model.predictor
    assert isinstance(predictor, DropPosNetwork)
    total, weights = 0.0, 0.0
    for b in range(3):
        own = visible[b]
        p = predictor(patches[b, own][None], own[None], known[b][None])[0].softmax(1)
        every = torch.ones(1, 16, dtype=torch.bool)
        f = predictor.encode(patches[b][None], torch.arange(16)[None], every)[0]
        near = [math.exp(torch.cosine_similarity(f[0], f[1 + int(i)], 0) / temperature) for i in own]
        for i in range(8):
            if not known[b, i]:
                weight = near[i] / sum(near)
                weights += weight
                total -= weight * sum(float(target[own[i], j]) * math.log(p[i, j]) for j in range(16))
    found = recipe.loss(recipe.model, (patches, visible, known, target), Generator())
    assert float(found) == pytest.approx(total / weights, rel=1e-4)


def test_only_dropped_positions_are_learnt() -> None:
    objective = TrainDropPos(gamma=0.25)
    made = objective.batch(ramps(4).pixels(torch.arange(4)), torch.zeros(4, dtype=torch.int64), small(), Generator())
    logits = torch.randn(4, 12, 16, requires_grad=True)

    class Said(nn.Module):
        def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
            return logits, torch.rand(4, 12) + 0.1

    objective.loss(Said(), made).backward()
    assert logits.grad is not None
    assert (logits.grad[made[2]] == 0).all()
    assert (logits.grad[~made[2]] != 0).all()


def test_fixed_embeddings_stay_and_become_the_victims_own() -> None:
    model = small()
    recipe = ObjectiveRecipe(model, ramps(8), TrainDropPos(decoder_width=16), STILL)
    train(recipe, Plan(steps=3, batch_size=4))
    assert model.vit.pos_embed is not None
    torch.testing.assert_close(model.vit.pos_embed[0], torch.cat([torch.zeros(1, 32), sincos((4, 4), 32)]))
    assert not torch.equal(model.vit.patch_embed.proj.weight, small().vit.patch_embed.proj.weight)


# What training makes


def test_mp3_learns_places_that_show(mp3: tuple[PositionPredictor, list[float]]) -> None:
    predictor, losses = mp3
    assert losses[0] > 2 > 0.5 > losses[-1]
    found = position_accuracy(predictor, ramps(50, seed=1))
    assert found["accuracy"] == found["accuracy_eta_0"] > 0.9
    assert [*found] == ["accuracy", *(f"accuracy_eta_{eta}" for eta in ("0", "0.25", "0.5", "0.75"))]


def test_droppos_learns_places_that_show(droppos: tuple[PositionPredictor, list[float]]) -> None:
    predictor, _ = droppos
    found = position_accuracy(predictor, ramps(50, seed=1))
    grid = {name: value for name, value in found.items() if name != "accuracy"}
    assert len(grid) == 16
    assert found["accuracy"] == pytest.approx(sum(grid.values()) / 16)
    assert grid["accuracy_gamma_0_pos_0.25"] > 0.9


def test_untrained_predictors_are_at_chance() -> None:
    assert position_accuracy(Mp3Network(small()), ramps(20))["accuracy"] < 0.25


@pytest.mark.parametrize("kind", ["mp3", "droppos"])
def test_a_predictor_comes_back_from_its_file(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    predictor, _ = request.getfixturevalue(kind)
    save_predictor(predictor, tmp_path / "predictor.safetensors")
    again = load_predictor(tmp_path / "predictor.safetensors")
    patches, known = tiles(ramps(3).pixels(torch.arange(3)), 4), torch.arange(16).expand(3, -1) < 4
    assert again.name == predictor.name
    with torch.no_grad():
        torch.testing.assert_close(again.scores(patches, known), predictor.eval().scores(patches, known))
    assert load_predictor(tmp_path / "predictor.safetensors") is again
    assert not any(name.startswith(("model.vit.head", "model.vit.pos_embed")) for name in predictor.tensors())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of images without labels: 6 to learn, 4 to evaluate on."""
    for split, n in (("train", 6), ("test", 4)):
        (tmp_path / "pictures" / split).mkdir(parents=True)
        for i, image in enumerate(ramps(n, side=32).images):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "pictures" / split / f"{i}.png")
    return tmp_path / "pictures"


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
@pytest.mark.parametrize(("recipe", "model"), [("mp3", "cifar_vit_nope"), ("droppos", "cifar_vit")])
def test_a_training_writes_a_predictor_and_a_start(recipe: str, model: str, folder: Path, tmp_path: Path) -> None:
    config = TrainingConfig(recipe=recipe, model=model, data=str(folder), preset="small", epochs=1.0)
    card = train_victim(config, tmp_path / "out")
    assert card["test"]["images"] == 4
    assert 0 <= card["test"]["accuracy"] <= 1
    found = load_predictor(tmp_path / "out" / "predictor.safetensors")
    assert (found.name, found.model.grid, found.model.patch) == (recipe, (8, 8), 4)
    start = victim(model, weights=tmp_path / "out" / "model.safetensors").model
    torch.testing.assert_close(start.vit.blocks[0].state_dict(), found.model.vit.blocks[0].state_dict())
    text = (tmp_path / "out" / "card.json").read_text("utf-8")
    assert json.loads(text, parse_constant=pytest.fail)["predictor_sha256"]  # τ = ∞ too is strict JSON


def test_a_black_rim_gives_no_place_away() -> None:
    for recipe in ("mp3", "droppos"):
        assert all(preset.augmentation.shift == 0 for preset in PRESETS[recipe].values())


def test_trainings_that_go_on_end_with_the_same_bits(tmp_path: Path) -> None:
    """The smoothing of a step depends on the step alone."""
    plan, often = Plan(steps=6, batch_size=4), Compute(log_every=2, save_every=2)

    def recipe() -> ObjectiveRecipe:
        return ObjectiveRecipe(small(), ramps(8), TrainDropPos(decoder_width=16), STILL)

    class Stopped(Exception):
        pass

    def stop(now: object) -> None:
        if getattr(now, "step") == 4:  # noqa: B009
            raise Stopped

    whole, parts = recipe(), recipe()
    train(whole, plan)
    with pytest.raises(Stopped):
        train(recipe(), plan, compute=often, out=tmp_path, progress=stop)
    train(parts, plan, compute=often, out=tmp_path)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, parts.model.state_dict()[name]), name


# Bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainMp3(eta=1.0), r"eta \(η\) must be in \[0, 1\)\. Found 1\.0\."),
        (lambda: TrainMp3(drop_path=-0.1), r"drop_path must be in \[0, 1\)\. Found -0\.1\."),
        (lambda: TrainDropPos(gamma=1.0), r"gamma \(γ\) of droppos must be in \[0, 1\)"),
        (lambda: TrainDropPos(gamma_pos=0.0), r"gamma_pos \(γ_pos\) must be in \(0, 1\]"),
        (lambda: TrainDropPos(sigma=-1.0), r"sigma \(σ\) must be at least 0"),
        (lambda: TrainDropPos(temperature=0.0), r"temperature \(τ\) must be positive"),
        (lambda: DropPosNetwork(small(), 10, 2, 4), r"Found 32, and a decoder of 2 blocks, width 10 and 4 heads"),
        (lambda: TrainDropPos().module(small(pos_embed="none")), "this one has none: use mp3"),
        (lambda: Mp3Network(small(reg_tokens=2)), "made of a plain ViT with one class token"),
        (lambda: Mp3Network(small(init_values=0.1)), "made of a plain ViT with one class token"),
        (lambda: Mp3Network(small()).check((4, 4), 8), r"for 4 × 4 patches of 4 × 4 pixels\. Found 4 × 4 of 8 × 8\."),
    ],
)
def test_bad_options(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        make()


def test_files_that_are_no_predictors(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    with pytest.raises(PrivlabError, match="No position predictor at"):
        load_predictor(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(PrivlabError, match="is not a position predictor"):
        load_predictor(path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(PrivlabError, match="not a position predictor"):
        load_predictor(path)
    predictor = Mp3Network(small())
    facts = {"predictor": "mp3", "img_size": [16, 16], "patch_size": 4, "in_chans": 3, "embed_dim": 32, "depth": 2}
    facts |= {"num_heads": 2, "mlp_ratio": 4.0, "mean": [0.5] * 3, "std": [0.5] * 3, "decoder": {}}
    for change in ({"predictor": "mp4"}, {"embed_dim": 64}, {"depth": "two"}, {"decoder": {"width": 8}}):
        save_file(predictor.tensors(), path, {"privlab": json.dumps(facts | change)})
        with pytest.raises(PrivlabError, match="is not a position predictor") as error:
            load_predictor(path)
        assert "\n" not in str(error.value)
    save_file(predictor.tensors(), path, {"privlab": json.dumps(facts)})
    assert load_predictor(path).slots == 16


def test_masks_come_from_the_draw() -> None:
    objective, images = replace(TrainMp3(), eta=0.5), ramps(4).pixels(torch.arange(4))
    labels = torch.zeros(4, dtype=torch.int64)
    first, again, other = (
        objective.batch(images, labels, small(), draw_for(seed, "", "mask"))[1] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
