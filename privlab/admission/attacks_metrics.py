"""The admission test of an attack or a metric: what it lacks, before a run finds it."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_origin, get_type_hints

import torch
from torch import Tensor

from privlab.admission.admit import admit, photographs, quiet, same_random_state, small_victim
from privlab.admission.claims import Check
from privlab.attacks import attacks
from privlab.base import PrivlabError, check_name, configure, read_options
from privlab.defenses import BlockScrambling, Blur, CutMix, GradientNoise, RowPermutation, Undefended, defenses
from privlab.evaluation import attack_batch, unread
from privlab.metrics import METRICS, Metric
from privlab.release import observe, observe_features, observe_updates, released_parameters, send
from privlab.threat import (
    AttackDeclarations,
    Capability,
    Client,
    ClientData,
    Draws,
    FeatureObservation,
    GradientDefense,
    Observation,
    Stack,
    attack_declarations,
)
from privlab.victims import VictimModel
from privlab.victims.model import april_twin

RANK = 40
"""The width of adapters in which a release is tried: above twice the tokens of the small victim."""

Seen = Observation | FeatureObservation


def admit_any(
    name: str,
    options: Sequence[str] = (),
    *,
    gamma: float | None = None,
    seed: int = 0,
    **victim: Any,  # noqa: ANN401
) -> tuple[Check, ...]:
    """Admit a defense, an attack or a metric by its name; where a name is of two, it is the first of these.

    Args:
        name: of the defense, attack or metric; no stack of defenses with "+".
        options: of it, [NAME.]KEY=VALUE, as `--set` takes them; metrics have none.
        gamma: share of the patches that is shuffled, for the defenses `jigsaw` and `mjp`.
        seed: of the victim's random weights, of the draws, and of the directions of finite differences.
        **victim: `model`, `weights`, `img_size` and `depth`, as `small_victim` takes them.

    Raises:
        PrivlabError: for an unknown name, an option of something else, and as the admission of each.
    """
    if "+" in name:
        raise PrivlabError(f"Defenses are admitted one at a time. Found '{name}'.")
    check_name("defense, attack or metric", name, [*defenses(), *attacks(), *METRICS])
    kind = defenses().get(name)
    if gamma is not None and (kind is None or "gamma" not in {field.name for field in fields(kind)}):
        raise PrivlabError(f"--gamma is for jigsaw and mjp. Found {gamma} for {name}: leave it out.")
    if kind is not None:
        read_options(options, [kind])
        defense = configure(kind, options, {} if gamma is None else {"gamma": gamma})
        return admit(defense, small_victim(**victim, seed=seed), seed=seed)
    if name in attacks():
        return admit_attack(name, options, seed=seed, **victim)
    if options:
        raise PrivlabError(f"Metrics take no options. Found '{options[0]}' for {name}: leave it out.")
    return admit_metric(METRICS[name])


def admit_attack(
    name: str,
    options: Sequence[str] = (),
    *,
    seed: int = 0,
    **victim: Any,  # noqa: ANN401
) -> tuple[Check, ...]:
    """Try an installed attack on a small victim, as a run would.

    `declared`: its name, paper, capabilities, parameters and what else it declares are there, and of their types.
    `granted`: some release of the victim grants what it requires: plain gradients, those behind a defense that it
    knows, updates, or features. `returns`: it returns an image in [0, 1] for each that was released. `untouched`: it
    changes neither the victim nor the release. `same-seen`: the same observation gives the same images. After a failed
    check what stands on it is left out.

    Args:
        name: of the attack.
        options: of it, KEY=VALUE, as `--set` takes them.
        seed: of the weights and of the release's draws.
        **victim: as in `admit_any`.

    Raises:
        PrivlabError: for an unknown name or option, or a victim that cannot be made.
    """
    check_name("attack", name, attacks())
    kind = attacks()[name]
    problems = list(_missing_declarations(name, kind))
    declared = Check("declared", float(len(problems)), 0.0, "; ".join(problems[:3]) or "faults of what it says")
    if problems:
        return (declared,)
    read_options(options, [kind])
    attack = configure(kind, options)
    model = small_victim(**victim, seed=seed)
    with same_random_state(), quiet():
        return (declared, *_try_attack(attack, model, seed))


def admit_metric(metric: Metric) -> tuple[Check, ...]:
    """Try a metric on photographs: each beside itself, beside another, and beside noise.

    `returns`: one real value per image. `range`: all are within the range that it states. `direction`: an image beside
    itself leaks at least as much as beside anything else. `alone`: an image's value does not depend on the batch.
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
        yield "it is no dataclass"
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
    images, public = photographs(victim)[:2].to(victim.mean), photographs(victim)[2:].to(victim.mean)
    labels = torch.arange(2) % victim.vit.num_classes

    def draw(number: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed + number)

    def gradients(model: VictimModel, *defense: Any) -> Observation:  # noqa: ANN401
        read = sorted(released_parameters(model))
        return observe(model, images, labels, read, defense, [draw(0), draw(1)], public=public)

    def features(defense: Any) -> FeatureObservation:  # noqa: ANN401
        stack, draws = Stack((defense,)), Draws([draw(0), draw(1)], draw(2), draw(3))
        feed = stack.feed(images, victim.patch, draws.images, key=draws.model)
        return observe_features(victim, send(victim, feed, stack, draws), stack, public)

    yield gradients(victim)
    yield gradients(april_twin(victim))
    yield gradients(victim, noisy)
    for client in (Client(), Client("adamw"), Client(trains="adapters", rank=RANK), Client(clients=2, steps=2)):
        one_by_one = zip(images.split(1), labels.split(1), (draw(0), draw(1)), strict=True)
        yield observe_updates(victim, client, [ClientData(*each) for each in one_by_one])
    for defense in (Undefended(), RowPermutation(), Blur(sigma=1.0), CutMix()):
        yield features(defense)
    scrambling = Stack((BlockScrambling(),))
    encrypted = scrambling.feed(images, victim.patch, [draw(0), draw(1)], key=draw(3))
    yield observe(victim, encrypted, labels, sorted(released_parameters(victim)), scrambling.parts)


