"""What a client sends is what a plain PyTorch loop makes of its images, for every optimiser and setting."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from privlab.base import PrivlabError
from privlab.defenses import GradientPruning, GradientQuantisation, Mjp
from privlab.release import as_gradients, observe, observe_updates, rounding_deviation, run_client, trained_parameters
from privlab.threat import CLIENT_PRESETS, Capability, Client, ClientData, Effects, Feed
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 7}


@pytest.fixture(scope="module")
def model(tiny_model: Model) -> VictimModel:
    """Return a small victim whose weights are stored as clients store them, in float32."""
    return tiny_model().float()


def private(m: int, seed: int = 3) -> ClientData:
    draw = torch.Generator().manual_seed(seed)
    return ClientData(torch.rand(m, 3, 16, 16, generator=draw), torch.arange(m) % 7, draw)


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.01},
    "sgd momentum": {"lr": 0.01, "momentum": 0.9},
    "sgd all": {"lr": 0.01, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.05},
    "sgd nesterov": {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    "adam": {"optimiser": "adam", "lr": 1e-3, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1},
    "adamw": {"optimiser": "adamw", "lr": 1e-3, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1},
    "cosine": {"schedule": "cosine", "lr_min": 1e-3},
    "step": {"schedule": "step", "lr_every": 2, "lr_factor": 0.3},
    "in order": {"shuffle": False},
    "accumulated": {"accumulation": 2},
    "clipped": {"clip": 0.05},
    "smoothed": {"label_smoothing": 0.1},
    "dropout": {"dropout": 0.3},
    "drop path": {"drop_path": 0.5},
    "autocast": {"autocast": "bf16"},
    "head": {"trains": "head"},
    "norms": {"trains": "norms"},
    "attention": {"trains": "attention"},
    "no embedding": {"trains": "no-embedding"},
    "weights": {"sends": "weights"},
    "weights in bf16": {"sends": "weights", "sent_as": "bf16"},
    "difference in fp16": {"sent_as": "fp16"},
    "difference in int8": {"sent_as": "int8"},
    "weights in int8": {"sends": "weights", "sent_as": "int8"},
}


def plain_loop(model: VictimModel, settings: dict[str, Any], data: ClientData, epochs: int) -> dict[str, Tensor]:
    """Train as anybody would, with timm's own dropout, torch's own schedulers and batches of two: the naive twin."""
    given: dict[str, Any] = {field.name: field.default for field in fields(Client)} | settings
    rates = {
        "pos_drop_rate": given["dropout"],
        "proj_drop_rate": given["dropout"],
        "drop_path_rate": given["drop_path"],
    }
    vit = VisionTransformer(**SIZES, **rates)
    vit.load_state_dict(model.vit.state_dict())
    twin = VictimModel(vit, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)).train()
    wanted = {
        "all": [*dict(vit.named_parameters())],
        "head": ["head.weight", "head.bias"],
        "norms": [name for name, _ in vit.named_parameters() if "norm" in name],
        "attention": [name for name, _ in vit.named_parameters() if "qkv" in name or "attn.proj" in name],
        "no-embedding": [n for n, _ in vit.named_parameters() if n.startswith(("blocks", "norm", "head"))],
    }[given["trains"]]
    parameters = [vit.get_parameter(name) for name in wanted]
    if given["optimiser"] == "sgd":
        keys = ("momentum", "dampening", "nesterov", "weight_decay")
        optimiser: torch.optim.Optimizer = torch.optim.SGD(parameters, given["lr"], **{k: given[k] for k in keys})
    else:
        kind = torch.optim.Adam if given["optimiser"] == "adam" else torch.optim.AdamW
        betas = (given["beta1"], given["beta2"])
        optimiser = kind(parameters, given["lr"], betas, given["eps"], given["weight_decay"])
    schedulers = torch.optim.lr_scheduler
    T = epochs * (2 if given["accumulation"] == 2 else 3)
    scheduler = {
        "constant": lambda: schedulers.ConstantLR(optimiser, factor=1),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimiser, T, given["lr_min"]),
        "step": lambda: schedulers.StepLR(optimiser, given["lr_every"], given["lr_factor"]),
    }[given["schedule"]]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=data.draw)))
        for _ in range(epochs):
            m = len(data.images)
            order = torch.randperm(m, generator=data.draw) if given["shuffle"] else torch.arange(m)
            batches, group = [order[i : i + 2] for i in range(0, m, 2)], given["accumulation"]
            for parts in [batches[i : i + group] for i in range(0, len(batches), group)]:
                optimiser.zero_grad()
                for rows in parts:
                    with torch.autocast("cpu", torch.bfloat16, enabled=given["autocast"] == "bf16"):
                        smoothing = given["label_smoothing"]
                        loss = F.cross_entropy(twin(data.images[rows]), data.labels[rows], label_smoothing=smoothing)
                    (loss / len(parts)).backward()
                if given["clip"] is not None:
                    nn.utils.clip_grad_norm_(parameters, given["clip"])
                optimiser.step()
                scheduler.step()
    number = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(given["sent_as"])
    found = {}
    for name, after in zip(wanted, parameters, strict=True):
        before = model.vit.get_parameter(name).detach()
        sent = after.detach() if given["sends"] == "weights" else after.detach() - before
        if number is None:  # int8, its scale beside it
            scale = sent.abs().max() / 127
            sent = (sent / scale).round().clamp(-127, 127).to(torch.int8).float() * scale
        else:
            sent = sent.to(number).float()
        found[name] = sent - before if given["sends"] == "weights" else sent
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_is_that_of_a_plain_loop(model: VictimModel, name: str) -> None:
    """Bit for bit, but where torch's cosine is a recursion with roundings of its own."""
    before = copy.deepcopy(model.state_dict())
    found = run_client(model, Client(images=5, batch_size=2, epochs=2, **SETTINGS[name]), private(5))
    expected = plain_loop(model, SETTINGS[name], private(5), 2)
    assert found.keys() == expected.keys()
    for key, update in found.items():
        torch.testing.assert_close(update, expected[key], rtol=0, atol=2e-7 if name == "cosine" else 0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_each_setting_changes_the_update(model: VictimModel) -> None:
    """A setting that had no effect would pass every comparison with a loop that ignores it too."""
    plain = run_client(model, Client(images=5, batch_size=2, epochs=2), private(5))["head.weight"]
    for name, settings in SETTINGS.items():
        if name in ("sgd", "weights") or settings.get("trains") in ("norms", "attention"):
            continue
        own = run_client(model, Client(images=5, batch_size=2, epochs=2, **settings), private(5))
        assert not torch.equal(own["head.weight"], plain), name


@dataclass(frozen=True)
class Turned:
    """Turns the images upside down, and notes what it was given."""

    name: ClassVar[str] = "turned"
    paper: ClassVar[str] = "a test"
    acts_as: ClassVar[Effects] = Effects(other=True)

    sizes: list[int] = field(default_factory=list, compare=False)

    def __call__(self, images: Tensor, patch: int, draws: Sequence[torch.Generator]) -> Feed:
        """Return the images upside down."""
        self.sizes.append(len(images))
        assert len(draws) == len(images)
        return Feed.undefended(images.flip(2), patch)


def test_a_defense_of_images_acts_on_each_batch_of_each_step(model: VictimModel) -> None:
    client, data, turned = Client(images=5, batch_size=2, epochs=2), private(5), Turned()
    found = run_client(model, client, data, (turned,))
    assert turned.sizes == [2, 2, 1, 2, 2, 1]
    plain = run_client(model, client, replace(private(5), images=private(5).images.flip(2)))
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in found)


