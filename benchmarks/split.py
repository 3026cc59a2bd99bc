"""`privlab bench split`: training over loopback against training in one process, and the server's memory."""

import copy
import importlib.util
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor

from privlab.base import PrivlabError, PrivlabWarning, Progress, pick_device
from privlab.benchmarks.common import Bench, machine, peak_memory, quiet, sample_images, time_stage
from privlab.victims import Victim, victim

if TYPE_CHECKING:
    from privlab.split import Client, Learner
    from privlab.split.client.data import Batches
    from privlab.split.client.loops import StepDone

_TINY = "tiny"
_EARLY_STEP, _LATE_STEP = 100, 1000
"""Numbers of the training steps between which the server's memory must not grow."""
_SINGLE, _SPLIT = "training step, one process", "training step, split"
_TARGETS = {
    "split_over_single_throughput": "≥ 0.85",
    "split_loss_gap": "≤ 0.0001",
    "server_rss_1000_over_100": "≤ 1.05",
}


def bench_split(
    *,
    model: str,
    defense: str,
    batch: int,
    repeats: int,
    memory: bool,
    device: str,
    progress: Progress = lambda done, total: None,
) -> Bench:
    """Time training steps over a real connection and, after each, the same step in one process; medians are compared.

    The server is a process of its own on this machine. Both trainings see the same batch and begin with the same random
    weights; `split_loss_gap` is the largest difference of their losses. `server_rss_1000_over_100` is the server's peak
    memory after 1000 batches over that after 100, with a tiny model, for which a leak would be most visible.

    Args:
        model: name of the victim, or "tiny".
        defense: names of the client's defenses, joined by "+"; "none" for no defense.
        batch: number of images in the batch.
        repeats: steps that are timed, after one that warms up.
        memory: whether the server's memory is measured too.
        device: "auto", "cpu", "cuda" or "cuda:N", for both trainings and the server.
        progress: is called with the steps done and their number.

    Raises:
        PrivlabError: for a model, a defense or a device that is not there, or a server that does not start.
    """
    if importlib.util.find_spec("grpc") is None:
        raise PrivlabError("Split learning needs the extra: pip install 'privlab[split]'.")
    target = pick_device(device)
    steps, total = repeats + 1, repeats + 1 + memory * _LATE_STEP
    with quiet():
        pair = _side_by_side(_subject(model), defense, batch, steps, target, lambda n: progress(n, total))
        peaks = _peaks(lambda n: progress(steps + n, total)) if memory else {}
    medians = {name: statistics.median(each[1:]) / batch for name, each in pair.seconds.items()}
    figures = {"split_over_single_throughput": medians[_SINGLE] / medians[_SPLIT], "split_loss_gap": pair.loss_gap}
    if memory:
        figures["server_rss_1000_over_100"] = peaks[_LATE_STEP] / peaks[_EARLY_STEP]
    setup = {"model": model, "defense": defense, "batch": batch, "repeats": repeats}
    return Bench(figures, {name: _TARGETS[name] for name in figures}, medians, setup | machine(target))


def serve_child(name: str, folder: str, device: str, every: int) -> None:
    """Serve until SIGTERM; print the address, then at each checkpoint the step and this process's peak memory in kB.

    Args:
        name: name of the victim, or "tiny".
        folder: holds the file `token`; the server's state goes into `server` in it.
        device: device of the server.
        every: number of steps between two checkpoints.
    """
    from privlab.split import Server, read_token, serve

    def tell(event: dict[str, object]) -> None:
        if event["event"] == "saved":
            print(json.dumps([event["step"], peak_memory()]), flush=True)  # noqa: T201

    warnings.simplefilter("ignore", PrivlabWarning)
    token, state = read_token(Path(folder, "token")), Path(folder, "server")
    server = Server(_subject(name), token=token, state=state, checkpoint_every=every, device=device, on_event=tell)
    serve(server, started=lambda listening: print(listening.address, flush=True))  # noqa: T201


