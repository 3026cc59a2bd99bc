"""The Python interface step by step: what is observed of what is given as objects, and how it is scored."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import privlab
from privlab.attacks import LeastSquares, MjpFull, PatchUpdate
from privlab.base import PrivlabError
from privlab.defenses import GradientNoise, Jigsaw, Mjp, RowPermutation

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


def test_gradients_step_by_step(photos: Tensor) -> None:
    victim = privlab.victim("cifar_vit_mjp27")
    seen = privlab.observe(victim, photos, torch.tensor([3, 7, 1]), defense=Mjp(gamma=0.27), seed=0)
    scores = privlab.score(MjpFull()(seen), photos, ["psnr", "ssim"])
    assert list(scores.columns) == ["psnr", "ssim", "levels_wrong"]
    assert scores.psnr.mean() > 25
    again = privlab.observe(victim, photos, torch.tensor([3, 7, 1]), defense=[Mjp(gamma=0.27)], seed=0)
    other = privlab.observe(victim, photos, torch.tensor([3, 7, 1]), defense=Mjp(gamma=0.27), seed=1)
    name = "patch_embed.proj.weight"
    assert torch.equal(seen.gradients[name], again.gradients[name])
    assert not torch.equal(seen.gradients[name], other.gradients[name])


@pytest.mark.parametrize(("release", "right"), [(privlab.Client(), "Update"), ("gradient", "Gradient"), (None, None)])
def test_what_is_no_release_is_refused(photos: Tensor, release: Any, right: str | None) -> None:
    if right is None:
        assert privlab.observe("cifar_vit", photos, [3, 7, 1], release=release).gradients
        return
    with pytest.raises(Exception, match="release") as caught:  # where types are checked, by that
        privlab.observe("cifar_vit", photos, [3, 7, 1], release=release)
    assert right in str(caught.value)
    with pytest.raises(Exception, match=r"release.*name|release.*gradient|parameter 'release'"):
        privlab.attack("cifar_vit", photos, [3, 7, 1], release=release)


def test_the_batch_changes_no_bit_of_a_shuffled_image_s_gradient(photos: Tensor) -> None:
    victim, mjp, labels = privlab.victim("cifar_vit_mjp27"), Mjp(gamma=0.27), torch.tensor([3, 7, 1])
    seen = privlab.observe(victim, photos, labels, defense=mjp)
    for i in range(3):
        alone = privlab.observe(victim, photos[i : i + 1], labels[i : i + 1], defense=mjp)
        assert all(torch.equal(g[0], seen.gradients[name][i]) for name, g in alone.gradients.items())


@pytest.mark.parametrize(
    ("given", "right"), [("learning_rate", "lr"), ("optimizer", "optimiser"), ("weight_dcay", "weight_decay")]
)
def test_a_client_names_the_setting_that_is_meant(given: str, right: str) -> None:
    with pytest.raises(PrivlabError, match=f"{given}.*{right}"):
        privlab.Client(**{given: 1})
    client = privlab.Client("adam", lr=0.1)
    assert copy.deepcopy(client) == client


def test_an_update_and_features_step_by_step(photos: Tensor, photographs: Any) -> None:
    victim = privlab.victim("cifar_vit")
    client = privlab.Client(lr=0.01, steps=2)
    seen = privlab.observe(victim, photos, [3, 7, 1], release=privlab.Update(client))
    assert (privlab.score(PatchUpdate()(seen), photos).psnr > 60).all()
    seen = privlab.observe(victim, photos, release=privlab.Features(), defense=RowPermutation(), public=photos)
    assert seen.features.shape[0] == 3
    plain = privlab.observe(victim, photos, release=privlab.Features(), public=photographs(9, 32)[3:])
    assert privlab.score(LeastSquares()(plain), photos).psnr.min() > 20


def test_several_images_in_one_gradient(photos: Tensor) -> None:
    victim = privlab.victim("cifar_vit")
    seen = privlab.observe(victim, photos, [3, 7, 1], ["head.bias"], release=privlab.Gradient(batch=3))
    assert (seen.images_per_release, list(seen.gradients)) == (3, ["head.bias"])
    with pytest.raises(PrivlabError, match="multiple of 2"):
        privlab.observe(victim, photos, release=privlab.Gradient(batch=2))


def test_mjp_of_a_model_of_ones_own(photos: Tensor) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)
    victim = privlab.victim(vit, unknown_pe="mean")
    assert torch.equal(victim.model.unk_embed, vit.pos_embed[:, 1:].mean(1, keepdim=True))
    images = torch.nn.functional.interpolate(photos, scale_factor=2)
    seen = privlab.observe(victim, images, [3, 7, 1], ["pos_embed"], defense=Mjp(gamma=0.27))
    assert (seen.gradients["pos_embed"][:, 0, 1:].abs().sum(2) == 0).any()
    with pytest.raises(PrivlabError, match="of your own"):
        privlab.victim("cifar_vit", unknown_pe="mean")


def test_a_model_is_observed_as_it_is_attacked(photos: Tensor) -> None:
    """`observe` makes a victim of a timm model or of a name, as `attack` does."""
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    for model in (vit, "cifar_vit"):
        wanted = privlab.observe(privlab.victim(model), photos, [3, 7, 1], ["pos_embed"])
        found = privlab.observe(model, photos, [3, 7, 1], ["pos_embed"])
        assert torch.equal(found.gradients["pos_embed"], wanted.gradients["pos_embed"])
    with pytest.raises(PrivlabError, match="ViT of timm"):
        privlab.observe(torch.nn.Linear(1, 1), photos)


@pytest.mark.parametrize(
    ("name", "defense"),
    [
        ("gradient-noise", GradientNoise()),
        ("mjp+gradient-noise", (Mjp(), GradientNoise())),
        (["jigsaw", GradientNoise()], (Jigsaw(), GradientNoise())),
        ("auto", Mjp()),
        ("none", ()),
    ],
)
def test_a_defense_is_observed_by_its_name(name: Any, defense: Any, photos: Tensor) -> None:
    wanted, found = (
        privlab.observe("cifar_vit_mjp27", photos, [3, 7, 1], ["pos_embed"], defense=each) for each in (defense, name)
    )
    assert torch.equal(found.gradients["pos_embed"], wanted.gradients["pos_embed"])


def test_an_unknown_defense_is_refused_with_the_nearest_names(photos: Tensor) -> None:
    with pytest.raises(PrivlabError, match="gradient-noise"):
        privlab.observe("cifar_vit", photos, defense="gradient-nois")


def test_gradients_of_images_are_those_that_are_released_and_can_be_followed(photos: Tensor) -> None:
    seen = privlab.observe(privlab.victim("cifar_vit"), photos, [3, 7, 1], ["head.weight", "pos_embed"])
    made = seen.gradients_of(photos, torch.tensor([3, 7, 1]))
    for name, gradient in seen.gradients.items():
        torch.testing.assert_close(made[name], gradient, rtol=1e-3, atol=1e-6)
    guess = photos.clone().requires_grad_()
    labels = torch.zeros(3, 10).requires_grad_()
    loss = sum(g.square().sum() for g in seen.gradients_of(guess, labels.softmax(1)).values())
    slopes = torch.autograd.grad(loss, (guess, labels))
    assert all(slope.abs().max() > 0 for slope in slopes)
    update = privlab.observe(
        privlab.victim("cifar_vit"), photos, [3, 7, 1], release=privlab.Update(privlab.Client(steps=5))
    )
    with pytest.raises(PrivlabError, match="one step"):
        update.gradients_of(photos, torch.tensor([3, 7, 1]))