def test_mjp_draws_a_mask_for_each_step_and_trains_its_embedding(tiny_model: Model) -> None:
    """One step is the gradient under the first draw times the rate; two have masks of their own."""
    model, client = tiny_model(), Client(lr=0.5)
    data = replace(private(1), images=private(1).images.double())
    mjp = Mjp(gamma=0.3)
    seen = observe_updates(model, client, [data], None, (mjp,))
    assert "unk_embed" in seen.gradients
    draw = private(1).draw
    torch.randint(2**62, (), generator=draw)  # the seed of dropout, and the order of the images
    torch.randperm(1, generator=draw)
    feed = mjp(data.images, model.patch, [draw])
    own = observe(model, feed, data.labels, ["pos_embed", "unk_embed"], (mjp,))
    for name, gradient in own.gradients.items():
        torch.testing.assert_close(seen.gradients[name], 0.5 * gradient, rtol=1e-5, atol=1e-7)
    again = replace(data, draw=private(1).draw)
    two = observe_updates(model, replace(client, lr=1e-4, steps=2), [again], None, (mjp,))
    once, twice = ((each.gradients["pos_embed"][0, 0, 1:] == 0).all(1) for each in (seen, two))
    assert feed.masked_pe is not None
    assert torch.equal(once, feed.masked_pe[0])
    assert twice.sum() < once.sum()
    assert "unk_embed" not in observe_updates(model, client, [data]).gradients


