"""The process that runs a plug-in: it forks for every call, so that no call sees what another one left behind.

It is started by `privlab.testing.plugin_process`. A first copy of it reads a call from standard input, and writes the
answer to standard output. A copy of this copy imports the plug-in, with its own limits, and confined.
"""

import json
import os
import pickle
import random
import select
import signal
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Generator, Tensor

from privlab.base import foreign_error
from privlab.testing.confined import confine, end_with
from privlab.threat import AttackDeclarations, DefenseDeclarations, Draws

MODULE = "privlab_benchmark_entry"
"""The name under which the module of an entry is imported."""

METHODS = frozenset(
    {
        *("__call__", "release", "variance", "send", "expected", "at_bound", "guarantee", "secret_bits", "remark"),
        *("withholds", "beyond", "refuses", "suspicion"),
    }
)
"""The methods of a plug-in that may be called."""

DECLARED = frozenset(
    {"name", "paper", "requires"}
    | {each.name for kind in (AttackDeclarations, DefenseDeclarations) for each in fields(kind)} - METHODS
)
"""The values that a plug-in may declare."""

_ANSWERED, _ANSWERED_WITH_MODEL = 0, 2
"""How the process that keeps a call ends; 1 after the last call."""

LENGTH = struct.Struct(">Q")
"""How the length of a message is written before it."""


@dataclass(frozen=True)
class Task:
    """What the process runs: the source of a plug-in, the limits of a call, and the paths that it may read."""

    source: str
    limits: Mapping[str, float]
    readable: tuple[str, ...]


@dataclass(frozen=True)
class Seeds:
    """The seeds of a call's generators: one for each image, and of `Draws` those of the batch and the model as well."""

    images: tuple[int, ...]
    shared: tuple[int, int] | None = None

    def generators(self) -> list[Generator] | Draws:
        """Return the generators."""
        images = [Generator().manual_seed(seed) for seed in self.images]
        if self.shared is None:
            return images
        return Draws(images, *(Generator().manual_seed(seed) for seed in self.shared))


def encode(value: Any, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401
    """Return a value as JSON; its tensors are collected by name, and referred to.

    Args:
        value: what a plug-in returned.
        tensors: is filled.

    Raises:
        TypeError: for a value that cannot be sent.
    """
    if isinstance(value, Enum):  # before texts: capabilities are both
        return {"capability": value.value}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, tuple | list | frozenset | set):
        kind = next(name for name in ("tuple", "list", "set") if isinstance(value, _KINDS[name]))
        return {kind: [encode(each, tensors) for each in value]}
    if isinstance(value, Mapping):
        return {"mapping": [[str(name), encode(each, tensors)] for name, each in value.items()]}
    if is_dataclass(value) and not isinstance(value, type):
        found = {each.name: encode(getattr(value, each.name), tensors) for each in fields(value)}
        return {"object": type(value).__name__, "fields": found}
    raise TypeError(f"{type(value).__name__} cannot be returned by a plug-in")


_KINDS: Mapping[str, Any] = {"tuple": tuple, "list": list, "set": frozenset | set}


def serve() -> None:
    """Answer calls until standard input ends. The first message is a `Task`."""
    receive, reply = os.dup(0), os.dup(1)
    _silence()
    torch.set_num_threads(1)
    torch.backends.cpu.get_cpu_capability()  # torch reads of what kind the processor is, which calls cannot
    first = _read(receive)
    if first is None:
        return
    task = pickle.loads(first)
    while (ended := _kept(task, receive, reply)) in (_ANSWERED, _ANSWERED_WITH_MODEL):
        if ended == _ANSWERED_WITH_MODEL:  # timm is imported once, and not in each forked process
            import privlab.victims.model  # noqa: F401  # pyright: ignore[reportUnusedImport]


def _kept(task: Task, receive: int, reply: int) -> int:
    """Read and answer a call in a copy of this process, and return how the copy ended.

    What a call and its answer leave in memory ends with the copy. In this process, later calls would find it there.
    """
    keeper = os.fork()
    if keeper == 0:
        ended = 1
        try:
            if (call := _read(receive)) is not None:
                with_model = b"privlab.victims" in call
                if with_model:
                    import privlab.victims.model  # noqa: F401  # pyright: ignore[reportUnusedImport]
                _write(reply, _answered(task, call, (receive, reply)))
                ended = _ANSWERED_WITH_MODEL if with_model else _ANSWERED
        finally:
            os._exit(ended)
    return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])


