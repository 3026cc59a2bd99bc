"""Checks of an attack or a metric: what it lacks, before a run finds it."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_origin, get_type_hints

import torch
from torch import Tensor

from privlab.attacks import attacks
from privlab.base import PrivlabError, check_name, configure, foreign_error, read_options
from privlab.defenses import BlockScrambling, Blur, CutMix, GradientNoise, RowPermutation, Undefended, defenses
from privlab.evaluation import Batch, Clients, ObservationChanged, attack_batch, completed, unchanged, unread
from privlab.evaluation.batch import Seen
from privlab.images import NamedImage
from privlab.metrics import METRICS, Metric
from privlab.release import released_parameters
from privlab.testing.claims import Check
from privlab.testing.defenses import (
    check_defense,
    photographs,
    quiet,
    same_random_state,
    small_victim,
)
from privlab.threat import (
    AttackDeclarations,
    Capability,
    Client,
    FeatureObservation,
    Features,
    Gradient,
    GradientDefense,
    Release,
    Stack,
    Update,
    attack_declarations,
)
from privlab.victims import VictimModel
from privlab.victims.model import april_twin

RANK = 40
"""The width of adapters in which a release is tried: above twice the tokens of the small victim."""


def check_any(
    name: str,
    options: Sequence[str] = (),
    *,
    gamma: float | None = None,
    seed: int = 0,
    **victim: Any,  # noqa: ANN401
) -> tuple[Check, ...]:
    """Check a defense, an attack or a metric by its name; where a name has two meanings, it is the first of these.

    Args:
        name: of the defense, attack or metric; no stack of defenses with "+".
        options: of it, [NAME.]KEY=VALUE, as `--set` takes them; metrics have none.
        gamma: share of the patches that is shuffled, for the defenses `jigsaw` and `mjp`.
        seed: of the victim's random weights, of the draws, and of the directions of finite differences.
        **victim: `model`, `weights`, `img_size` and `depth`, as `small_victim` takes them.

    Raises:
        PrivlabError: for an unknown name, an option of something else, and as the check of each.
    """
    if "+" in name:
        raise PrivlabError(f"Defenses are admitted one at a time. Found '{name}'.")
    check_name("defense, attack or metric", name, [*defenses(), *attacks(), *METRICS])
    kind: Any = defenses().get(name)
    if gamma is not None and (kind is None or "gamma" not in {field.name for field in fields(kind)}):
        raise PrivlabError(f"--gamma is for jigsaw and mjp. Found {gamma} for {name}: leave it out.")
    if kind is not None:
        read_options(options, [kind])
        defense = configure(kind, options, {} if gamma is None else {"gamma": gamma})
        return check_defense(defense, small_victim(**victim, seed=seed), seed=seed)
    if (kind := attacks().get(name)) is not None:
        if problems := list(_missing_declarations(name, kind)):
            return (_declared(problems),)
        read_options(options, [kind])
        return check_attack(configure(kind, options), seed=seed, **victim)
    if options:
        raise PrivlabError(f"Metrics take no options. Found '{options[0]}' for {name}: leave it out.")
    return check_metric(METRICS[name])


def check_attack(attack: Any, *, seed: int = 0, **victim: Any) -> tuple[Check, ...]:  # noqa: ANN401
    """Try an attack on a small victim, as a run would.

    `declared`: its name, paper, capabilities, parameters and what else it declares are there, and of their types.
    `granted`: some release of the victim grants what it requires: plain gradients, those behind a defense that it
    knows, updates, or features. `returns`: it returns an image in [0, 1] for each that was released. `untouched`: it
    changes neither the victim nor the release. `same-seen`: the same observation gives the same images. After a failed
    check what depends on it is left out.

    Args:
        attack: an instance; what its class does not declare has a default.
        seed: of the weights and of the release's draws.
        **victim: as in `check_any`.

    Raises:
        PrivlabError: if it is not an instance of a dataclass, or the victim cannot be made.
    """
    attack = completed(attack, "attack")
    declared = _declared(list(_missing_declarations(attack.name, type(attack))))
    if not declared.passed:
        return (declared,)
    model = small_victim(**victim, seed=seed)
    with same_random_state(), quiet():
        return (declared, *_try_attack(attack, model, seed))


def _declared(problems: Sequence[str]) -> Check:
    return Check("declared", float(len(problems)), 0.0, "; ".join(problems[:3]) or "faults of what it says")


def check_metric(metric: Metric) -> tuple[Check, ...]:
    """Try a metric on photographs: each against itself, against another, and against noise.

    `returns`: one real value per image. `range`: all are within the range that it states. `direction`: an image against
    itself leaks at least as much as against anything else. `alone`: an image's value does not depend on the batch.
    `untouched`: it changes no image that it is given.

    Args:
        metric: with a function; one that needs trained weights cannot be tried.

    Raises:
        PrivlabError: if it needs trained weights, or fails on images of 64 × 64 pixels.
    """
    if metric.function is None:
        raise PrivlabError(f"Metric '{metric.name}' needs trained weights, and cannot be admitted.")
    with same_random_state():
        return tuple(_check_metric(metric, metric.function))


def _missing_declarations(name: str, kind: type[Any]) -> Iterator[str]:
    """Yield what an attack's class lacks, or says in another type."""
    if not is_dataclass(kind):
        yield "it is not a dataclass"
        return
    hints = get_type_hints(AttackDeclarations).items()
    optional = {attribute: get_origin(hint) or hint for attribute, hint in hints}
    forms = {"name": str, "paper": str, "requires": frozenset} | optional
    found = {attribute: getattr(kind, attribute, None) for attribute in forms}
    for attribute, form in forms.items():
        if not isinstance(found[attribute], form) and not (found[attribute] is None and attribute in optional):
            yield f"{attribute} must be a {form.__name__}. Found {found[attribute]!r}"
    if isinstance(found["name"], str) and found["name"] != name:
        yield f"its name is '{found['name']}', and it is installed as '{name}'"
    requires = found["requires"] or frozenset()
    if odd := [each for each in requires if not isinstance(each, Capability)]:
        yield f"requires must hold capabilities. Found {odd[0]!r}"
    if not found["parameters"] and Capability.RELEASED_FEATURES not in requires:
        yield "parameters must name the gradients that it reads, or be ('*',)"


