"""`--device` on a machine without that device: one clear line, exit status 2, nothing written, by every command."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from PIL import Image

from privlab.cli import cli as root

VICTIM = ("--model", "cifar_vit", "--weights", "random")
NOWHERE = ("--server", "127.0.0.1:1", "--retry-for", "0", "--token-file", "{token}")
COMMANDS: dict[str, tuple[str, ...]] = {
    "attack": (*VICTIM, "--attack", "patch-gradient"),
    "audit update": ("{image}", "{image}", *VICTIM[:2], "--client", "sgd"),
    "audit gradients": ("{image}", *VICTIM),
    "audit features": ("{recording}", *VICTIM),
    "audit weights": ("{image}", *VICTIM[:2]),
    "table": ("mjp_table5_cifar",),
    "evaluate": (*VICTIM, "--data", "{images}", "--split", "test"),
    "train": ("classify", "--model", "cifar_vit", "--data", "{images}", "--out", "{out}"),
    "study split-privacy": (*VICTIM, "--images", "{images}", "--out", "{out}"),
    "keys finetune-study": ("--model", "cifar_vit", "--images", "{images}", "--out", "{out}"),
    "split serve": (*VICTIM, "--token-file", "{token}", "--state", "{out}"),
    "split train": (*VICTIM, "--images", "{images}", "--out", "{out}", *NOWHERE),
    "split infer": (*VICTIM, "--images", "{images}", *NOWHERE),
    "identify": ("{images}", "--candidates", "{images}"),
    "bench attack": (),
    "bench clients": (),
    "bench permutation": (),
    "bench split": (),
    "bench table": (),
    "bench train": (),
}
REFUSED = {
    "cuda": "Device 'cuda' is not there: torch sees 0 GPUs. Use --device cpu.",
    "cuda:7": "Device 'cuda:7' is not there: torch sees 0 GPUs. Use --device cpu.",
    **{
        name: f"Unknown device '{name}'. Use auto, cpu, cuda or cuda:N."
        for name in ("mps", "tpu", "gpu", "cuda:", "cuda:x", "cpu:0", "")
    },
}


def with_device(command: click.Command, name: str = "") -> Iterator[str]:
    """Yield the names of the commands that take --device."""
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for each in command.list_commands(context):
                if (found := command.get_command(context, each)) is not None:
                    yield from with_device(found, f"{name} {each}".strip())
    elif any("--device" in parameter.opts for parameter in command.params):
        yield name


def test_every_command_that_takes_a_device_is_tried() -> None:
    assert set(with_device(root)) == set(COMMANDS)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> dict[str, str]:
    """Return what commands are given, on a machine without a GPU: images of two classes, a token, and a new folder."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for part in ("train", "test"):
        for label in ("a", "b"):
            folder = tmp_path / "images" / part / label
            folder.mkdir(parents=True)
            Image.new("RGB", (32, 32), "red").save(folder / "0.png")
    (tmp_path / "recording").mkdir()
    (tmp_path / "recording" / "session.json").write_text(
        '{"format": "privlab-recording", "version": 1, "session": "s"}'
    )
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    found = {"images": tmp_path / "images", "image": tmp_path / "images/train/a/0.png", "token": token}
    found |= {"recording": tmp_path / "recording", "out": tmp_path / "out"}
    return {name: str(path) for name, path in found.items()}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_device_that_is_not_there(cli: Callable[..., Any], places: dict[str, str], command: str) -> None:
    given = [text.format(**places) for text in COMMANDS[command]]
    for name, message in REFUSED.items():
        assert cli(*command.split(), *given, "--device", name).error == message
    left = sorted(path.name for path in Path(places["out"]).parent.iterdir())
    assert [name for name in left if name not in ("cache", "images", "recording", "token")] == []
