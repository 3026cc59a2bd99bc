"""What a user gives `privlab.observe`: converted where one reading is possible, else refused in one line."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import privlab
from privlab.attacks import GradientMatching
from privlab.base import PrivlabError
from privlab.defenses import GradientNoise
from privlab.release import observe, observe_updates, released_parameters
from privlab.release.checked import images_for, labels_for, model_of
from privlab.threat import Client, ClientData, Feed

NAMES = ("pos_embed", "patch_embed.proj.weight")
BYTES = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()
IMAGES = BYTES / 255


@pytest.fixture(scope="module")
def victim() -> privlab.Victim:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=5)
    return privlab.victim(vit)


@pytest.mark.parametrize(
    "images",
    [
        BYTES,
        BYTES.numpy(),
        IMAGES.numpy(),
        IMAGES.double(),
        list(IMAGES),
        [image.numpy() for image in IMAGES],
        IMAGES.numpy()[:, :, ::-1][:, :, ::-1],
    ],
)
@pytest.mark.parametrize("labels", [[4, 0], np.array([4, 0]), torch.tensor([4, 0], dtype=torch.uint8)])
def test_bytes_arrays_and_lists_give_what_the_tensor_gives(victim: privlab.Victim, images: Any, labels: Any) -> None:
    wanted = privlab.observe(victim.model, IMAGES, torch.tensor([4, 0]), NAMES)
    found = privlab.observe(victim, images, labels, NAMES)
    for name in NAMES:
        assert torch.equal(found.gradients[name], wanted.gradients[name])


def test_public_images_are_converted_too(victim: privlab.Victim) -> None:
    seen = privlab.observe(victim, IMAGES, [0, 1], NAMES, public=BYTES[:1].numpy())
    assert seen.public is not None
    assert torch.equal(seen.public, IMAGES[:1])


def marked(value: float) -> torch.Tensor:
    images = IMAGES.clone()
    images[1, 2, 3, 4] = value
    return images


WRONG: dict[str, tuple[Any, str]] = {
    "larger": (torch.rand(2, 3, 48, 48), "2×3×48×48. Resize"),
    "channels last": (IMAGES.permute(0, 2, 3, 1), "channels come last"),
    "one image": (IMAGES[0], "Add a dimension"),
    "grey": (IMAGES[:, :1], "2×1×32×32"),
    "values of bytes": (255 * IMAGES, "divide them by 255"),
    "normalised": ((IMAGES - 0.5) / 0.5, "normalises them itself"),
    "a little too bright": (marked(1.01), "Found values from 0 to 1.01"),
    "negative": (marked(-0.01), "-0.01"),
    "NaN": (marked(float("nan")), "1 of 2 images"),
    "infinite": (marked(float("inf")), "finite"),
    "integers": (BYTES.long(), "Found int64"),
    "booleans": (BYTES > 100, "Found bool"),
    "ragged": ([np.zeros((3, 32, 32)), np.zeros((3, 16, 16))], "cannot be made one tensor"),
    "text": (np.array([["a"]]), "cannot be made one tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_images_that_could_mean_several_things_are_refused(victim: privlab.Victim, case: str) -> None:
    images, message = WRONG[case]
    for given in (images, images.numpy() if isinstance(images, torch.Tensor) else images):
        with pytest.raises(PrivlabError) as error:
            images_for(victim.model, given)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(PrivlabError):
        privlab.observe(victim, images, [0, 1], NAMES)
    with pytest.raises(PrivlabError, match="public images"):
        privlab.observe(victim, IMAGES, [0, 1], NAMES, public=images)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 5], "0 … 4, .* Found 5"),
        ([-1, 0], "Found -1"),
        ([0], "each of the 2 images. Found 1 labels"),
        ([0, 1, 2], "Found 3 labels"),
        (np.array([[0, 1], [1, 0]]), "shape"),
        (np.full((2, 5), 0.3), "add up to 1"),
        (torch.tensor([[2.0, -1, 0, 0, 0], [1, 0, 0, 0, 0]]), "add up to 1"),
        (torch.tensor([0.0, 1.0]), "Found type float32"),
        (np.array([True, False]), "Found type bool"),
        (np.array(["cat", "dog"]), "cannot be made one tensor"),
        (torch.tensor(3), "shape"),
    ],
)
def test_labels_that_are_none_of_the_model_are_refused(victim: privlab.Victim, labels: Any, message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        labels_for(victim.model, labels, 2)


def test_no_image_is_refused(victim: privlab.Victim) -> None:
    with pytest.raises(PrivlabError, match="at least one image"):
        privlab.observe(victim, IMAGES[:0], [], NAMES)


def test_another_size_in_a_feed_is_refused(victim: privlab.Victim) -> None:
    with pytest.raises(PrivlabError, match="Resize"):
        observe(victim, Feed.undefended(torch.rand(2, 3, 64, 64), 16), [0, 1], NAMES)


def test_what_is_no_victim_is_refused(victim: privlab.Victim) -> None:
    for model in (victim.model.vit, "cifar_vit", None):
        with pytest.raises(PrivlabError, match=r"privlab\.victim"):
            model_of(model)
    assert model_of(victim) is model_of(victim.model) is victim.model


def test_a_frozen_model_and_a_string_of_names_are_one_line(tiny_vit: Callable[..., VisionTransformer]) -> None:
    model = privlab.victim(tiny_vit().requires_grad_(False)).model
    x, y = torch.zeros(1, 3, 16, 16), torch.tensor([1])
    with pytest.raises(PrivlabError, match="gradient"):
        privlab.observe(model, x, y, ["pos_embed"])
    with pytest.raises(PrivlabError, match=r"list of names\. Found 'pos_embed'"):
        privlab.observe(model, x, y, "pos_embed", defense=GradientNoise())
    with pytest.raises(PrivlabError, match=r"list of names\. Found 'pos_embed'"):
        observe_updates(model, Client(), [], "pos_embed")


def test_inference_mode_is_named(tiny_vit: Callable[..., VisionTransformer]) -> None:
    """A victim that is made within it can be observed outside, with images and labels that were made within it."""
    with torch.inference_mode():
        model = privlab.victim(tiny_vit()).model
        x, y = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([1])
        data = ClientData(x.double(), y, torch.Generator())
        for use in (
            partial(privlab.observe, model, x, y, ["pos_embed"]),
            partial(observe_updates, model, Client(), [data]),
        ):
            with pytest.raises(PrivlabError, match=r"inference_mode"):
                use()
    names = sorted(released_parameters(model))
    seen = privlab.observe(model, x, y, names)
    again = privlab.observe(privlab.victim(tiny_vit()), x.numpy(), y.tolist(), names)
    for name in names:
        torch.testing.assert_close(seen.gradients[name], again.gradients[name])
    with torch.inference_mode(), pytest.raises(PrivlabError, match=r"inference_mode"):
        GradientMatching(steps=1)(seen)
