"""Checks of a defense on a small victim: whether its release is what it declares and nothing else."""

import copy
import math
import pickle
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError, PrivlabWarning, foreign_error, full_precision
from privlab.evaluation import completed
from privlab.images import Preprocessing, open_images
from privlab.release import AnyDefense
from privlab.testing.claims import Check, OnFeatures, OnImages, largest_difference
from privlab.testing.gradient_claims import OnGradients
from privlab.threat import FeatureDefense, GradientDefense, defense_declarations
from privlab.victims import VictimModel, victim

Case = OnImages | OnFeatures | OnGradients

MODEL = "vit_ti_mjp"
"""The victim on which a defense is tested; it has E_unk, which MJP needs."""
MOST_IMAGES = 8
"""The most images that a check takes; each client has its own generator."""
MOST_CHANGE = 1e-9
"""The largest change by rounding of a client's own release when the batch changes, relative to its size."""


def check_defense(
    defense: Any,  # noqa: ANN401
    model: VictimModel | None = None,
    images: Float[Tensor, "n c h w"] | None = None,
    *,
    seed: int = 0,
) -> tuple[Check, ...]:
    """Measure whether a defense releases what it declares and nothing else.

    The checks are

    - `contents`: the release has its form and nothing else; if this fails, checks that need the form are left out;
    - `acts-as`, if the class says what it does: the release agrees with that;
    - `order`, `rows` or `variance`: the release agrees with what is declared; attacks would ignore a release whose
      variance is `overstated`;
    - `gradients`: they are those of the defended model, by finite differences;
    - `effect`: how much is changed; this never fails;
    - `same-draw`: the same draw gives the same release;
    - `neighbours`: a client's release does not depend on another's image, unless the class says `mixes = True`;
    - `random-state`: the defense draws only from the generators that it is given;
    - `untouched`: nothing that it is given is changed;
    - `control`: without the defense, the image leaks.

    Args:
        defense: an instance: a defense on images, features or gradients; what its class does not declare has a default.
        model: the victim, copied in float64; by default two blocks of a random ViT-Ti at 64 pixels, with E_unk.
        images: three images in [0, 1] or more: those of clients, and a last one that takes the second one's place; by
            default three photographs.
        seed: seed of the draws and of the directions of finite differences.

    Raises:
        PrivlabError: if it is not an instance of a dataclass or cannot be run, or the victim is one that it, or the
            control, does not fit.
    """
    defense = completed(defense, "defense")
    model = small_victim() if model is None else model
    images = photographs(model) if images is None else images
    if images.shape[1:] != model.image_shape or not 3 <= len(images) <= MOST_IMAGES:
        expected = (3, *model.image_shape)
        raise PrivlabError(f"The check takes three images, of shape {expected}. Found {tuple(images.shape)}.")
    case = case_of(defense, model, images, seed)
    with same_random_state(), full_precision(), quiet():
        return tuple(_checks(case, model))


def case_of(defense: AnyDefense, model: VictimModel, images: Float[Tensor, "n c h w"], seed: int = 0) -> Case:
    """Return a defense with the clients that it is tried on, in float64.

    Args:
        defense: the defense.
        model: the victim, which is copied.
        images: those of clients, and a last one that takes the second one's place.
        seed: seed of the draws and of the directions of finite differences.
    """
    given = (copy.deepcopy(model).double(), images.detach().cpu().double(), seed)
    if isinstance(defense, GradientDefense):
        return OnGradients(defense, *given)
    return OnFeatures(defense, *given) if isinstance(defense, FeatureDefense) else OnImages(defense, *given)


def small_victim(
    model: str = MODEL, weights: str = "random", img_size: int | None = 64, depth: int | None = 2, seed: int = 0
) -> VictimModel:
    """Return a victim with only its first blocks, because the checks are about algebra and not about accuracy.

    Args:
        model: name of the victim.
        weights: "random", or others that `victim` takes.
        img_size: side of the input in pixels, a multiple of the patches' side; None keeps the victim's own.
        depth: number of the first blocks that are kept; None keeps all.
        seed: seed of random weights.
    """
    with quiet():
        found = copy.deepcopy(victim(model, weights=weights, img_size=img_size, seed=seed).model)
    found.vit.blocks = found.vit.blocks[:depth]
    return found


