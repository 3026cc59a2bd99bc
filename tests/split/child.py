"""What the tests run in processes of their own, and the tiny things that both sides use; run by `runpy`.

`main` is the command line, `serve` a server with the tiny victim, `train` a client of it.
"""

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer

from privlab.split.client.client import Client, Remote
from privlab.split.client.data import Batches, Dataset
from privlab.split.client.job import stack_of
from privlab.split.client.learner import Learner
from privlab.split.client.loops import Trainer
from privlab.split.protocol.checkpoint import read
from privlab.split.protocol.contract import Contract
from privlab.split.server.server import Server
from privlab.split.server.server import serve as run_server
from privlab.split.server.session import Limits
from privlab.victims import Victim, victim

TOKEN = "t" * 40
SECRET = "5e" * 32
STEPS = 11  # 3 epochs of 20 images in batches of 6, less one step


def tiny() -> Victim:
    """Return a victim of two blocks: 3 × 16 × 16 pixels, 17 tokens of width 32, seven classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=7)
    return victim(vit)


def batches() -> Batches:
    """Return 20 images of noise with random labels, in batches of 6."""
    rng = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (20, 3, 16, 16), generator=rng, dtype=torch.uint8)
    labels = torch.randint(0, 7, (20,), generator=rng)
    return Batches(Dataset(tuple(map(str, range(20))), images, labels, "noise", {}), size=6)


def contract(defense: str = "none", **options: object) -> Contract:
    """Return terms for the tiny victim; its backbone is brought where the columns are permuted."""
    settings = {"dtype": "float32", "optimizer": "adamw", "lr": 1e-2, "own_weights": "column" in defense}
    return Contract("VisionTransformer", 32, 17, 6, **(settings | options))  # pyright: ignore[reportArgumentType]


def learner(defense: str = "row-permutation", options: tuple[str, ...] = (), **terms: object) -> Learner:
    """Return a fresh client's half."""
    return Learner(tiny().model, stack_of(defense, options), contract(defense, **terms), SECRET)


def _redirected(out: Path) -> None:
    """Let standard output and error go to files, and be killed by SIGTERM and SIGINT as usual."""
    for number, path in ((1, out.with_suffix(".out")), (2, out.with_suffix(".err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)


def main(out: Path, arguments: Sequence[str], settings: str, folder: str) -> None:
    """Run the command line in a folder, with settings of its own."""
    _redirected(out)
    os.chdir(folder)
    os.environ |= {"XDG_CONFIG_HOME": settings, "HF_HUB_OFFLINE": "1"}
    sys.argv = ["privlab", *map(str, arguments)]
    from privlab.cli import main as command_line

    command_line()


def serve(out: Path, state: Path, port: int = 0, every: int = 4, **options: object) -> None:
    """Serve the tiny victim; the first line of the output is the address."""
    _redirected(out)
    limits = Limits(**options)  # pyright: ignore[reportArgumentType]
    server = Server(
        tiny(), token=TOKEN, state=state, port=port, checkpoint_every=every, limits=limits,
        on_event=lambda event: sys.stderr.write(f"{event}\n"),
    )  # fmt: skip
    run_server(server, started=lambda s: print(s.address, flush=True))  # noqa: T201


def train(out: Path, address: str, folder: Path, stop_at: int = 0, half: str = "forward", **options: float) -> None:
    """Train, or go on from the file in the folder; at step `stop_at` say so and hang before its forward or backward."""
    _redirected(out)
    asked = getattr(Remote, half)

    def hang(remote: Remote, step: int, tensor: torch.Tensor) -> torch.Tensor:
        if step == stop_at:
            print("there", flush=True)  # noqa: T201
            signal.pause()
        return asked(remote, step, tensor)

    setattr(Remote, half, hang)
    local, file, session = learner(), folder / "client.safetensors", None
    if file.exists():
        local.restore(file)
        session = read(file)[1]["session"]
    print("started", flush=True)  # noqa: T201
    Trainer(local, Client(address, TOKEN, **options), folder, session=session).train(
        batches(),
        STEPS,
        lambda done: print("step", flush=True),  # noqa: T201
    )


warnings.simplefilter("ignore")
if "job" in globals():
    globals()[globals()["job"]](**globals()["arguments"])
