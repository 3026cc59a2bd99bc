"""The slices of a volume, which one ViT reads in one step: their features are fused before the head and one label."""

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from privlab.attacks import TokenSeparation
from privlab.base import PrivlabError
from privlab.release import as_gradients, observe_updates
from privlab.release.explained import residual_of_head
from privlab.release.labels import labels_of_update
from privlab.threat import Capability, Client, ClientData, Observation
from privlab.victims import VictimModel, fusing, victim

Models = Callable[..., VictimModel]
SLICES, LABEL = 3, 5


def volume(side: int, slices: int = SLICES, noise: float = 0.05) -> Tensor:
    """Return slices of a ball of noise, in grey levels of three equal channels."""
    draw = torch.Generator().manual_seed(0)
    z, y, x = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in (slices, side, side)), indexing="ij")
    ball = torch.where(z**2 / 4 + y**2 + x**2 < 0.7, 0.6, 0.2)
    levels = (ball + 0.2 * x + noise * torch.randn(ball.shape, generator=draw)).clamp(0, 1)
    return ((levels * 255).round() / 255)[:, None].expand(-1, 3, -1, -1)


def client(fusion: str, slices: int = SLICES, **settings: object) -> Client:
    return Client(images=slices, batch_size=slices, fusion=fusion, **settings)  # pyright: ignore[reportArgumentType]


def released(model: VictimModel, of: Client, images: Tensor, label: int = LABEL) -> Observation:
    labels = torch.full((len(images),), label)
    return observe_updates(model, of, [ClientData(images, labels, Generator().manual_seed(0))])


@pytest.mark.parametrize("fusion", ["mean", "attention"])
def test_a_step_follows_the_gradient_of_one_prediction_of_the_volume(tiny_model: Models, fusion: str) -> None:
    model, images, label = tiny_model(), volume(16).double(), torch.tensor([LABEL])
    fused = fusing(model, fusion)
    features = model.features(images)
    assert fused.fusion is not None
    one = features.mean(0, keepdim=True) if fusion == "mean" else fused.fusion(features)
    assert one.shape == (1, model.vit.num_features)
    assert_close(fused(images), model.logits(one))
    fused.requires_grad_(True)
    cross_entropy(fused(images), label).backward()
    gradients = {name: parameter.grad for name, parameter in fused.vit.named_parameters()}
    moved = released(model, client(fusion, lr=0.01), images).gradients
    assert moved.keys() == gradients.keys()  # the layer that fuses is no part of the victim
    for name, u in moved.items():
        gradient = gradients[name]
        assert gradient is not None
        assert_close(u[0], 0.01 * gradient, rtol=1e-6, atol=1e-12)


def test_attention_reads_the_order_of_the_slices_and_the_mean_does_not(tiny_model: Models) -> None:
    model, images = tiny_model(), volume(16).double()
    for fusion, equal in (("mean", True), ("attention", False)):
        fused = fusing(model, fusion)
        assert torch.allclose(fused(images), fused(images.flip(0)), rtol=1e-9, atol=1e-12) == equal
        assert_close(fused(images), fusing(model, fusion)(images), rtol=0, atol=0)  # from a public seed


@pytest.mark.parametrize("steps", [1, 3])
def test_all_slices_are_certified_together_under_the_mean_alone(tiny_model: Models, steps: int) -> None:
    model, images = tiny_model(), volume(16).double()
    seen = released(model, client("mean", steps=steps), images)
    own, other = (residual_of_head(seen, x) for x in (images, images.roll(1, 3)))
    assert own is not None
    assert other is not None
    assert own < 1e-3 < 0.05 < other
    assert residual_of_head(released(model, client("attention"), images), images) is None


def test_the_volume_has_one_label_that_the_head_gives_away(tiny_model: Models) -> None:
    model, images = tiny_model(), volume(16).double()
    for fusion in ("mean", "attention"):
        seen = released(model, client(fusion), images)
        assert labels_of_update(seen).labels == (LABEL,)
        assert Capability.CLASS_LABELS not in seen.grants  # attacks that match gradients of each image's loss


def test_what_cannot_be_fused_is_refused(tiny_model: Models) -> None:
    with pytest.raises(PrivlabError, match="fusion of slices"):
        Client(fusion="max")
    with pytest.raises(PrivlabError, match="both to the number of slices"):
        Client(images=4, batch_size=2, fusion="mean")
    model = tiny_model()
    model.vit.head_dist = model.vit.head
    with pytest.raises(PrivlabError, match="one head"):
        fusing(model, "mean")


@pytest.mark.slow
def test_slices_whose_tokens_differ_come_back_exactly(shared: Callable[[str], str]) -> None:
    """3 × 17 tokens < D = 192: all slices are exact, also behind attention; the certificate is that of the mean."""
    base = victim("vit_ti", weights=shared("weights/vit_tiny_patch16_224.safetensors"), img_size=64)
    images = volume(64)
    for fusion, proven in (("mean", True), ("attention", None)):
        seen = released(base.model, client(fusion), images)
        found = TokenSeparation()(as_gradients(seen)).images
        distances = (found[:, None] - images[None]).abs().amax((2, 3, 4))
        assert sorted(distances.argmin(0).tolist()) == [0, 1, 2]
        assert distances.amin(0).max() < 0.5 / 255
        left = residual_of_head(seen, found)
        assert (None if left is None else left < 0.05) is proven