def _try_attack(attack: Any, victim: VictimModel, seed: int) -> Iterator[Check]:  # noqa: ANN401
    """Yield what comes of an attack on the first release that grants what it requires."""
    missing: list[frozenset[Capability]] = []
    for seen in _releases(victim, _filter_for(attack), seed):
        lacking = attack.requires - seen.grants
        if not lacking and _reads(attack, seen):
            yield Check("granted", 0.0, 0.0, "capabilities that it requires, and this victim cannot grant")
            yield from _run(attack, seen)
            return
        missing.append(lacking)
    least = min(missing, key=len)
    what = ", ".join(sorted(capability.value for capability in least)) or "a gradient that it reads is not released"
    yield Check("granted", float(max(len(least), 1)), 0.0, f"not granted by this victim: {what}")


def _reads(attack: Any, seen: Seen) -> bool:  # noqa: ANN401
    """Return whether an attack reads a release: features, or gradients or updates that have what it names."""
    if isinstance(seen, FeatureObservation):
        return True
    released = {*attack_declarations(attack).parameters} <= {"*", *released_parameters(seen.model)}
    return released and unread(attack, seen.client) is None


def _filter_for(attack: Any) -> GradientDefense:  # noqa: ANN401
    """Return a defense of gradients that an attack knows: noise, unless it knows others alone."""
    known = [defenses()[name]() for name in sorted(attack_declarations(attack).knows) if name in defenses()]
    filters = {each.name: each for each in known if isinstance(each, GradientDefense)}
    return filters.get(GradientNoise.name) or next(iter(filters.values()), GradientNoise())


