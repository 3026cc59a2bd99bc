"""The audit of weights that a server sent: manipulated weights are found, and what it counts can really be read."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import privlab
from privlab.attacks.dishonest.layout import mlp_inputs
from privlab.attacks.dishonest.manipulations import MANIPULATIONS
from privlab.base import PrivlabError
from privlab.runs import sent_weights
from privlab.runs.sent_weights import PURE, WeightsAudit, audit_sent_weights
from privlab.victims import Victim, VictimModel, victim


@pytest.fixture(scope="module")
def cifar() -> Victim:
    return victim("cifar_vit")


@pytest.fixture
def images(photographs: Callable[[int, int], Tensor]) -> Tensor:
    return photographs(4, 32)


def manipulated(cifar: Victim, images: Tensor, name: str) -> VictimModel:
    model = copy.deepcopy(cifar.model)
    MANIPULATIONS[name](model, images)
    return model


def readable(audit: WeightsAudit, layer: str) -> int:
    (found,) = (each.of_one_image for each in audit.layers if each.layer == layer)
    return found


@pytest.mark.parametrize("name", ["cifar_vit", "cifar_vit_early", "cifar_vit_droppos", "cifar_vit_nope"])
def test_trained_models_are_not_suspicious(name: str, images: Tensor) -> None:
    found = audit_sent_weights(victim(name).model, images)
    assert not found.suspicious, found.verdict
    assert found.table().usual.all()


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")  # random weights
def test_the_rows_of_a_layer_of_two_inputs_are_not_compared(images: Tensor) -> None:
    """The bias of relative places is made of two coordinates, so that many of its rows are parallel."""
    relative = victim("timm:vit_relpos_small_patch16_224", weights="random", img_size=32, classes=10)
    found = audit_sent_weights(relative.model, images)
    assert not found.suspicious, found.verdict


@pytest.mark.parametrize("name", MANIPULATIONS)
def test_chosen_weights_are_suspicious(name: str, cifar: Victim, images: Tensor) -> None:
    before = {n: p.clone() for n, p in cifar.model.vit.state_dict().items()}
    found = audit_sent_weights(manipulated(cifar, images, name), images)
    assert found.suspicious
    assert found.verdict.startswith("suspicious")
    assert all(torch.equal(p, before[n]) for n, p in cifar.model.vit.state_dict().items())


def closest(rows: Tensor, inputs: Tensor) -> Tensor:
    """Return for each input how far the nearest multiple of a row or of a difference is from it, in its norm."""
    pairs = rows[:, None] - rows
    cosines = F.normalize(torch.cat([rows, pairs.flatten(0, 1)])) @ F.normalize(inputs).mT
    return (1 - cosines.abs().amax(0).square()).clamp(min=0).sqrt()


@pytest.mark.parametrize("name", ["bins", "traps", "places"])
def test_what_is_counted_can_be_read_from_the_gradient(name: str, cifar: Victim, images: Tensor) -> None:
    """The gradient of one image, by autograd: its rows and differences of rows are the tokens."""
    model = manipulated(cifar, images, name)
    one = images[:1]
    counted = readable(audit_sent_weights(model, one), "blocks.0.mlp.fc1")
    (gradient,) = torch.autograd.grad(
        F.cross_entropy(model.requires_grad_(True)(one), torch.tensor([0])), [model.vit.blocks[0].mlp.fc1.weight]
    )
    read = closest(gradient, mlp_inputs(model, one)[0, 1:]) <= (1 - PURE) / PURE
    assert 10 <= counted <= int(read.sum())


def test_a_rotation_of_the_channels_hides_rows_and_not_the_combination() -> None:
    """30 of 400 patches have a channel each, of 40 channels; the others share the rest."""
    draw = torch.Generator().manual_seed(0)
    δ = torch.zeros(4, 100, 40)
    δ.flatten(0, 1)[:30, :30] = torch.eye(30)
    δ.flatten(0, 1)[30:, 30:] = torch.randn(370, 10, generator=draw)
    rotation = torch.linalg.qr(torch.randn(40, 40, generator=draw)).Q
    patches = torch.rand(4, 100, 12, generator=draw)
    assert sent_weights._readable("layer", δ, patches, 100).of_batch == 30
    assert sent_weights._readable("layer", δ @ rotation, patches, 100).of_batch == 0
    for each in (δ, δ @ rotation):
        assert sent_weights._of_embedding(each, patches)["isolated patches / channels"] == 30 / 40


@pytest.mark.parametrize("seen", [0.0, 1.0])
def test_the_dependence_on_the_image_is_that_of_the_gradients(seen: float, images: Tensor) -> None:
    """Of an embedding that shows no pixels, images of one class have one gradient; one image has no number."""
    model = copy.deepcopy(victim("cifar_vit").model)
    model.vit.patch_embed.proj.weight.data *= seen
    found = {each.name: each for each in audit_sent_weights(model, images).statistics}["dependence on the image"]
    assert (found.value > 0.9, found.is_usual) == (bool(seen),) * 2
    assert seen or found.value < 1e-3
    assert "dependence on the image" not in {each.name for each in audit_sent_weights(model, images[:1]).statistics}


def test_factors_of_slots_are_no_dependence_on_the_image_by_slot(
    cifar: Victim, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    δ = torch.randn(5, 6, generator=draw, dtype=torch.float64)
    factors = torch.tensor([[1.0, 1, 1, 1, 1], [3.0, 1, 1, -1, 0.1]]).double()
    shown = torch.einsum("bn,nd->bnd", factors, δ)
    monkeypatch.setattr(sent_weights, "layer_gradients", lambda *given: given[-1]("patch_embed.proj", shown, shown))
    whole, by_slot = (sent_weights._dependence(cifar.model, images[:2], each) for each in (False, True))
    cosine = float(torch.nn.functional.cosine_similarity(*shown.flatten(1), dim=0))
    assert whole == pytest.approx((1 - cosine**2) ** 0.5)
    assert whole > 0.3
    assert by_slot < 1e-7


def test_a_model_that_was_trained_before_has_to_depend_more_on_the_image(cifar: Victim, images: Tensor) -> None:
    faint = copy.deepcopy(cifar.model)
    faint.vit.patch_embed.proj.weight.data *= 0.03
    for model, suspicious in ((cifar.model, False), (faint, True)):
        found = [
            privlab.audit_weights(model.vit, model="cifar_vit", images=images, pretrained=p) for p in (False, True)
        ]
        assert [each.suspicious for each in found] == [False, suspicious]


@given(st.integers(0, 99), st.integers(1, 3), st.integers(1, 4), st.floats(0.1, 10))
def test_a_pure_token_has_nine_tenths_of_a_row_or_of_a_difference(
    seed: int, images: int, tokens: int, scale: float
) -> None:
    """The shares of all tokens, row by row; neurons are in another order and scale, which changes nothing."""
    draw = torch.Generator().manual_seed(seed)
    parts = torch.randn(images * tokens, 5, generator=draw).pow(3)  # so that some tokens outweigh the others
    parts += 0.01 * parts.sign()  # no row is faint

    def shares(rows: Tensor, of: slice) -> Tensor:
        both = rows, rows[:, rows.abs().sum(0).argsort()].diff(dim=1)
        return torch.cat([terms[of].abs() / terms[of].abs().sum(0) for terms in both], 1).amax(1)

    alone, of_batch = sent_weights._pure(scale * parts[:, torch.randperm(5, generator=draw)], tokens)
    assert torch.equal(of_batch, shares(parts, slice(None)) >= PURE)
    few = [shares(parts, slice(i * tokens, (i + 1) * tokens)) for i in range(images)]
    assert torch.equal(alone, torch.cat(few) >= PURE)


@given(st.integers(0, 99), st.floats(0.0, 0.5))
def test_a_sketch_keeps_parallel_rows_and_makes_no_others(seed: int, noise: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    row = torch.randn(1, 700, generator=draw)
    rows = torch.cat([row, -3 * row, row + noise * torch.randn(1, 700, generator=draw)])
    whole, sketched = (F.normalize(each) @ F.normalize(each).mT for each in (rows, sent_weights._sketch(rows)))
    assert sketched[0, 1] == pytest.approx(-1, abs=1e-5)
    assert torch.allclose(sketched, whole, atol=0.2)
    assert torch.equal(sent_weights._sketch(rows[:, :20]), rows[:, :20])


@pytest.mark.parametrize(("size", "tested"), [(32, 2), (16, 8), (8, 8)])
def test_as_few_images_are_tested_as_have_128_patches(
    size: int, tested: int, photographs: Callable[[int, int], Tensor]
) -> None:
    vit = VisionTransformer(img_size=size, patch_size=4, depth=1, embed_dim=24, num_heads=3, num_classes=10)
    found = sent_weights.audit_of_round(victim(vit).model, photographs(9, size))
    assert {layer.patches for layer in found.layers} == {tested * (size // 4) ** 2}


def test_what_few_images_show_is_confirmed_by_more(cifar: Victim, images: Tensor) -> None:
    honest = sent_weights.audit_of_round(cifar.model, images)
    chosen = sent_weights.audit_of_round(manipulated(cifar, images, "traps"), images)
    assert (honest.suspicious, chosen.suspicious) == (False, True)
    assert (honest.layers[0].patches, chosen.layers[0].patches) == (2 * 64, len(images) * 64)


def test_the_change_since_the_last_round_is_shown_and_refuses_nothing(cifar: Victim) -> None:
    last = {name: tensor.clone() for name, tensor in cifar.model.vit.state_dict().items()}
    last["blocks.1.mlp.fc2.weight"] /= 10
    audit = privlab.audit_weights(cifar.model.vit, model="cifar_vit", last=last, limit=1)
    (change,) = (each for each in audit.statistics if each.name == "change since the last round")
    assert not audit.suspicious
    assert change.value == pytest.approx(9, rel=1e-5)  # (10 − 1) W₀ over W₀


def test_weights_that_are_no_numbers_and_no_images_are_refused(cifar: Victim, images: Tensor) -> None:
    with pytest.raises(PrivlabError, match="at least one image"):
        audit_sent_weights(cifar.model, images[:0])
    model = copy.deepcopy(cifar.model)
    model.vit.blocks[1].mlp.fc1.bias.data[3] = float("nan")
    with pytest.raises(PrivlabError, match=r"finite. Found NaN or infinity in blocks.1.mlp.fc1.bias"):
        audit_sent_weights(model, images)


@pytest.fixture
def files(cifar: Victim, images: Tensor, vit: VisionTransformer, tmp_path: Path) -> Path:
    """Return a folder with weights as a server may send them: good ones, manipulated ones and broken ones."""
    state = {name: tensor.clone() for name, tensor in cifar.model.vit.state_dict().items()}
    save_file(state, tmp_path / "good.safetensors")
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, tmp_path / "wrapped.pth")
    save_file({name: tensor.half() for name, tensor in state.items()}, tmp_path / "half.safetensors")
    save_file(dict(vit.state_dict()), tmp_path / "other.safetensors")
    save_file(dict(manipulated(cifar, images, "bins").vit.state_dict()), tmp_path / "bins.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:9999])
    adapters = {f"base_model.model.blocks.0.attn.qkv.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}
    save_file(adapters, tmp_path / "adapter_model.safetensors")
    return tmp_path


MISTAKES = {
    "other": "other.safetensors holds the weights of a ViT (D = 64, 2 blocks), and this model is a ViT (D = 128, ",
    "cut": "cannot be read as weights; it may be truncated",
    "adapter_model": "holds LoRA's adapters, and peft's adapter_config.json is not in its folder",
    "nothing": "nothing.safetensors",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_files_that_are_not_this_model_are_refused_in_one_line(files: Path, cli: Any, name: str) -> None:
    assert MISTAKES[name] in cli("audit", "weights", files / f"{name}.safetensors", "--model", "cifar_vit").error


def test_the_command_says_what_is_unusual_and_fails_if_asked(files: Path, cli: Any) -> None:
    ask = ("--model", "cifar_vit", "--limit", "2")
    good = cli(
        "audit",
        "weights",
        files / "wrapped.pth",
        *ask,
        "--fail-on-leak",
        "--reference-weights",
        files / "good.safetensors",
    )
    assert (good.status, good.err) == (0, "")
    assert "nothing unusual was found" in good.out
    bad = cli("audit", "weights", files / "bins.safetensors", *ask, "--fail-on-leak")
    assert bad.status == 3
    assert "can be read from blocks.0.mlp.fc1" in " ".join(bad.out.split())
    told = cli("audit", "weights", files / "bins.safetensors", *ask, "--json").json
    assert told["suspicious"]
    assert {row["what"] for row in told["statistics"] if not row["usual"]} >= {"parallel rows", "largest bias"}


def test_half_precision_is_audited_as_the_model_has_it(files: Path, cli: Any) -> None:
    found = cli("audit", "weights", files / "half.safetensors", "--model", "cifar_vit", "--limit", "2", "--json")
    assert not found.json["suspicious"]
    assert "half.safetensors has weights of torch.float16; they are audited in" in found.err


def test_only_the_images_that_are_tested_are_read(cifar: Victim) -> None:
    class Counted:
        read = 0

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, place: int) -> tuple[Tensor, int]:
            self.read += 1
            return torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(place)), 0

    data = Counted()
    privlab.audit_weights(cifar.model.vit, model="cifar_vit", images=data)
    assert data.read <= 2 * sent_weights.MOST_IMAGES  # the first one's values are checked when data are opened
