"""A graphics card that is not there: tensors that compute on the CPU, say that they live on cuda:0, and mix with none.

A tensor of the card wraps one of the CPU. While a `Card` is in force, an operation on such tensors runs on what they
wrap, so that it gives the very same bits; whatever would fail on a real card fails here, and whatever makes Python wait
for a real card is counted, under the name of the function that asked for it.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import privlab

CUDA = torch.device("cuda", 0)
"""What Python reads as a tensor's device, and gives to factories and `.to`."""

_INNER = torch.device("meta", 1)
"""What C++ reads: autograd knows no card without a driver. Meta tensors need none, and no others have a number."""

_aten: Any = torch.ops.aten
_ROOTS = tuple(str(Path(privlab.__file__).resolve().parents[1] / room) for room in ("privlab", "attacks", "defenses"))

Waits: TypeAlias = Counter[tuple[str, str]]
"""(what Python waits for, file:function of privlab) ↦ how often."""

_WAITS = {
    _aten._local_scalar_dense.default: "item",
    _aten.is_nonzero.default: "item",
    _aten.equal.default: "item",
    _aten.nonzero.default: "nonzero",
    _aten.nonzero_numpy.default: "nonzero",
    _aten.masked_select.default: "nonzero",
    _aten.unique_dim.default: "nonzero",
    _aten._unique2.default: "nonzero",
    _aten.unique_consecutive.default: "nonzero",
    _aten.bincount.default: "nonzero",
    _aten._linalg_check_errors.default: "check",
}
"""Operations whose result Python reads from the card, or whose shape it must learn from there."""

