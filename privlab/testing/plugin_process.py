"""A plug-in in a separate process: classes that replace its classes here, and what crosses the pipe.

The process is given what a call is about and nothing else: a defense the images, gradients or features that it must
defend, one image at a time where it does not mix them, an attack an observation. It never holds the private image of an
attack, a metric or a score. What it answers is read as JSON and safetensors, and checked. Admission and a measured run
make the same calls: float64 with the precision of float32, and seeds in place of generators.
"""

import importlib.util
import io
import json
import math
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError, one_line
from privlab.testing.confined import has_seccomp, landlock_version
from privlab.testing.plugin_child import DECLARED, LENGTH, METHODS, MODULE, Seeds, Task
from privlab.threat import Capability, Draws, Effects, Feed, Guarantee, Reconstruction, Sent, defense_declarations

_OBJECTS = {each.__name__: each for each in (Feed, Sent, Reconstruction, Effects, Guarantee)}
"""What a plug-in may return besides plain values and tensors."""

_TEXT = 1 << 20
"""The most bytes of an answer besides its tensors."""

_NAME = 500
"""The most characters of a name."""

_DEVICES = ("/dev/null", "/dev/urandom")
"""The devices that may be read."""

_STARTING = 120.0
"""Seconds that the process may take for its start, besides those of a call."""


@dataclass(frozen=True)
class Limits:
    """Of a call: its seconds, the bytes of memory that it may take, and the most bytes of its answer."""

    seconds: float = 600.0
    memory: int = 4 * 2**30
    answer: int = 2**30


@cache
def confinement() -> str:
    """Return in a clause how the process of a plug-in is confined on this system, besides its limits."""
    works = {
        "bubblewrap": _bubblewrap() is not None,
        "Landlock": landlock_version() > 0,
        "seccomp": has_seccomp(),
    }
    by = " and ".join(name for name, found in works.items() if found)
    if not by:
        return "not confined: files, the network and other processes are open to it. Install bubblewrap (bwrap)"
    files = works["bubblewrap"] or works["Landlock"]
    others = works["bubblewrap"] or works["seccomp"]
    return (
        f"confined by {by}: {'no files but those of Python and the system' if files else 'YOUR FILES ARE OPEN TO IT'}, "
        f"{'no network, no other processes' if others else 'THE NETWORK AND OTHER PROCESSES ARE OPEN TO IT'}"
    )


