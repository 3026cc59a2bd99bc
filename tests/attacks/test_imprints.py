"""`imprint-bins` and `trap-weights`: patches of one image by the published manipulations of one layer."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import privlab
from privlab.attacks.dishonest.imprint_bins import ImprintBins
from privlab.attacks.dishonest.layout import image_of_tokens
from privlab.attacks.dishonest.trap_weights import TrapWeights
from privlab.attacks.tokens import normalised_tokens
from privlab.patches import patchify
from privlab.threat import Observation


def make(**options: Any) -> privlab.Victim:
    """Return a random ViT with N = 16 patches, K = 48 and D = 96."""
    given: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 4}
    torch.manual_seed(0)
    made: Any = timm.create_model("vit_tiny_patch16_224", num_classes=10, **(given | options))
    torch.nn.init.normal_(made.pos_embed, std=0.3)
    return privlab.victim(made, normalisation="imagenet")


@pytest.mark.parametrize(("server", "least"), [(ImprintBins(), 6), (TrapWeights(), 8)])
def test_tokens_that_are_alone_in_a_neuron_are_exact(
    server: Any, least: int, photographs: Callable[[int, int], Tensor]
) -> None:
    images = photographs(2, 16)
    seen = privlab.observe(make(), images, torch.tensor([3, 8]), server=server)
    assert isinstance(seen, Observation)
    assert server.beyond(seen) is None
    off = (patchify(server(seen), 4) - patchify(images, 4)).abs().amax(2)
    exact = (off < 0.5 / 255).sum(1)
    assert (exact >= least).all()


def test_tokens_in_any_order_and_mixtures_give_the_image(photographs: Callable[[int, int], Tensor]) -> None:
    model, image = make().model, photographs(1, 16)
    both, g, _ = normalised_tokens(model)
    x = patchify(model.normalise(image), 4)[0].double()
    z = x @ both[:, :-1].mT + g
    u = z / z.square().mean(1, keepdim=True).sqrt() + both[:, -1]
    mixtures = (u[:8] + u[8:]) / 2
    shuffled = torch.cat([mixtures, u.flip(0)])
    found = image_of_tokens(model, shuffled)
    torch.testing.assert_close(found, image.to(found), rtol=0, atol=1e-5)


def test_wide_patches_are_beyond_their_range() -> None:
    seen = privlab.observe(make(embed_dim=48), torch.rand(1, 3, 16, 16), torch.tensor([1]), server=ImprintBins())
    assert isinstance(seen, Observation)
    assert ImprintBins().beyond(seen) == TrapWeights().beyond(seen) == "D = 48 <= K + 1 = 49"
