"""What an attack is called with leads to nothing private, by whatever reference one follows it."""

import gc
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from privlab.evaluation import Batch, Evaluator
from privlab.images import NamedImage
from privlab.threat import ClientData, Draws, Feed, Sent

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")

PRIVATE = (Feed, Sent, ClientData, Batch, NamedImage, Draws, Evaluator, Generator)


def successors(thing: object) -> list[Any]:
    """Return what an object refers to; of a function not the globals of its module, which are everybody's."""
    found = gc.get_referents(thing)
    if isinstance(thing, Tensor):
        found += [thing._base, thing.grad, thing.grad_fn]
    if isinstance(thing, dict):
        found += [*thing]  # the collector passes over keys that are words
    return [other for other in found if other is not getattr(thing, "__globals__", None)]


def reached(*roots: object) -> Iterator[object]:
    """Yield every object that can be reached."""
    seen: dict[int, object] = {}
    left = [*roots]
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, ModuleType):
            continue
        seen[id(thing)] = thing  # kept alive, so that no other takes its number
        yield thing
        if not isinstance(thing, type):  # what classes refer to is code
            left += successors(thing)


def secrets_of(batch: Batch) -> dict[str, Tensor]:
    """Return every private tensor by its name."""
    found = {
        "images": batch.images,
        "labels": batch.labels,
        "reference": batch.reference,
        **{name: getattr(batch.fed, name) for name in ("order", "moved", "masked_pe")},
        "fed": batch.fed.images,
    }
    if batch.sent is not None:
        found |= {"source": batch.sent.source, "columns": batch.sent.columns}
    return {name: value for name, value in found.items() if value is not None}


def found_in(call: tuple[Any, Any], batch: Batch) -> set[str]:
    """Return what of the private side an attack and its observation lead to."""
    secrets = secrets_of(batch)
    said = [word for image in batch.named for word in (image.name, image.sha256)]
    found: set[str] = set()
    for thing in reached(*call):
        if isinstance(thing, PRIVATE):
            found.add(type(thing).__name__)
        elif isinstance(thing, str) and any(word in thing for word in said):
            found.add("a name or a hash")
        elif isinstance(thing, Tensor):
            assert thing.grad_fn is None  # a graph holds what it was made of
            found |= {name for name, secret in secrets.items() if _shows(thing, secret)}
    return found


def _shows(thing: Tensor, secret: Tensor) -> bool:
    if thing.untyped_storage().data_ptr() == secret.untyped_storage().data_ptr() != 0:
        return True
    return thing.shape == secret.shape and thing.dtype == secret.dtype and torch.equal(thing, secret)


CASES: dict[str, dict[str, Any]] = {
    "gradients": {"gamma": 0.5},
    "several in one": {"gamma": 0.5, "gradient_batch": 2, "attack": ("token-separation",)},
    "features": {"defense": "row-permutation+column-permutation"},
    "update": {"client": "sgd", "setting": ("a",), "options": ("client.steps=2", "client.dropout=0.1")},
    "update of several": {
        **{"client": "sgd", "setting": ("a",), "options": ("client.images=2", "client.steps=3")},
        **{"attack": ("patch-gradient",), "block": "stock", "force": True},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_attack_is_led_to_the_truth(run: Any, case: str) -> None:
    watched = run(**CASES[case])
    assert watched.called
    (batch,) = watched.batches
    for call in watched.called:
        assert found_in(call, batch) == set(), call[0].name


def test_it_would_be_found(run: Any) -> None:
    """The walk finds each secret where it is hidden: in a module's hook, in a closure, in a view, in a key."""
    watched = run(defense="row-permutation+column-permutation", attack=("least-squares",))
    (batch,) = watched.batches
    for name, secret in secrets_of(batch).items():
        layer = torch.nn.Identity()
        layer.register_forward_hook(lambda *_, secret=secret: None)
        assert name in found_in((layer, None), batch)
        assert name in found_in((secret[:1], None), batch)
        assert name in found_in((secret.clone(), None), batch)
    for hidden in (batch, batch.feed, batch.sent, batch.named[0], batch.draws(0, "defense", 0)):
        assert found_in(((lambda hidden=hidden: hidden), None), batch)
    named = {f"cell/{batch.named[0].sha256}": 0}
    assert found_in((named, None), batch) == {"a name or a hash"}
    assert found_in((torch.nn.Identity(), torch.zeros(3)), batch) == set()
