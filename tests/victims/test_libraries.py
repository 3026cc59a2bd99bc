"""ViTs of other libraries: their own tokens and outputs by timm's blocks, and what is no such ViT in one line."""

import argparse
import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.testing import assert_close

import privlab
from privlab.attacks import PatchGradient
from privlab.base import PrivlabError, PrivlabWarning
from privlab.metrics import psnr
from privlab.release import observe
from privlab.victims import as_timm, timm_names, victim

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers: Any = pytest.importorskip("transformers")

SIZE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "image_size": 16,
    "patch_size": 4,
    "mlp_ratio": 2,
}


def made(name: str, **options: Any) -> Any:
    """Return a small model of transformers by its class's name, with drawn weights."""
    kind = name.split("Model")[0].split("For")[0]
    options = SIZE | options
    config: dict[str, Any] = dict(options)
    if kind in ("CLIP", "Siglip"):
        vision = getattr(transformers, f"{kind}VisionConfig")(**SIZE)
        config = {"vision_config": vision.to_dict(), "num_labels": options.get("num_labels", 2)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**config)).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


def tokens_of_clip(model: Any, x: torch.Tensor) -> torch.Tensor:
    return getattr(model, "vision_model", model).post_layernorm(model(pixel_values=x).last_hidden_state)


def tokens_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(pixel_values=x).last_hidden_state


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("ViTModel", tokens_of),
        ("Dinov2Model", tokens_of),
        ("Dinov2WithRegistersModel", tokens_of),
        ("CLIPVisionModel", tokens_of_clip),
        ("SiglipVisionModel", tokens_of),
    ],
)
def test_tokens_and_pooled_features_are_the_model_s_own(name: str, tokens: Callable[..., torch.Tensor]) -> None:
    model, x = made(name), torch.randn(2, 3, 16, 16)
    vit = as_timm(model)
    with torch.no_grad():
        assert_close(vit.forward_features(x), tokens(model, x), rtol=1e-4, atol=1e-5)
        if name in ("CLIPVisionModel", "SiglipVisionModel", "Dinov2Model"):
            assert_close(vit(x), model(pixel_values=x).pooler_output, rtol=1e-4, atol=1e-5)
    assert vit.num_classes == 0


def test_a_classifier_is_the_head_and_gradients_are_renamed_alike() -> None:
    """The gradient by transformers' names, renamed, is that of timm's ViT."""
    model, x, y = made("ViTForImageClassification", num_labels=4), torch.randn(2, 3, 16, 16), torch.tensor([1, 3])
    vit = as_timm(model)
    nn.functional.cross_entropy(model(pixel_values=x).logits, y).backward()
    nn.functional.cross_entropy(vit(x), y).backward()
    theirs = timm_names({name: p.grad for name, p in model.named_parameters()})
    for name, parameter in vit.named_parameters():
        assert_close(theirs[name], parameter.grad, rtol=1e-4, atol=1e-5)
    base = victim(model)
    assert base.name == "transformers-vit"
    assert base.preprocessing.mean == (0.5, 0.5, 0.5)
    image = torch.rand(1, 3, 16, 16)
    assert psnr(PatchGradient()(observe(base.model, image, y[:1], PatchGradient.parameters)), image).min() > 60


def test_the_projection_of_clip_is_a_head_without_bias() -> None:
    model = made("CLIPVisionModelWithProjection", projection_dim=12)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        assert_close(as_timm(model)(x), model(pixel_values=x).image_embeds, rtol=1e-4, atol=1e-5)


