"""A client that trains prompt tokens or bottleneck adapters sends what a plain loop in PyTorch makes of its images."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from privlab.base import PrivlabError
from privlab.release import as_gradients, observe, observe_updates, run_client, served, trained_parameters
from privlab.threat import Client, ClientData
from privlab.victims import VictimModel, bottlenecked, prompted

Model = Callable[..., VictimModel]
PROMPTS, ADAPTERS = Client(trains="prompts", prompts=3, lr=0.5), Client(trains="adapters", rank=5, lr=0.5)


def private(m: int) -> ClientData:
    draw = torch.Generator().manual_seed(3)
    return ClientData(torch.rand(m, 3, 16, 16, generator=draw, dtype=torch.float64), torch.arange(m) + 2, draw)


class Prompted(nn.Module):
    """The prompts as the paper writes them: they stand between the class token and the patches, without a PE."""

    def __init__(self, vit: VisionTransformer, tokens: Tensor) -> None:
        super().__init__()
        self.vit, self.reg_token = vit, nn.Parameter(tokens.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of normalised images."""
        z = self.vit._pos_embed(self.vit.patch_embed(x))
        z = torch.cat([z[:, :1], self.reg_token.expand(len(z), -1, -1), z[:, 1:]], 1)
        return self.vit.head(self.vit.norm(self.vit.blocks(z))[:, 0])


class Adapted(nn.Module):
    """The adapters as the paper draws them: they change what each MLP gives, before the skip is added."""

    def __init__(self, vit: VisionTransformer, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.vit, self.state = vit, nn.ParameterDict({k.replace(".", "|"): v.clone() for k, v in state.items()})

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of normalised images."""
        z = self.vit._pos_embed(self.vit.patch_embed(x))
        blocks: Any = self.vit.blocks
        for n, block in enumerate(blocks):
            V, v, U, u = (
                self.state[f"blocks|{n}|mlp|adapter|{part}"]
                for part in ("down|weight", "down|bias", "up|weight", "up|bias")
            )
            z = z + block.attn(block.norm1(z))
            h = block.mlp(block.norm2(z))
            z = z + h + F.gelu(h @ V.T + v) @ U.T + u
        return self.vit.head(self.vit.norm(z)[:, 0])


def by_hand(model: VictimModel, client: Client) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return the plain model of a client, and what it trains by the names of what it sends."""
    vit, made = copy.deepcopy(model.vit).requires_grad_(True), served(model, client).vit
    head = {"head.weight": vit.head.weight, "head.bias": vit.head.bias}
    if client.trains == "prompts":
        twin: Any = Prompted(vit, made.get_parameter("reg_token"))
        return twin, {"reg_token": twin.reg_token} | head
    twin = Adapted(vit, {name: p for name, p in made.named_parameters() if ".adapter." in name})
    return twin, {name.replace("|", "."): p for name, p in twin.state.items()} | head


SETTINGS = [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"optimiser": "adamw", "lr": 1e-3}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("trains", ["prompts", "adapters"])
def test_an_update_is_that_of_a_plain_loop(tiny_model: Model, trains: str, settings: dict[str, Any]) -> None:
    model, data = tiny_model(), private(3)
    given: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.0} | settings
    client = Client(trains=trains, images=3, steps=3, shuffle=False, **given)
    twin, moving = by_hand(model, client)
    before = {name: p.detach().clone() for name, p in moving.items()}
    kind = torch.optim.AdamW if given.pop("optimiser", "sgd") == "adamw" else torch.optim.SGD
    optimiser = kind([*moving.values()], **given)
    for x, y in zip(data.images, data.labels, strict=True):
        optimiser.zero_grad()
        F.cross_entropy(twin(model.normalise(x[None])), y[None]).backward()
        optimiser.step()
    found = run_client(model, client, data)
    assert found.keys() == moving.keys()
    for name, update in found.items():
        expected = (moving[name].detach() - before[name]).double()
        torch.testing.assert_close(update, expected, rtol=1e-6, atol=1e-9)
        assert update.any(), name


@pytest.mark.parametrize("client", [PROMPTS, ADAPTERS])
def test_one_step_is_the_gradient_by_the_rules(tiny_model: Model, client: Client) -> None:
    model, data = tiny_model(), private(1)
    seen = as_gradients(observe_updates(model, client, [data]))
    expected = observe(seen.model, data.images, data.labels, [*seen.gradients]).gradients
    assert [*seen.gradients] == trained_parameters(model, client)
    for name, g in expected.items():
        torch.testing.assert_close(seen.gradients[name], g, rtol=1e-5, atol=1e-7)


def test_adapters_wider_than_the_tokens_release_the_spans_of_both_their_inputs(tiny_model: Model) -> None:
    """∂V = Σ_n δ_n h_nᵀ and ∂U = Σ_n ε_n GELU(V h_n + v)ᵀ: what a token is told by, if r > N + 1 of ∂U's dimensions."""
    model, data = tiny_model(), private(1)
    seen = as_gradients(observe_updates(model, Client(trains="adapters", rank=40, lr=0.5), [data]))
    read: list[Tensor] = []
    path = "blocks.0.mlp.adapter"
    seen.model.vit.get_submodule(path).register_forward_hook(lambda _, inputs, __: read.append(inputs[0][0]))
    seen.model(data.images)
    h, tokens = read[0], 17
    a = F.gelu(h @ seen.model.vit.get_parameter(f"{path}.down.weight").mT)
    for rows, name in ((h, "down"), (a, "up")):
        σ, V = torch.linalg.svd(seen.gradients[f"{path}.{name}.weight"][0])[1:]
        assert σ[tokens] < 1e-3 * σ[tokens - 1]  # what float32 sends
        assert (rows - rows @ V[:tokens].mT @ V[:tokens]).norm() < 1e-3 * rows.norm()
        other = rows.roll(1, 1)
        assert (other - other @ V[:tokens].mT @ V[:tokens]).norm() > 0.3 * other.norm()


def test_prompts_have_no_place_and_adapters_start_near_nothing(tiny_model: Model) -> None:
    model, images = tiny_model(), private(2).images
    names, plain = [*model.state_dict()], model(images)
    first, again = prompted(model, 4), prompted(model, 4)
    assert torch.equal(first.vit.get_parameter("reg_token"), again.vit.get_parameter("reg_token"))
    z, own = first.embed(images), model.embed(images)
    torch.testing.assert_close(z[:, [0, *range(5, z.shape[1])]], own)
    tokens = first.vit.get_parameter("reg_token")
    torch.testing.assert_close(z[:, 1:5], tokens.expand(2, -1, -1))
    bound = (6 / (3 * 4**2 + 64)) ** 0.5
    assert -bound < tokens.min() < -0.9 * bound < 0.9 * bound < tokens.max() < bound
    assert prompted(first, 4) is first
    adapters = bottlenecked(model, 2)
    assert bottlenecked(adapters, 2) is adapters
    assert 0 < (adapters(images) - plain).norm() < 0.02 * plain.norm()
    down = adapters.vit.get_parameter("blocks.1.mlp.adapter.down.weight")
    assert down.shape == (2, 64)
    assert 0.01 < down.abs().max() <= 0.02
    assert not adapters.vit.get_parameter("blocks.1.mlp.adapter.up.bias").any()
    copied = copy.deepcopy(adapters)
    copied.vit.get_parameter("blocks.0.mlp.adapter.up.bias").copy_(torch.arange(64) / 64)  # LN hides a constant
    torch.testing.assert_close(adapters(images), bottlenecked(model, 2)(images), rtol=0, atol=0)
    assert (copied(images) - adapters(images)).norm() > 0.01
    assert [*model.state_dict()] == names
    torch.testing.assert_close(model(images), plain, rtol=0, atol=0)
    assert not any(parameter.requires_grad for parameter in (*first.parameters(), *adapters.parameters()))


def test_place_embeddings_without_a_class_token_stay(tiny_model: Model) -> None:
    """Timm's `no_embed_class` leaves prefix tokens without place embeddings, prompts among them."""
    model, images = tiny_model(no_embed_class=True), private(1).images
    z, own = prompted(model, 2).embed(images), model.embed(images)
    torch.testing.assert_close(z[:, [0, *range(3, z.shape[1])]], own)


def test_what_cannot_be_added_is_one_line(tiny_model: Model) -> None:
    for count in (0, 201):
        with pytest.raises(PrivlabError, match=rf"client.prompts must be in \[1, 200\]. Found {count}."):
            Client(trains="prompts", prompts=count)
    with pytest.raises(PrivlabError, match=r"client.prompts=8.*client.trains=lora"):
        Client(trains="lora", prompts=8)
    with pytest.raises(PrivlabError, match="register"):
        run_client(tiny_model(reg_tokens=2), PROMPTS, private(1))
    model = tiny_model()
    model.vit.blocks[1] = nn.Identity()
    with pytest.raises(PrivlabError, match=r"1.*\(Identity\)"):
        run_client(model, ADAPTERS, private(1))