def test_steps_go_round_the_images(model: VictimModel) -> None:
    four = run_client(model, Client(images=3, batch_size=2, steps=4), private(3))
    two_passes = run_client(model, Client(images=3, batch_size=2, epochs=2), private(3))
    assert all(torch.equal(four[name], two_passes[name]) for name in four)
    three = run_client(model, Client(images=3, batch_size=2, steps=3), private(3))
    assert not torch.equal(three["head.weight"], four["head.weight"])


def test_a_step_of_sgd_is_observed_as_its_gradient_times_the_rate(tiny_model: Model) -> None:
    model, data = tiny_model(), private(2)
    data = ClientData(data.images.double(), data.labels, data.draw)
    client = Client(lr=0.5, images=2, batch_size=2)
    seen = observe_updates(model, client, [data, data])
    assert seen.client == client
    assert (seen.images_per_release, len(seen.gradients["pos_embed"])) == (2, 2)
    plain = observe(model, data.images, data.labels, ["pos_embed", "patch_embed.proj.weight"], images_per_release=2)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(seen.gradients[name][1], 0.5 * gradient[0], rtol=1e-5, atol=1e-7)


def test_the_mean_of_clients_that_take_one_step_is_the_update_of_one_batch(model: VictimModel) -> None:
    """Secure aggregation shows the server no more and no less than a client with the images of all."""
    data = private(3)
    alone = [ClientData(x[None], y[None], torch.Generator()) for x, y in zip(data.images, data.labels, strict=True)]
    updates = [run_client(model, Client(lr=0.1), each) for each in alone]
    together = run_client(model, Client(lr=0.1, images=3, batch_size=3), data)
    for name, update in together.items():
        torch.testing.assert_close(torch.stack([each[name] for each in updates]).mean(0), update, rtol=1e-4, atol=1e-6)
    settings = {"lr": 0.1, "images": 1, "clients": 3}
    seen, batch = (observe_updates(model, Client(**settings), alone), Client(lr=0.1, images=3, batch_size=3))
    of_batch = observe_updates(model, batch, [data])
    assert seen.images_per_release == of_batch.images_per_release == 3
    assert seen.grants == of_batch.grants
    assert Client(**settings).gradient_factor == batch.gradient_factor == 0.1
    for name, update in of_batch.gradients.items():
        torch.testing.assert_close(seen.gradients[name], update, rtol=1e-4, atol=1e-6)


MEANS: dict[str, dict[str, Any]] = {
    "one image each": {"epochs": 4},
    "batches of two": {"images": 5, "batch_size": 2, "epochs": 2, "momentum": 0.9, "weight_decay": 0.05},
    "weights in bf16": {"images": 2, "epochs": 2, "sends": "weights", "sent_as": "bf16"},
}


@pytest.mark.parametrize("name", MEANS)
def test_what_secure_aggregation_shows_is_the_mean_of_plain_loops(model: VictimModel, name: str) -> None:
    """Each client starts from the same weights, with its own images and draws; the next K make the next release."""
    settings = {"batch_size": 2, **MEANS[name]}
    client = Client(lr=0.05, clients=3, **settings)
    clients = [private(client.images, seed) for seed in range(6)]
    seen = observe_updates(model, client, clients)
    assert seen.images_per_release == 3 * client.images
    given = {key: value for key, value in settings.items() if key not in ("images", "epochs", "batch_size")} | {
        "lr": 0.05
    }
    loops = [plain_loop(model, given, private(client.images, seed), client.epochs or 1) for seed in range(6)]
    for parameter, update in seen.gradients.items():
        for release in range(2):
            a, b, c = (loops[3 * release + k][parameter] for k in range(3))
            assert torch.equal(update[release], -(a + b + c) / 3)


