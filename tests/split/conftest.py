"""Real servers on real sockets, in this process and in others, for a tiny victim; all of them end with the test."""

import multiprocessing
import os
import runpy
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
pytest.importorskip("grpc", reason="needs the extra: pip install 'privlab[split]'")

CHILD = str(Path(__file__).with_name("child.py"))
PATIENCE = 60.0


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """Return the makers of tiny things that the child processes use too."""
    with warnings.catch_warnings():
        return SimpleNamespace(**runpy.run_path(CHILD))


@pytest.fixture(scope="session")
def serving(tiny: SimpleNamespace) -> Callable[..., Any]:
    """Return a maker of servers in this process: (folder of the state, options) ↦ a context: (server, events)."""

    @contextmanager
    def serve(state: Path, **options: Any) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
        events: list[dict[str, Any]] = []
        settings = {"token": tiny.TOKEN, "state": state, "on_event": events.append}
        with tiny.Server(tiny.tiny(), **(settings | options)) as running:
            yield running, events

    return serve


@pytest.fixture
def server(serving: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Return a maker of servers whose state is in a folder of the test."""
    return lambda **options: serving(**({"state": tmp_path / "state"} | options))


@pytest.fixture(scope="session")
def client(tiny: SimpleNamespace) -> Callable[..., Any]:
    """Return a maker of clients of a server."""
    return lambda running, **options: tiny.Client(running.address, **({"token": tiny.TOKEN, "timeout": 30.0} | options))


@pytest.fixture
def alone(tiny: SimpleNamespace) -> Callable[..., list[float]]:
    """Return training in one process, without any permutation: (contract, steps) ↦ the loss of each step."""

    def train(contract: Any, steps: int) -> list[float]:
        model = tiny.tiny().model.to(contract.torch_dtype).requires_grad_(True)
        optimizer, losses, batches = contract.optimizer_of(model.parameters()), [], tiny.batches()
        for step in range(1, steps + 1):
            images, labels = batches[step]
            loss = F.cross_entropy(model(images.to(contract.torch_dtype)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return train


class Child:
    """A process that runs one of the jobs of child.py."""

    def __init__(self, process: BaseProcess, out: Path) -> None:
        self.process, self._out = process, out

    @property
    def out(self) -> str:
        """Return what it wrote to standard output."""
        return self._read(".out")

    @property
    def err(self) -> str:
        """Return what it wrote to standard error."""
        return self._read(".err")

    def line(self, has: str = "") -> str:
        """Wait for the first whole line of output that holds a text."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            whole = self.out.rpartition("\n")[0].splitlines()
            if found := [line for line in whole if has in line]:
                return found[0]
            assert self.process.is_alive(), f"ended with {self.process.exitcode}: {self.err}"
            time.sleep(0.01)
        raise AssertionError(f"no line with '{has}' came; {self.out} {self.err}")

    def kill(self, number: int = signal.SIGKILL) -> int | None:
        """Send a signal, and wait for the end."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        return self.wait()

    def wait(self) -> int | None:
        """Wait for the end, and return the exit status."""
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, f"still running: {self.out} {self.err}"
        return self.process.exitcode

    def _read(self, suffix: str) -> str:
        path = self._out.with_suffix(suffix)
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="session")
def forks() -> Any:
    """Return a maker of processes, forked from a fresh one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["privlab.split.client.job", "privlab.split.server.server", "privlab.cli.split.commands"]
    )
    forkserver.ensure_running()
    return context


@pytest.fixture(scope="session")
def spawning(forks: Any) -> Callable[..., Any]:
    """Return a context that yields a starter of jobs of child.py in processes of their own, which end with it."""

    @contextmanager
    def spawn(folder: Path) -> Iterator[Callable[..., Child]]:
        started: list[Child] = []

        def start(job: str, **arguments: Any) -> Child:
            out = folder / f"{job}-{len(started)}"
            settings = {"job": job, "arguments": {"out": out, **arguments}}
            child = Child(forks.Process(target=runpy.run_path, args=(CHILD, settings), daemon=True), out)
            child.process.start()
            started.append(child)
            return child

        try:
            yield start
        finally:
            for child in started:
                child.process.kill()
                child.process.join(10)
                child.process.close()

    return spawn


@pytest.fixture
def spawn(spawning: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Yield a starter of jobs of child.py in processes of their own."""
    with spawning(tmp_path) as start:
        yield start


@pytest.fixture
def same() -> Callable[[dict[str, Tensor], dict[str, Tensor]], bool]:
    """Return whether two sets of named tensors are the same, bit by bit."""
    return lambda a, b: a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def stream(tiny: SimpleNamespace) -> Callable[..., tuple[str, str]]:
    """Return a way to send raw messages in one stream: the status and the words with which the server ends it."""
    import grpc

    from privlab.split.server.server import METHOD

    def send(address: str, *messages: bytes, token: str | None = f"Bearer {tiny.TOKEN}") -> tuple[str, str]:
        metadata = () if token is None else (("authorization", token),)
        with grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)]) as channel:
            call = channel.stream_stream(METHOD)(iter(messages), metadata=metadata, timeout=30)
            try:
                replies = list(call)
            except grpc.RpcError as error:
                return error.code().name, error.details()  # pyright: ignore[reportAttributeAccessIssue]
        return "OK", f"{len(replies)} replies"

    return send
