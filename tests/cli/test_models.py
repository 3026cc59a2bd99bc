"""`privlab models`: what is at hand, what was imported, and whether weights are those of their card."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from privlab.victims import ZOO, hash_of, victim
from privlab.victims import catalogue as shelf
from privlab.victims import named as victims


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep imported models away from the user's."""
    monkeypatch.setenv("PRIVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def checkpoint(tmp_path: Path, state: dict[str, Tensor]) -> Path:
    """Return weights of vit_ti at 32 pixels, ten classes, as the MJP authors save theirs."""
    theirs = {f"module.{name}": tensor for name, tensor in state.items() if name != "pos_embed"}
    draw = torch.Generator().manual_seed(3)
    theirs["module.pos_embed.weight"] = torch.cat([state["pos_embed"][0], torch.randn(1, 192, generator=draw)])
    theirs["module.dlocr.layers.0.weight"] = torch.zeros(2, 192)
    torch.save(
        {"model": {name.removeprefix("module."): tensor for name, tensor in theirs.items()}}, tmp_path / "mjp.pth"
    )
    return tmp_path / "mjp.pth"


@pytest.mark.slow
def test_an_import_is_used_by_its_path(
    cli: Callable[..., Any], checkpoint: Path, cache: Path, state: dict[str, Tensor]
) -> None:
    told = cli("models", "import", checkpoint, "--as", "vit_ti_mjp", "--img-size", 32)
    assert (told.status, told.err) == (0, "")
    path = Path(told.out.strip())
    assert path.parent == cache
    card = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert (card["source"], card["left_out"]) == ("mjp.pth", ["dlocr.layers.0.weight"])
    assert (card["fits"]["unk_embed"], card["fits"]["classes"], card["fits"]["input"]) == ("trained", 10, [3, 32, 32])
    subject = victim("vit_ti_mjp", weights=path, img_size=32)
    assert subject.weights.sha256 == card["sha256"] == hash_of(load_file(path))
    assert victim("vit_ti_mjp", weights=checkpoint, img_size=32).weights.sha256 == card["sha256"]
    torch.testing.assert_close(subject.model.vit.state_dict()["head.weight"], state["head.weight"])
    assert cli("models", "import", checkpoint, "--as", "vit_ti_mjp", "--img-size", 32).out.strip() == str(path)
    shown = json.loads(cli("models", "show", path.stem, "--json").out)
    assert (shown["matches"], shown["card"], shown["origin"]) == (True, card, "imported")
    assert path.stem in cli("models", "list").out


def test_changed_weights_are_said_to_differ_from_their_card(cli: Callable[..., Any], checkpoint: Path) -> None:
    made = json.loads(cli("models", "import", checkpoint, "--as", "vit_ti_mjp", "--img-size", 32, "--json").out)
    state = load_file(made["file"])
    state["head.bias"] = state["head.bias"] + 1
    save_file(state, made["file"])
    told = cli("models", "show", made["file"])
    assert told.status == 2
    assert "are not those of the card" in told.err
    assert json.loads(cli("models", "show", made["file"], "--json").out)["matches"] is False
    Path(made["file"]).with_suffix(".json").unlink()
    assert json.loads(cli("models", "show", made["file"], "--json").out)["matches"] is None


def test_the_list_holds_zoo_and_hub_and_asks_no_network(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the list asked a network")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("socket.socket.connect", refuse)
    cache.mkdir(parents=True)
    (cache / "odd.safetensors").write_bytes(b"")
    (cache / "odd.json").write_text("[")
    rows = {row["name"]: row for row in json.loads(cli("models", "list", "--json").out)}
    assert set(ZOO) < set(rows)
    assert (rows["deit_s"]["origin"], rows["deit_s"]["file"]) == ("timm", None)
    assert "cannot be read" in rows["odd"]["about"]
    assert rows["cifar_vit"]["architecture"] == "cifar_vit"


def test_a_shipped_model_is_found_by_name(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = {"a": torch.ones(3)}
    save_file(state, tmp_path / "cifar_vit.safetensors")
    (tmp_path / "cifar_vit.json").write_text(json.dumps({"sha256": hash_of(state), "recipe": "classify"}))
    for module in (shelf, victims):
        monkeypatch.setattr(
            module, "shipped_file", lambda name: tmp_path / f"{name}.safetensors" if name == "cifar_vit" else None
        )
    shown = cli("models", "show", "cifar_vit")
    assert shown.status == 0
    assert "classify" in shown.out
    assert cli("models", "fetch", "cifar_vit").out.strip() == str(tmp_path / "cifar_vit.safetensors")
    absent = json.loads(cli("models", "show", "cifar_vit_nope", "--json").out)
    assert (absent["file"], absent["matches"]) == (None, None)


def test_a_card_is_shown_line_by_line(cli: Callable[..., Any], tmp_path: Path) -> None:
    """What a card holds by name is indented below its name, and no line is wider than a terminal."""
    save_file(state := {"a": torch.ones(3)}, tmp_path / "m.safetensors")
    card = {"sha256": hash_of(state), "plan": {"steps": 4, "clip": None}, "mean": [0.5, 0.25], "skipped": []}
    card["data"] = {"split": "train", "notes": ["one, and", "two"]}
    (tmp_path / "m.json").write_text(json.dumps(card))
    told = cli("models", "show", tmp_path / "m.safetensors")
    assert told.status == 0
    _, below = told.out.split("matches: true\ncard:\n")
    assert below.splitlines() == [
        f"  sha256: {hash_of(state)}",
        *("  plan:", "    steps: 4", "    clip: —", "  mean: [0.5, 0.25]", "  skipped: —"),
        *("  data:", "    split: train", "    notes:", "      - one, and", "      - two"),
    ]
    assert max(len(line) for line in below.splitlines()) <= 80
    (tmp_path / "m.json").unlink()
    assert "matches: —\ncard: —\n" in cli("models", "show", tmp_path / "m.safetensors").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fetch", "deit_s"), "HF_HUB_OFFLINE forbids a download"),
        (("fetch", "deit_ss"), "Unknown model 'deit_ss'. Did you mean"),
        (("show", "cifar_vti"), "Unknown model 'cifar_vti'. Did you mean"),
        (("import", "gone.pth", "--as", "vit_ti"), "No weights file at 'gone.pth'."),
        (("import", "random", "--as", "vit_ti"), "import takes a file. Found 'random'"),
        (("import", "{checkpoint}", "--as", "vit_tii"), "Unknown model 'vit_tii'."),
        (("import", "{checkpoint}", "--as", "vit_ti_mjp"), "--img-size resizes position embeddings"),
        (("import", "{checkpoint}", "--as", "vit_ti", "--img-size", "32"), "hold E_unk of MJP"),
        (
            ("import", "{checkpoint}", "--as", "deit_s_mjp", "--img-size", "32"),
            "this model is a ViT-S (D = 384, 12 blocks).",
        ),
    ],
)
def test_mistakes_are_one_line(
    cli: Callable[..., Any], checkpoint: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in cli("models", *(argument.format(checkpoint=checkpoint) for argument in arguments)).error


def test_a_zoo_model_that_is_not_here_is_one_line(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(victims, "shipped_file", lambda name: None)
    assert (
        "holds no trained weights of cifar_vit; `privlab train` makes some" in cli("models", "fetch", "cifar_vit").error
    )


def test_a_store_that_cannot_be_written_is_one_line(cli: Callable[..., Any], checkpoint: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    error = cli("models", "import", checkpoint, "--as", "vit_ti_mjp", "--img-size", 32).error
    assert "The model cannot be kept in" in error