OF_TRANSFORMERS = {
    "ViTForImageClassification": "vit_tiny_patch16_224",
    "DeiTForImageClassification": "vit_tiny_patch16_224",
    "DeiTForImageClassificationWithTeacher": "deit_tiny_distilled_patch16_224",
    "Dinov2ForImageClassification": "vit_tiny_patch16_224",
    "Dinov2WithRegistersForImageClassification": "vit_tiny_patch16_224",
    "CLIPForImageClassification": "vit_tiny_patch16_224",
    "SiglipForImageClassification": "vit_tiny_patch16_224",
}
"""Classifiers of transformers -> the model of timm that has their sizes."""


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@torch.no_grad()
def test_a_classifier_has_its_own_logits_as_an_object(name: str) -> None:
    model, x = made(name, num_labels=5), torch.rand(3, 3, 16, 16)
    base = victim(model).model
    assert_close(base(x), model(pixel_values=base.normalise(x)).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@torch.no_grad()
def test_a_classifier_has_its_own_logits_as_a_file(
    name: str, beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is what transformers saves, with `config.json` beside it, or the checkpoint of a Lightning module."""
    size = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "patch_size": 16, "mlp_ratio": 4}
    monkeypatch.setattr(f"{__name__}.SIZE", SIZE | size | {"num_hidden_layers": 12, "image_size": 32})
    model, x = made(name, num_labels=5), torch.rand(2, 3, 32, 32)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if not beside:
        file = tmp_path / "elsewhere" / "a.ckpt"
        file.parent.mkdir()
        torch.save({"state_dict": {f"model.{key}": tensor for key, tensor in model.state_dict().items()}}, file)
    with pytest.warns(PrivlabWarning, match=f"{file.name}: read .*transformers"):
        base = victim(f"timm:{OF_TRANSFORMERS[name]}", weights=file, img_size=32).model
    assert_close(base(x), model(pixel_values=base.normalise(x)).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*OF_TRANSFORMERS, "CLIPVisionModelWithProjection"])
@torch.no_grad()
def test_a_folder_has_its_own_logits_by_its_path(name: str, tmp_path: Path) -> None:
    model, x = made(name, num_labels=5), torch.rand(3, 3, 16, 16)
    model.save_pretrained(tmp_path / "mine")
    with pytest.warns(PrivlabWarning, match="transformers"):
        base = victim(str(tmp_path / "mine"))
    found = model(pixel_values=base.model.normalise(x))
    assert_close(base.model(x), getattr(found, "logits", getattr(found, "image_embeds", None)), rtol=0, atol=1e-5)
    assert (base.name, base.weights.origin) == ("mine", "file:mine")
    assert base.weights.sha256 == victim(model).weights.sha256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made("ViTForImageClassification", num_labels=5).save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.mark.filterwarnings("ignore:model.safetensors. read tensors by the names of transformers")
def test_the_model_of_a_folder_takes_other_weights_and_another_size(folder: Path, tmp_path: Path) -> None:
    state = {name: 2 * tensor for name, tensor in victim(str(folder)).model.vit.state_dict().items()}
    torch.save(state, tmp_path / "after.pt")
    base = victim(str(folder), weights=tmp_path / "after.pt")
    assert all(torch.equal(tensor, state[name]) for name, tensor in base.model.vit.state_dict().items())
    assert base.weights.origin == "file:after.pt"
    assert victim(str(folder), img_size=24).model.image_shape == (3, 24, 24)
    with pytest.raises(PrivlabError, match="4×4 pixels"):
        victim(str(folder), img_size=23)
    with pytest.raises(PrivlabError, match="has weights"):
        victim(str(folder), weights="random")


@pytest.mark.filterwarnings("ignore:model.safetensors. read tensors by the names of transformers")
@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("model_type", "swin", "one of the ViTs.*'swin'"),
        ("num_attention_heads", 7, "cannot be built"),
        ("num_attention_heads", "2", "num_attention_heads in .*Found '2'"),
        ("layer_norm_eps", [1], "layer_norm_eps in"),
    ],
)
def test_a_configuration_that_fits_no_vit_is_one_line(folder: Path, setting: str, value: Any, said: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {setting: value}))
    with pytest.raises(PrivlabError, match=said) as caught:
        victim(str(folder))
    assert "\n" not in str(caught.value)


MEANS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}


@pytest.mark.filterwarnings("ignore:model.safetensors. read tensors by the names of transformers")
@pytest.mark.parametrize(
    ("processor", "mean", "std"),
    [
        (MEANS | {"do_normalize": True}, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
        (MEANS, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
        (MEANS | {"do_normalize": False}, (0, 0, 0), (1, 1, 1)),
        ({}, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ],
)
def test_the_image_processor_of_a_folder_states_the_normalisation(
    folder: Path, processor: dict[str, Any], mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    found = victim(str(folder)).preprocessing
    assert (found.mean, found.std) == (pytest.approx(mean), pytest.approx(std))
    assert victim(str(folder), normalisation="0.2/0.3").preprocessing.mean == pytest.approx((0.2, 0.2, 0.2))


@pytest.mark.filterwarnings("ignore:model.safetensors. read tensors by the names of transformers")
@pytest.mark.parametrize(
    ("wrong", "said"), [({"image_mean": "0.5"}, "list of numbers"), ({"image_std": [0.5, 0]}, "0.5,0")]
)
def test_an_image_processor_that_states_no_normalisation_is_one_line(
    folder: Path, wrong: dict[str, Any], said: str
) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(MEANS | wrong))
    with pytest.raises(PrivlabError, match=said):
        victim(str(folder))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_the_command_line_takes_a_folder(folder: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    options = ("--limit", 1, "--attack", "patch-gradient", "--metrics", "psnr", "--device", "cpu")
    done = cli("attack", "--model", folder, "--out", tmp_path / "run", *options)
    assert "mine, setting a" in done.out
    assert str(tmp_path) not in done.out.partition("Pictures")[0]
    base, image = victim(str(folder)), torch.rand(1, 3, 16, 16)
    before = {name: tensor.clone() for name, tensor in base.model.vit.state_dict().items()}
    vit = copy.deepcopy(base.model.vit).requires_grad_(True)
    nn.functional.cross_entropy(vit(base.model.normalise(image)), torch.tensor([3])).backward()
    torch.optim.SGD(vit.parameters(), lr=0.01).step()
    files = privlab.capture_update(before, vit, tmp_path)
    client = ("--client", "sgd", "--set", "client.lr=0.01", "--attack", "patch-update")
    done = cli("audit", "update", *files, "--model", folder, *client, "--out", tmp_path / "audit", "--device", "cpu")
    assert "leaks: yes" in done.out


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
@pytest.mark.parametrize("target", [["query", "value"], ["q_proj", "v_proj"]])
@torch.no_grad()
def test_adapters_of_peft_are_merged(target: list[str]) -> None:
    peft = pytest.importorskip("peft")
    model, x = made("ViTForImageClassification", num_labels=5), torch.rand(2, 3, 16, 16)
    if not any(name.endswith(target[0]) for name, _ in model.named_modules()):
        pytest.skip("the other version of transformers has this name")
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=target, modules_to_save=["classifier"])
    model = peft.get_peft_model(model, config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    before = copy.deepcopy(model.state_dict())
    base = victim(model).model
    assert_close(base(x), model(pixel_values=base.normalise(x)).logits, rtol=0, atol=1e-5)
    assert base.frozen == {name for name, _ in base.vit.named_parameters()} - {"head.weight", "head.bias"}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
@pytest.mark.filterwarnings("ignore:model.safetensors. read tensors by the names of transformers")
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "alpha_pattern": {"0.attention.q_proj": 1}}])
@torch.no_grad()
def test_adapters_that_peft_saves_are_merged_into_their_base(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is in the folder; else a line says what is missing."""
    peft = pytest.importorskip("peft")
    size = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "patch_size": 16}
    monkeypatch.setattr(f"{__name__}.SIZE", SIZE | size | {"num_hidden_layers": 12, "image_size": 32})
    model, x = made("ViTForImageClassification", num_labels=5), torch.rand(2, 3, 32, 32)
    model.save_pretrained(tmp_path / "base")
    target = r".*\.(query|value|q_proj|v_proj)"
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=target, modules_to_save=["classifier"], **options)
    model = peft.get_peft_model(model, config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(PrivlabError, match=r"put the base's model\.safetensors"):
        victim("timm:vit_tiny_patch16_224", weights=tmp_path / "adapter", img_size=32)
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "adapter" / "model.safetensors")
    with pytest.warns(PrivlabWarning, match="LoRA's adapters, which are merged"):
        base = victim("timm:vit_tiny_patch16_224", weights=tmp_path / "adapter", img_size=32).model
    assert_close(base(x), model(pixel_values=base.normalise(x)).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_retfounds_mean_of_the_patches_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    """RETFound fine-tunes MAE's encoder with `global_pool`: fc_norm of the mean of the patches' tokens, and no norm."""
    mae: Any = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5).eval()
    norm = nn.LayerNorm(192, eps=1e-6)
    for parameter in (*mae.parameters(), *norm.parameters()):
        nn.init.normal_(parameter, std=0.1)
    state = {name: tensor for name, tensor in mae.state_dict().items() if not name.startswith("norm.")}
    state |= {f"fc_norm.{name}": tensor for name, tensor in norm.state_dict().items()}
    decoder = {"mask_token": torch.zeros(1, 1, 8), "decoder_embed.weight": torch.zeros(8, 192)}
    torch.save({"model": state | decoder, "args": argparse.Namespace(lr=0.1), "epoch": 3}, tmp_path / "a.pth")
    base = victim("timm:vit_tiny_patch16_224", weights=tmp_path / "a.pth", img_size=32).model
    x = torch.rand(2, 3, 32, 32)
    tokens = mae.blocks(base.embed(x))
    assert_close(base(x), mae.head(norm(tokens[:, 1:].mean(1))), rtol=1e-5, atol=1e-5)