def _releases(victim: VictimModel, noisy: GradientDefense, seed: int) -> Iterator[Seen]:
    """Yield each observation on which an attack may be tried; it is made when it is asked for."""
    shown, labels = photographs(victim).to(victim.mean), torch.arange(2) % victim.vit.num_classes
    batch = Batch([NamedImage(f"image-{i}", str(i), None) for i in range(2)], shown[:2], labels)

    def seen(release: Release, *defense: Any, model: VictimModel = victim) -> Seen:  # noqa: ANN401
        clients = Clients(release, Stack(defense), seed, 0, "")
        return clients.observe(model, batch, public=shown[2:])

    yield seen(Gradient())
    yield seen(Gradient(), model=april_twin(victim))
    yield seen(Gradient(), noisy)
    for client in (Client(), Client("adamw"), Client(trains="adapters", rank=RANK), Client(clients=2, steps=2)):
        yield seen(Update(client))
    for defense in (Undefended(), RowPermutation(), Blur(sigma=1.0), CutMix()):
        yield seen(Features(), defense)
    yield seen(Gradient(), BlockScrambling())


def _run(attack: Any, seen: Seen) -> Iterator[Check]:  # noqa: ANN401
    try:
        with unchanged(seen):
            images = attack_batch(attack, seen).images
    except ObservationChanged as error:
        yield Check("untouched", 1.0, 0.0, str(error))
        return
    except Exception as error:
        yield Check("returns", 1.0, 0.0, foreign_error(error, type(attack).__module__))
        return
    yield Check("returns", 0.0, 0.0, "faults; it returns an image in [0, 1] for each that was released")
    yield Check("untouched", 0.0, 0.0, "tensors of the victim and the release that it changed")
    difference = float((attack_batch(attack, seen).images - images).abs().max())
    yield Check("same-seen", difference, 0.0, "largest difference of two reconstructions from one observation")


def _check_metric(metric: Metric, function: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Check]:
    shown = photographs(small_victim())[:2]
    noise = torch.rand(shown.shape, generator=torch.Generator().manual_seed(0)).to(shown)
    x, y = torch.cat([shown] * 3), torch.cat([shown, shown.flip(0), noise])
    given = copy.deepcopy((x, y))
    try:
        values = function(x, y)
    except Exception as error:
        raise PrivlabError(
            f"Metric '{metric.name}' does not run: {foreign_error(error, function.__module__)}"
        ) from error
    fine = isinstance(values, Tensor) and values.shape == (len(x),) and values.is_floating_point()
    found = f"{tuple(values.shape)} of {values.dtype}" if isinstance(values, Tensor) else type(values).__name__
    yield Check("returns", float(not fine), 0.0, f"faults; real values of shape ({len(x)},), found {found}")
    if not fine:
        return
    low, high = metric.range
    outside = int(((values < low) | (values > high) | values.isnan()).sum())
    yield Check("range", float(outside), 0.0, f"values outside of [{low:g}, {high:g}]")
    if metric.arrow:
        sign = 1 if metric.arrow == "↑" else -1
        leaks = sign * values
        worse = int((leaks[2:] > leaks[:2].min()).sum())
        yield Check("direction", float(worse), 0.0, "pairs that leak more than an image and itself")
    alone = torch.cat([function(a[None], b[None]) for a, b in zip(x, y, strict=True)])
    same = torch.where(alone == values, 0.0, (alone - values).abs())  # infinite ones too
    limit = 1e-6 * float(values[values.isfinite()].abs().max()) if values.isfinite().any() else 0.0
    yield Check("alone", float(same.max()), limit, "change of an image's value with the batch around it")
    changed = sum(not torch.equal(now, before) for now, before in zip((x, y), given, strict=True))
    yield Check("untouched", float(changed), 0.0, "batches of images that it changed")