@cache
def _bubblewrap() -> str | None:
    found = shutil.which("bwrap")
    if found is None:
        return None
    tried = subprocess.run(
        [found, "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, check=False, timeout=20
    )
    return found if tried.returncode == 0 else None


@cache
def _readable() -> tuple[str, ...]:
    """Return what the process of a plug-in may read: the system's programs, Python, and where packages are.

    It is not all of `sys.path`, which begins with the folder where Python was started.
    """
    package = Path(__file__).parents[1]
    own = [package, *(linked.resolve() for linked in package.iterdir() if linked.is_symlink())]
    needed = [importlib.util.find_spec(name) for name in ("torch", "timm", "numpy", "safetensors")]
    installed = [Path(spec.origin).parents[1] for spec in needed if spec is not None and spec.origin is not None]
    system = map(Path, ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"))
    return tuple(sorted({str(path) for path in (*system, Path(sys.prefix), Path(sys.base_prefix), *own, *installed)}))


def _command() -> list[str]:
    """Return the command of the process: Python without the user's settings, in bubblewrap where that works."""
    path = [entry for entry in sys.path if entry and Path(entry).exists()]
    # without a temporary directory, libraries may still ask for its name
    code = "import sys, json, tempfile; tempfile.tempdir = '/tmp'; sys.path[:] = json.loads(sys.argv[1])"
    serve = "from privlab.testing.plugin_child import serve; serve()"
    python = [sys.executable, "-I", "-c", f"{code}; {serve}", json.dumps(path)]
    if (bubblewrap := _bubblewrap()) is None:
        return python
    binds = [word for place in _readable() for word in ("--ro-bind-try", place, place)]
    # of /proc only what torch chooses its kernels by: it would show the other processes, and how many calls there were
    binds += ["--ro-bind-try", "/proc/cpuinfo", "/proc/cpuinfo"]
    confined = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    empty = ["--dev", "/dev", "--dir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return [bubblewrap, *confined, *binds, *empty, *python]


class _Pickler(pickle.Pickler):
    """Writes tensors as copies of what they show: a view would bring the whole batch that it is a view of."""

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401
        if isinstance(obj, nn.Parameter):
            return nn.Parameter, (obj.data, obj.requires_grad)
        if type(obj) is Tensor:
            return torch.from_numpy, (obj.detach().cpu().contiguous().numpy().copy(),)
        return NotImplemented


def _pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


@dataclass(eq=False)
class Plugin:
    """The source of a plug-in, and the process that runs it, which is started by the first call."""

    source: str
    limits: Limits = Limits()
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def ask(self, *call: Any) -> Any:  # noqa: ANN401
        """Return what the plug-in answers to a call.

        Raises:
            PrivlabError: for its error, and if it breaks a limit, or answers in another form.
        """
        process = self._started()
        try:
            assert process.stdin is not None
            message = _pickled(call)
            process.stdin.write(LENGTH.pack(len(message)) + message)
            process.stdin.flush()
            answer = self._read(process)
        except (OSError, EOFError):
            self.close()
            raise PrivlabError("The plug-in ended its process.") from None
        try:
            return _decoded(answer)
        except PrivlabError:
            raise
        except Exception as error:
            _refuse(f"an answer that cannot be read ({type(error).__name__})")

    def close(self) -> None:
        """End the process; the next call starts another one.

        Nothing is read to its end: what the process started, bubblewrap's own child too, may hold the pipe open.
        """
        if (process := self._process) is not None:
            self._process = None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            process.wait()

    def stand_ins(self) -> dict[str, type[Any]]:
        """Return a class for each dataclass of the plug-in, by its name, which asks the process for everything."""
        described = self.ask("describe")
        with _refusing():
            return {name: _stand_in(self, name, **given) for name, given in described.items()}

    def _started(self) -> subprocess.Popen[bytes]:
        if sys.platform == "win32":
            raise PrivlabError("A plug-in needs a process that can fork. Use Linux, macOS or WSL.")
        if self._process is None:
            environment = {"PATH": "/nowhere", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": "/tmp"}
            self._process = subprocess.Popen(
                _command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd=tempfile.gettempdir() if _bubblewrap() is None else "/",
                start_new_session=True,
                bufsize=0,
            )
            message = _pickled(Task(self.source, asdict(self.limits), (*_readable(), *_DEVICES)))
            assert self._process.stdin is not None
            self._process.stdin.write(LENGTH.pack(len(message)) + message)
        return self._process

    def _read(self, process: subprocess.Popen[bytes]) -> bytes:
        until = time.monotonic() + self.limits.seconds + _STARTING
        (length,) = LENGTH.unpack(self._exactly(process, LENGTH.size, until))
        if length > self.limits.answer + 2 * _TEXT:
            raise EOFError
        return self._exactly(process, length, until)

    @staticmethod
    def _exactly(process: subprocess.Popen[bytes], count: int, until: float) -> bytes:
        assert process.stdout is not None
        found = bytearray()
        while len(found) < count:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
            part = process.stdout.read(min(count - len(found), 1 << 20)) if ready else b""
            if not part:
                raise EOFError
            found += part
        return bytes(found)


def _refuse(what: str) -> NoReturn:
    raise PrivlabError(f"The plug-in returned {what}.")


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuse an answer whose use fails, since a part of it has another kind or shape."""
    try:
        yield
    except PrivlabError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        _refuse(f"an answer that cannot be used ({one_line(error, kind=True)})")


def _decoded(answer: bytes) -> Any:  # noqa: ANN401
    """Return the value of an answer, in which nothing is believed.

    Raises:
        PrivlabError: for the error that it states, and for another form.
    """
    (length,) = LENGTH.unpack(answer[: LENGTH.size])
    if length > min(_TEXT, len(answer)):
        _refuse("a text that is too long")
    start = LENGTH.size + length
    said = json.loads(answer[LENGTH.size : start])
    if "error" in said:
        raise PrivlabError(f"The plug-in failed: {' '.join(str(said['error']).split())[:300]}")
    return _value(said["done"], load(answer[start:]))


def _value(said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    """Return a value from JSON, as `plugin_child.encode` writes it."""
    ((kind, given), *rest) = said.items()
    if kind == "value" and not isinstance(given, list | dict):
        return given
    if kind == "tensor":
        return tensors[str(given)]
    if kind == "capability":
        return Capability(given)
    if kind in ("tuple", "list", "set"):
        return {"tuple": tuple, "list": list, "set": frozenset}[kind](_value(each, tensors) for each in given)
    if kind == "mapping":
        return {str(name): _value(each, tensors) for name, each in given}
    if kind == "object" and given in _OBJECTS:
        return _OBJECTS[given](**{str(name): _value(each, tensors) for name, each in dict(rest)["fields"].items()})
    _refuse(f"a {kind}: '{str(given)[:60]}'")


def as_exchanged(tensor: Tensor) -> Tensor:
    """Return real numbers as a plug-in gets them, float64 with the precision of float32, and others as they are."""
    return tensor.detach().float().double() if tensor.is_floating_point() else tensor.detach()


class StandIn:
    """What the classes have in common that replace those of a plug-in."""

    plugin: Plugin

    def of_process(self, what: str, *given: Any) -> Any:  # noqa: ANN401
        """Return an attribute of the plug-in's own instance, or what its method returns."""
        options = {name: getattr(self, name) for name in type(self).__dataclass_fields__}  # pyright: ignore[reportAttributeAccessIssue]
        return self.plugin.ask(what, type(self).__name__, options, *given)


def _stand_in(
    plugin: Plugin,
    name: str,
    parameters: Mapping[str, Any],
    values: Mapping[str, Any],
    depending: Sequence[str],
    methods: Sequence[str],
) -> type[Any]:
    """Return a class with the parameters of a plug-in's class, what it declares, and methods that ask the process.

    Args:
        plugin: has the process.
        name: that of the class.
        parameters: their defaults, by name.
        values: what the class declares.
        depending: the names of declarations that depend on the parameters.
        methods: the names of its methods.
    """
    _check_described(name, parameters, values, depending, methods)

    def made(self: StandIn) -> None:
        for key, actual in self.of_process("make").items():
            if key in parameters:
                object.__setattr__(self, key, actual)

    space: dict[str, Any] = {**values, "plugin": plugin, "__post_init__": made, "__module__": MODULE}
    space |= {each: property(lambda self, each=each: self.of_process(each)) for each in depending}
    of_images = "__call__" in methods and "requires" not in values
    for each in methods:
        if each == "__call__":
            space[each] = _refusing()(_on_images if of_images else _attacked)
        else:
            space[each] = _refusing()(_METHODS.get(each) or _plain(each))
    own = [(key, type(default), field(default=default)) for key, default in parameters.items()]
    return make_dataclass(name, own, bases=(StandIn,), namespace=space, frozen=True)


def _check_described(
    name: str,
    parameters: Mapping[str, Any],
    values: Mapping[str, Any],
    depending: Sequence[str],
    methods: Sequence[str],
) -> None:
    """Raise PrivlabError if the process describes a class that cannot be; the arguments are those of `_stand_in`."""
    stated = {*values, *depending}
    odd = [*stated - DECLARED, *{*methods} - METHODS, *stated & {*methods}]
    odd += [each for each in (name, *parameters) if not each.isidentifier() or each.startswith("_")]
    odd += [each for each in parameters if each in {*stated, *methods, "plugin", "of_process"}]
    odd += [each for each in ("name", "paper") if not isinstance(values.get(each, ""), str)]
    odd += [each for each in ("name", "paper") if len(values.get(each, "")) > _NAME]
    if odd:
        _refuse(f"a class with a declaration that cannot be: {odd[0][:60]!r}")


def _plain(name: str) -> Callable[..., Any]:
    def call(self: StandIn, *given: Any) -> Any:  # noqa: ANN401
        return self.of_process(name, *given)

    return call


def _seed(draw: Generator) -> int:
    """Draw a seed: the process gets no generator, whose state would say what is drawn elsewhere."""
    return int(torch.randint(2**63 - 1, (1,), generator=draw, device=draw.device))


def _like(made: object, wanted: Tensor, name: str) -> Tensor:
    """Return a tensor that a plug-in returned in the type and on the device of another, whose shape it must have."""
    if not isinstance(made, Tensor) or made.shape != wanted.shape:
        found = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        _refuse(f"{name} of {found} instead of {tuple(wanted.shape)}")
    if made.is_floating_point() != wanted.is_floating_point() or not made.isfinite().all():
        _refuse(f"{name} of {made.dtype} with values that are not finite, or of another kind than {wanted.dtype}")
    return made.to(wanted)


def _by_release(
    self: StandIn, what: str, tensors: Mapping[str, Tensor], seeds: Sequence[int] = ()
) -> dict[str, Tensor]:
    """Return what a method makes of gradients, which are sent one release at a time; a name may be left out."""
    found: list[dict[str, Tensor]] = []
    count = len(next(iter(tensors.values()))) if tensors else 0
    for i in range(count):
        one = {name: as_exchanged(tensor[i : i + 1]) for name, tensor in tensors.items()}
        made = self.of_process(what, one, *([Seeds((seeds[i],))] if seeds else ()))
        if not isinstance(made, Mapping):
            _refuse(f"{type(made).__name__} instead of gradients by name")
        if odd := made.keys() - tensors.keys():
            _refuse(f"{', '.join(sorted(odd))[:60]}, which it was not given")
        found.append(dict(made))
    if len({tuple(sorted(each)) for each in found}) > 1:
        _refuse("other parameters of one image than of another")
    names = [name for name in tensors if found and name in found[0]]
    kind = torch.bool if what == "at_bound" else None
    wanted = {name: tensors[name] if kind is None else tensors[name].to(kind) for name in names}
    return {name: _like(torch.cat([each[name] for each in found]), wanted[name], name) for name in names}


def _release(self: StandIn, gradients: Mapping[str, Tensor], draws: Sequence[Generator]) -> dict[str, Tensor]:
    return _by_release(self, "release", gradients, [*map(_seed, draws)])


def _of_released(what: str) -> Callable[..., Any]:
    def call(self: StandIn, released: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _by_release(self, what, released)

    return call


def _on_images(self: StandIn, images: Tensor, patch: int, draws: Sequence[Generator]) -> Feed:
    """Return what the plug-in feeds: image by image, where one does not depend on another."""
    declared: Any = defense_declarations(self)  # pyright: ignore[reportArgumentType]
    seeds = [*map(_seed, draws)]
    if declared.mixes or declared.per == "batch":
        return _fed(self.of_process("__call__", as_exchanged(images), patch, Seeds(tuple(seeds))), images)
    own = seeds * len(images) if declared.per == "model" else seeds
    made = [
        _fed(self.of_process("__call__", as_exchanged(images[i : i + 1]), patch, Seeds((own[i],))), images[i : i + 1])
        for i in range(len(images))
    ]
    if len({(each.masked_pe is None, each.replacement) for each in made}) > 1:
        _refuse("masks of one image and none of another")
    masked = None if made[0].masked_pe is None else torch.cat([m for each in made if (m := each.masked_pe) is not None])
    fed, order, moved = (torch.cat([getattr(each, name) for each in made]) for name in ("images", "order", "moved"))
    return Feed(fed, order, moved, masked, made[0].replacement)


def _fed(made: object, images: Tensor) -> Feed:
    if not isinstance(made, Feed):
        _refuse(f"{type(made).__name__} instead of Feed")
    masked = None if made.masked_pe is None else made.masked_pe.to(images.device)
    shown = _like(made.images, images, "images")
    return Feed(shown, made.order.to(images.device), made.moved.to(images.device), masked, made.replacement)


def _send(self: StandIn, sent: Sent, draws: Draws) -> Sent:
    given = Sent(as_exchanged(sent.features), sent.source, sent.prefix, sent.columns, sent.key_bits)
    seeds = Seeds(tuple(map(_seed, draws.images)), (_seed(draws.batch), _seed(draws.model)))
    made = self.of_process("send", given, seeds)
    if not isinstance(made, Sent):
        _refuse(f"{type(made).__name__} instead of Sent")
    device = sent.features.device
    columns = None if made.columns is None else made.columns.to(device)
    features = _like(made.features, sent.features, "features")
    return Sent(features, _like(made.source, sent.source, "source"), made.prefix, columns, made.key_bits)


def _attacked(self: StandIn, seen: Any) -> Reconstruction:  # noqa: ANN401
    made = self.of_process("__call__", seen)
    if isinstance(made, Tensor) and made.ndim == 4:
        made = Reconstruction(made.to(seen.model.mean))
    if not isinstance(made, Reconstruction):
        _refuse(f"{type(made).__name__} instead of images, b × c × h × w")
    device = seen.model.mean.device
    moved = {
        name: value.to(device)
        for name in ("rows", "columns", "loose", "tokens", "tokens_sure")
        if (value := getattr(made, name)) is not None
    }
    return Reconstruction(made.images.to(seen.model.mean), **moved)


def _suspicion(self: StandIn, model: Any, images: Tensor, labels: Tensor, last: Any) -> float:  # noqa: ANN401
    found = self.of_process("suspicion", model, images, labels, last)
    if isinstance(found, bool) or not isinstance(found, int | float) or math.isnan(found):
        _refuse(f"{found!r:.60} instead of a number")
    return float(found)


_METHODS: Mapping[str, Callable[..., Any]] = {
    "suspicion": _suspicion,
    "release": _release,
    "send": _send,
    **{name: _of_released(name) for name in ("variance", "expected", "at_bound")},
}
"""How methods are called whose tensors are sent in part."""