def of_monai(**options: Any) -> Any:
    """Return a small two-dimensional ViT of MONAI."""
    pytest.importorskip("einops")
    nets = pytest.importorskip("monai.networks.nets")
    sizes = {"img_size": (32, 32), "patch_size": (16, 16), "hidden_size": 192, "mlp_dim": 768, "num_heads": 3}
    kind = {"in_channels": 1, "spatial_dims": 2, "classification": True, "num_classes": 5, "post_activation": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nets.ViT(**sizes | kind | options).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True, "in_channels": 3}])
@torch.no_grad()
def test_monais_vit_has_its_own_logits_as_an_object_and_as_a_file(options: dict[str, Any], tmp_path: Path) -> None:
    model = of_monai(**options)
    x = torch.rand(2, model.patch_embedding.patch_embeddings.in_channels, 32, 32)
    assert_close(victim(model).model(x), model(x)[0], rtol=0, atol=1e-5)
    torch.save({"model": model.state_dict()}, tmp_path / "a.pt")
    with pytest.warns(PrivlabWarning, match="MONAI"):
        base = victim("timm:vit_tiny_patch16_224", weights=tmp_path / "a.pt", img_size=32).model
    assert_close(base(x), model(base.normalise(x))[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"post_activation": "Tanh"}, "tanh behind its classifier.*take post_activation=None"),
        ({"proj_type": "perceptron"}, "take proj_type='conv'"),
        ({"spatial_dims": 3, "img_size": (32,) * 3, "patch_size": (16,) * 3}, "three-dimensional patches"),
    ],
)
def test_what_monai_adds_is_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PrivlabError, match=said):
        victim(of_monai(num_layers=1, **options))