def _silence() -> None:
    """Make what is printed, and what is read from standard input, nothing."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)


def _read(pipe: int) -> bytes | None:
    """Return the next message; None at the end."""
    head = _exactly(pipe, LENGTH.size)
    return None if head is None else _exactly(pipe, LENGTH.unpack(head)[0])


def _exactly(pipe: int, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = os.read(pipe, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _write(pipe: int, message: bytes) -> None:
    view = memoryview(LENGTH.pack(len(message)) + message)
    while view:
        view = view[os.write(pipe, view) :]


def _answered(task: Task, call: bytes, ours: tuple[int, int]) -> bytes:
    """Return the answer to a call, which a forked process gives within the limits."""
    reader, writer = os.pipe()
    asker, forked = os.getpid(), os.fork()
    if forked == 0:
        try:
            end_with(asker)
            os.setsid()
            for pipe in (*ours, reader):
                os.close(pipe)
            _silence()  # by files that no other call shares: their flags would be a memory
            _send(writer, *_called(task, call))
        finally:
            os._exit(0)
    os.close(writer)
    limits, answer, problem = task.limits, bytearray(), ""
    until, most = time.monotonic() + limits["seconds"], int(limits["answer"])
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, until - time.monotonic()))
        if not ready or time.monotonic() > until:  # it may write without end
            problem = f"it took longer than {limits['seconds']:g} seconds"
            break
        part = os.read(reader, 1 << 20)
        if not part:
            break
        answer += part
        if len(answer) > most:
            problem = f"its answer has more than {most:,} bytes"
            break
    with suppress(OSError):
        os.killpg(forked, signal.SIGKILL)  # with what it started
    with suppress(OSError):
        os.kill(forked, signal.SIGKILL)
    _, status = os.waitpid(forked, 0)
    os.close(reader)
    if not problem and not answer:
        ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "no answer"
        problem = f"it ended with {ended}, within {limits['memory'] / 2**30:g} GiB of memory"
    return _message({"error": problem}, {}) if problem else bytes(answer)


def _limit(limits: Mapping[str, float]) -> None:
    """Limit the memory, the time, the files and the processes of this process."""
    import resource

    wanted = {
        "RLIMIT_AS": _address_space() + int(limits["memory"]),
        "RLIMIT_CPU": int(limits["seconds"]) + 1,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": 0,
        "RLIMIT_NOFILE": 64,
    }
    for name, most in wanted.items():
        with suppress(AttributeError, ValueError, OSError):  # a system may lack one
            resource.setrlimit(getattr(resource, name), (most, most))


def _address_space() -> int:
    """Return the size of this process in bytes, up to 1 MiB: the smallest limit under which it gets another page.

    Linux states it in /proc, which would also show other processes, and is therefore not there.
    """
    import mmap
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    fails, works = 0, 1 << 47
    while works - fails > 1 << 20:
        middle = (fails + works) // 2
        try:
            resource.setrlimit(resource.RLIMIT_AS, (middle, before[1]))
            mmap.mmap(-1, mmap.PAGESIZE).close()
            works = middle
        except (OSError, MemoryError):
            fails = middle
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
    return works


def _send(writer: int, answer: Any, tensors: dict[str, Tensor]) -> None:  # noqa: ANN401
    view = memoryview(_message(answer, tensors))
    while view:
        view = view[os.write(writer, view) :]


def _message(answer: Any, tensors: dict[str, Tensor]) -> bytes:  # noqa: ANN401
    text = json.dumps(answer).encode()
    return LENGTH.pack(len(text)) + text + save(tensors)


def _called(task: Task, call: bytes) -> tuple[Any, dict[str, Tensor]]:
    """Import the plug-in in what is left of this process, do what is asked, and return JSON and its tensors."""
    tensors: dict[str, Tensor] = {}
    for seed in (torch.seed, random.seed, np.random.seed):  # what draws from these is not the same twice
        seed()
    try:
        _limit(task.limits)
        confine(task.readable)
        module = ModuleType(MODULE)
        sys.modules[MODULE] = module
        exec(compile(task.source, "plug-in.py", "exec"), vars(module))  # this process exists for it
        what, *given = pickle.loads(call)
        found = _described(module) if what == "describe" else _called_of(module, what, *given)
        return {"done": encode(found, tensors)}, tensors
    except Exception as error:
        return {"error": foreign_error(error, MODULE)}, {}


def _described(module: ModuleType) -> dict[str, Any]:
    """Return what the classes of a plug-in declare: their parameters with defaults, and values and methods by name."""
    found: dict[str, Any] = {}
    for key, kind in vars(module).items():
        if not isinstance(kind, type) or kind.__module__ != MODULE or not is_dataclass(kind):
            continue
        stated = {name for base in kind.__mro__[:-1] for name in vars(base)}
        own = {name: getattr(kind, name) for name in (DECLARED | METHODS) & stated}
        own = {name: value for name, value in own.items() if value is not None}
        depending = [name for name, value in own.items() if isinstance(value, property)]
        methods = [name for name in own if name in METHODS and name not in depending]
        parameters = {each.name: each.default for each in fields(kind) if each.default is not MISSING}
        found[key] = {
            "parameters": parameters,
            "values": {name: own[name] for name in own if name not in methods and name not in depending},
            "depending": depending,
            "methods": methods,
        }
    return found


def _called_of(module: ModuleType, what: str, kind: str, options: dict[str, Any], *given: Any) -> Any:  # noqa: ANN401
    """Return the parameters of an instance ("make"), or the value of one of its attributes, which is called."""
    made = getattr(module, kind)(**options)
    if what == "make":
        return {each.name: getattr(made, each.name) for each in fields(made)}
    value = getattr(made, what)
    if what not in METHODS:
        return value
    return value(*(each.generators() if isinstance(each, Seeds) else each for each in given))
