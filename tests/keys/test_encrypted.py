"""Encrypted model files: timm loads them, they are useless without the key, and they come back bit by bit."""

import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from privlab.base import PrivlabError
from privlab.keys import (
    KeyFile,
    ModelShape,
    check_model,
    decrypt_file,
    encrypt_file,
    new_key,
    public_state,
    read_model,
    rekey_file,
    shape_of_model,
)
from privlab.patches import permute_features, restore_features
from privlab.victims import save

OWNERS = {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
OWNERS |= {f"{module}.{kind}" for module in ("norm", "head") for kind in ("weight", "bias")}


@pytest.fixture(scope="session")
def vit(tiny_vit: Callable[..., VisionTransformer]) -> VisionTransformer:
    return tiny_vit(embed_dim=16, depth=2, num_heads=4).float()


@pytest.fixture
def model(vit: VisionTransformer, tmp_path: Path) -> Path:
    """Return a file of weights, as timm would write it."""
    save_file(vit.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture(scope="session")
def stored(vit: VisionTransformer) -> KeyFile:
    return KeyFile(new_key(shape := ModelShape.of(vit)), shape)


@pytest.fixture
def sealed(model: Path, stored: KeyFile, tmp_path: Path) -> Path:
    """Return an encrypted model; its owner's file is beside it."""
    encrypt_file(read_model(model), stored, out := tmp_path / "enc.safetensors", tmp_path / "owner.safetensors")
    return out


def decrypted(sealed: Path, stored: KeyFile, owner: str | None = "owner.safetensors") -> Path:
    out = sealed.with_name("again.safetensors")
    owners = None if owner is None else sealed.with_name(owner)
    decrypt_file(read_model(sealed), stored, out, owners, overwrite=True)
    return out


def test_timm_loads_it_as_it_is(sealed: Path, vit: VisionTransformer) -> None:
    twin = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=4,
                             num_classes=7)  # fmt: skip
    twin.load_state_dict(load_file(sealed), strict=True)
    timm.models.load_checkpoint(twin, str(sealed), strict=True)
    state = vit.state_dict()
    for name, tensor in twin.state_dict().items():
        assert tensor.any() != (name in OWNERS)
        assert name in OWNERS or not torch.equal(tensor, state[name]) or torch.equal(*tensor.aminmax())


def test_the_owner_keeps_embedding_final_norm_and_head(sealed: Path, vit: VisionTransformer) -> None:
    kept = load_file(owner := sealed.with_name("owner.safetensors"))
    assert kept.keys() == OWNERS
    assert all(torch.equal(tensor, vit.state_dict()[name]) for name, tensor in kept.items())
    assert stat.S_IMODE(owner.stat().st_mode) == 0o600


def test_no_key_is_in_an_encrypted_file(sealed: Path, stored: KeyFile) -> None:
    file = read_model(sealed)
    assert file.state.keys() == load_file(sealed).keys()
    assert set(file.metadata) == {"format", "privlab_format", "privlab_key_id", "privlab_owner", "privlab_shape"}
    order = stored.key.residual
    for dtype in (torch.int16, torch.int32, torch.int64, torch.float32):
        assert order.to(dtype).numpy().tobytes() not in sealed.read_bytes()


def test_the_same_key_gives_the_same_file(sealed: Path, model: Path, stored: KeyFile, tmp_path: Path) -> None:
    encrypt_file(read_model(model), stored, tmp_path / "b", tmp_path / "c")
    assert (tmp_path / "b").read_bytes() == sealed.read_bytes()


def test_decrypting_gives_the_same_bytes(sealed: Path, model: Path, stored: KeyFile) -> None:
    assert decrypted(sealed, stored).read_bytes() == model.read_bytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_metadata_come_back(
    vit: VisionTransformer, stored: KeyFile, tmp_path: Path, dtype: torch.dtype
) -> None:
    state = {name: tensor.to(dtype) for name, tensor in vit.state_dict().items()}
    save_file(state, path := tmp_path / "m.safetensors", {"format": "pt", "licence": "of its own"})
    encrypt_file(read_model(path), stored, tmp_path / "enc.safetensors", tmp_path / "owner.safetensors")
    again = read_model(decrypted(tmp_path / "enc.safetensors", stored))
    assert "licence" not in read_model(tmp_path / "enc.safetensors").metadata
    assert again.metadata == {"format": "pt", "licence": "of its own"}
    assert all(t.dtype == dtype and torch.equal(t, state[name]) for name, t in again.state.items())
    assert again.state.keys() == state.keys()


def test_a_torch_checkpoint_comes_back_as_safetensors(vit: VisionTransformer, stored: KeyFile, tmp_path: Path) -> None:
    torch.save({"model": vit.state_dict(), "epoch": 3}, path := tmp_path / "m.pth")
    encrypt_file(read_model(path), stored, tmp_path / "enc.safetensors", tmp_path / "owner.safetensors")
    found = load_file(decrypted(tmp_path / "enc.safetensors", stored))
    assert all(torch.equal(tensor, vit.state_dict()[name]) for name, tensor in found.items())
    assert found.keys() == vit.state_dict().keys()


def test_e_unk_stays_with_the_owner(vit: VisionTransformer, stored: KeyFile, tmp_path: Path) -> None:
    state = dict(vit.state_dict()) | {"unk_embed": torch.ones(1, 1, 16)}
    save(state, path := tmp_path / "m.safetensors")
    encrypt_file(read_model(path), stored, tmp_path / "enc.safetensors", tmp_path / "owner.safetensors")
    assert "unk_embed" not in load_file(tmp_path / "enc.safetensors")
    assert decrypted(tmp_path / "enc.safetensors", stored).read_bytes() == path.read_bytes()


def test_the_embedding_may_stay_in_the_clear(model: Path, stored: KeyFile, tmp_path: Path) -> None:
    encrypt_file(read_model(model), stored, out := tmp_path / "clear.safetensors", None)
    state, plain = load_file(out), load_file(model)
    assert all(torch.equal(state[name], plain[name]) for name in OWNERS)
    assert not torch.equal(state["blocks.0.attn.qkv.weight"], plain["blocks.0.attn.qkv.weight"])
    assert decrypted(out, stored, owner=None).read_bytes() == model.read_bytes()


def test_another_key_takes_over(sealed: Path, model: Path, stored: KeyFile) -> None:
    new = KeyFile(new_key(stored.shape), stored.shape)
    rekey_file(read_model(sealed), stored, new, out := sealed.with_name("enc2.safetensors"))
    assert decrypted(out, new).read_bytes() == model.read_bytes()
    with pytest.raises(PrivlabError, match="Wrong key"):
        check_model(stored, read_model(out))


def test_what_was_trained_encrypted_is_decrypted(sealed: Path, vit: VisionTransformer, stored: KeyFile) -> None:
    """Trained weights, saved by timm without metadata: the key fits still, and the backbone has what it learnt."""
    state = {name: tensor + 1 for name, tensor in load_file(sealed).items()}
    save_file(state, sealed)
    found = load_file(decrypted(sealed, stored))
    for name, tensor in vit.state_dict().items():
        assert torch.equal(found[name], tensor if name in OWNERS else tensor + 1)


def test_a_trained_model_works_with_the_key_and_not_without(
    shared: Callable[[str], Path], photographs: Callable[[int, int], Tensor], tmp_path: Path
) -> None:
    """ViT-Ti on photographs: the same classes with the key; without it, those of chance."""
    path = shared("weights/vit_tiny_patch16_224.safetensors")
    plain, secret = (timm.create_model("vit_tiny_patch16_224").eval() for _ in range(2))
    plain.load_state_dict(load_file(path))
    stored = KeyFile(new_key(shape := ModelShape.of(plain)), shape)
    encrypt_file(read_model(path), stored, out := tmp_path / "enc.safetensors", None)
    secret.load_state_dict(load_file(out), strict=True)
    images, columns = (photographs(5, 224) - 0.5) / 0.5, stored.key.residual
    with torch.no_grad():
        expected = plain(images).argmax(1)
        Z = secret._pos_embed(secret.patch_embed(images))
        features = restore_features(secret.blocks(permute_features(Z, columns=columns)), columns=columns)
        assert torch.equal(secret.forward_head(secret.norm(features)).argmax(1), expected)
        assert (secret(images).argmax(1) == expected).sum() <= 1


# ---- shapes of named models


def test_names_and_files_have_the_same_shape(model: Path) -> None:
    assert shape_of_model(str(model), 4) == ModelShape(width=16, depth=2, heads=4, head_dim=4, hidden=64)
    assert shape_of_model("vit_b") == shape_of_model("timm:vit_base_patch16_224") == shape_of_model("deit_b_mjp")
    assert shape_of_model("vit_b") == ModelShape(width=768, depth=12, heads=12, head_dim=64, hidden=3072)


def test_an_encrypted_file_says_its_heads(sealed: Path, stored: KeyFile) -> None:
    assert shape_of_model(str(sealed)) == stored.shape


def test_public_weights_come_from_files(model: Path, vit: VisionTransformer) -> None:
    assert public_state(str(model)).keys() == vit.state_dict().keys()


# ---- what is refused


def test_heads_are_asked_for_and_only_of_files(model: Path) -> None:
    with pytest.raises(PrivlabError, match=r"--heads.*'.*model"):
        shape_of_model(str(model))
    with pytest.raises(PrivlabError, match=r"--heads.*'vit_b'"):
        shape_of_model("vit_b", 12)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet50", "needs a plain ViT, timm's VisionTransformer. Found resnet50"),
        ("timm:resnet18", "Keys are for timm's VisionTransformer. Found timm:resnet18, a ResNet."),
        ("vit_bb", "Unknown model 'vit_bb'. Did you mean vit_b"),
        ("timm:vit_bas", "Unknown timm model 'vit_bas'. Did you mean vit_base"),
    ],
)
def test_what_is_no_vit_by_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(PrivlabError, match=re.escape(message)):
        shape_of_model(name)