@pytest.mark.parametrize("name", MEANS)
def test_the_mean_of_one_client_is_its_update(model: VictimModel, name: str) -> None:
    client, seeds = Client(lr=0.05, clients=1, **MEANS[name]), range(2)
    seen = observe_updates(model, client, [private(client.images, seed) for seed in seeds])
    for seed in seeds:
        for parameter, update in run_client(model, client, private(client.images, seed)).items():
            assert torch.equal(seen.gradients[parameter][seed], -update)


def test_a_mean_that_cannot_be_is_one_line(model: VictimModel) -> None:
    with pytest.raises(PrivlabError, match=r"client.clients=2.*3"):
        observe_updates(model, Client(clients=2), [private(1)] * 3)
    with pytest.raises(PrivlabError, match=r"client.images=2.*1.*1"):
        observe_updates(model, Client(clients=2, images=2), [private(2), private(1)])
    with pytest.raises(PrivlabError, match=r"'gradient-pruning'.*client.clients=2"):
        observe_updates(model, Client(clients=2), [private(1)] * 2, defense=(GradientPruning(),))


ONE_STEP: dict[str, Client] = {
    "plain": Client(lr=0.03, images=4, batch_size=4),
    "decay": Client(lr=0.03, images=4, batch_size=8, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nesterov": Client(lr=0.03, images=4, batch_size=4, momentum=0.9, nesterov=True, weight_decay=0.1),
    "accumulated": Client(lr=0.03, images=4, batch_size=2, accumulation=2),
    "the head alone": Client(lr=0.03, images=4, batch_size=4, trains="head"),
}


@pytest.mark.parametrize("name", ONE_STEP)
def test_one_step_of_sgd_is_the_gradient_of_the_mean_loss(tiny_model: Model, name: str) -> None:
    """Whatever reads gradients reads such an update: its share of decay and its factor are taken off."""
    model, data, client = tiny_model(), private(4), ONE_STEP[name]
    seen = as_gradients(observe_updates(model, client, [data]))
    expected = observe(model, data.images.double(), data.labels, [*seen.gradients], images_per_release=4)
    assert seen.client is None
    assert Capability.CLIENT_UPDATE not in seen.grants
    for parameter, g in expected.gradients.items():
        assert (seen.gradients[parameter] - g).norm() < 2e-6 * g.norm()  # what float32 sends


@pytest.mark.parametrize(
    "client",
    [
        Client(steps=2),
        Client(images=4, batch_size=2),
        Client(images=4, batch_size=2, steps=1),
        Client(images=3, batch_size=2, accumulation=2),
        Client(clip=1.0),
        Client(label_smoothing=0.1),
        Client(dropout=0.1),
        Client(drop_path=0.1),
        Client(optimiser="adamw"),
    ],
)
def test_other_updates_are_no_gradients(model: VictimModel, client: Client) -> None:
    assert client.gradient_factor is None
    with pytest.raises(PrivlabError, match=r"Client\("):
        as_gradients(observe_updates(model, client, [private(client.images)]))


def test_what_is_granted_is_what_was_trained(model: VictimModel) -> None:
    def granted(**settings: Any) -> frozenset[Capability]:
        return observe_updates(model, Client(**settings), [private(settings.get("images", 1))]).grants

    pe, update = Capability.LEARNABLE_PE_GRADIENT, Capability.CLIENT_UPDATE
    assert {pe, update, Capability.PLAIN_BLOCK, Capability.BATCH_SIZE_ONE} <= granted()
    assert Capability.BATCH_SIZE_ONE not in granted(images=2)
    for trains in ("head", "norms", "attention", "no-embedding"):
        assert pe not in granted(trains=trains)
        assert (Capability.PLAIN_BLOCK in granted(trains=trains)) == (trains == "no-embedding")
    assert update not in observe(model, private(1).images, torch.tensor([0]), ["pos_embed"]).grants


def test_sets_of_parameters_are_timms(tiny_model: Model, tiny_vit: Callable[..., VisionTransformer]) -> None:
    model = tiny_model(reg_tokens=2)
    names = {kind: trained_parameters(model, Client(trains=kind)) for kind in ("all", "no-embedding", "norms", "head")}
    assert names["all"] == [name for name, _ in model.vit.named_parameters()]
    left = {"cls_token", "reg_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert set(names["all"]) - set(names["no-embedding"]) == left
    assert len(names["norms"]) == 2 * (2 * 2 + 1)
    frozen = tiny_vit()
    frozen.head.requires_grad_(False)
    with pytest.raises(PrivlabError, match=r"nothing to train: of \d+ parameters 2 have requires_grad=False"):
        trained_parameters(VictimModel(frozen, (0.5,) * 3, (0.5,) * 3), Client(trains="head"))


def test_a_client_that_cannot_run_is_one_line(model: VictimModel) -> None:
    with pytest.raises(PrivlabError, match=r"client.images=2.*1.*1"):
        run_client(model, Client(images=2), private(1))
    diverged = run_client(model, Client(lr=1e30, steps=9), private(1))
    assert not all(difference.isfinite().all() for difference in diverged.values())
    with pytest.raises(PrivlabError, match="update"):
        observe_updates(model, Client(), [])


def test_presets_run(model: VictimModel) -> None:
    for client in CLIENT_PRESETS.values():
        assert run_client(model, client, private(client.images))


@pytest.mark.parametrize("sends", ["difference", "weights"])
def test_int8_has_an_error_of_one_step_for_a_whole_parameter(sends: str) -> None:
    """It is told by what was sent alone, also where a part of the update is subtracted from it."""
    draw = torch.Generator().manual_seed(0)
    before = torch.randn(40_000, generator=draw)
    after = before + 1e-3 * torch.randn(40_000, generator=draw)
    exact = after if sends == "weights" else after - before
    step = exact.abs().max().item() / 127
    sent = (exact / step).round() * step
    moved = sent - before if sends == "weights" else sent
    client = Client(sends=sends, sent_as="int8")
    told = rounding_deviation(before, -moved, client, moved)
    torch.testing.assert_close(told, torch.full_like(told, step / 12**0.5), rtol=1e-3, atol=0)
    assert ((sent - exact).double() / told).square().mean().sqrt() == pytest.approx(1, abs=0.03)
    torch.testing.assert_close(rounding_deviation(before, -moved, client), told, rtol=1e-3, atol=0)
    if sends == "difference":
        torch.testing.assert_close(rounding_deviation(after, -moved / 9, client, moved), told, rtol=1e-3, atol=0)


def test_a_parameter_that_did_not_move_has_no_rounding_of_int8() -> None:
    one, zero = torch.ones(3), torch.zeros(3)
    assert torch.equal(rounding_deviation(one, zero, Client(sent_as="int8")), rounding_deviation(one, zero, Client()))


def test_int8_rounds_as_the_defense_does_and_takes_no_other(model: VictimModel) -> None:
    rounded, plain = Client(steps=2, sent_as="int8"), Client(steps=2)
    found = observe_updates(model, rounded, [private(1)])
    defended = observe_updates(model, plain, [private(1)], defense=(GradientQuantisation(),))
    assert all(torch.equal(u, defended.gradients[name]) for name, u in found.gradients.items())
    with pytest.raises(PrivlabError, match=r"'gradient-pruning'.*client\.sent_as=int8"):
        observe_updates(model, rounded, [private(1)], defense=(GradientPruning(),))


@pytest.mark.parametrize(("sends", "sent_as"), [("difference", "float32"), ("weights", "float32"), ("weights", "bf16")])
def test_rounding_is_as_large_as_is_said(sends: str, sent_as: str) -> None:
    """The same steps in float64 show the error of stored weights: uniform within an ulp, one per step, on 40,000."""
    draw = torch.Generator().manual_seed(0)
    before = torch.randn(40_000, generator=draw) * torch.logspace(-3, 1, 40_000)
    client, after, exact = Client(steps=7, sends=sends, sent_as=sent_as), before.clone(), before.double()
    for _ in range(7):
        step = torch.randn(40_000, generator=draw) * before.abs() * 1e-3
        after, exact = after - step, exact - step.double()
    sent = after.bfloat16().float() if sent_as == "bf16" else after
    errors = (sent.double() - exact) / rounding_deviation(before, before - after, client)
    assert errors.square().mean().sqrt() == pytest.approx(1, abs=0.03)
    for part in errors.chunk(4):  # whatever the size of the weights
        assert part.square().mean().sqrt() == pytest.approx(1, abs=0.05)


def test_rounding_of_a_zero_weight_is_that_of_what_it_becomes() -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    assert rounding_deviation(zero, -one, Client()).item() == pytest.approx(2**-23 / 12**0.5)
    assert rounding_deviation(zero, zero, Client()).item() < 1e-40