def photographs(model: VictimModel, count: int = 3) -> Float[Tensor, "n c h w"]:
    """Return the first bundled photographs, three or `count`, resized to the input of the victim."""
    colours, *size = model.image_shape
    cut = Preprocessing((size[0], size[1]), (0.5,) * colours, (0.5,) * colours, 1.0, "bicubic")
    return torch.stack([cut(image.pixels) for image in open_images("samples", limit=count) if image.pixels])


def _checks(case: Case, own: VictimModel) -> Iterator[Check]:
    """Yield every check of a defense; those that need the form of the release are left out if the form is wrong."""
    inputs = case.inputs()
    given = {name: value.clone() for name, value in inputs.items()}
    weights = {name: value.clone() for name, value in own.state_dict().items()}
    states = _random_states()
    with _running(case):
        release: Any = case.run(given, case.draws())
    drawn = [name for name, state in _random_states().items() if state != states[name]]
    changed = [*_changed_tensors(inputs, given), *_changed_tensors(weights, own.state_dict())]
    with _running(case):
        problems = list(case.problems(release))
    text = "; ".join(problems[:3]) or f"faults; it is {case.contents}, and nothing else"
    yield Check("contents", float(len(problems)), 0.0, text)
    same = None
    if not problems:
        with _running(case):
            yield from [*case.acts_as(), *case.checks(release)]
        yield _effect(case, release)
        yield (same := _same_draw(case, release))
        yield _neighbours(case, release)
    if same is None or same.passed:  # type checkers draw from it as well: it counts only if releases differ
        drawn = [name for name in drawn if name != "random"]
    yield Check.none("random-state", sorted(drawn), "global generators that were drawn from")
    yield Check.none("untouched", sorted(changed), "tensors given to it, and changed")
    yield case.control()


def _effect(case: Case, release: Any) -> Check:  # noqa: ANN401
    """Return how far a release is from an undefended one; it never fails, because noise of `std=0` changes nothing."""
    made, plain = case.tensors(release), case.without_defense()
    added = [value for name, value in made.items() if name not in plain]
    kept = {name: value for name, value in made.items() if name in plain}
    value = max([largest_difference(kept, plain), *(float(value.any()) for value in added)])
    nothing = "nothing was changed: with these options the defense does nothing here"
    return Check("effect", value, 0.0, "change of the release by the defense" if value else nothing, "≥")


def _same_draw(case: Case, release: Any) -> Check:  # noqa: ANN401
    """Return the difference of two releases with the same draw, under different global generators."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    with _running(case):
        again: Any = case.run(case.inputs(), case.draws())
    value = largest_difference(case.tensors(release), case.tensors(again))
    return Check("same-draw", value, 0.0, "largest difference of two releases with the same draw")


def _neighbours(case: Case, release: Any) -> Check:  # noqa: ANN401
    """Return the change of the first client's release when the image and the draw of the second change."""
    with _running(case):
        other: Any = case.run(case.inputs(neighbour=True), case.draws(neighbour=True))
    limit, text = MOST_CHANGE, "change of one's own release with another image in the batch"
    if defense_declarations(case.defense).mixes:
        limit, text = math.inf, "change of one's own release; it mixes images, as it says"
    return Check("neighbours", largest_difference(case.own(release), case.own(other)), limit, text)


def _changed_tensors(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that were changed, added or removed."""
    kept = before.keys() & after.keys()
    return [name for name in {*before, *after} if name not in kept or not torch.equal(before[name], after[name])]


@contextmanager
def _running(case: Case) -> Iterator[None]:
    """Make one line of an error of the defense.

    Raises:
        PrivlabError: if it raises anything.
    """
    try:
        yield
    except PrivlabError:
        raise
    except Exception as error:
        raise PrivlabError(
            f"Defense '{case.defense.name}' does not run: {foreign_error(error, type(case.defense).__module__)}"
        ) from error


def _random_states() -> dict[str, object]:
    """Return the states of all global generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "random": random.getstate(),
        "numpy.random": pickle.dumps(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "torch.cuda": [state.tolist() for state in cuda],
    }


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore all global generators afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def quiet() -> AbstractContextManager[object]:
    """Suppress privlab's warnings, which weaken a verdict on an attack: here only the figures count."""
    return warnings.catch_warnings(action="ignore", category=PrivlabWarning)