_TAKES_SCALARS = {
    _aten.fill_.Tensor,
    _aten.masked_fill.Tensor,
    _aten.masked_fill_.Tensor,
    _aten.index_fill.int_Tensor,
    _aten.index_fill_.int_Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
"""Operations that take a CPU tensor without dimensions beside tensors of a card, as element-wise ones do."""

_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
"""Operations whose indices may be on the CPU."""


class Away(Tensor):
    """A tensor of the card; `held` is its content, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls: type["Away"], held: Tensor) -> "Away":
        """Wrap a tensor of the CPU."""
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=_INNER,
        )
        made.held = held
        return made

    device = property(lambda self: CUDA)  # pyright: ignore[reportAssignmentType]
    is_cuda = property(lambda self: True)  # pyright: ignore[reportAssignmentType]
    is_meta = property(lambda self: False)  # pyright: ignore[reportAssignmentType]
    is_cpu = property(lambda self: False)  # pyright: ignore[reportAssignmentType]

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the content without its graph; modules set it when they are moved or converted."""
        return Tensor.data.__get__(self)  # pyright: ignore[reportAttributeAccessIssue]

    @data.setter
    def data(self, new: "Away") -> None:
        Tensor.data.__set__(self, new)  # pyright: ignore[reportAttributeAccessIssue]
        self.held = new.held

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part; lists and arrays become tensors of the CPU here, which is what torch makes of them."""
        return Tensor.__getitem__(self, _index_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set a part, likewise."""
        Tensor.__setitem__(self, _index_tensors(index), value)

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a tensor of the card."""
        return torch.tensor(data, dtype=dtype or self.dtype, device=CUDA, **options)

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse, as torch does."""
        raise AssertionError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuse: NumPy and SciPy ask for it."""
        return self.numpy()

    def tolist(self) -> Any:
        """Return the values, which is a copy to the CPU."""
        return self.cpu().tolist()

    def __format__(self, spec: str) -> str:
        """Return a number as text, as torch does."""
        return format(self.item(), spec) if self.ndim == 0 else repr(self)

    def __repr__(self, **_: Any) -> str:
        """Return the content; the built-in one would compute on the card."""
        return f"Away({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: without a `Card` in force there is nothing to compute on."""
        raise RuntimeError(f"{func} on a tensor of the card, and no card is in force")


class Card(TorchDispatchMode):
    """The card: it runs operations on its tensors, and counts in `waits` what makes Python wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Waits = Counter()
        self.operations = 0

    def __enter__(self) -> "Card":
        """Put the card in force; `torch.tensor` makes a CPU tensor first and copies it, since no driver answers."""
        self._lifting = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        """Take the card out."""
        super().__exit__(*raised)
        torch._C._set_only_lift_cpu_tensors(self._lifting)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, as a card and a CPU would that share no memory."""
        kwargs = dict(kwargs or {})
        self.operations += 1
        flat = list(_leaves((*args, *kwargs.values())))
        away = {id(t.held): t for t in flat if isinstance(t, Away)}
        target, copies = kwargs.get("device"), func in (_aten._to_copy.default, _aten.copy_.default)
        if target is None:
            on_card = isinstance(args[0], Away) if copies else bool(away)
        else:
            on_card, kwargs["device"] = torch.device(target) in (CUDA, _INNER), torch.device("cpu")
        if copies:
            source = isinstance(args[func is _aten.copy_.default], Away)
            if source != on_card:
                self._note("download" if source else "upload")
        elif away:
            self._check(func, args, kwargs)
        if on_card and (draw := kwargs.get("generator")) is not None and not away.keys() & {id(draw)}:
            raise AssertionError("Expected a 'cuda' device type for generator but found 'cpu'")
        if func is _aten.empty.memory_format and target == _INNER:
            raise NotImplementedError("C++ makes no tensor from data of Python here: see `Away.new_tensor`")
        if away and (kind := _WAITS.get(func)) is not None:
            self._note(kind)
        result = func(*_map(args, _held), **{name: _map(value, _held) for name, value in kwargs.items()})
        if not on_card:
            return result
        return _map(result, lambda t: away.get(id(t)) if id(t) in away else Away(t))

    def _check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse tensors of the CPU beside those of the card, and what a card cannot compute."""
        scalars = torch.Tag.pointwise in func.tags or func in _TAKES_SCALARS
        for place, value in enumerate((*args, *kwargs.values())):
            if place == 1 and func in _INDEXING and isinstance(args[0], Away):
                self._index(func, args, value)
                continue
            for t in _leaves((value,)):
                if not isinstance(t, Away) and (t.ndim or not scalars or (place == 0 and func._schema.is_mutable)):
                    raise AssertionError(
                        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                        f"cpu! ({func}, {tuple(t.shape)})"
                    )
        if func is _aten.linalg_lstsq.default and kwargs.get("driver") not in (None, "gels"):
            raise AssertionError("torch.linalg.lstsq: `driver` must be gels on a card")
        if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self._note("nonzero")

    def _index(self, func: Any, args: Any, indices: Any) -> None:
        for t in _leaves(indices):
            if not isinstance(t, Away):
                self._note("upload")
            elif t.dtype in (torch.bool, torch.uint8) and (func is _aten.index.Tensor or args[2].numel() > 1):
                self._note("nonzero")

    def _note(self, kind: str) -> None:
        self.waits[kind, _caller()] += 1


def _caller() -> str:
    """Return file:function of the innermost function of privlab that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        name = _name_of(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "test"


@cache
def _name_of(file: str) -> str | None:
    """Return a file's path below privlab's rooms; None for a file of others."""
    path = str(Path(file).resolve())
    return path[len(str(Path(_ROOTS[0]).parent)) + 1 :] if path.startswith(_ROOTS) else None


def _leaves(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _leaves(value)


def _map(value: Any, f: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, list | tuple):
        made = [_map(each, f) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def _index_tensors(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_index_tensors(each) for each in index)
    if isinstance(index, list | np.ndarray):
        return torch.tensor(index) if len(index) else torch.zeros(0, dtype=torch.long)
    return index


def _held(t: Tensor) -> Tensor:
    return t.held if isinstance(t, Away) else t


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """Put a card into the machine for a test: cuda:0 exists, and what torch asks its driver is answered.

    Where there is a real one, it is tried instead (`pytest -m gpu`): what is cached for cuda:0 must be of one of them.
    """
    if torch.cuda.is_available():
        pytest.skip("there is a real card, which the tests marked gpu use")
    answers: dict[str, Any] = {
        **{"is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda device=None: "a card"},
        **{name: lambda *_: None for name in ("_lazy_init", "synchronize", "set_device", "empty_cache", "manual_seed")},
        "get_device_capability": lambda device=None: (9, 0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        monkeypatch.setattr(torch.optim.Optimizer, name, lambda self: None, raising=False)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda device=None: torch.get_rng_state())
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda state, device=None: torch.set_rng_state(state))
    with Card() as made:
        yield made


@pytest.fixture
def off() -> Callable[[Any], Any]:
    """Return a function that takes a result off the card, uncounted: tensors within lists, tuples and dictionaries."""

    def take(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: take(each) for name, each in value.items()}
        return _map(value, _held)

    return take


@pytest.fixture
def no_card(card: Card) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context in which the card is out of the machine."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes
