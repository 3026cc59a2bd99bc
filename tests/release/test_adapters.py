"""A client that trains LoRA's adapters sends what a plain loop with peft makes of its images."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privlab.attacks.gradients.gradient_matching import Match
from privlab.base import PrivlabError
from privlab.patches import patchify
from privlab.release import (
    as_gradients,
    observe,
    observe_updates,
    run_client,
    told_images,
    trained_parameters,
    update_capabilities,
)
from privlab.threat import Capability, Client, ClientData
from privlab.victims import VictimModel, adapted

peft: Any = pytest.importorskip("peft", reason="needs privlab[peft]")

Model = Callable[..., VictimModel]
LORA = Client(trains="lora", rank=3, lr=0.5)


@pytest.fixture
def model(tiny_model: Model) -> VictimModel:
    return tiny_model()


def private(m: int) -> ClientData:
    draw = torch.Generator().manual_seed(3)
    return ClientData(torch.rand(m, 3, 16, 16, generator=draw, dtype=torch.float64), torch.arange(m) + 2, draw)


def peft_model(model: VictimModel, rank: int) -> nn.Module:
    """Return timm's model as a user of peft adapts it, the random numbers begun at 0."""
    settings = peft.LoraConfig(target_modules=["qkv"], r=rank, lora_alpha=rank, modules_to_save=["head"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(copy.deepcopy(model.vit).requires_grad_(True), settings)


def timm_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"optimiser": "adamw", "lr": 1e-3}])
def test_an_update_is_that_of_a_plain_loop_with_peft(model: VictimModel, settings: dict[str, Any]) -> None:
    data, twin = private(3), peft_model(model, 3)
    given: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.0} | settings
    client = Client(trains="lora", rank=3, images=3, steps=3, shuffle=False, **given)
    moving = {timm_name(name): p for name, p in twin.named_parameters() if p.requires_grad}
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
        expected = (moving[name].detach() - before[name]).float().double()
        torch.testing.assert_close(update, expected, rtol=1e-6, atol=1e-9)
        assert update.any(), name


def test_the_first_step_moves_b_and_the_head_alone(model: VictimModel) -> None:
    """∂A = 0 and ∂B = Σ_n δ_n (A u_n)ᵀ at B = 0, with what qkv of the plain model reads and gets back."""
    data = private(1)
    read: dict[int, Tensor] = {}
    given: dict[int, Tensor] = {}
    seen = as_gradients(observe_updates(model, LORA, [data]))

    def tap(n: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def record(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            read[n], given[n] = inputs[0], output

        return record

    for n in range(len(model.vit.blocks)):
        model.vit.get_submodule(f"blocks.{n}.attn.qkv").register_forward_hook(tap(n))
    images = data.images.clone().requires_grad_()
    loss = F.cross_entropy(model(images), data.labels)
    for n in range(len(model.vit.blocks)):
        (δ,) = torch.autograd.grad(loss, given[n], retain_graph=True)
        path = f"blocks.{n}.attn.qkv"
        A = seen.model.vit.get_parameter(f"{path}.lora_A.default.weight")
        expected = δ[0].mT @ (read[n][0] @ A.mT)
        assert not seen.gradients[f"{path}.lora_A.default.weight"].any()
        torch.testing.assert_close(seen.gradients[f"{path}.lora_B.default.weight"][0], expected, rtol=1e-5, atol=1e-7)
    head = {name: g[0] for name, g in seen.gradients.items() if name.startswith("head.")}
    assert isinstance(model.vit.head, nn.Linear)
    f = told_images(model.vit.head, head, 1).f
    torch.testing.assert_close(f, model.features(data.images), rtol=1e-4, atol=1e-5)
    assert int(head["head.bias"].argmin()) == int(data.labels)


def test_adapters_change_no_logits_and_no_victim(model: VictimModel) -> None:
    names, state = [*model.state_dict()], torch.random.get_rng_state()
    first = adapted(model, 2)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(9)
    again = adapted(model, 2)
    torch.random.set_rng_state(state)
    images = private(2).images
    torch.testing.assert_close(first(images), model(images), rtol=0, atol=1e-12)
    assert [*model.state_dict()] == names
    assert adapted(first, 2) is first
    assert not any(parameter.requires_grad for parameter in first.parameters())
    held = first.state_dict()
    assert all(torch.equal(value, held[name]) for name, value in again.state_dict().items())
    A = held["vit.blocks.0.attn.qkv.lora_A.default.weight"]
    assert A.shape == (2, model.vit.embed_dim)
    assert A.any()


def test_what_is_trained_and_granted(model: VictimModel) -> None:
    parts = ("lora_A", "lora_B")
    adapters = [f"blocks.{n}.attn.qkv.{part}.default.weight" for n in range(len(model.vit.blocks)) for part in parts]
    assert trained_parameters(model, LORA) == [*adapters, "head.weight", "head.bias"]
    granted = update_capabilities(model, LORA)
    assert granted >= {Capability.KNOWS_WEIGHTS, Capability.CLASS_LABELS, Capability.CLIENT_UPDATE}
    assert not granted & {Capability.LEARNABLE_PE_GRADIENT, Capability.PLAIN_BLOCK}


def test_gradient_matching_compares_adapters(model: VictimModel) -> None:
    """Its distance is 0 at the private image alone, and the rules of gradients give those of the adapters."""
    data = private(1)
    seen = as_gradients(observe_updates(model, LORA, [data]))
    expected = observe(seen.model, data.images, data.labels, [*seen.gradients]).gradients
    for name, g in expected.items():
        torch.testing.assert_close(seen.gradients[name], g, rtol=1e-5, atol=1e-7)
    match = Match.of(seen, "l2", 0.0)
    assert any(".lora_B." in name for name in match.target)
    for images, small in ((data.images, True), (data.images.flip(2), False)):
        points = match.coordinates(patchify(model.normalise(images), model.patch)[None])
        value, _ = match(points, torch.tensor([0]))
        assert (float(value) < 1e-10) == small


def test_what_cannot_be_adapted_is_one_line(model: VictimModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 65):
        with pytest.raises(PrivlabError, match=rf"client.rank must be in \[1, 64\]. Found {rank}."):
            Client(trains="lora", rank=rank)
    with pytest.raises(PrivlabError, match=r"client.rank=8.*client.trains=head"):
        Client(trains="head", rank=8)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        with pytest.raises(PrivlabError, match=r"client.trains=lora.*'privlab\[peft\]'"):
            adapted(model, 2)
    for block in model.vit.blocks:
        block.attn = nn.Identity()
    with pytest.raises(PrivlabError, match="layers"):
        run_client(model, LORA, private(1))


def test_values_of_an_update_are_at_its_own_model(model: VictimModel) -> None:
    """What decays is A and the head; the observation's model holds both, and B = 0."""
    seen = observe_updates(model, Client(trains="lora", rank=3, lr=0.1, weight_decay=0.2), [private(1)])
    A: Tensor = seen.model.vit.get_parameter("blocks.0.attn.qkv.lora_A.default.weight")
    found = seen.gradients["blocks.0.attn.qkv.lora_A.default.weight"][0]
    torch.testing.assert_close(found, 0.02 * A, rtol=1e-6, atol=1e-9)
    assert not seen.model.vit.get_parameter("blocks.0.attn.qkv.lora_B.default.weight").any()
