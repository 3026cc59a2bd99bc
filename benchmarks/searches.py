"""The searches of `privlab bench attack`: what each costs, measured once, because a round of all would take minutes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks import BreachingInvertingGradients, GradientMatching, InversionConv, MjpFull, MjpSubspace
from privlab.attacks.decoders.networks import Decoder
from privlab.base import draw_for, full_precision
from privlab.benchmarks.common import peak_gpu_memory, time_stage
from privlab.defenses import Mjp
from privlab.release import observe, observe_features, released_parameters, send
from privlab.threat import Draws, FeatureObservation, Feed, Observation, Stack
from privlab.victims import VictimModel

_SUBSPACE, _FULL = "mjp-subspace", "mjp-full"
_TRAINED, _INVERTED = "inversion-conv: a training step", "inversion-conv: inversion"
_MATCHED, _BREACHING_MATCHED = "gradient-matching: a step", "breaching: a step of invertinggradients"

_ON_CPU, _ON_GPU = 2, 8
"""The most photographs that MJP's attacks are measured on: one of DeiT-S takes a core as long as a hundred steps."""

_BUDGETS = {"cpu": (1, 3), "cuda": (5, 25)}
"""Two numbers of steps: the difference of their times is what steps cost, and preparation drops out."""


@dataclass
class SearchCosts:
    """Seconds per image of each search, the most memory on a GPU that it held (MiB), and ratios of these times."""

    seconds_per_image: dict[str, float] = field(default_factory=dict)
    gpu_memory: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)


def search_costs(
    model: VictimModel, images: Float[Tensor, "b c h w"], steps: Callable[[], None], device: torch.device
) -> SearchCosts:
    """Measure `mjp-subspace` and `mjp-full`, a decoder's training and inversion, and a step of gradient matching.

    On a CPU it is processor time, in one thread: those that wait for each other on a busy machine would count as work.
    On a GPU it is the GPU's time, after a call that warms up. The observation is not counted. MJP leaves the masked
    slots without a position embedding, because not every victim has E_unk. What is learned once in a process, the prior
    of `mjp-subspace`, is learned before. Gradient matching and breaching's search both descend on one image with Adam,
    the cosine of all gradients, and a total variation.

    Args:
        model: the victim.
        images: the photographs; the searches take the first of them.
        steps: a training step on all of them, which `mjp-full` is compared with.
        device: the device of both.
    """
    found, gpu = SearchCosts(), device.type == "cuda"
    some = images[: _ON_GPU if gpu else _ON_CPU]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if gpu else 1)
    try:
        seen = _seen_under_mjp(model, some)
        MjpSubspace()(_first(seen))
        found.seconds_per_image[_SUBSPACE] = _cost(lambda: MjpSubspace()(seen), device) / len(some)
        if gpu:
            MjpFull()(_first(seen))
        found.seconds_per_image[_FULL] = _cost(lambda: MjpFull()(seen), device) / len(some)
        step = _cost(steps, device) / len(images)
        found.ratios["mjp_full_over_step"] = found.seconds_per_image[_FULL] / step
        stages: dict[str, Callable[[], object]] = {
            _SUBSPACE: lambda: MjpSubspace()(seen),
            _FULL: lambda: MjpFull()(_first(seen)),
        }
        if model.image_shape[0] == 3:
            stages |= _measure_decoder(found, model, some, device)
        stages |= _measure_matching(found, model, some[:1], device)
        found.gpu_memory = peak_gpu_memory(stages, device)
    finally:
        torch.set_num_threads(threads)
    return found


def _measure_decoder(
    found: SearchCosts, model: VictimModel, images: Float[Tensor, "b c h w"], device: torch.device
) -> dict[str, Callable[[], object]]:
    """Measure the training step and the inversion of a decoder; return both as stages."""
    few, more = _BUDGETS[device.type]
    seen = _features(model, images)
    decoders: list[Decoder] = []

    def train(count: int) -> None:
        decoders.append(InversionConv(steps=count, batch_size=len(images)).trained(seen))

    def invert() -> object:
        with torch.no_grad(), full_precision():
            return decoders[-1].reconstruct(seen.features.float(), "kept")

    found.seconds_per_image[_TRAINED] = _cost_of_step(train, few, more, device) / len(images)
    invert()
    found.seconds_per_image[_INVERTED] = _cost(invert, device) / len(images)
    return {_TRAINED: lambda: train(few), _INVERTED: invert}


def _measure_matching(
    found: SearchCosts, model: VictimModel, image: Float[Tensor, "1 c h w"], device: torch.device
) -> dict[str, Callable[[], object]]:
    """Measure a step of gradient matching, and of breaching's; return both as stages."""
    few, more = _BUDGETS[device.type]
    labels = torch.zeros(1, dtype=torch.long, device=device)
    seen = observe(model, image, labels, released_parameters(model))

    def match(count: int) -> None:
        with full_precision():
            GradientMatching(steps=count, optimiser="adam", tv=0.1, start="noise")(seen)

    def match_as_breaching(count: int) -> None:
        with full_precision():
            BreachingInvertingGradients(config=(("optim.max_iterations", count),))(seen)

    ours = _cost_of_step(match, few, more, device)
    theirs = _cost_of_step(match_as_breaching, few, more, device)
    found.seconds_per_image |= {_MATCHED: ours, _BREACHING_MATCHED: theirs}
    found.ratios["breaching_matching_step_over_privlab"] = theirs / ours
    return {_MATCHED: lambda: match(few), _BREACHING_MATCHED: lambda: match_as_breaching(few)}


def _seen_under_mjp(model: VictimModel, images: Float[Tensor, "b c h w"]) -> Observation:
    """Return what a server sees of images under MJP: the gradients that `mjp-full` reads."""
    defense = Mjp(masked_pe="none")
    feed = defense(images, model.patch, [draw_for(0, str(i), "defense") for i in range(len(images))])
    labels = torch.arange(len(images), device=images.device) % model.classes
    return observe(model, feed, labels, MjpFull.parameters, (defense,))


def _first(seen: Observation) -> Observation:
    """Return the observation of the first image alone."""
    return replace(seen, gradients={name: g[:1] for name, g in seen.gradients.items()})


def _features(model: VictimModel, images: Float[Tensor, "b c h w"]) -> FeatureObservation:
    """Return what a server sees of the features of images, without a defense."""
    draws = [draw_for(0, str(i), "features") for i in range(len(images) + 2)]
    feed, stack = Feed.undefended(images, model.patch), Stack(())
    sent = send(model, feed, stack, Draws(images=draws[2:], batch=draws[0], model=draws[1]))
    return observe_features(model, sent, stack, images)


def _cost_of_step(run: Callable[[int], object], few: int, more: int, device: torch.device) -> float:
    """Return the seconds of one step: what `more` steps take beyond `few` ones."""
    run(few)  # warms up
    short, long = (_cost(lambda count=count: run(count), device) for count in (few, more))
    return max(long - short, 1e-9) / (more - few)


def _cost(stage: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the processor that a stage takes, or those of the GPU."""
    if device.type == "cuda":
        return time_stage(stage, device)
    began = time.process_time()
    stage()
    return time.process_time() - began
