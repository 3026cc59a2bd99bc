"""One attack on one batch: it may come from another package, so what it returns is checked before it is used."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from privlab.base import PrivlabError, foreign_error, full_precision, memory_ended
from privlab.release import as_gradients
from privlab.threat import (
    Attack,
    Capability,
    FeatureAttack,
    FeatureObservation,
    Observation,
    Reconstruction,
    attack_declarations,
    check_capabilities,
)

T = TypeVar("T")


class ObservationChanged(PrivlabError):
    """The error of an attack that changed the model or what was released."""


@dataclass(frozen=True)
class Attempt:
    """How an attack on an observation went: the seconds it took, or why it failed.

    `beyond` says for each release why it is outside the range in which the attack is exact; None where it is within.
    """

    seconds: float = 0.0
    reason: str | None = None
    beyond: tuple[str | None, ...] = ()


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Return a result and the seconds it took, with the device's queue finished before and after."""
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return result, time.perf_counter() - start


def attempt(
    attack: Attack | FeatureAttack,
    seen: Observation | FeatureObservation,
    run: Callable[[Callable[[], Reconstruction]], tuple[Reconstruction, float]] | None = None,
    *,
    force: bool = False,
) -> tuple[Reconstruction | None, Attempt]:
    """Run an attack; return its reconstruction, or None if it failed in any way, and how it went.

    An error is not passed on: its traceback would hold the tensors of the batch.

    Args:
        attack: reads an observation of this kind.
        seen: what was released.
        run: calls its argument, and returns the result with the seconds that it took; None for `timed`.
        force: whether the attack may run without a capability that can be forced.
    """
    beyond: tuple[str | None, ...] = ()
    try:
        if Capability.AUXILIARY_IMAGES in attack.requires:  # all may be private here, and there are none then
            check_capabilities(attack, seen.grants, force=force)
        read = as_read(attack, seen)
        beyond = tuple(beyond_range(attack, release) for release in read.each())
        foreign = not type(attack).__module__.startswith("privlab.attacks.")
        with unchanged(read) if foreign else nullcontext():
            measured = run or (lambda work: timed(work, seen.model.mean.device))
            reconstruction, seconds = measured(lambda: attack_batch(attack, read))
    except Exception as error:
        return None, Attempt(reason=reason_of(attack, error), beyond=beyond)
    return reconstruction, Attempt(seconds, beyond=beyond)


def attack_batch(attack: Attack | FeatureAttack, seen: Observation | FeatureObservation) -> Reconstruction:
    """Run an attack in full precision, and check the shape, finiteness and range of the images that it returns.

    It returns an image for each image that was released; an attack for one image per release, forced on the gradient of
    several, one for each release.

    Raises:
        PrivlabError: if it returns anything else; what the attack itself raises goes on.
    """
    with full_precision():
        made: Any = attack(seen)  # pyright: ignore[reportArgumentType]  # the plan gave each its observation
    if not isinstance(made, Tensor | Reconstruction):
        raise PrivlabError(f"the attack returned {type(made).__name__} instead of a tensor or a Reconstruction")
    reconstruction = Reconstruction.of(made)
    if (found := reconstruction.images.device) != (device := seen.model.mean.device):
        raise PrivlabError(f"the attack returned images on {found} instead of {device}")
    if isinstance(seen, FeatureObservation):
        count = len(seen.features)
    else:
        alone = Capability.BATCH_SIZE_ONE in attack.requires
        count = len(next(iter(seen.gradients.values()))) * (1 if alone else seen.images_per_release)
    check_reconstruction(reconstruction.images, (count, *seen.model.image_shape))
    return reconstruction


@contextmanager
def unchanged(seen: Observation | FeatureObservation) -> Iterator[None]:
    """Put back what an attack of somebody else changes of an observation in place, as other attacks read it too.

    Raises:
        ObservationChanged: if it changed the model or what was released.
    """
    model = seen.model
    released = {"features": seen.features} if isinstance(seen, FeatureObservation) else seen.gradients
    before = [(tensor, tensor.detach().clone()) for tensor in (*model.state_dict().values(), *released.values())]
    modes = [(module, module.training) for module in model.modules()]
    followed = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        changed = [(tensor, own) for tensor, own in before if not torch.equal(tensor, own)]
        changed_modes = [(module, mode) for module, mode in modes if module.training != mode]
        changed_parameters = [(parameter, mode) for parameter, mode in followed if parameter.requires_grad != mode]
        with torch.no_grad():
            for tensor, own in changed:
                tensor.copy_(own)
        for module, mode in changed_modes:
            module.training = mode
        for parameter, mode in changed_parameters:
            parameter.requires_grad_(mode)
    if changed or changed_modes or changed_parameters:
        raise ObservationChanged(
            "the attack changed the model or what was released: let it change a copy (copy.deepcopy)"
        )


def reason_of(attack: Attack | FeatureAttack, error: Exception) -> str:
    """Return why an attack failed, in one line; of an error that is not privlab's, its kind and the line of code."""
    if (memory := memory_ended(error)) is not None:
        return f"{attack.name}: {memory}"
    if isinstance(error, PrivlabError):
        return f"{attack.name}: {error}".splitlines()[0]
    return f"{attack.name}: {foreign_error(error, type(attack).__module__)}"


def check_reconstruction(images: Tensor, shape: Sequence[int]) -> None:
    """Check that an attack returned images of this shape, b × c × h × w, in [0, 1].

    Raises:
        PrivlabError: if it returned anything else, or a value that is not finite.
    """
    if images.shape != tuple(shape):
        raise PrivlabError(f"the attack returned {tuple(images.shape)} instead of {tuple(shape)}")
    if not images.isfinite().all():
        raise PrivlabError("the attack returned values that are not finite")
    if images.min() < 0 or images.max() > 1:
        low, high = images.aminmax()
        raise PrivlabError(f"the attack returned values in [{low:.3g}, {high:.3g}] instead of [0, 1]")


def beyond_range(attack: Attack | FeatureAttack, seen: Observation | FeatureObservation) -> str | None:
    """Return why an attack runs outside the range in which it is said to be exact, from what is public; else None.

    The range is stated by the attack's own method `beyond`; an attack without that method has none. An attack that was
    forced to run without a capability that it requires is always outside its range.
    """
    if missing := attack.requires - seen.grants:
        return "forced without " + ", ".join(sorted(capability.value for capability in missing))
    return attack_declarations(attack).beyond(seen)


def as_read(attack: Attack | FeatureAttack, seen: Observation | FeatureObservation) -> Observation | FeatureObservation:
    """Return updates as the gradients of one step that they are, where an attack does not read updates themselves.

    Args:
        attack: one that reads the observation as it is, or as gradients.
        seen: what was released; other observations than updates are returned as they are.
    """
    if isinstance(seen, FeatureObservation) or seen.client is None:
        return seen
    return seen if seen.client.optimiser in attack_declarations(attack).updates_of else as_gradients(seen)
