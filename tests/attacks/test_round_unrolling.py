"""`round-unrolling` against rounds whose images are known, and its parts against naive twins."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks.rows import known_tokens
from privlab.attacks.tokens import (
    FC1,
    FC2,
    Embeddings,
    ImageTokens,
    Mlp,
    Reads,
    Spans,
    complete_tokens,
    row_space,
    separate,
    slots_by_law,
)
from privlab.attacks.tokens.context import _Search
from privlab.attacks.tokens.spans import Near, normalise
from privlab.attacks.updates.round_unrolling import RoundUnrolling
from privlab.base import PrivlabError, PrivlabWarning
from privlab.evaluation import unread
from privlab.metrics import psnr
from privlab.release import observe_updates, replay, run_client
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel, first_block

Model = Callable[..., VictimModel]
PATCH = "patch_embed.proj.weight"
QUICK = {"starts": 8, "rounds": 12, "passes": 1}


def labels_of(images: Tensor) -> Tensor:
    return torch.arange(len(images)) * 2 % 7


def seen_of(model: VictimModel, images: Tensor, **settings: Any) -> Observation:
    """Return a round of batches of one on these images, in their order."""
    client = Client(**({"images": len(images), "shuffle": False} | settings))
    return observe_updates(
        model, client, [ClientData(images, labels_of(images), Generator())], RoundUnrolling.parameters
    )


def stored(crops: Tensor, count: int, side: int) -> Tensor:
    """Return images of 256 grey levels, of the most contrast: patches that are alike have one token."""
    cut = crops[..., :side, :side]
    return cut[cut.std((1, 2, 3)).argsort(descending=True)[: 9 * count : 9]].double()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1},
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.05},
        {"lr": 0.1, "schedule": "cosine", "clip": 0.5, "label_smoothing": 0.1, "momentum": 0.5, "nesterov": True},
    ],
    ids=["plain", "momentum and decay", "all else"],
)
def test_all_images_of_a_round_are_exact(tiny_model: Model, crops: Tensor, settings: dict[str, Any]) -> None:
    images = stored(crops, 3, 8)
    found = RoundUnrolling(**QUICK)(seen_of(tiny_model(img_size=8), images, **settings))
    assert found.tokens is not None
    assert found.tokens.tolist() == [5, 5, 0]  # the last image needs none
    assert (psnr(found.images, images) > 150).all()  # and they come in the order of the steps


@pytest.mark.slow
def test_later_passes_are_not_needed(tiny_model: Model, crops: Tensor) -> None:
    images = stored(crops, 2, 8)
    found = RoundUnrolling(**QUICK)(seen_of(tiny_model(img_size=8), images, lr=0.1, epochs=2)).images
    assert (psnr(found, images) > 150).all()


@pytest.mark.slow
def test_images_without_grey_levels(tiny_model: Model, crops: Tensor) -> None:
    images = stored(crops, 2, 8)
    images = images + 0.002 * torch.rand(images.shape, generator=Generator().manual_seed(0), dtype=images.dtype)
    seen = seen_of(tiny_model(img_size=8), images, lr=0.1)
    for levels in (0, 255):  # the levels are tried, and leave more of the update
        assert (psnr(RoundUnrolling(**QUICK, levels=levels)(seen).images, images) > 80).all()


def test_a_step_that_is_left_is_weighed_by_the_rounding_of_the_whole_round(tiny_model: Model, crops: Tensor) -> None:
    """The step of int8 is that of the release, and what is left of it is smaller."""
    model, names = tiny_model().float(), ("pos_embed", PATCH)
    client = Client(sent_as="int8")
    data = ClientData(crops[:1].float(), torch.tensor([2]), Generator())
    update = {name: -u for name, u in run_client(model, client, data).items()}
    whole = {name: (50 if name == PATCH else 1) * update[name] for name in names}
    own = RoundUnrolling(levels=0)
    assert_close(own.alone(model, client, update), own.alone(model, client, update, update))
    assert (own.alone(model, client, update)[0] - own.alone(model, client, update, whole)[0]).abs().max() > 1e-3
    plain = Client()
    assert_close(own.alone(model, plain, update), own.alone(model, plain, update, whole))


def test_a_round_beyond_the_width_is_grey_and_is_reported(tiny_model: Model, crops: Tensor) -> None:
    images = stored(crops, 4, 16)
    seen = seen_of(tiny_model(), images)
    assert RoundUnrolling().beyond(seen) == "T·(N + 1) = 68 ≥ D = 64"
    assert RoundUnrolling().beyond(seen_of(tiny_model(), images[:3])) is None
    with pytest.warns(PrivlabWarning, match="68 tokens"):
        found = RoundUnrolling()(seen)
    assert (found.images == 0.5).all()
    assert len(found.images) == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"images": 4, "batch_size": 2}, "reads rounds with one image in each step, and here a step has up to 2"),
        ({"images": 2, "accumulation": 2}, "a step has up to 2"),
        ({"images": 2, "dropout": 0.1}, "dropout is private"),
        ({"images": 2, "drop_path": 0.1}, "dropout is private"),
        ({"images": 2, "autocast": "bf16"}, "here they are in bf16"),
        ({"images": 2, "optimiser": "adam"}, "reads updates of sgd, and this run"),
    ],
)
def test_other_rounds_are_refused_with_the_reason(settings: dict[str, Any], said: str) -> None:
    refusal = unread(RoundUnrolling, Client(**settings))
    assert refusal is not None
    assert refusal.startswith("Attack 'round-unrolling' ")
    assert said in refusal
    assert refusal.endswith("no evidence of privacy.")


def test_rounds_of_one_image_a_step_are_read(tiny_model: Model, crops: Tensor) -> None:
    assert unread(RoundUnrolling, Client(images=4)) is None
    assert unread(RoundUnrolling, Client(images=1, batch_size=32, steps=3)) is None
    two = tiny_model(img_size=8).float(), stored(crops, 2, 8).float()
    with pytest.raises(PrivlabError, match="up to 2"):
        RoundUnrolling()(seen_of(*two, batch_size=2))


@pytest.mark.parametrize("option", [{"passes": -1}, {"levels": -1}, {"starts": 0}])
def test_options_out_of_range(option: dict[str, int]) -> None:
    with pytest.raises(PrivlabError, match="Found"):
        RoundUnrolling(**option)


SETTINGS = [{}, {"momentum": 0.9, "weight_decay": 0.05, "clip": 0.1}, {"schedule": "cosine", "momentum": 0.5}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_whole_replay_is_the_clients_update(tiny_model: Model, crops: Tensor, settings: dict[str, Any]) -> None:
    model, images = tiny_model().float(), stored(crops, 3, 16).float()
    client = Client(images=3, shuffle=False, lr=0.05, **settings)
    sent = run_client(model, client, ClientData(images, labels_of(images), Generator()))
    update = replay(model, client, images, labels_of(images)).update
    for name, difference in sent.items():
        assert torch.equal(update[name], -difference)


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_a_part_of_a_replay_leaves_is_linear_in_later_gradients(
    tiny_model: Model, crops: Tensor, settings: dict[str, Any]
) -> None:
    model, images, name = tiny_model(), stored(crops, 3, 16), FC1
    client = Client(images=3, shuffle=False, lr=0.05, **settings)
    labels = labels_of(images)
    none, one, two, whole = (replay(model, client, images[:t], labels[:t]) for t in range(4))
    assert_close(none.update[name], (1 - client.kept_share) * model.vit.get_parameter(name))
    kept, buffer = 0.0, 0.0  # what a unit gradient of the second step moves until the end
    for step, rate in enumerate(client.rates):
        d = (step == 1) + client.weight_decay * kept
        buffer = client.momentum * buffer + d if client.momentum else d
        kept -= rate * buffer
    after = one.model.vit
    with torch.enable_grad():
        own = one.model.requires_grad_(True)
        loss = torch.nn.functional.cross_entropy(own(images[1, None]), labels[1, None])
        gradients = torch.autograd.grad(loss, list(after.parameters()))
    norm = torch.stack([g.norm() for g in gradients]).norm()
    scale = min(1.0, client.clip / (float(norm) + 1e-6)) if client.clip else 1.0
    moved = two.update[name] - one.update[name]
    at = [n for n, _ in after.named_parameters()].index(name)
    assert_close(moved, -kept * scale * gradients[at])
    assert not torch.equal(two.model.vit.get_parameter(name), whole.model.vit.get_parameter(name))


class Parts:
    """The first image of a round of two in the terms of the search, and what is true of it."""

    def __init__(self, model: VictimModel, images: Tensor) -> None:
        self.seen = seen_of(model, images, lr=0.1)
        self.block, self.images, self.model = first_block(model), images, model
        self.z = model.embed(images).double()
        self.u = torch.stack([self.block.norm2(z + self.block.attention(z)) for z in self.z])
        self.G1, self.G2 = (self.seen.gradients[name][0] for name in (FC1, FC2))
        self.count = 2 * self.u.shape[1]
        self.prefix, self.pe = known_tokens(model)
        self.Y = row_space(self.seen.gradients[PATCH][0].flatten(1), 2 * len(self.pe))
        reads = Reads.of(self.seen, 0, self.block, self.count)
        self.of = Embeddings.of(reads, self.Y, self.pe)


@pytest.fixture(scope="module")
def parts(tiny_model: Model, crops: Tensor) -> Parts:
    return Parts(tiny_model(), stored(crops, 2, 16))


def test_spans_hold_the_first_image_and_not_the_second(parts: Parts) -> None:
    off = [float((parts.of.nearest(z) - z).norm() / z.norm()) for z in parts.z[:, 1:]]
    assert off[0] < 0.05  # singular values of the gradients below those of float32 are left out
    assert off[1] > 5 * off[0]
    assert parts.of.Q.shape[1] < len(parts.Y)


def test_the_search_ends_at_the_first_image(parts: Parts) -> None:
    draw = Generator().manual_seed(0)
    options = {"starts": 16, "rounds": 30, "steps": 40, "tolerance": 1e-3}
    G1, G2 = parts.G1[None], parts.G2[None]
    (few,) = separate(Mlp.of(parts.block), G1, G2, parts.count, [draw], **options, most=3)
    assert few.wanted == 3
    assert len(few.u) == 3
    off = torch.cdist(few.u, parts.u.flatten(0, 1)).min(1)
    assert (off.values < 1e-2).all()
    assert (off.indices < parts.u.shape[1]).all()


def test_tokens_are_placed_by_the_law_of_photographs(parts: Parts, crops: Tensor) -> None:
    z = parts.model.embed(crops[:64].double())
    usual = torch.stack([parts.block.norm2(each + parts.block.attention(each)) for each in z])
    order = torch.randperm(parts.u.shape[1], generator=Generator().manual_seed(1))[:12]
    tokens = slots_by_law(Mlp.of(parts.block), parts.u[0, order], usual)
    assert torch.equal(tokens.u, parts.u[0, tokens.place])
    assert sorted(tokens.place.tolist()) == sorted(order.tolist())
    assert tokens.missing(parts.u.shape[1]) == sorted({*range(17)} - {*order.tolist()})


def test_a_missing_token_asks_all_others_and_nothing_of_what_stands_in_its_place(parts: Parts) -> None:
    place, noise = 6, 10 * torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    search = _Search.of(Mlp.of(parts.block), parts.block, Spans.of(parts.G1, parts.G2, parts.count))
    c = (parts.z[0, place] - parts.of.base[place - 1]) @ parts.of.Q

    def found(other: int) -> Tensor:
        z = parts.z[0].index_copy(0, torch.tensor([other]), noise[None])
        return search.run(z, place, parts.of.base[place - 1], parts.of.Q, c[None])

    plain = search.run(parts.z[0], place, parts.of.base[place - 1], parts.of.Q, c[None])
    assert torch.equal(found(place), plain)
    assert not torch.equal(found(place - 3), plain)
    assert not torch.equal(found(place + 3), plain)


def test_missing_tokens_are_found_and_embeddings_with_them(parts: Parts, crops: Tensor) -> None:
    kept = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16])
    whole = Spans.of(parts.G1, parts.G2, parts.count)
    tokens, z = complete_tokens(
        parts.model,
        parts.block,
        parts.of,
        whole,
        (parts.G1, parts.G2),
        ImageTokens(parts.u[0, kept], kept),
        parts.model.embed(crops[:32].double())[:, 1:],
        steps=40,
        tolerance=1e-3,
        passes=3,
    )
    assert sorted(tokens.place.tolist()) == list(range(17))
    assert_close(tokens.u[tokens.place.argsort()], parts.u[0], rtol=0, atol=1e-2)
    assert ((z - parts.z[0, 1:]).norm(dim=1) < 0.05 * parts.z[0, 1:].norm(dim=1)).all()


def test_few_photographs_leave_a_search_without_starts(parts: Parts, crops: Tensor) -> None:
    """Eight of them are those of the second pass, and the third pass, which would have none, ends the search."""
    kept = torch.arange(16)
    tokens, _ = complete_tokens(
        parts.model,
        parts.block,
        parts.of,
        Spans.of(parts.G1, parts.G2, parts.count),
        (parts.G1, parts.G2),
        ImageTokens(parts.u[0, kept], kept),
        parts.model.embed(crops[:8].double())[:, 1:],
        steps=2,
        tolerance=0.0,
        passes=3,
    )
    assert torch.equal(tokens.place, kept)


@pytest.mark.parametrize("empty", [0, 1])
def test_guesses_of_a_release_without_any_token_are_left_out(parts: Parts, empty: int) -> None:
    mlp, u = Mlp.of(parts.block), parts.u[0]
    Q = torch.linalg.qr(u.new_ones(u.shape[1], 1)).Q
    t = normalise(mlp, u)
    guess = Near(u + 0.01, torch.nn.functional.normalize(t - t @ Q @ Q.mT, dim=1), Q)
    G1, G2 = (torch.stack([G, G]).index_fill(0, torch.tensor([empty]), 0) for G in (parts.G1, parts.G2))
    draws = [Generator().manual_seed(0) for _ in range(2)]
    options = {"starts": 8, "rounds": 1, "steps": 40, "tolerance": 1e-2}
    found = separate(mlp, G1, G2, parts.count, draws, **options, near=Near.of([guess, guess]))
    assert (len(found[empty].u), found[empty].wanted) == (0, 0)
    own = found[1 - empty].u
    assert len(own) == len(u)
    assert (torch.cdist(own, u).amin(1) < 1e-2 * u.norm(dim=1).mean()).all()
