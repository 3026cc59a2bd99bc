"""Models as users have them: without classifier, of any input size, behind a pre-norm, and some that are no victims."""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
from privlab.evaluation import Specification, applicable
from privlab.images import open_images
from privlab.metrics import psnr
from privlab.release import gradient_capabilities, observe, released_parameters
from privlab.release.gradients import obstacles
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
    torchvision.models.VisionTransformer(32, 16, 1, 2, 32, 64),
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
        "VisionTransformer of torchvision.models.vision_transformer, which has no patch embedding",
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
    with pytest.warns(PrivlabWarning, match="has no classifier; a random one of 5 classes is UNTRAINED"):
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


def test_a_head_is_for_weights_without_one(tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0)
    save(vit.state_dict(), tmp_path / "bare.safetensors")
    options = {"weights": tmp_path / "bare.safetensors", "img_size": 32}
    with pytest.warns(PrivlabWarning, match="vit_ti has no classifier; a random one of 4 classes is UNTRAINED"):
        made = victim("vit_ti", classes=4, **options)
    assert made.model.classes == 4
    assert torch.equal(made.model.vit.blocks[0].norm1.weight, vit.blocks[0].norm1.weight)  # pyright: ignore
    with pytest.raises(PrivlabError, match=r"missing: head\.weight, head\.bias"):
        victim("vit_ti", **options)
    whole = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    save(whole.state_dict(), tmp_path / "whole.safetensors")
    with pytest.raises(PrivlabError, match=r"--classes gives a head .* Found 4, and vit_ti has 10: leave it out\."):
        victim("vit_ti", weights=tmp_path / "whole.safetensors", img_size=32, classes=4)
    assert victim("vit_ti", weights=tmp_path / "whole.safetensors", img_size=32, classes=10).model.classes == 10
    with pytest.raises(PrivlabError, match=r"Found 4, and vit_tiny_patch16_224 has 10: leave it out\."):
        victim(whole, classes=4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PrivlabError, match=r"classes must be a positive number\. Found 0\."):
        victim("vit_ti", weights="random", classes=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_timm_s_models_without_classifier_run(tmp_path: Path) -> None:
    options = {"weights": "random", "img_size": 28, "limit": 1, "attack": "patch-gradient", "metrics": "psnr"}
    name = "timm:vit_small_patch14_dinov2"
    with pytest.raises(PrivlabError, match=r"without classifier \(num_classes = 0\): --classes N, or classes=N"):
        privlab.attack(name, **options)
    frame = privlab.attack(name, classes=3, **options)
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
    spec = Specification(models=("own",), attacks=("mjp-full", "token-separation"), block="stock")
    refused = applicable(spec, base)[1]
    assert refused.keys() == {"mjp-full", "token-separation"}
    for refusal in refused.values():
        assert "plain_block (a pre-norm, LayerNorm `norm_pre`, stands between the embedding and the first" in refusal
        assert "timm's own" not in refusal
    for block, why in (
        ("auto", "april_block (a pre-norm, LayerNorm `norm_pre`"),
        ("april", "--block april needs timm's"),
    ):
        spec = Specification(models=("own",), attacks=("april",), block=block)
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
    frame = privlab.attack(grey, limit=2, metrics="mse,psnr,ssim,ssim_skimage,fft2d,fft2d_mjp", out=out, **options)
    assert not (frame.status == "failed").any(), frame[frame.status == "failed"].reason.unique()
    assert json.loads(frame.victim_params.iloc[0])["input"] == [1, 64, 64]
    attacked = frame[~frame.attack.str.startswith("control")]
    assert attacked.psnr.max() > (30 if "release" in options else 60)  # features: K = 256 > D = 192
    assert frame[frame.attack == "control:mean"].psnr.max() < 30
    assert list((out / "strips").iterdir())


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_decoders_of_rgb_say_so(grey: VisionTransformer) -> None:
    frame = privlab.attack(grey, limit=1, attack="inversion-conv", metrics="psnr")
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
