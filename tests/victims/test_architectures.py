"""Each kind of ViT that timm has: its own logits and gradients, which closed form is left, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from privlab.attacks import PatchGradient, TokenSeparation
from privlab.base import PrivlabError
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.release import gradient_capabilities, observe, observe_features, released_parameters
from privlab.release.local_training import run_client
from privlab.release.releases import obstacles
from privlab.split.protocol.backbone import Backbone, check_cut
from privlab.threat import Capability, Client, ClientData, Sent, Stack
from privlab.victims import VictimModel, first_block, victim, why_no_plain_block
from privlab.victims.anatomy import TELLERS

SMALL: dict[str, Any] = {"embed_dim": 96, "num_heads": 3, "depth": 2, "num_classes": 5}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 32, "patch_size": 8}),
    "registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 28, "patch_size": 7, "init_values": 0.1}),
    "map": ("vit_base_patch16_siglip_224", {"img_size": 32, "patch_size": 8}),
    "rotary": ("vit_small_patch16_rope_224", {"img_size": 32, "patch_size": 8, "init_values": 0.1}),
    "rotary per block": ("vit_small_patch16_rope_mixed_224", {"img_size": 32, "patch_size": 8, "init_values": 0.1}),
    "rotary and absolute": ("eva02_tiny_patch14_224", {"img_size": 28, "patch_size": 7}),
    "DINOv3": ("vit_small_patch16_dinov3", {"img_size": 32, "patch_size": 8, "init_values": 0.1}),
    "BEiT": ("beit_base_patch16_224", {"img_size": 32, "patch_size": 8, "init_values": 0.1}),
    "BEiT, shared": ("beit_base_patch16_224", {"img_size": 32, "patch_size": 8, "use_shared_rel_pos_bias": True}),
    "relative": ("vit_relpos_small_patch16_224", {"img_size": 32, "patch_size": 8, "init_values": 0.1}),
    "relative, shared": ("vit_srelpos_small_patch16_224", {"img_size": 32, "patch_size": 8, "init_values": 0.1}),
    "relative, norm last": ("vit_relpos_small_patch16_rpn_224", {"img_size": 32, "patch_size": 8}),
    "parallel": ("vit_base_patch16_xp_224", {"img_size": 32, "patch_size": 8}),
    "rectangular": ("vit_small_patch16_rope_224", {"img_size": (16, 40), "patch_size": 8, "init_values": 0.1}),
}
"""A name for each kind -> a model of timm that has it, and what makes it small."""

CLOSED_FORM = {
    **dict.fromkeys(("distilled", "registers", "map", "rotary and absolute", "parallel"), "patch-gradient"),
    **dict.fromkeys(("rotary", "rotary per block", "DINOv3", "BEiT", "BEiT, shared"), "token-separation"),
    **dict.fromkeys(("relative", "relative, shared", "rectangular"), "token-separation"),
    "relative, norm last": "none",
}


def make(kind: str, **options: Any) -> nn.Module:
    """Return the model of a kind with random weights, in evaluation mode."""
    name, own = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        vit = timm.create_model(name, **SMALL | own | options).eval()
        for parameter in vit.parameters():  # timm's own would hide mistakes: biases of 0, and layer scales near it
            nn.init.normal_(parameter, std=0.2)
    return vit


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_victim_is_the_model_and_its_gradients_are_autograds(kind: str) -> None:
    """To all images alike, and of every parameter that is said to be released."""
    vit = make(kind)
    before = copy.deepcopy(vit.state_dict())
    model = victim(vit).model.double()
    own = copy.deepcopy(vit).double()
    x = torch.rand(2, *model.image_shape, generator=torch.Generator().manual_seed(2)).double()
    y = torch.tensor([1, 4])
    assert_close(model(x), own(model.normalise(x)))
    assert_close(model.classify(model.embed(x)), model(x))
    assert_close(model.head(model.backbone(model.client_blocks(model.embed(x), 1), 1)), model(x))
    F.cross_entropy(own(model.normalise(x)), y).backward()
    names = released_parameters(model)
    assert {"patch_embed.proj.weight", "blocks.0.attn.proj.weight", "head.weight"} <= names or kind == "parallel"
    seen = observe(model, x, y, names, images_per_release=2)
    for name in names:
        assert_close(seen.gradients[name][0], own.get_parameter(name).grad, rtol=1e-6, atol=1e-9)
    assert before.keys() == vit.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in vit.state_dict().items())
    assert not any(module._forward_pre_hooks for module in vit.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_one_closed_form_is_left_or_the_reason_is_said(kind: str, photographs: Callable[..., Tensor]) -> None:
    model = victim(make(kind)).model.double()
    grants, why = gradient_capabilities(model), obstacles(model)
    x = photographs(1, 40).double()[..., : model.image_shape[1], : model.image_shape[2]]
    y = torch.tensor([3])
    learns = Capability.LEARNABLE_PE_GRADIENT in grants
    assert learns == (model.vit.pos_embed is not None)
    assert learns or why[Capability.LEARNABLE_PE_GRADIENT] == "this model adds no position embedding to its tokens"
    assert (Capability.PLAIN_BLOCK in grants) == (why_no_plain_block(model) is None)
    if CLOSED_FORM[kind] == "patch-gradient":
        seen = observe(model, x, y, PatchGradient.parameters)
        assert psnr(PatchGradient()(seen), x).min() > 60
        return
    assert not learns
    if CLOSED_FORM[kind] == "none":
        assert "the first block, ResPostRelPosBlock, does more than" in why[Capability.PLAIN_BLOCK]
        return
    attack = TokenSeparation()
    seen = observe(model, x, y, [*attack.parameters, "patch_embed.proj.weight"])
    made = attack(seen)
    assert attack.beyond(seen) is None
    assert made.tokens is not None
    n = model.grid[0] * model.grid[1]
    assert int(made.tokens) >= n - 1  # one may be too weak a part of the gradient
    found, true = (patchify(each, model.patch)[0].double() for each in (made.images, x))
    far = torch.cdist(found, true).amin(1)
    assert int((far < 0.02).sum()) >= min(int(made.tokens), n)  # each is a patch of the image, wherever it was put


def test_places_that_attention_reads_are_needed_for_several_images() -> None:
    model = victim(make("rotary")).model
    x, y = torch.rand(2, *model.image_shape), torch.tensor([0, 1])
    names = [*TokenSeparation.parameters, "patch_embed.proj.weight"]
    with pytest.raises(PrivlabError, match=r"\(AttentionRope\).*Found.*2"):
        TokenSeparation()(observe(model, x, y, names, images_per_release=2))


@pytest.mark.parametrize("kind", ["rotary", "relative, shared", "BEiT, shared"])
def test_copies_tell_their_blocks_of_places_by_their_own(kind: str) -> None:
    """What a copy learns of relative places is its own: the first model keeps its logits."""
    model = victim(make(kind)).model
    x = torch.rand(1, *model.image_shape)
    before, twin = model(x), copy.deepcopy(model)
    assert_close(twin(x), before)
    of_places: nn.Module = next(part for name in TELLERS if (part := getattr(twin.vit, name, None)) is not None)
    for tensor in (*of_places.parameters(), *of_places.buffers()):
        tensor.data += torch.randn_like(tensor) if tensor.is_floating_point() else 0
    assert not torch.allclose(twin(x), before, rtol=1e-4, atol=1e-5)
    assert_close(model(x), before)


def test_split_learning_hands_over_blocks_that_read_tokens_alone() -> None:
    for kind, argument in (("rotary", "rope"), ("BEiT, shared", "shared_rel_pos_bias")):
        with pytest.raises(PrivlabError, match=f"whose blocks are told of places by {argument}"):
            check_cut(victim(make(kind)).model, 0)
    model = victim(make("BEiT")).model
    x = torch.rand(1, *model.image_shape)
    assert_close(Backbone(model, torch.float32)(model.embed(x)), model.backbone(model.embed(x)))


def test_layers_that_read_no_image_release_nothing_by_a_rule() -> None:
    """The queries of a pooling and the network of a relative bias."""
    assert victim(make("map")).model.silent == {"attn_pool.q"}
    relative = victim(make("relative")).model.silent
    assert relative == {f"blocks.{i}.attn.rel_pos.mlp.fc{j}" for i in (0, 1) for j in (1, 2)}


def test_the_parts_of_the_first_block_are_the_block() -> None:
    for kind in ("rotary", "BEiT", "relative", "registers"):
        model = victim(make(kind)).model.double()
        block, z = first_block(model), torch.randn(model.embed(torch.rand(1, *model.image_shape).double()).shape)
        assert_close(block(z.double()), model.vit.blocks[:1](z.double()))
        assert block.reads_places == (kind != "registers")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "cait_xxs24_224",
            {"depth": 1},
            "is more than embedding, blocks, norm and head: these alone",
        ),
        ("convit_tiny", {"depth": 2}, "does not run as embedding, blocks, norm and head"),
        ("vit_tiny_r_s16_p8_224", {"depth": 1}, "square patches that do not overlap linearly, and has an input size"),
        ("xcit_nano_12_p16_224", {"depth": 1}, r"Found ConvPatchEmbed with Sequential\( and grid None"),
        ("swin_tiny_patch4_window7_224", {}, "whose stages cut tokens into windows and merge them"),
        ("swinv2_tiny_window8_256", {}, "whose stages cut tokens into windows and merge them"),
        ("samvit_base_patch16_224", {"depth": 1}, "whose tokens do not go through one norm into one head"),
        ("naflexvit_base_patch16_gap", {"depth": 1}, "which has no patch embedding"),
        ("vit_small_patch16_224", {"depth": 1, "in_chans": 9}, "images of 1 to 8 channels. Found a model with 9"),
        ("vit_small_patch16_rope_224", {"depth": 1, "patch_drop_rate": 0.5}, "drops patches under a rotary embedding"),
    ],
)
def test_what_is_refused_is_one_line(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PrivlabError, match=said) as caught:
        victim(timm.create_model(name, **options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_one_to_four_channels(channels: int) -> None:
    base = victim(make("registers", in_chans=channels))
    assert base.model.image_shape[0] == len(base.preprocessing.mean) == len(base.preprocessing.std) == channels
    from privlab.images import open_images

    pixels = next(iter(open_images("samples", limit=1))).pixels
    assert pixels is not None
    image = base.preprocessing(pixels)[None]
    assert image.shape[1] == channels
    if channels == 4:  # as PIL weighs the colours, before it is resized in eight bits
        luma = (image[:, :3] * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1)
        assert_close(image[:, 3], luma, rtol=0, atol=0.02)
    seen = observe(base.model, image, torch.tensor([1]), PatchGradient.parameters)
    assert psnr(PatchGradient()(seen), image).min() > 60


def test_a_model_without_classifier_sends_features_and_updates_of_losses_without_labels() -> None:
    model = victim(make("registers", num_classes=0)).model
    x = torch.rand(1, *model.image_shape)
    sent = Sent.plain(model.embed(x), model.vit.num_prefix_tokens)
    assert observe_features(model, sent, Stack(()), x[:0]).features.shape == (1, 21, 96)
    data = ClientData(x, torch.tensor([0]), torch.Generator().manual_seed(0))
    with pytest.raises(PrivlabError, match=r"without classifier \(num_classes = 0\)"):
        run_client(model, Client(), data)
    assert run_client(model, Client(loss="regression"), data)["pos_embed"].any()


def test_the_distilled_head_reads_two_tokens() -> None:
    model: VictimModel = victim(make("distilled")).model
    with pytest.raises(PrivlabError, match="tokens"):
        model.logits(torch.zeros(1, 96))