def test_a_wrong_key_of_the_right_shape_is_refused(sealed: Path, stored: KeyFile) -> None:
    wrong = KeyFile(new_key(stored.shape), stored.shape)
    with pytest.raises(
        PrivlabError, match=f"Wrong key: .* with key {stored.key_id[:16]}…, this is {wrong.key_id[:16]}"
    ):
        decrypted(sealed, wrong)
    assert not sealed.with_name("again.safetensors").exists()


def test_a_key_for_another_model_is_refused_by_its_fingerprint(model: Path) -> None:
    shape = ModelShape(width=16, depth=3, heads=2, head_dim=8, hidden=64)
    message = f"its fingerprint {shape.fingerprint[:16]}… .* has depth 2 instead of 3"
    with pytest.raises(PrivlabError, match=message):
        check_model(KeyFile(new_key(shape), shape), read_model(model))


def test_what_is_encrypted_is_not_encrypted_again(sealed: Path, stored: KeyFile, tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match="is encrypted already"):
        encrypt_file(read_model(sealed), stored, tmp_path / "b", None)


def test_what_is_not_encrypted_is_not_rekeyed(model: Path, stored: KeyFile, tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match="encrypted"):
        rekey_file(read_model(model), stored, stored, tmp_path / "b")


def test_the_owners_file_is_asked_for(sealed: Path, stored: KeyFile) -> None:
    with pytest.raises(PrivlabError, match="--owner"):
        decrypted(sealed, stored, owner=None)


