"""`token-bins`: exact on a batch, with weights that are made from the architecture alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import timm
import torch
from torch import Tensor

import privlab
from privlab.attacks.dishonest.layout import patch_transform
from privlab.attacks.dishonest.token_bins import TokenBins, _completed
from privlab.attacks.dishonest.token_plan import Plan
from privlab.base import PrivlabError
from privlab.defenses import Mjp
from privlab.evaluation import as_read, unread
from privlab.metrics import assign_images, psnr
from privlab.patches import patchify
from privlab.threat import Observation, Reconstruction


def make(size: int = 16, unknown_pe: Literal["mean"] | None = None, **options: Any) -> privlab.Victim:
    """Return a random ViT with patches of 4 × 4 pixels, K = 48, and D = 64."""
    given: dict[str, Any] = {
        "img_size": size,
        "patch_size": 4,
        "embed_dim": 64,
        "depth": 4,
        "num_heads": 4,
        "num_classes": 10,
    }
    torch.manual_seed(0)
    made = timm.create_model("vit_tiny_patch16_224", **(given | options))
    return privlab.victim(made, normalisation="imagenet", unknown_pe=unknown_pe)


def released(victim: privlab.Victim, images: Tensor, together: int | None = None) -> Observation:
    """Return what clients with random labels release under the weights that the attack chooses."""
    labels = torch.arange(len(images)) * 3 % victim.model.classes
    release = privlab.Gradient(len(images) if together is None else together)
    seen = privlab.observe(victim, images, labels, release=release, server=TokenBins())
    assert isinstance(seen, Observation)
    return seen


def scores(found: Tensor, images: Tensor, patch: int = 4) -> Tensor:
    return psnr(assign_images(Reconstruction(found), images, patch).images, images)


def test_a_batch_of_photographs_is_exact(photographs: Callable[[int, int], Tensor]) -> None:
    victim, images = make(depth=8), photographs(6, 16)
    seen = released(victim, images)
    assert TokenBins().beyond(seen) is None
    assert (scores(TokenBins()(seen).images, images) > 110).all()


def test_where_no_token_is_found_the_images_are_grey(photographs: Callable[[int, int], Tensor]) -> None:
    seen = released(make(), photographs(2, 16))
    noise = {name: torch.randn_like(sent) for name, sent in seen.gradients.items()}
    assert (TokenBins()(replace(seen, gradients=noise)).images == 0.5).all()


def test_each_release_gives_its_own_images(photographs: Callable[[int, int], Tensor]) -> None:
    victim, images = make(depth=6), photographs(4, 16)
    found = TokenBins()(released(victim, images, together=2)).images
    assert (scores(found[:2], images[:2]) > 110).all()
    assert (scores(found[2:], images[2:]) > 110).all()


def test_equal_patches_of_two_images_go_to_both(photographs: Callable[[int, int], Tensor]) -> None:
    victim, images = make(depth=8), photographs(3, 16)
    images[:2, :, :4, 4:8] = 1.0  # white in two photographs: one bin holds both tokens
    assert (scores(TokenBins()(released(victim, images)).images, images) > 110).all()


@pytest.mark.parametrize(
    "client",
    [
        privlab.Client(lr=0.01, images=4, batch_size=4),
        privlab.Client(lr=0.01, images=2, batch_size=2, clients=2),
        privlab.Client(optimiser="adam", lr=1e-3, images=4, batch_size=4),
        privlab.Client(optimiser="adamw", lr=1e-3, images=4, batch_size=4, weight_decay=0.05),
    ],
    ids=["sgd", "secure aggregation", "adam", "adamw"],
)
def test_updates_of_one_step_are_exact(client: privlab.Client, photographs: Callable[[int, int], Tensor]) -> None:
    images, labels = photographs(4, 16), torch.arange(4)
    seen = privlab.observe(make(depth=6), images, labels, release=privlab.Update(client), server=TokenBins())
    read = as_read(TokenBins(), seen)
    assert isinstance(read, Observation)
    assert (scores(TokenBins()(read).images, images) > 100).all()


@pytest.mark.parametrize("masked_pe", ["unknown", "none"])
@pytest.mark.parametrize("per", ["image", "batch"])
def test_masked_patches_of_mjp_come_back_with_their_image(
    masked_pe: str, per: str, photographs: Callable[[int, int], Tensor]
) -> None:
    victim = make(depth=8, unknown_pe="mean")
    images, labels = photographs(4, 16), torch.arange(4)
    images[0, :, 4:8, 4:12] = 0.5  # equal patches of one image
    images[1:3, :, 8:12, 4:8] = 1.0  # and of two
    mjp, release = Mjp(gamma=0.5, per=per, masked_pe=masked_pe), privlab.Gradient(4)
    seen = privlab.observe(victim, images, labels, release=release, defense=mjp, server=TokenBins())
    assert isinstance(seen, Observation)
    found = assign_images(TokenBins()(seen), images, 4).images
    off = (patchify(found, 4)[:, :, None] - patchify(images, 4)[:, None]).abs().amax(3)  # b × slots × patches
    assert (off < 0.5 / 255).any(1).all()  # every patch is in its image,
    assert (off.diagonal(dim1=1, dim2=2) < 0.5 / 255).sum(1).min() >= 8  # and those that are not masked in their slots


def test_borders_show_the_slots_of_masked_patches() -> None:
    victim, x = make(32, depth=8, unknown_pe="mean"), torch.arange(32.0).expand(32, 32)
    images = torch.stack([7 * x, 7 * x.T, 3 * x + 4 * x.T])[None] / 255  # smooth, and no two patches are equal
    labels = torch.zeros(1, dtype=torch.long)
    seen = privlab.observe(victim, images, labels, defense=Mjp(gamma=0.27), server=TokenBins())
    assert isinstance(seen, Observation)
    assert (scores(TokenBins()(seen).images, images) > 90).all()


def test_more_steps_of_adam_are_refused() -> None:
    assert "one step of Adam" in str(unread(TokenBins(), privlab.Client(optimiser="adam", steps=2)))


def test_the_weights_do_not_depend_on_the_honest_ones_which_stay_as_they_are() -> None:
    victim = make()
    before = {name: tensor.clone() for name, tensor in victim.model.state_dict().items()}
    chosen = TokenBins().choose(victim.model, 4, None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in victim.model.state_dict().items())
    for parameter in victim.model.vit.parameters():
        parameter.mul_(2)
    again = TokenBins().choose(victim.model, 4, None)
    assert chosen.keys() == dict(victim.model.vit.named_parameters()).keys()
    assert all(torch.equal(chosen[name], again[name]) for name in chosen)


def test_a_neuron_fires_for_its_slot_alone_and_above_its_edge() -> None:
    """On tokens of each slot with every brightness, against the definition of the bins."""
    victim = make()
    plan = Plan(victim.model)
    coefficient, low, _ = plan.bins[0]
    D, levels = victim.model.vit.embed_dim, torch.linspace(-0.983, 0.987, 37).double() * plan.largest
    tokens = torch.zeros(plan.slots, len(levels), D, dtype=torch.float64)
    tokens[:, :, :5] = plan.known[:, None]
    tokens[:, :, 6:] = 0.0137  # of the other coefficients, at no edge
    tokens[:, :, 5] = levels
    u = torch.nn.functional.layer_norm(tokens, (D,))
    fires = torch.einsum("nld,smd->nlsm", u, torch.stack(plan.neurons)) > 0
    value = torch.where(coefficient == 0, levels[:, None], 0.0137)
    expected = (value > low)[None, :, None] & torch.eye(plan.slots, dtype=torch.bool)[:, None, :, None]
    assert torch.equal(fires, expected)


def test_more_tokens_than_neurons_and_wide_patches_are_beyond_its_range(
    photographs: Callable[[int, int], Tensor],
) -> None:
    narrow = released(make(embed_dim=48), photographs(2, 16))
    assert TokenBins().beyond(narrow) == "K = 48 > D - 5 = 43"
    many = released(make(depth=2, mlp_ratio=0.5), photographs(3, 16))
    assert TokenBins().beyond(many) == "48 tokens > 32 neurons"


def test_few_lost_coefficients_follow_from_whole_grey_levels(photographs: Callable[[int, int], Tensor]) -> None:
    patches = patchify(photographs(4, 64).double() * 2 - 1, 16).flatten(0, 1)
    rows = patch_transform(3, 16)
    known = patches @ rows[:-8].T @ rows[:-8]
    made = _completed(known, rows[-8:])
    off = ((known - patches).abs().amax(1) * 127.5, (made - patches).abs().amax(1) * 127.5)
    assert (off[0] > 0.5).any()
    assert (off[1] < 0.01).double().mean() > 0.95


@pytest.mark.parametrize(
    ("options", "word"),
    [({"class_token": False, "global_pool": "avg"}, "class token"), ({"num_classes": 1}, "classes")],
)
def test_a_model_without_a_place_for_the_bins_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(PrivlabError, match=word):
        TokenBins().choose(make(**options).model, 1, None)
