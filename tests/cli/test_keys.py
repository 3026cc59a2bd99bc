"""`privlab keys`: every command as a user runs it, and each mistake in one line."""

import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from privlab import victim
from privlab.cli import _status
from privlab.keys import load_key, residual_only, save_key
from privlab.victims import save

Cli = Callable[..., object]


@pytest.fixture
def model(state: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """Return a file with the weights of the tiny victim."""
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture(scope="module")
def made(state: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a key, a model that it encrypted, and the owner's file; not to be written to."""
    folder = tmp_path_factory.mktemp("keys")
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    named = {name: str(folder / f"{name}.safetensors") for name in ("model", "enc", "owner")}
    key = str(folder / "a.key")
    assert _status(["keys", "new", "--model", "vit_ti", "--out", key]) == 0
    files = ["--out", named["enc"], "--owner", named["owner"]]
    assert _status(["keys", "encrypt", named["model"], "--key", key, *files]) == 0
    return folder


@pytest.fixture
def key(made: Path, tmp_path: Path) -> Path:
    """Return a key of ViT-Ti."""
    return Path(shutil.copy(made / "a.key", tmp_path))


@pytest.fixture
def encrypted(made: Path, tmp_path: Path) -> Path:
    """Return an encrypted model, with its owner's file beside it."""
    shutil.copy(made / "owner.safetensors", tmp_path)
    return Path(shutil.copy(made / "enc.safetensors", tmp_path))


def facts(result: object) -> dict[str, object]:
    assert result.status == 0
    return json.loads(result.out)


# ---- keys


@pytest.mark.parametrize(("space", "bits"), [("full", 97639.7), ("paper", 298.6), ("residual", 1184.4)])
def test_a_new_key_states_its_bits(cli: Cli, tmp_path: Path, space: str, bits: float) -> None:
    result = facts(cli("keys", "new", "--model", "vit_ti", "--space", space, "--out", tmp_path / "k", "--json"))
    assert (result["space"], result["bits"]) == (space, bits)
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
    assert load_key(tmp_path / "k").key.space == space


def test_a_file_gets_a_key_with_its_heads(cli: Cli, model: Path, tmp_path: Path) -> None:
    result = facts(cli("keys", "new", "--model", model, "--heads", 3, "--out", tmp_path / "k", "--json"))
    assert (result["width"], result["depth"], result["heads"], result["head_dim"]) == (192, 12, 3, 64)


def test_a_trained_victim_of_the_package_gets_a_key_which_is_found(cli: Cli, tmp_path: Path) -> None:
    """Its name is that of a victim, of which timm knows none."""
    key, encrypted = tmp_path / "k", tmp_path / "e.safetensors"
    assert cli("keys", "new", "--model", "cifar_vit", "--out", key).status == 0
    save(victim("cifar_vit").model.vit.state_dict(), tmp_path / "m.safetensors")
    assert (
        cli("keys", "encrypt", tmp_path / "m.safetensors", "--key", key, "--out", encrypted, "--keep-embedding").status
        == 0
    )
    told = cli("keys", "recover", encrypted, "--base", "cifar_vit", "--key", key, "--json")
    assert json.loads(told.out)["residual_recovered"] == 1.0


def test_show_says_everything_but_the_key(cli: Cli, key: Path) -> None:
    shown = facts(cli("keys", "show", key, "--json"))
    stored = load_key(key)
    assert shown["fingerprint"] == stored.shape.fingerprint
    assert shown["key_id"] == stored.key_id
    assert not any(isinstance(value, list | dict) for value in shown.values())
    table = cli("keys", "show", key).out
    assert f"key id              {stored.key_id}\n" in table
    assert "residual bits       1184.4\n" in table


def test_check_says_that_all_is_well(cli: Cli, key: Path, model: Path, encrypted: Path) -> None:
    for what, key_id in ((encrypted, "ok"), (model, "not encrypted"), ("vit_ti", "not encrypted")):
        result = facts(cli("keys", "check", key, "--model", what, "--json"))
        assert (result["checksum"], result["fingerprint"], result["key_id"]) == ("ok", "ok", key_id)


# ---- models


def test_round_trip(cli: Cli, model: Path, key: Path, encrypted: Path, tmp_path: Path) -> None:
    timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10).load_state_dict(load_file(encrypted))
    again, owner = tmp_path / "again.safetensors", tmp_path / "owner.safetensors"
    assert cli("keys", "decrypt", encrypted, "--key", key, "--owner", owner, "--out", again).status == 0
    assert again.read_bytes() == model.read_bytes()


def test_the_embedding_may_stay(cli: Cli, model: Path, key: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "enc", tmp_path / "again.safetensors"
    result = facts(cli("keys", "encrypt", model, "--key", key, "--out", out, "--keep-embedding", "--json"))
    assert result["owner"] == "clear"
    out = out.rename(tmp_path / "enc.safetensors")
    assert cli("keys", "decrypt", out, "--key", key, "--out", again).status == 0
    assert again.read_bytes() == model.read_bytes()


def test_rekey(cli: Cli, model: Path, key: Path, encrypted: Path, tmp_path: Path) -> None:
    new, out, again = tmp_path / "b.key", tmp_path / "enc2.safetensors", tmp_path / "again.safetensors"
    cli("keys", "new", "--model", encrypted, "--out", new)
    assert cli("keys", "rekey", encrypted, "--key", key, "--new-key", new, "--out", out).status == 0
    assert "Wrong key" in cli("keys", "check", key, "--model", out).error
    owner = tmp_path / "owner.safetensors"
    assert cli("keys", "decrypt", out, "--key", new, "--owner", owner, "--out", again).status == 0
    assert again.read_bytes() == model.read_bytes()


def test_recover_finds_the_key_and_writes_it(cli: Cli, model: Path, key: Path, encrypted: Path, tmp_path: Path) -> None:
    """The recovered key is the key: its file decrypts, its key id is the same."""
    out = tmp_path / "recovered.key"
    result = facts(cli("keys", "recover", encrypted, "--base", model, "--key", key, "--out", out, "--json"))
    assert result["residual_recovered"] == 1
    assert (result["confidence_min"], result["agreement"]) == (1, 1)
    assert load_key(out).key_id == load_key(key).key_id
    assert "residual recovered" not in cli("keys", "recover", encrypted, "--base", model).out


def test_help_says_plainly_what_this_is(cli: Cli) -> None:
    assert "This is obfuscation." in cli("keys", "--help").out


# ---- mistakes


def test_a_model_that_lost_its_metadata_is_decrypted_with_a_warning(
    cli: Cli, model: Path, key: Path, encrypted: Path, tmp_path: Path
) -> None:
    save_file(load_file(encrypted), encrypted)
    again, owner = tmp_path / "again.safetensors", tmp_path / "owner.safetensors"
    result = cli("keys", "decrypt", encrypted, "--key", key, "--owner", owner, "--out", again)
    assert result.status == 0
    assert "names no key: whether this one is right cannot be checked" in result.err
    assert again.read_bytes() == model.read_bytes()


def test_wrong_keys(cli: Cli, model: Path, key: Path, encrypted: Path, tmp_path: Path) -> None:
    other, small = tmp_path / "b.key", tmp_path / "s.key"
    cli("keys", "new", "--model", "vit_ti", "--out", other)
    cli("keys", "new", "--model", "vit_s", "--out", small)
    arguments = ("--owner", tmp_path / "owner.safetensors", "--out", tmp_path / "x")
    assert "Wrong key" in cli("keys", "decrypt", encrypted, "--key", other, *arguments).error
    error = cli("keys", "decrypt", encrypted, "--key", small, *arguments).error
    assert "key is for another model" in error
    assert "width 192 instead of 384, heads 3 instead of 6, hidden 768 instead of 1536" in error
    assert "key is for another model" in cli("keys", "check", key, "--model", "vit_s").error
    assert not (tmp_path / "x").exists()


def test_key_files(cli: Cli, key: Path, model: Path, tmp_path: Path) -> None:
    assert "No key file at" in cli("keys", "show", tmp_path / "none").error
    assert "exists already" in cli("keys", "new", "--model", "vit_ti", "--out", key).error
    assert "cannot be written" in cli("keys", "new", "--model", "vit_ti", "--out", key / "k").error
    key.chmod(0o644)
    assert "(mode 644): run chmod 600" in cli("keys", "show", key).error
    model.chmod(0o600)
    assert "is not a key file of privlab" in cli("keys", "show", model).error
    key.chmod(0o600)
    key.write_bytes(key.read_bytes()[:-9])
    assert "corrupted or truncated" in cli("keys", "show", key).error
    assert cli("keys", "new", "--model", "vit_ti", "--out", key, "--overwrite").status == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new", "--model", "vit_tii"), "Unknown model 'vit_tii'. Did you mean vit_ti"),
        (("new", "--model", "vit_ti", "--space", "pape"), "Unknown key space 'pape'. Did you mean paper?"),
        (("new", "--model", "none.safetensors", "--heads", "3"), "No weights file at 'none.safetensors'"),
        (("new", "--model", "MODEL"), "do not say how many heads they have: give --heads"),
        (("new", "--model", "MODEL", "--heads", "7"), "cannot have 7 heads"),
        (("new", "--model", "vit_ti", "--heads", "3"), "--heads is for files"),
        (("encrypt", "MODEL", "--key", "KEY"), "--owner FILE"),
        (("encrypt", "MODEL", "--key", "KEY", "--keep-embedding", "--owner", "o"), "--keep-embedding"),
        (("encrypt", "KEY", "--key", "KEY", "--keep-embedding"), "is refused"),
        (("recover", "MODEL", "--base", "MODEL"), "give --heads"),
        (("recover", "MODEL", "--heads", "3", "--base", "vit_ti"), "vit_tiny_patch16_224"),
    ],
)
def test_other_mistakes(
    cli: Cli, model: Path, key: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    paths = {"MODEL": str(model), "KEY": str(key)}
    assert message in cli("keys", *(paths.get(a, a) for a in arguments), "--out", tmp_path / "out").error


def test_a_missing_tensor_is_named(cli: Cli, model: Path, key: Path, tmp_path: Path) -> None:
    state = load_file(model)
    del state["blocks.5.mlp.fc1.bias"]
    save_file(state, model)
    error = cli("keys", "encrypt", model, "--key", key, "--keep-embedding", "--out", tmp_path / "x").error
    assert error == "The weights lack a tensor that other blocks have: 'blocks.5.mlp.fc1.bias'."


def test_a_broken_key_of_the_right_format_is_refused(cli: Cli, key: Path, tmp_path: Path) -> None:
    shape = load_key(key).shape
    save_key(residual_only(torch.zeros(192, dtype=torch.int64), shape), shape, tmp_path / "b")
    assert "order 'residual' is not a permutation" in cli("keys", "show", tmp_path / "b").error