def test_another_owners_file_is_refused(sealed: Path, stored: KeyFile) -> None:
    kept = load_file(owner := sealed.with_name("owner.safetensors"))
    save_file(kept | {"head.bias": kept["head.bias"] + 1}, owner)
    with pytest.raises(PrivlabError, match="owner"):
        decrypted(sealed, stored)


def test_one_file_cannot_be_both(model: Path, stored: KeyFile, tmp_path: Path) -> None:
    out = tmp_path / "x"
    with pytest.raises(PrivlabError, match="must be two files"):
        encrypt_file(read_model(model), stored, out, tmp_path / "." / "x", overwrite=True)
    assert not out.exists()


def test_earlier_files_stay(sealed: Path, model: Path, stored: KeyFile) -> None:
    before = sealed.read_bytes()
    with pytest.raises(PrivlabError, match="exists already"):
        encrypt_file(read_model(model), stored, sealed, None)
    assert sealed.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"privlab_format": "privlab-encrypted/2"}, "has the format privlab-encrypted/2; this privlab reads"),
        ({"privlab_shape": "{}"}, "metadata of the encrypted model .* are damaged"),
        ({"privlab_shape": "x"}, "metadata of the encrypted model .* are damaged"),
        ({"privlab_key_id": None}, "metadata of the encrypted model .* are damaged"),
    ],
)
def test_damaged_metadata_are_refused(sealed: Path, change: dict[str, str | None], message: str) -> None:
    file = read_model(sealed)
    save_file(file.state, sealed, {k: v for k, v in (dict(file.metadata) | change).items() if v})
    with pytest.raises(PrivlabError, match=message):
        read_model(sealed)
