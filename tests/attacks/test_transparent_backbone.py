"""`transparent-backbone`: one image from adapters alone, exactly where they read all values of a patch."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import privlab
from privlab.attacks.dishonest.layout import patch_transform
from privlab.attacks.dishonest.transparent_backbone import ChannelPlan, TransparentBackbone, _known
from privlab.base import PrivlabError
from privlab.evaluation import unread
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.runs.sent_weights import audit_sent_weights
from privlab.threat import Observation

pytest.importorskip("peft", reason="needs privlab[peft]")

SGD: dict[str, Any] = {"lr": 0.1}
ADAMW: dict[str, Any] = {"optimiser": "adamw", "lr": 1e-3, "weight_decay": 0.05}


def make(**options: Any) -> privlab.Victim:
    """Return a random ViT with N = 16 patches of K = 48 values, D = 96 and 4 blocks."""
    given: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 4}
    torch.manual_seed(0)
    made = timm.create_model("vit_tiny_patch16_224", num_classes=10, **(given | options))
    return privlab.victim(made, normalisation="imagenet")


def released(images: Tensor, victim: privlab.Victim | None = None, **client: Any) -> Observation:
    """Return what clients of one image each send of their adapters, under the weights that the attack chooses."""
    release = privlab.Update(privlab.Client(**client))
    labels = torch.arange(len(images)) * 3 + 1
    seen = privlab.observe(victim or make(), images, labels, release=release, server=TransparentBackbone())
    assert isinstance(seen, Observation)
    return seen


@pytest.mark.parametrize("settings", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("trains", ["lora", "adapters"])
def test_enough_blocks_give_an_image_exactly(
    trains: str, settings: dict[str, Any], photographs: Callable[[int, int], Tensor]
) -> None:
    images = photographs(2, 16)
    seen = released(images, trains=trains, rank=16, **settings)
    assert TransparentBackbone().beyond(seen) is None
    found = TransparentBackbone()(seen)
    assert (psnr(found, images) > 75).all()


@pytest.mark.parametrize("trains", ["lora", "adapters"])
def test_the_audit_of_the_backbone_alone_finds_it(trains: str, photographs: Callable[[int, int], Tensor]) -> None:
    """Nothing is read from the layers of the backbone behind adapters, but most of their rows are 0."""
    images = photographs(4, 16)
    chosen = released(images[:1], trains=trains, rank=16, **SGD).model.vit.state_dict()
    honest = make().model
    assert not audit_sent_weights(honest, images).suspicious
    shared = {name.replace(".base_layer", ""): tensor for name, tensor in chosen.items()}
    honest.vit.load_state_dict({name: shared[name] for name in honest.vit.state_dict()})
    unusual = {each.name for each in audit_sent_weights(honest, images).unusual}
    assert "largest row / median row" in unusual


def test_register_tokens_change_nothing(photographs: Callable[[int, int], Tensor]) -> None:
    images = photographs(1, 16)
    found = TransparentBackbone()(released(images, make(reg_tokens=2), trains="lora", rank=16, **SGD))
    assert (psnr(found, images) > 100).all()


def test_fewer_numbers_give_the_low_frequencies(photographs: Callable[[int, int], Tensor]) -> None:
    """Of C = r (L − 1) = 12 coefficients of 48 all are those of the photograph; the others are a guess."""
    images = photographs(1, 16)
    seen = released(images, trains="lora", rank=4, **SGD)
    assert TransparentBackbone().beyond(seen) == "r (L - 1) = 12 < K = 48"
    normalised = patchify(seen.model.normalise(images), 4).double()
    found = _known(seen, ChannelPlan(seen.model))
    torch.testing.assert_close(found, normalised @ patch_transform(3, 4)[:12].T, rtol=0, atol=1e-3)
    assert (psnr(TransparentBackbone()(seen), images) > 20).all()


def test_other_clients_and_models_are_refused() -> None:
    why = {
        "client.trains=all": privlab.Client(),
        "one step": privlab.Client(trains="lora", steps=2),
        "one step of Adam": privlab.Client(trains="adapters", optimiser="adam", steps=2),
    }
    for words, client in why.items():
        assert words in str(unread(TransparentBackbone(), client))
    assert unread(TransparentBackbone(), privlab.Client(trains="adapters", optimiser="adam")) is None
    with pytest.raises(PrivlabError, match=r"N = 16 channels"):
        released(torch.rand(1, 3, 16, 16), make(embed_dim=48), trains="lora", rank=16)
    with pytest.raises(PrivlabError, match="class token"):
        released(torch.rand(1, 3, 16, 16), make(class_token=False, global_pool="avg"), trains="lora")
    with pytest.raises(PrivlabError, match=r"client\.trains=lora"):
        TransparentBackbone().choose(make().model, 1, None)