def _run(attack: Any, seen: Seen) -> Iterator[Check]:  # noqa: ANN401
    before = {name: value.clone() for name, value in _tensors_of(seen).items()}
    try:
        images = attack_batch(attack, seen).images
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        yield Check("returns", 1.0, 0.0, what)
        return
    yield Check("returns", 0.0, 0.0, "faults; it returns an image in [0, 1] for each that was released")
    changed = [name for name, value in _tensors_of(seen).items() if not torch.equal(value, before[name])]
    yield Check.none("untouched", changed, "tensors of the victim and the release that it changed")
    if not changed:
        apart = float((attack_batch(attack, seen).images - images).abs().max())
        yield Check("same-seen", apart, 0.0, "largest difference of two reconstructions from one observation")


def _tensors_of(seen: Seen) -> Mapping[str, Tensor]:
    """Return every tensor that an attack is given."""
    released = {"features": seen.features} if isinstance(seen, FeatureObservation) else dict(seen.gradients)
    return {f"weights of {name}": value for name, value in seen.model.state_dict().items()} | released


def _check_metric(metric: Metric, function: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Check]:
    shown = photographs(small_victim())[:2]
    noise = torch.rand(shown.shape, generator=torch.Generator().manual_seed(0)).to(shown)
    x, y = torch.cat([shown] * 3), torch.cat([shown, shown.flip(0), noise])
    given = copy.deepcopy((x, y))
    try:
        values = function(x, y)
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise PrivlabError(f"Metric '{metric.name}' does not run: {what}") from error
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
        yield Check("direction", float(worse), 0.0, "pairs that leak more than an image beside itself")
    alone = torch.cat([function(a[None], b[None]) for a, b in zip(x, y, strict=True)])
    same = torch.where(alone == values, 0.0, (alone - values).abs())  # infinite ones too
    limit = 1e-6 * float(values[values.isfinite()].abs().max()) if values.isfinite().any() else 0.0
    yield Check("alone", float(same.max()), limit, "change of an image's value with the batch around it")
    changed = sum(not torch.equal(now, before) for now, before in zip((x, y), given, strict=True))
    yield Check("untouched", float(changed), 0.0, "batches of images that it changed")