@dataclass
class _Pair:
    """Seconds and losses of steps over the wire, and of the same steps in one process."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {_SINGLE: [], _SPLIT: []})
    loss_gap: float = 0.0


class _Single:
    """Training in one process, without any defense: a step returns its loss."""

    def __init__(self, learner: "Learner", batches: "Batches") -> None:
        self.model, self.batches, self.device, self.done = copy.deepcopy(learner.model), batches, learner.device, 0
        for name, parameter in self.model.vit.named_parameters():
            parameter.requires_grad_(name not in self.model.frozen)
        self.optimizer = learner.contract.optimizer_of(p for p in self.model.parameters() if p.requires_grad)

    def step(self) -> float:
        self.done += 1
        images, labels = (each.to(self.device) for each in self.batches[self.done])
        loss = F.cross_entropy(self.model.vit(self.model.normalise(images)), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def _side_by_side(
    subject: Victim, defense: str, batch: int, steps: int, device: torch.device, progress: Callable[[int], None]
) -> _Pair:
    images = (sample_images(subject, batch) * 255).round().to(torch.uint8)
    batches, learner, pair = _batches(images), _learner(subject, defense, batch, device), _Pair()
    single = _Single(learner, batches)

    def on_step(done: "StepDone") -> None:
        pair.seconds[_SPLIT].append(done.seconds)
        losses = [done.loss]
        pair.seconds[_SINGLE].append(time_stage(lambda: losses.append(single.step()), device))
        pair.loss_gap = max(pair.loss_gap, abs(losses[0] - losses[1]))
        progress(done.step)

    _train(subject.name, learner, batches, steps, steps, on_step)
    return pair


def _peaks(progress: Callable[[int], None]) -> dict[int, int]:
    """Return the peak memory of a server, in kB, by the number of batches after which it was measured."""
    noise = torch.randint(0, 256, (32, 3, 32, 32), generator=Generator().manual_seed(0), dtype=torch.uint8)
    learner = _learner(_subject(_TINY), "none", len(noise), torch.device("cpu"))
    return _train(_TINY, learner, _batches(noise), _LATE_STEP, _EARLY_STEP, lambda done: progress(done.step))


def _train(
    name: str, learner: "Learner", batches: "Batches", steps: int, every: int, on_step: "Callable[[StepDone], None]"
) -> dict[int, int]:
    """Train with a new server, and return the peak memory of that server by step."""
    from privlab.split import Trainer

    with tempfile.TemporaryDirectory() as folder, _serve(name, Path(folder), learner.device, every) as (client, said):
        Trainer(learner, client, Path(folder)).train(batches, steps, on_step)
    return dict(json.loads(line) for line in said)


@contextmanager
def _serve(name: str, folder: Path, device: torch.device, every: int) -> "Iterator[tuple[Client, list[str]]]":
    """Run a server in a process of its own; afterwards the list holds the lines that it printed."""
    from privlab.split import Client, make_token

    token, said = make_token(folder / "token"), []
    arguments = f"{name!r}, {str(folder)!r}, {str(device)!r}, {every}"
    program = f"from privlab.benchmarks.split import serve_child; serve_child({arguments})"
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-c", program]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder)
    assert child.stdout is not None
    try:
        if not (address := child.stdout.readline().strip()):
            raise PrivlabError(f"The server did not start: {(folder / 'log').read_text().splitlines()[-1]}")
        yield Client(address, token), said
    finally:
        child.terminate()
        said += child.communicate()[0].splitlines()


def _learner(subject: Victim, defense: str, batch: int, device: torch.device) -> "Learner":
    from privlab.split import Contract, Learner
    from privlab.split.client.job import stack_of

    vit = subject.model.vit
    tokens = vit.num_prefix_tokens + vit.patch_embed.num_patches
    contract = Contract(subject.architecture, vit.embed_dim, tokens, batch, own_weights=True)
    return Learner(subject.model, stack_of(defense, ()), contract, secrets.token_hex(32), device=device)


def _batches(images: UInt8[Tensor, "n c h w"]) -> "Batches":
    """Return batches that are, at every step, all of the images with the labels 0, 1, …."""
    from privlab.split.client.data import Batches, Dataset

    names = tuple(map(str, range(len(images))))
    return Batches(Dataset(names, images, torch.arange(len(images)), "", {}), len(images))


def _subject(name: str) -> Victim:
    """Return a victim with random weights, the same in every process."""
    if name != _TINY:
        return victim(name, weights="random")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return victim(VisionTransformer(img_size=32, patch_size=4, embed_dim=128, depth=1, num_heads=4))
