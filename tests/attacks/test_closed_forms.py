"""The closed forms against exact answers: small models in float64, DeiT-S and a trained ViT-Ti on photographs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.testing import assert_close

from privlab.attacks import ATTACKS, April, PatchGradient, attacks
from privlab.base import PrivlabError, PrivlabWarning, draw_for
from privlab.defenses import Mjp, Undefended
from privlab.images import open_images
from privlab.metrics import psnr, psnr_region
from privlab.patches import slots_to_pixels
from privlab.release import gradient_capabilities, observe
from privlab.threat import Attack, Capability, FeatureAttack, Feed, Observation, check_capabilities
from privlab.victims import Victim, VictimModel, april_twin, victim

Model = Callable[..., VictimModel]
Photographs = Callable[[int, int], Tensor]
random_weights = pytest.mark.filterwarnings("ignore:.*RANDOM weights:privlab.base.warnings.PrivlabWarning")


def feed_of(images: Tensor, patch: int, defense: Undefended | Mjp | None = None) -> Feed:
    """Return what clients feed under a defense, or without one."""
    draws = [draw_for(0, str(i), "defense") for i in range(len(images))]
    return (defense or Undefended())(images, patch, draws)


def seen(model: VictimModel, images: Tensor, attack: Attack, defense: Mjp | None = None) -> Observation:
    """Return an observation with what an attack needs."""
    feed = feed_of(images, model.patch, defense)
    return observe(model, feed, torch.arange(len(images)) % model.vit.num_classes, attack.parameters)


def small(n: int = 3) -> Tensor:
    """Return n random images of 16 × 16 in float64."""
    return torch.rand(n, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_patch_gradient_is_exact_on_a_small_model(tiny_model: Model) -> None:
    images = small()
    reconstruction = PatchGradient()(seen(tiny_model(), images, PatchGradient()))
    assert psnr(reconstruction, images).min() > 200


def test_april_is_exact_on_a_small_model_with_its_block(tiny_model: Model) -> None:
    """K = 48 ≤ D = 64: the projection loses nothing."""
    images, model = small(), april_twin(tiny_model())
    assert psnr(April()(seen(model, images, April())), images).min() > 200


def test_patch_gradient_needs_no_architecture(tiny_model: Model) -> None:
    """Exact whatever follows the embedding: post-norm block, registers, no class token, average pooling."""
    images = small()
    for model in (
        april_twin(tiny_model()),
        tiny_model(reg_tokens=2, no_embed_class=True),
        tiny_model(class_token=False, global_pool="avg"),
        tiny_model(pre_norm=True),
    ):
        assert psnr(PatchGradient()(seen(model, images, PatchGradient())), images).min() > 200


def test_aprils_identity_holds_on_its_block_only(tiny_model: Model) -> None:
    """(∂ℓ/∂z)ᵀ z = W_Qᵀ ∂ℓ/∂W_Q + W_Kᵀ ∂ℓ/∂W_K + W_Vᵀ ∂ℓ/∂W_V (MJP, Eq. 8)."""
    images = small(1)
    for model, holds in ((april_twin(tiny_model()), True), (tiny_model(), False)):
        found = seen(model, images, April()).gradients
        qkv = model.vit.get_parameter("blocks.0.attn.qkv.weight")
        right = sum(W.T @ dW for W, dW in zip(qkv.chunk(3), found["blocks.0.attn.qkv.weight"][0].chunk(3), strict=True))
        left = found["pos_embed"][0, 0].T @ model.embed(images)[0]
        assert torch.allclose(left, right) == holds


def test_april_on_a_stock_block_does_not_recover_the_image(tiny_model: Model) -> None:
    images = small(1)
    assert psnr(April()(seen(tiny_model(), images, April())), images).max() < 20


def test_patch_gradient_equals_a_plain_least_squares(tiny_model: Model) -> None:
    """The naive twin: one image at a time by gelsd, zero rows of MJP included."""
    model, images = tiny_model(), small()
    found = seen(model, images, PatchGradient(), Mjp(gamma=0.5))
    with pytest.warns(PrivlabWarning, match="received no gradient"):
        batched = PatchGradient()(found)
    for i, image in enumerate(batched):
        A, G = found.gradients["pos_embed"][i, 0, 1:], found.gradients["patch_embed.proj.weight"][i].flatten(1)
        X = torch.linalg.lstsq(A.T, G, driver="gelsd").solution
        assert_close(model.to_images(X[None])[0], image, atol=1e-6, rtol=1e-6)


def test_images_of_a_batch_do_not_mix(tiny_model: Model) -> None:
    model, images = tiny_model(), small()
    together = PatchGradient()(seen(model, images, PatchGradient()))
    alone = PatchGradient()(seen(model, images[:1], PatchGradient()))
    assert_close(together[:1], alone)


def test_mjp_keeps_both_closed_forms_from_the_image(tiny_model: Model) -> None:
    """The non-adaptive baseline: patches are mixed with those of the masked slots."""
    images = small()
    for attack, model in ((PatchGradient(), tiny_model()), (April(), april_twin(tiny_model()))):
        with pytest.warns(PrivlabWarning, match="does not know"):
            reconstruction = attack(seen(model, images, attack, Mjp(gamma=0.5)))
        feed = feed_of(images, model.patch, Mjp(gamma=0.5))
        assert psnr(reconstruction, feed.images).max() < 25


@pytest.mark.filterwarnings("ignore:.*no gradient:privlab.base.warnings.PrivlabWarning")
def test_masked_patches_come_back_grey_from_patch_gradient(tiny_model: Model) -> None:
    model, images = tiny_model(), small()
    reconstruction = PatchGradient()(seen(model, images, PatchGradient(), Mjp(gamma=0.5)))
    feed = feed_of(images, model.patch, Mjp(gamma=0.5))
    masked = slots_to_pixels(feed.moved, model.grid, model.patch)
    grey = model.mean.expand_as(images).permute(0, 2, 3, 1)
    assert_close(reconstruction.permute(0, 2, 3, 1)[masked], grey[masked])


def test_too_many_tokens_are_told(tiny_model: Model) -> None:
    model = tiny_model(embed_dim=16)  # N = 16 = D
    with pytest.warns(PrivlabWarning, match=r"16 tokens.*15"):
        PatchGradient()(seen(model, small(1), PatchGradient()))


def test_missing_capabilities_are_named(tiny_model: Model) -> None:
    with pytest.raises(PrivlabError, match=r"'april'.*april_block.*\(the"):
        check_capabilities(April(), gradient_capabilities(tiny_model()))
    check_capabilities(April(), gradient_capabilities(tiny_model()), force=True)
    nope = gradient_capabilities(tiny_model(pos_embed="none"))
    with pytest.raises(PrivlabError, match="learnable_pe_gradient"):
        check_capabilities(PatchGradient(), nope, force=True)


def test_april_refuses_position_embeddings_that_skip_tokens(tiny_model: Model) -> None:
    model = april_twin(tiny_model(no_embed_class=True))
    with pytest.raises(PrivlabError, match=r"pe_of_every_token.*\(the"):
        check_capabilities(April(), gradient_capabilities(model))


def test_a_frozen_position_embedding_is_not_released(tiny_vit: Callable[..., VisionTransformer]) -> None:
    vit = tiny_vit()
    assert vit.pos_embed is not None
    vit.pos_embed.requires_grad_(False)
    model = victim(vit).model
    with pytest.raises(PrivlabError, match="learnable_pe_gradient"):
        check_capabilities(PatchGradient(), gradient_capabilities(model))
    with pytest.raises(PrivlabError, match=r"Unknown parameter .* 'pos_embed'"):
        seen(model, small(1), PatchGradient())


def test_april_says_what_the_projection_drops(tiny_model: Model) -> None:
    """K = 48 > D = 32."""
    model = april_twin(tiny_model(embed_dim=32))
    with pytest.warns(PrivlabWarning, match=r"48.*projected.*32"):
        April()(seen(model, small(1), April()))


def test_every_attack_fulfils_the_protocol() -> None:
    assert attacks() == ATTACKS
    for name, kind in ATTACKS.items():
        on_features = Capability.RELEASED_FEATURES in kind.requires
        assert isinstance(kind(), FeatureAttack if on_features else Attack)
        assert on_features != hasattr(kind, "parameters")
        assert kind.name == name
        assert kind.requires <= set(Capability)


@pytest.mark.slow
@random_weights
def test_deit_s_leaks_photographs_in_float32(photographs: Photographs) -> None:
    base, images = victim("deit_s", weights="random"), photographs(6, 224)
    reconstruction = PatchGradient()(seen(base.model, images, PatchGradient()))
    assert psnr(reconstruction, images).min() > 55
    twin = base.with_block("april")
    with pytest.warns(PrivlabWarning, match=r"768.*384"):
        april = psnr(April()(seen(twin.model, images, April())), images)
    assert 9 < april.mean() < 25


def trained(shared: Callable[[str], Path], name: str, side: int) -> tuple[Victim, Tensor]:
    """Return the trained ViT-Ti at an input size, and eight photographs preprocessed for it."""
    base = victim(name, weights=shared("weights/vit_tiny_patch16_224.safetensors"), img_size=side)
    pictures = open_images(shared("data/imagenet_samples"), limit=8)
    return base, torch.stack([base.preprocessing(image.pixels) for image in pictures if image.pixels])


@pytest.mark.slow
@pytest.mark.parametrize("side", [160, 192])
def test_trained_vit_ti_leaks_photographs_where_n_is_below_d(shared: Callable[[str], Path], side: int) -> None:
    base, images = trained(shared, "vit_ti", side)
    labels = base.model(images).argmax(1)  # the loss, and so the gradient, is small
    found = observe(base.model, feed_of(images, 16), labels, PatchGradient.parameters)
    assert psnr(PatchGradient()(found), images).min() > 100


@pytest.mark.slow
def test_trained_vit_ti_at_224_pixels_has_more_tokens_than_width(shared: Callable[[str], Path]) -> None:
    base, images = trained(shared, "vit_ti", 224)
    with pytest.warns(PrivlabWarning, match=r"196.*192"):
        reconstruction = PatchGradient()(seen(base.model, images, PatchGradient()))
    assert 20 < psnr(reconstruction, images).mean() < 45


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_mjp_on_trained_weights_hides_the_image_from_the_plain_attack(shared: Callable[[str], Path]) -> None:
    base, images = trained(shared, "vit_ti_mjp", 160)
    feed = feed_of(images, 16, Mjp())
    found = observe(base.model, feed, base.model(images).argmax(1), PatchGradient.parameters)
    unmasked = slots_to_pixels(~feed.moved, base.model.grid, 16)
    assert psnr_region(PatchGradient()(found), images, unmasked).mean() < 16


@pytest.mark.gpu
@random_weights
def test_attacks_on_a_gpu_leak_as_on_the_cpu(photographs: Photographs) -> None:
    images = photographs(4, 224).cuda()
    base = victim("deit_s", weights="random").to("cuda")
    feed = feed_of(images, 16)
    found = observe(base.model, feed, torch.arange(4, device="cuda"), PatchGradient.parameters)
    assert psnr(PatchGradient()(found), images).min() > 55


def test_april_follows_weights_that_change_in_place(tiny_model: Model) -> None:
    """The inverse of the projection is kept between batches, but not beyond a change of the weights."""
    images, model = small(1), april_twin(tiny_model())
    assert psnr(April()(seen(model, images, April())), images).min() > 200
    with torch.no_grad():
        model.vit.patch_embed.proj.weight.mul_(1.5)
    assert psnr(April()(seen(model, images, April())), images).min() > 200
