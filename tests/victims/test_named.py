"""Victims: equal to timm's models, copies, with weights of every layout and of stated origin."""

import copy
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn
from torch.testing import assert_close

from privlab.base import PrivlabError, PrivlabWarning
from privlab.release import observe
from privlab.victims import ARCHITECTURES, ZOO, AprilBlock, VictimModel, april_twin, victim, victim_names
from privlab.victims import weights as stored

quiet = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
Vit = Callable[..., VisionTransformer]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give empty caches and a network that does not answer."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(stored, "reachable", lambda url, seconds=5.0: False)


def timm_state(architecture: str = "vit_tiny_patch16_224", img_size: int = 32) -> dict[str, Tensor]:
    """Return a state of timm's that no victim would draw by itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        return timm.create_model(architecture, img_size=img_size).state_dict()


def mjp_authors(state: dict[str, Tensor], unknown: Tensor) -> dict[str, dict[str, Tensor]]:
    """Return a state in the layout of the MJP authors, with the heads of DAL."""
    state = dict(state)
    table = torch.cat([state.pop("pos_embed")[0], unknown[None]])
    dal = {"dlocr.layers.0.weight": torch.rand(2, 192), "dlocr.layers.0.bias": torch.rand(2)}
    return {"model": state | {"pos_embed.weight": table} | dal}


@quiet
@pytest.mark.parametrize("name", ["vit_ti", "deit_ti", "timm:deit3_small_patch16_224"])
def test_forward_is_timms(name: str) -> None:
    base = victim(name, weights="random", img_size=32)
    images = torch.rand(2, 3, 32, 32)
    assert_close(base.model(images), base.model.vit(base.model.normalise(images)), atol=1e-5, rtol=1e-5)


@quiet
def test_without_position_embeddings_is_with_zeros() -> None:
    """Some versions of timm drop the class token where there are no position embeddings: that is not meant here."""
    nope, plain = (victim(name, weights="random", img_size=32).model for name in ("vit_ti_nope", "vit_ti"))
    state = {name: value for name, value in plain.vit.state_dict().items() if name != "pos_embed"}
    nope.vit.load_state_dict(state)
    assert plain.vit.pos_embed is not None
    plain.vit.pos_embed.zero_()
    images = torch.rand(2, 3, 32, 32)
    assert_close(nope(images), plain(images))


@quiet
def test_a_hybrid_is_refused() -> None:
    with pytest.raises(PrivlabError, match=r"embeds square patches .* linearly"):
        victim("timm:vit_tiny_r_s16_p8_224", weights="random")


def test_april_twin_has_neither_pre_norm_nor_skip(tiny_model: Callable[..., VictimModel]) -> None:
    model = tiny_model()
    twin = april_twin(model)
    x = torch.rand(2, 17, 64, dtype=torch.float64)
    block = model.vit.blocks[0]
    assert_close(twin.vit.blocks[0](x), block.mlp(block.norm2(block.attn(x))))
    assert not isinstance(block, AprilBlock)
    assert "blocks.0.norm1.weight" not in dict(twin.vit.named_parameters())


def test_april_twin_is_refused_behind_a_norm(tiny_model: Callable[..., VictimModel]) -> None:
    with pytest.raises(PrivlabError, match="LayerNorm"):
        april_twin(tiny_model(pre_norm=True))


def test_a_model_of_ones_own_is_copied_and_left_alone(tiny_vit: Vit) -> None:
    own = tiny_vit().train()
    before = copy.deepcopy(own.state_dict())
    base = victim(own, block="april")
    with torch.no_grad():
        next(base.model.parameters()).add_(1)
    assert_close(own.state_dict(), before, rtol=0, atol=0)
    assert own.training
    assert all(parameter.requires_grad for parameter in own.parameters())
    assert type(own.blocks[0]).__name__ == "Block"
    assert base.weights.origin == "given"


@quiet
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("deit_m", r"Unknown model 'deit_m'\. Did you mean deit_"),
        ("timm:vit_tinny_patch16_224", "Unknown timm model 'vit_tinny_patch16_224'. Did you mean vit_tiny_patch16_224"),
        ("timm:vit_tiny_patch16_224.foo", r"Unknown timm model .* vit_tiny_patch16_224\.augreg"),
        ("timm:resnet10t", "Found ResNet of timm.models.resnet, which has no patch embedding"),
    ],
)
def test_models_that_cannot_be_victims(model: str, message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        victim(model, weights="random")


@quiet
def test_random_weights_are_those_of_the_seed_and_leave_torchs_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = (victim("vit_ti_mjp", weights="random", img_size=32, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.weights == again.weights
    assert first.weights.sha256 != other.weights.sha256
    assert first.weights.origin == "random"
    assert first.weights.unknown == "random"


@pytest.mark.usefixtures("no_network")
def test_auto_falls_back_to_random_weights_with_a_warning() -> None:
    with pytest.warns(PrivlabWarning, match=r"RANDOM.*\(seed.*0\).*timm/deit_tiny"):
        base = victim("deit_ti", img_size=32)
    assert base.weights.is_random


@pytest.mark.usefixtures("no_network")
def test_pretrained_weights_that_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PrivlabError, match=r"--weights pretrained: .*cannot be reached"):
        victim("deit_ti", weights="pretrained")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PrivlabError, match="HF_HUB_OFFLINE forbids a download"):
        victim("deit_ti", weights="pretrained")
    with pytest.raises(PrivlabError, match=r"--weights.*vit_base_patch16_xp_224"):
        victim("timm:vit_base_patch16_xp_224", weights="pretrained")


@pytest.mark.slow
@pytest.mark.usefixtures("no_network")
def test_timms_cache_counts(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "checkpoints" / "deit_tiny_patch16_224-a1311bcf.pth"
    cached.parent.mkdir(parents=True)
    torch.save({"model": timm_state("deit_tiny_patch16_224", 224)}, cached)
    base = victim("deit_ti", weights="pretrained")
    assert base.weights.origin == "pretrained:deit_tiny_patch16_224"
    with pytest.warns(PrivlabWarning, match="UNTRAINED"):
        assert victim("deit_ti_mjp").weights.unknown == "mean-pe"
    with pytest.warns(PrivlabWarning, match="embeddings"):
        assert victim("deit_ti_nope").model.vit.pos_embed is None


def test_a_host_that_does_not_answer_is_given_up_in_seconds() -> None:
    start = time.monotonic()
    assert not stored.reachable("http://127.0.0.1:9", seconds=1.0)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_files_in_timms_layout(tmp_path: Path, suffix: str) -> None:
    state, path = timm_state(), tmp_path / f"weights{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save({"state_dict": state}, path)
    base = victim("vit_ti", weights=path, img_size=32)
    assert_close(dict(base.model.vit.state_dict()), state, rtol=0, atol=0)
    assert base.weights.origin == f"file:weights{suffix}"


@pytest.mark.parametrize("prefix", ["", "module."])
def test_files_in_the_mjp_authors_layout(tmp_path: Path, prefix: str) -> None:
    state, unknown, path = timm_state(), torch.rand(192), tmp_path / "mjp.pth"
    torch.save({k: {prefix + n: v for n, v in s.items()} for k, s in mjp_authors(state, unknown).items()}, path)
    base = victim("vit_ti_mjp", weights=path, img_size=32)
    assert base.model.unk_embed is not None
    assert_close(base.model.unk_embed[0, 0], unknown, rtol=0, atol=0)
    assert_close(dict(base.model.vit.state_dict()), state, rtol=0, atol=0)
    assert base.weights.unknown == "trained"
    with pytest.raises(PrivlabError, match=r"E_unk.*MJP.*`_mjp`.*vit_ti_mjp"):
        victim("vit_ti", weights=path, img_size=32)


def test_privlabs_own_layout_comes_back(tmp_path: Path) -> None:
    state, unknown, path = timm_state(), torch.rand(1, 1, 192), tmp_path / "own.safetensors"
    stored.save(state | {"unk_embed": unknown}, path)
    base = victim("vit_ti_mjp", weights=path, img_size=32)
    assert_close(base.model.unk_embed, nn.Parameter(unknown, requires_grad=False), rtol=0, atol=0)
    assert base.weights.sha256 == stored.hash_of(state | {"unk_embed": unknown})


def test_weights_without_e_unk_get_the_mean_position_embedding(tmp_path: Path) -> None:
    state, path = timm_state(), tmp_path / "plain.safetensors"
    save_file(state, path)
    with pytest.warns(PrivlabWarning, match=r"E_unk.*UNTRAINED"):
        base = victim("vit_ti_mjp", weights=path, img_size=32)
    assert base.model.unk_embed is not None
    assert_close(base.model.unk_embed[0, 0].data, state["pos_embed"][0, 1:].mean(0))


@pytest.mark.slow
def test_position_embeddings_are_resized_as_timm_does(tmp_path: Path) -> None:
    state, path = timm_state(img_size=64), tmp_path / "big.safetensors"
    save_file(state, path)
    base = victim("vit_ti", weights=path, img_size=96)
    want = checkpoint_filter_fn(dict(state), timm.create_model("vit_tiny_patch16_224", img_size=96))
    assert_close(base.model.vit.pos_embed, nn.Parameter(want["pos_embed"], requires_grad=False), rtol=0, atol=0)
    assert base.preprocessing.size == (96, 96)


def test_another_resolution_is_refused_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    save_file(timm_state(img_size=64), path)
    with pytest.raises(PrivlabError, match=r"mis-shaped.*pos_embed.*\(1.*17.*192\).*\(--img-size"):
        victim("vit_ti", weights=path)


def test_a_model_of_ones_own_keeps_weights_device_and_precision(tiny_vit: Vit) -> None:
    base = victim(tiny_vit())
    assert base.model.mean.dtype == torch.float64
    assert base.model(torch.rand(1, 3, 16, 16, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(PrivlabError, match="'random'"):
        victim(tiny_vit(), weights="random")
    with pytest.raises(PrivlabError, match=r"1.*8.*channels.*9"):
        victim(tiny_vit(in_chans=9))


def test_number_of_classes_is_that_of_the_head(tmp_path: Path) -> None:
    state, path = timm_state(), tmp_path / "ten.safetensors"
    state["head.weight"], state["head.bias"] = torch.rand(10, 192), torch.rand(10)
    save_file(state, path)
    assert victim("vit_ti", weights=path, img_size=32).model.vit.num_classes == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("norm.bias"), r"missing: norm\.bias"),
        (lambda s: s.update(extra=torch.rand(1)), "unexpected: extra"),
        (lambda s: s.update({"norm.bias": torch.rand(3)}), r"mis-shaped: norm\.bias \(3,\) instead of \(192,\)"),
        (lambda s: s.update({"patch_embed.proj.weight": torch.rand(192, 3, 32, 32)}), r"mis-shaped: patch_embed\.proj"),
        (lambda s: s.update(pos_embed=torch.rand(1, 7, 192)), r"mis-shaped: pos_embed \(1, 7, 192\)"),
        (lambda s: s.update({"norm.bias": torch.ones(192).int()}), r"numbers\. Found norm\.bias of torch\.int32: save"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    state, path = timm_state(), tmp_path / "bad.safetensors"
    change(state)
    save_file(state, path)
    with pytest.raises(PrivlabError, match=message):
        victim("vit_ti", weights=path, img_size=32)


def test_integers_that_a_model_does_not_have_are_left_aside(tmp_path: Path) -> None:
    state, path = timm_state(), tmp_path / "counted.safetensors"
    save_file(state | {"bn.num_batches_tracked": torch.tensor(3)}, path)
    with pytest.warns(PrivlabWarning, match=r"bn\.num_batches_tracked is left aside"):
        made = victim("vit_ti", weights=path, img_size=32)
    assert torch.equal(made.model.vit.get_parameter("norm.bias"), state["norm.bias"])


def test_hash_covers_names_shapes_and_values() -> None:
    state = {"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    reordered = {"b": state["b"], "a": state["a"]}
    assert stored.hash_of(state) == stored.hash_of(reordered)
    others = [
        state | {"a": torch.arange(6.0).view(2, 3)},
        state | {"a": -torch.arange(6.0)},
        {"c": state["a"], "b": state["b"]},
    ]
    assert len({stored.hash_of(s) for s in [state, *others]}) == 4
    assert len(stored.hash_of(state)) == len(hashlib.sha256().hexdigest())


def test_mean_and_deviation_come_from_timms_configuration(shared: Callable[[str], Path]) -> None:
    base = victim("vit_ti", weights=shared("weights/vit_tiny_patch16_224.safetensors"))
    assert base.params()["mean"] == [0.5, 0.5, 0.5]
    state = load_file(shared("weights/vit_tiny_patch16_224.safetensors"))
    assert base.weights.sha256 == stored.hash_of(state)


@quiet
def test_every_name_is_a_victim() -> None:
    variants = {name + variant for name in ARCHITECTURES for variant in ("", "_nope", "_mjp")}
    assert set(victim_names()) == variants | set(ZOO)
    assert victim("deit_ti_mjp", weights="random", img_size=32).preprocessing.mean == (0.485, 0.456, 0.406)


def test_unknown_block_is_refused() -> None:
    with pytest.raises(PrivlabError, match="'aprl'"):
        victim("vit_ti", weights="random", block="aprl")


def test_a_model_without_classifier_has_no_gradient_of_a_label(tiny_vit: Vit, crops: Tensor) -> None:
    bare = victim(tiny_vit(num_classes=0)).model
    with pytest.raises(PrivlabError, match="classifies"):
        observe(bare, crops[:1], torch.tensor([0]), ("pos_embed",))


@quiet
@pytest.mark.parametrize(
    ("stated", "mean", "std"),
    [
        ("imagenet", IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
        ("none", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        ("0.4/0.25", (0.4, 0.4, 0.4), (0.25, 0.25, 0.25)),
        ("0.1,0.2,0.3/1,2,4", (0.1, 0.2, 0.3), (1.0, 2.0, 4.0)),
    ],
)
def test_a_victim_normalises_as_it_is_stated(stated: str, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    base = victim("vit_ti", weights="random", img_size=32)
    other = base.normalised_by(stated)
    image = torch.rand(1, 3, 32, 32)
    expected = (image - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    assert_close(other.model.normalise(image), expected)
    assert (other.preprocessing.mean, other.params()["std"]) == (mean, list(std))
    assert other.weights == base.weights
    assert other.model.vit is base.model.vit
    assert base.model.mean.flatten().tolist() == [0.5] * 3
    stated_at_once = victim("vit_ti", weights="random", img_size=32, normalisation=stated)
    assert stated_at_once.params() == other.params()


@quiet
@pytest.mark.parametrize("stated", ["half", "0.5", "0.5,0.5/0.5,0.5", "0.5/0", "nan/1", "0.5/0.5/0.5", "0.5/0.5,0,0.5"])
def test_a_normalisation_that_is_none_is_one_line(stated: str) -> None:
    with pytest.raises(PrivlabError, match=rf"or MEAN/STD with a number for each of 3 channels.* Found '{stated}'"):
        victim("vit_ti", weights="random", img_size=32, normalisation=stated)