def test_names_of_version_4_are_those_of_version_5() -> None:
    old = {
        "vit.encoder.layer.1.attention.attention.query.weight": torch.full((2, 2), 1.0),
        "vit.encoder.layer.1.attention.attention.key.weight": torch.full((2, 2), 2.0),
        "vit.encoder.layer.1.attention.attention.value.weight": torch.full((2, 2), 3.0),
        "vit.encoder.layer.1.attention.output.dense.weight": torch.zeros(2, 2),
        "vit.encoder.layer.1.intermediate.dense.weight": torch.zeros(4, 2),
        "vit.encoder.layer.1.output.dense.weight": torch.zeros(2, 4),
        "vit.encoder.layer.1.layernorm_before.bias": torch.zeros(2),
        "vision_model.encoder.layers.0.self_attn.out_proj.bias": torch.zeros(2),
        "vit.pooler.dense.weight": torch.zeros(2, 2),
    }
    found = timm_names(old)
    assert found.pop("blocks.1.attn.qkv.weight")[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert sorted(found) == [
        *("blocks.0.attn.proj.bias", "blocks.1.attn.proj.weight", "blocks.1.mlp.fc1.weight"),
        *("blocks.1.mlp.fc2.weight", "blocks.1.norm1.bias"),
    ]


def test_what_is_frozen_stays_so() -> None:
    model = made("ViTModel")
    for parameter in model.embeddings.parameters():
        parameter.requires_grad_(False)
    frozen = victim(model).model.frozen
    assert frozen == {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}


def test_weights_of_timm_give_timm_s_logits() -> None:
    """What transformers makes of them, by a state that is written by its names, is what timm makes."""
    vit = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=64, num_heads=2, depth=2)
    size = SIZE | {"intermediate_size": 256, "layer_norm_eps": 1e-6}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**size, num_labels=1000)).eval()
    wanted = vit.state_dict()
    for name, tensor in model.state_dict().items():
        part = timm_names({name: tensor}) if ".attention." not in name or "o_proj" in name or "output" in name else {}
        if part:
            (key,) = part
            tensor.copy_(wanted[key].reshape(tensor.shape))
        else:
            third = {"q": 0, "k": 1, "v": 2}[name.split(".")[-2][0]]
            block = next(piece for piece in name.split(".") if piece.isdigit())
            tensor.copy_(wanted[f"blocks.{block}.attn.qkv.{name.split('.')[-1]}"].chunk(3)[third])
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert_close(model(pixel_values=x).logits, vit.eval()(x), rtol=1e-4, atol=1e-4)
        assert_close(as_timm(model)(x), vit(x))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("BertModel", {}, "must be one of the ViTs"),
        ("BeitModel", {}, "relative positions"),
        ("DINOv3ViTModel", {}, "rotary positions"),
        ("Dinov2Model", {"use_swiglu_ffn": True}, "has a gated MLP"),
        ("ViTModel", {"hidden_act": "relu"}, "Unknown hidden_act of transformers 'relu'"),
    ],
)
def test_what_is_no_vit_of_timm_is_one_line(name: str, options: dict[str, Any], said: str) -> None:
    model = made(name, **options)
    with pytest.raises(PrivlabError, match=said) as caught:
        victim(model)
    assert "\n" not in str(caught.value)


def test_other_tokens_are_refused() -> None:
    model = made("ViTModel")
    model.register_forward_hook(lambda _, __, out: out)
    as_timm(model)
    model.layernorm.register_forward_hook(lambda _, __, out: out + 1)
    with pytest.raises(PrivlabError, match=r"ViTModel.*ViT"):
        as_timm(model)
