"""What is said of position predictors, against networks whose answers are known and against naive loops."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor

from privlab.experiments.figures.predictors import lay_out_patches
from privlab.experiments.studies.position_embeddings import attention_weights
from privlab.experiments.studies.position_predictors import (
    _attention,
    knn_accuracy,
    layers,
    offsets,
    places,
    reinitialise,
    relative,
)
from privlab.experiments.training.examples import Examples
from privlab.patches import permute, shuffle_within
from privlab.reassembly import DropPosNetwork, Mp3Network, PositionPredictor, tiles
from privlab.victims import VictimModel

LEVELS = torch.arange(16) / 16
"""The red of the patch in each of 4 × 4 slots."""


def model(width: int = 16, side: int = 16, heads: int = 2) -> VictimModel:
    sizes: dict[str, Any] = {"img_size": side, "patch_size": 4, "embed_dim": width, "depth": 2, "num_heads": heads}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = VisionTransformer(**sizes, num_classes=3)
    return VictimModel(vit.eval(), (0.0,) * 3, (1.0,) * 3).requires_grad_(False)


def reader(kind: type[PositionPredictor]) -> PositionPredictor:
    """Return a predictor that reads a patch's slot from its red r: its logits are 2 r rⱼ − rⱼ², scaled.

    Its blocks add nothing, and their attention is uniform.
    """
    made = (DropPosNetwork(model(4), 4, 0, 1) if kind is DropPosNetwork else Mp3Network(model(4))).requires_grad_(False)
    for parameter in made.parameters():
        parameter.zero_()
    for norm in (part for part in made.modules() if isinstance(part, torch.nn.LayerNorm)):
        norm.weight.fill_(1)
    embed = made.model.vit.patch_embed.proj
    embed.weight[0, 0], embed.weight[1, 0] = 1 / 16, -1 / 16
    embed.bias.copy_(torch.tensor([0.0, 0.0, 1.0, -1.0]))  # centred, so that the norm only scales
    if isinstance(made, DropPosNetwork):
        made.lead.weight.copy_(torch.eye(4))
    head: Any = made.head
    head.weight[:, 0], head.weight[:, 2] = 2 * LEVELS, -(LEVELS**2)
    return made.eval()


def pictures(n: int) -> Tensor:
    """Return images whose red says the slot; green and blue are noise."""
    images = torch.rand(n, 3, 16, 16, generator=Generator().manual_seed(0))
    images[:, 0] = LEVELS.view(4, 4).repeat_interleave(4, 0).repeat_interleave(4, 1)
    return images


@pytest.mark.parametrize("kind", [Mp3Network, DropPosNetwork])
def test_what_reads_the_slot_places_every_patch(kind: type[PositionPredictor]) -> None:
    draws = [Generator().manual_seed(seed) for seed in range(5)]
    moved = torch.stack([torch.rand(16, generator=draw) < 0.8 for draw in draws])
    order = torch.stack([shuffle_within(mask, draw) for mask, draw in zip(moved, draws, strict=True)])
    likeliest, assigned = places(reader(kind), permute(pictures(5), order, 4), ~moved)
    assert torch.equal(likeliest, order)
    assert torch.equal(assigned, order)


class _Told(Mp3Network):
    """A predictor whose scores are given."""

    def told(self, scores: Tensor) -> "_Told":
        self.given = scores
        return self

    def scores(self, patches: Tensor, known: Tensor) -> Tensor:
        return self.given


@pytest.mark.slow
@given(seed=st.integers(0, 1000), told=st.lists(st.booleans(), min_size=4, max_size=4))
def test_the_assignment_is_the_best_of_all(seed: int, told: list[bool]) -> None:
    scores = torch.randn(1, 4, 4, generator=Generator().manual_seed(seed))
    known = torch.tensor([told])
    likeliest, assigned = places(_Told(model(side=8)).told(scores), torch.zeros(1, 3, 8, 8), known)
    allowed = [order for order in itertools.permutations(range(4)) if all(order[i] == i for i in range(4) if told[i])]
    best = max(allowed, key=lambda order: sum(float(scores[0, i, s]) for i, s in enumerate(order) if not told[i]))
    assert tuple(assigned[0].tolist()) == best
    assert likeliest[0].tolist() == [i if told[i] else int(scores[0, i].argmax()) for i in range(4)]


def test_patches_that_fall_together_are_averaged_and_what_is_empty_is_grey() -> None:
    patches = np.arange(4.0).reshape(4, 1, 1, 1) * np.ones((4, 2, 2, 3))
    shown, empty = lay_out_patches(patches, np.array([3, 1, 1, 3]))
    assert shown[:, 0, 0, 0].tolist() == [0.5, 1.5, 0.5, 1.5]
    assert empty.tolist() == [True, False, True, False]


# The layers


def test_the_last_layer_is_what_the_head_reads() -> None:
    images = torch.rand(2, 3, 16, 16, generator=Generator().manual_seed(1))
    mp3, droppos = Mp3Network(model()), DropPosNetwork(model(), 8, 1, 2)
    *_, last = layers(mp3, images)
    torch.testing.assert_close(mp3.head(mp3.model.vit.norm(last[:, 1:])), mp3(tiles(images, 4)))
    own = torch.arange(16).expand(2, -1)
    tokens = [*layers(droppos, images)]
    assert len(tokens) == 3
    encoded = droppos.encode(tiles(images, 4), own, torch.ones_like(own, dtype=torch.bool))
    torch.testing.assert_close(droppos.model.vit.norm(tokens[-1]), encoded)


def test_weights_of_attention_are_those_of_the_block() -> None:
    block: Any = model().vit.blocks[0]
    x = torch.randn(2, 5, 16, generator=Generator().manual_seed(2))
    attention, weights = block.attn, attention_weights(block, x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5))
    v = attention.qkv(block.norm1(x)).unflatten(2, (3, 2, -1))[:, :, 2].transpose(1, 2)
    torch.testing.assert_close(attention.proj((weights @ v).transpose(1, 2).flatten(2)), attention(block.norm1(x)))


@given(h=st.integers(1, 4), w=st.integers(1, 4), seed=st.integers(0, 100))
def test_relative_attention_is_a_mean_over_pairs_and_keeps_what_is_given(h: int, w: int, seed: int) -> None:
    n = h * w
    weights = torch.rand(2, n, n, generator=Generator().manual_seed(seed), dtype=torch.float64)
    maps, pairs = relative(weights, (h, w))
    assert int(pairs.sum()) == n * n
    torch.testing.assert_close((maps * pairs).sum((1, 2)) / n, weights.sum(2).mean(1))
    down, right = h // 2, 1 - w
    found = [
        weights[1, i, j]
        for i, j in itertools.product(range(n), range(n))
        if (j // w - i // w, j % w - i % w) == (down, right)
    ]
    assert int(pairs[down + h - 1, right + w - 1]) == len(found)
    torch.testing.assert_close(maps[1, down + h - 1, right + w - 1], torch.stack(found).mean())


def test_a_patch_has_offset_zero_from_itself() -> None:
    assert set(offsets((3, 4)).diagonal().tolist()) == {2 * 7 + 3}


def test_heads_of_uniform_attention_are_known() -> None:
    data = Examples((pictures(3) * 255).byte(), torch.full((3,), -1), 0, "toy")
    heads, attention = _attention(reader(Mp3Network), data)
    assert heads.entropy.tolist() == pytest.approx([math.log(17)] * 4)
    assert heads.class_share.tolist() == pytest.approx([1 / 17] * 4)
    assert heads.distance.tolist() == pytest.approx(heads.distance_uniform.tolist())
    assert attention.weight.to_numpy() == pytest.approx(1 / 17)


@pytest.mark.parametrize("kind", [Mp3Network, DropPosNetwork])
def test_what_is_given_to_patches_is_what_the_class_token_leaves(kind: type[PositionPredictor]) -> None:
    network = Mp3Network(model()) if kind is Mp3Network else DropPosNetwork(model(), 8, 1, 2)
    for parameter in network.requires_grad_(False).parameters():
        parameter.add_(torch.randn(parameter.shape, generator=Generator().manual_seed(3)), alpha=0.3)
    heads, attention = _attention(network, Examples((pictures(60) * 255).byte(), torch.full((60,), -1), 0, "toy"))
    given = (attention.weight * attention.pairs).groupby([attention.layer, attention["head"]]).sum() / 16
    assert given.to_numpy() == pytest.approx(1 - heads.class_share.to_numpy())
    assert heads.class_share.std() > 0.001
    row = attention.query("layer == 2 and head == 1 and down == 0 and right == 0")
    assert row.pairs.item() == 16


# The probe


@given(seed=st.integers(0, 200))
def test_the_probe_is_a_vote_of_the_nearest(seed: int) -> None:
    draw = Generator().manual_seed(seed)
    known, queries = torch.randn(30, 4, generator=draw), torch.randn(20, 4, generator=draw)
    labels, wanted = torch.randint(3, (30,), generator=draw), torch.randint(3, (20,), generator=draw)
    right = 0
    for query, label in zip(queries, wanted, strict=True):
        cosine = torch.cosine_similarity(known, query[None])
        near = cosine.topk(5).indices
        score = {c: (int((labels[near] == c).sum()), float(cosine[near][labels[near] == c].sum())) for c in range(3)}
        right += max(score, key=lambda c: score[c]) == int(label)
    assert knn_accuracy(known, labels, queries, wanted, k=5) == pytest.approx(right / 20)


def test_fewer_neighbours_than_k_are_all_asked() -> None:
    known, labels = torch.eye(2), torch.tensor([0, 1])
    assert knn_accuracy(known, labels, torch.tensor([[2.0, 1.0], [0.1, 3.0]]), labels) == 1


@pytest.mark.parametrize("kind", [Mp3Network, DropPosNetwork])
def test_an_untrained_twin_shares_the_shape_and_nothing_else(kind: type[PositionPredictor]) -> None:
    network = reader(kind)
    before, state = network.tensors(), torch.get_rng_state()
    twin = reinitialise(network)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.tensors().items())
    for name, tensor in twin.tensors().items():
        assert tensor.shape == before[name].shape
        if name.endswith("weight") and "norm" not in name:
            assert not torch.equal(tensor, before[name]), name
    again = reinitialise(network).tensors()
    assert all(torch.equal(again[name], tensor) for name, tensor in twin.tensors().items())
