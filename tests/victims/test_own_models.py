"""Models as users have them: without classifier, of any input size, behind a pre-norm, and some that are no victims."""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import privlab
from privlab.attacks import PatchGradient
from privlab.base import PrivlabError, PrivlabWarning
from privlab.evaluation import applicable
from privlab.grids import specify
from privlab.images import open_images
from privlab.metrics import psnr
from privlab.release import gradient_capabilities, observe, released_parameters
from privlab.release.releases import obstacles
from privlab.threat import Capability
from privlab.victims import VictimModel, save, victim

Vit = Callable[..., VisionTransformer]

OTHERS = """
import timm, torch, torchvision, privlab
from privlab.base.errors import PrivlabError
from privlab.victims.model import VictimModel
from privlab.victims.named import victim
models = [
    timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=24),
    timm.create_model("pit_ti_224"),
    torchvision.models.resnet18(),
    torch.nn.Linear(2, 2),
    None,
    3,
]
for model in models:
    for use in (privlab.attack, victim, lambda given: VictimModel(given, (0.5,) * 3, (0.5,) * 3)):
        try:
            use(model)
        except PrivlabError as error:
            print(error)
"""
"""Run without the types that tests check: users have none."""


@pytest.mark.slow
def test_what_is_no_plain_vit_is_one_line(tmp_path: Path) -> None:
    """Elsewhere than in the checkout, whose folder would stand before what is installed."""
    done = subprocess.run([sys.executable, "-c", OTHERS], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stderr == ""
    said = re.findall(
        r"^A victim is a ViT of timm\. Found (.*)\. Give a name of `privlab list victims`, timm:NAME",
        done.stdout,
        re.MULTILINE,
    )
    kinds = (
        "SwinTransformer of timm.models.swin_transformer, whose stages cut tokens into windows and merge them, so that "
        "no block sees all",
        "PoolingVisionTransformer of timm.models.pit, which has no one sequence of blocks",
        "ResNet of torchvision.models.resnet, which has no patch embedding",
        "Linear of torch.nn.modules.linear, which has no patch embedding",
        "NoneType, which has no patch embedding",
        "int, which has no patch embedding",
    )
    assert said == [kind for kind in kinds for _ in range(3)]
    assert len(done.stdout.splitlines()) == len(said)


def test_a_model_without_classifier_is_given_a_head(tiny_vit: Vit) -> None:
    """It is random by the seed, the rest stays as it is, and so does the model that was handed over."""
    own = tiny_vit(num_classes=0)
    before = copy.deepcopy(own.state_dict())
    with pytest.warns(PrivlabWarning, match=r"5.*UNTRAINED"):
        made = victim(own, classes=5)
    with pytest.warns(PrivlabWarning, match="UNTRAINED"):
        other = victim(own, classes=5, seed=1)
    assert isinstance(made.model.vit.head, nn.Linear)
    assert made.model.vit.head.weight.shape == (5, 64)
    assert not torch.equal(made.model.vit.head.weight, other.model.vit.head.weight)  # pyright: ignore[reportArgumentType]
    for name, tensor in before.items():
        assert torch.equal(made.model.vit.state_dict()[name], tensor)
        assert torch.equal(own.state_dict()[name], tensor)
    assert own.num_classes == 0


@pytest.mark.slow
def test_a_head_is_for_weights_without_one(tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0)
    save(vit.state_dict(), tmp_path / "bare.safetensors")
    options = {"weights": tmp_path / "bare.safetensors", "img_size": 32}
    with pytest.warns(PrivlabWarning, match=r"vit_ti.*4.*UNTRAINED"):
        made = victim("vit_ti", classes=4, **options)
    assert made.model.classes == 4
    assert torch.equal(made.model.vit.blocks[0].norm1.weight, vit.blocks[0].norm1.weight)  # pyright: ignore
    with pytest.raises(PrivlabError, match=r"missing: head\.weight, head\.bias"):
        victim("vit_ti", **options)
    whole = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    save(whole.state_dict(), tmp_path / "whole.safetensors")
    with pytest.raises(PrivlabError, match=r"--classes.*4.*vit_ti.*10"):
        victim("vit_ti", weights=tmp_path / "whole.safetensors", img_size=32, classes=4)
    assert victim("vit_ti", weights=tmp_path / "whole.safetensors", img_size=32, classes=10).model.classes == 10
    with pytest.raises(PrivlabError, match=r"4.*vit_tiny_patch16_224.*10"):
        victim(whole, classes=4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PrivlabError, match=r"positive.*0"):
        victim("vit_ti", weights="random", classes=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_timm_s_models_without_classifier_run(tmp_path: Path) -> None:
    options = {"weights": "random", "img_size": 28, "limit": 1, "attacks": "patch-gradient", "metrics": "psnr"}
    name = "timm:vit_small_patch14_dinov2"
    with pytest.raises(PrivlabError, match=r"\(num_classes.*0\).*--classes.*classes=N"):
        privlab.attack(name, **options)
    frame = privlab.attack(name, classes=3, **options).records
    assert frame[frame.attack == "patch-gradient"].psnr.min() > 100


def test_a_vit_of_any_input_size_is_one_of_its_own(tiny_vit: Vit, crops: Tensor) -> None:
    """dynamic_img_size is no obstacle: a victim has the size that the model was made for."""
    fixed, dynamic = tiny_vit(), tiny_vit(dynamic_img_size=True)
    dynamic.load_state_dict(fixed.state_dict())
    made = victim(dynamic)
    x, y = crops[:2].double(), torch.tensor([1, 2])
    torch.testing.assert_close(made.model(x), dynamic(made.model.normalise(x)))
    torch.testing.assert_close(made.model(x), victim(fixed).model(x))
    seen = observe(made.model, x, y, released_parameters(made.model))
    assert psnr(PatchGradient()(seen), x).min() > 100


def test_a_pre_norm_is_named(tiny_model: Callable[..., VictimModel], tiny_vit: Vit) -> None:
    model = tiny_model(pre_norm=True)
    assert Capability.PLAIN_BLOCK not in gradient_capabilities(model)
    assert obstacles(tiny_model()) == {}
    base = victim(tiny_vit(pre_norm=True))
    spec = specify(model=("own",), attack=("mjp-full", "token-separation"), block="stock")
    refused = applicable(spec, base)[1]
    assert refused.keys() == {"mjp-full", "token-separation"}
    for refusal in refused.values():
        assert "plain_block (a pre-norm, LayerNorm `norm_pre`, stands between the embedding and the first" in refusal
        assert "timm's own" not in refusal
    for block, why in (
        ("auto", "april_block (a pre-norm, LayerNorm `norm_pre`"),
        ("april", "--block april needs timm's"),
    ):
        spec = specify(model=("own",), attack=("april",), block=block)
        refusal = applicable(spec, base)[1]["april"]
        assert why in refusal
        assert "knows_weights" not in refusal


@pytest.fixture(scope="module")
def grey() -> VisionTransformer:
    """Return a ViT for X-rays: one channel, five classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = timm.create_model("vit_tiny_patch16_224", in_chans=1, img_size=64, num_classes=5, depth=2)
    assert isinstance(vit, VisionTransformer)
    return vit


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
@pytest.mark.parametrize("options", [{}, {"defense": "jigsaw"}, {"release": "features"}, {"gradient_batch": 2}])
def test_grey_images_are_attacked(grey: VisionTransformer, tmp_path: Path, options: dict[str, Any]) -> None:
    """Whatever can run on them runs: images are made grey by their luma, and so are the photographs of priors."""
    out = tmp_path / "run"
    frame = privlab.attack(
        grey, limit=2, metrics="mse,psnr,ssim,ssim_skimage,fft2d,fft2d_mjp", out=out, **options
    ).records
    assert not (frame.status == "failed").any(), frame[frame.status == "failed"].reason.unique()
    assert json.loads(frame.victim_params.iloc[0])["input"] == [1, 64, 64]
    attacked = frame[~frame.attack.str.startswith("control")]
    assert attacked.psnr.max() > (30 if "release" in options else 60)  # features: K = 256 > D = 192
    assert frame[frame.attack == "control:mean"].psnr.max() < 30
    assert list((out / "strips").iterdir())


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_decoders_of_rgb_say_so(grey: VisionTransformer) -> None:
    frame = privlab.attack(grey, limit=1, attacks="inversion-conv", metrics="psnr").records
    told = frame[frame.attack == "inversion-conv"].reason
    assert told.str.contains("conv decoders paint RGB images. Found a victim of 1 channels.", regex=False).all()


def test_grey_images_are_pil_s_luma(grey: VisionTransformer) -> None:
    base = victim(grey)
    assert (base.preprocessing.mean, base.preprocessing.std) == ((0.5,), (0.5,))
    pixels = next(iter(open_images("samples", limit=1))).pixels
    assert pixels is not None
    square = pixels.resize((64, 64)).convert("RGB")
    red, green, blue = (torch.tensor(np.asarray(square)[..., i]).double() for i in range(3))
    image = replace(base.preprocessing, crop_pct=1.0)(square)
    assert image.shape == (1, 64, 64)
    assert (255 * image[0] - (0.299 * red + 0.587 * green + 0.114 * blue)).abs().max() <= 1


def test_weights_of_one_channel_make_a_grey_victim(tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", in_chans=1, img_size=32, num_classes=5)
    save(vit.state_dict(), tmp_path / "xray.safetensors")
    made = victim("vit_ti", weights=tmp_path / "xray.safetensors", img_size=32)
    assert made.model.image_shape == (1, 32, 32)
    assert made.model.std.shape == (1, 1, 1)


def plain_vit(**options: Any) -> VisionTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return VisionTransformer(
            img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=5, **options
        )


def without_pe(vit: VisionTransformer, x: Tensor) -> Tensor:
    assert vit.cls_token is not None
    return torch.cat([vit.cls_token.expand(len(x), -1, -1), x], 1)


class Mirrored(VisionTransformer):
    """A ViT that mirrors its input."""

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the tokens of the mirrored images."""
        return super().forward_features(x.flip(-1))


def doubled(module: nn.Module, name: str) -> None:
    own = getattr(module, name)
    setattr(module, name, lambda x, *_, **__: 2 * own(x))


def mirrored_input(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].flip(-1),)


CHANGES: dict[str, Callable[[VisionTransformer], object]] = {
    "forward": lambda vit: doubled(vit, "forward"),
    "_pos_embed": lambda vit: setattr(vit, "_pos_embed", partial(without_pe, vit)),
    "_pos_embed, bound": lambda vit: setattr(vit, "_pos_embed", MethodType(without_pe, vit)),
    "forward_features": lambda vit: doubled(vit, "forward_features"),
    "patch_embed": lambda vit: doubled(vit.patch_embed, "forward"),
    "a hook on the model": lambda vit: vit.register_forward_hook(lambda _, __, logits: logits + 1),
    "a hook before the model": lambda vit: vit.register_forward_pre_hook(mirrored_input),
    "a hook on the blocks": lambda vit: vit.blocks.register_forward_hook(lambda _, __, x: x.roll(1, 1)),
    "a class of its own": lambda vit: setattr(vit, "__class__", Mirrored),
    "logits in a tuple": lambda vit: vit.register_forward_hook(lambda _, __, logits: (logits,)),
}


@pytest.mark.parametrize("weights", ["drawn", "a head of zeros"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_is_not_attacked_as_if_it_had_not_been(change: str, weights: str) -> None:
    vit = plain_vit()
    if weights != "drawn":
        nn.init.zeros_(vit.head.weight)
    before, state = copy.deepcopy(vit.state_dict()), torch.get_rng_state()
    CHANGES[change](vit)
    with pytest.raises(PrivlabError, match=r"differ by up to [\d.]+|must give logits"):
        victim(vit)
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def same_forward(vit: VisionTransformer) -> None:
    own = vit.forward
    vit.forward = lambda x: own(x).float()


def doubled_and_bound(module: nn.Module, name: str) -> None:
    """Replace a method by one that a copied module has for itself."""
    setattr(module, name, MethodType(lambda self, x: 2 * getattr(type(self), name)(self, x), module))


KEPT: dict[str, Callable[[VisionTransformer], object]] = {
    "nothing": lambda vit: None,
    "a forward that casts logits": same_forward,
    "a hook that records": lambda vit: vit.register_forward_hook(lambda *_: None),
    "forward_head": lambda vit: doubled_and_bound(vit, "forward_head"),
    "a hook on the last block": lambda vit: vit.blocks[-1].register_forward_hook(lambda _, __, x: x + x.roll(1, 2)),
    "the last block": lambda vit: doubled_and_bound(vit.blocks[-1].mlp, "forward"),
    "another block": lambda vit: vit.blocks.__setitem__(0, nn.TransformerEncoderLayer(24, 2, 48, batch_first=True)),
    "another norm": lambda vit: setattr(vit, "norm", nn.Identity()),
}


@pytest.mark.parametrize("change", KEPT)
def test_what_the_parts_of_a_model_show_too_is_attacked_as_it_is(change: str) -> None:
    vit, images = plain_vit(), torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    KEPT[change](vit)
    made = victim(vit.eval())
    with torch.no_grad():
        torch.testing.assert_close(made.model(images), vit(made.model.normalise(images)), rtol=1e-5, atol=1e-6)


LAYERS = ("patch_embed.proj", "blocks.0.attn.qkv", "blocks.1.mlp.fc1", "blocks.0.norm1", "norm", "head")


def halved_gradient(module: nn.Module, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else g / 2 for g in gradients)


GRADIENTS_CHANGED: dict[str, Callable[[VisionTransformer], object]] = {
    **{f"forward of {name}": partial(lambda n, vit: doubled(vit.get_submodule(n), "forward"), name) for name in LAYERS},
    **{
        f"a hook on {name}": partial(
            lambda n, vit: vit.get_submodule(n).register_forward_hook(lambda _, __, x: x / 2), name
        )
        for name in LAYERS
    },
    "a hook before patch_embed.proj": lambda vit: vit.patch_embed.proj.register_forward_pre_hook(
        lambda _, inputs: (inputs[0] / 2,)
    ),
    "forward of an MLP, which runs the caller's": lambda vit: doubled(vit.blocks[0].mlp, "forward"),
    "a hook on pos_embed": lambda vit: vit.pos_embed.register_hook(lambda g: g * 0),
    "a hook on a parameter of a block": lambda vit: vit.blocks[1].norm2.bias.register_hook(lambda g: g / 2),
    "a hook before the model's backward pass": lambda vit: vit.register_full_backward_pre_hook(halved_gradient),
}


@pytest.mark.parametrize("change", GRADIENTS_CHANGED)
def test_a_model_whose_gradients_were_changed_is_refused(change: str) -> None:
    """Its logits are those of its parts; closed forms read what a hook or a replaced forward changes."""
    vit = plain_vit()
    GRADIENTS_CHANGED[change](vit)
    with pytest.raises(PrivlabError, match=r"gradients .*(differs by (1|0\.[3-9])|skips)"):
        victim(vit)


GRADIENTS_KEPT: dict[str, Callable[[VisionTransformer, list[object]], object]] = {
    "forward hooks": lambda vit, seen: [m.register_forward_hook(lambda *_: seen.append(0)) for m in vit.modules()],
    "backward hooks": lambda vit, seen: [
        m.register_full_backward_hook(lambda *_: seen.append(0)) for m in vit.modules()
    ],
    "hooks on parameters": lambda vit, seen: [p.register_hook(lambda _: seen.append(0)) for p in vit.parameters()],
    "a backward hook that changes values": lambda vit, seen: vit.blocks[1].register_full_backward_hook(
        lambda m, inputs, _: (seen.append(0), halved_gradient(m, inputs))[1]
    ),
}


@pytest.mark.parametrize("change", GRADIENTS_KEPT)
def test_hooks_under_which_the_released_gradients_are_right_are_kept(change: str) -> None:
    vit, seen = plain_vit().train(), []
    GRADIENTS_KEPT[change](vit, seen)
    for parameter in vit.parameters():
        parameter.grad = torch.ones_like(parameter)
    model = victim(vit).model
    assert seen
    assert all(bool((parameter.grad == 1).all()) for parameter in vit.parameters() if parameter.grad is not None)
    assert all(parameter.grad is not None for parameter in vit.parameters())
    assert all(module.training for module in vit.modules())
    x, y = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([2])
    released = observe(model, x, y, released_parameters(model)).gradients
    vit.zero_grad()
    nn.functional.cross_entropy(vit(model.normalise(x.requires_grad_())), y).backward()
    for name, parameter in vit.named_parameters():
        torch.testing.assert_close(released[name][0], parameter.grad, rtol=1e-4, atol=1e-6)


def test_hooks_on_accumulated_gradients_are_named_and_not_run() -> None:
    vit, seen = plain_vit(), []
    vit.cls_token.register_post_accumulate_grad_hook(seen.append)  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.warns(PrivlabWarning, match=r"hooks on accumulated gradients.*cls_token"):
        victim(vit)
    assert seen == []


def test_a_changed_first_block_is_no_plain_block() -> None:
    vit = plain_vit()
    assert Capability.PLAIN_BLOCK in gradient_capabilities(victim(vit).model)
    vit.blocks[0].register_forward_hook(lambda _, __, x: x.roll(1, 1))
    assert Capability.PLAIN_BLOCK not in gradient_capabilities(victim(vit).model)


@pytest.mark.parametrize(
    "options",
    [
        {"proj_drop_rate": 0.5, "drop_path_rate": 0.5, "pos_drop_rate": 0.5, "patch_drop_rate": 0.5, "drop_rate": 0.5},
        {"reg_tokens": 2, "no_embed_class": True},
        {"dynamic_img_size": True},
        {"global_pool": "avg"},
        {"class_token": False, "global_pool": "avg"},
        {"class_token": False, "global_pool": "map"},
        {"init_values": 1e-6},
    ],
)
def test_a_model_in_training_is_a_victim_and_goes_on_in_training(options: dict[str, Any]) -> None:
    vit = plain_vit(**options).train()
    made = victim(vit)
    assert all(module.training for module in vit.modules())
    assert not any(module.training for module in made.model.vit.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_compared_by_their_own_rounding(dtype: torch.dtype) -> None:
    assert victim(plain_vit().to(dtype)).model.mean.dtype == dtype
    changed = plain_vit().to(dtype)
    doubled(changed, "forward")
    with pytest.raises(PrivlabError, match="differ by"):
        victim(changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [
        lambda vit: torch.compile(vit, backend="eager"),
        nn.DataParallel,
        lambda vit: torch.compile(nn.DataParallel(vit), backend="eager"),
    ],
)
def test_wrappers_that_compute_the_same_are_taken_off(wrap: Callable[[nn.Module], nn.Module]) -> None:
    vit = plain_vit()
    assert victim(wrap(vit)).weights == victim(vit).weights
    assert VictimModel(wrap(vit), (0.5,) * 3, (0.5,) * 3).vit is vit


def test_other_wrappers_may_change_the_logits_and_are_refused() -> None:
    class Softmax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = plain_vit()

    with pytest.raises(PrivlabError, match="no patch embedding"):
        victim(Softmax())
