"""What each step of a search makes Python wait for on a card: nothing, but for what is stated here, place by place."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from privlab.attacks import ATTACKS
from privlab.attacks.tokens import FC1, FC2
from privlab.attacks.tokens.equations import _distinct
from privlab.attacks.tokens.spans import Mlp, Spans
from privlab.base import draw_for
from privlab.defenses import GaussianNoise, Mjp
from privlab.release import observe, observe_features, released_parameters, send
from privlab.threat import Capability, Draws, FeatureObservation, Feed, Observation, Stack
from privlab.victims import VictimModel, first_block

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


@dataclass(frozen=True)
class Loop:
    """A search with two budgets; `waits` bounds how often each place may wait in a step, or send a tensor to the card.

    Args:
        attack: its name.
        budget: the option that says how many steps there are.
        few: the smaller budget.
        more: the larger one.
        options: the other options.
        waits: the most waits in a step, by kind and place; no other place may wait at all.
    """

    attack: str
    budget: str
    few: int
    more: int
    options: dict[str, Any] = field(default_factory=dict)
    waits: dict[tuple[str, str], float] = field(default_factory=dict)


SETTLED = ("download", "attacks/tokens/refinement.py:refine")  # how many starts go on: the others cost nothing then
LEFT = ("upload", "attacks/tokens/refinement.py:refine")  # the images that these are of
TOLD = ("item", "attacks/solvers/descent.py:descend")  # the objective, for who is listening
STUCK = ("item", "attacks/solvers/descent.py:done")
TRIED = ("nonzero", "attacks/solvers/descent.py:_search")  # which points go on in a line search of ten trials or fewer
STOPPED = ("item", "attacks/tokens/sharpening.py:sharpen_coordinates")
FACTORED = ("check", "attacks/tokens/sharpening.py:_inverse_of_own")
SHORT = {"starts": 2, "rounds": 1, "steps": 3}

SEARCHES = {
    "attacks/tokens/equations.py:separate",
    "attacks/tokens/equations.py:start",
    "attacks/tokens/equations.py:distinct",
    "attacks/tokens/refinement.py:refine",
    "attacks/tokens/refinement.py:settle",
    "attacks/tokens/sharpening.py:sharpen_coordinates",
    "attacks/tokens/spans.py:factors",
    "attacks/tokens/spans.py:of",
    "attacks/tokens/spans.py:packed",
}

LOOPS = {
    "prior": Loop(
        "patch-gradient-prior", "rounds", 1, 4, {"steps": 2}, {("check", "attacks/solvers/prior.py:_weights"): 1}
    ),
    "prior, conjugate gradients": Loop("patch-gradient-prior", "steps", 2, 8, {"rounds": 1}),
    "subspace": Loop("mjp-subspace", "rounds", 1, 4, {"steps": 1}),
    "subspace, conjugate gradients": Loop("mjp-subspace", "steps", 1, 4, {"rounds": 1}),
    "separation": Loop("token-separation", "steps", 2, 5, {"rounds": 1, "starts": 2}, {SETTLED: 4, LEFT: 4}),
    "mjp-full": Loop("mjp-full", "sharpen", 1, 3, SHORT | {"inner": 1}, {STOPPED: 1, FACTORED: 1}),
    "L-BFGS": Loop("gradient-matching", "steps", 1, 4, {"start": "grey"}, {TOLD: 1, STUCK: 1, TRIED: 10}),
    "Adam": Loop("gradient-matching", "steps", 1, 4, {"start": "grey", "optimiser": "adam"}, {TOLD: 1}),
    "features": Loop("feature-optimisation", "steps", 1, 4),
    "decoder": Loop(
        *("inversion-conv", "steps", 1, 4, {}),
        {
            ("upload", "attacks/features/learned_inversion.py:batch"): 1,
            ("upload", "attacks/decoders/training.py:mirrored_and_rolled"): 1,
            ("upload", "defenses/features/gaussian_noise.py:send"): 1,
        },
    ),
}


@pytest.fixture(scope="module")
def learned(tiny_model: Callable[..., VictimModel], crops: Tensor) -> None:
    """Learn what is learned once in a process, the priors of photographs, so that no budget pays for it."""
    for name in ("mjp-subspace", "patch-gradient-prior"):
        model = of_attack(name, tiny_model)
        ATTACKS[name](rounds=1, steps=1)(seen_by(name, model, crops[:1].to(model.mean), crops))


def of_attack(name: str, tiny_model: Callable[..., VictimModel]) -> VictimModel:
    """Return the victim of an attack; N = D leaves something to the prior that `patch-gradient` does not find."""
    return tiny_model(embed_dim=16 if name == "patch-gradient-prior" else 64)


def seen_by(name: str, model: VictimModel, images: Tensor, crops: Tensor) -> Observation | FeatureObservation:
    """Return what an attack sees of one image."""
    attack, device = ATTACKS[name], model.mean.device
    draws = [torch.Generator().manual_seed(i) for i in range(3)]
    if Capability.RELEASED_FEATURES in attack.requires:
        stack = Stack((GaussianNoise(),))
        feed = Feed.undefended(images, model.patch)
        sent = send(model, feed, stack, Draws(images=draws[2:], batch=draws[0], model=draws[1]))
        return observe_features(model, sent, stack, crops[7:380:29].to(device))
    defense = (Mjp(gamma=0.25),) if "mjp" in name else ()
    feed = defense[0](images, model.patch, draws[:1]) if defense else images
    names = released_parameters(model) if "*" in attack.parameters else attack.parameters
    return observe(model, feed, torch.tensor([1], device=device), names, defense)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_step_waits_where_it_is_said_to(
    tiny_model: Callable[..., VictimModel], crops: Tensor, cache: object, learned: None, card: Any, name: str
) -> None:
    loop = LOOPS[name]
    model = of_attack(loop.attack, tiny_model).to("cuda:0")
    seen = seen_by(loop.attack, model, crops[:1].to(model.mean), crops)
    took: list[tuple[Counter[tuple[str, str]], int]] = []
    for budget in (loop.few, loop.more):
        before, operations = card.waits.copy(), card.operations
        ATTACKS[loop.attack](**loop.options, **{loop.budget: budget})(seen)
        took.append((card.waits - before, card.operations - operations))
    (few, worked_less), (more, worked_more) = took
    assert worked_more > worked_less
    grown = {place: (more[place] - few[place]) / (loop.more - loop.few) for place in more}
    assert {place: n for place, n in grown.items() if n > loop.waits.get(place, 0)} == {}


@pytest.mark.slow
def test_four_images_take_hardly_more_operations_than_one(
    tiny_model: Callable[..., VictimModel], crops: Tensor, cache: object, learned: None, card: Any
) -> None:
    """A card waits for Python, which hands it the operations one by one: those of a search serve all images at once."""
    model = tiny_model().to("cuda:0")
    draws, defense = [draw_for(0, str(i), "defense") for i in range(4)], Mjp(gamma=0.25)
    feed = defense(crops[:400:100].to(model.mean), model.patch, draws)
    labels = torch.arange(4, device="cuda:0")
    attack = ATTACKS["mjp-full"](starts=8, rounds=8)
    seen = observe(model, feed, labels, attack.parameters, (defense,))
    took: list[tuple[int, int]] = []
    found: list[list[int]] = []
    for count in (1, 4):
        some = replace(seen, gradients={name: g[:count] for name, g in seen.gradients.items()})
        before, operations = card.waits.copy(), card.operations
        found.append(attack(some).tokens.tolist())
        waits = {place: n for (_, place), n in (card.waits - before).items() if place in SEARCHES}
        took.append((card.operations - operations, sum(waits.values())))
    assert found[0] == found[1][:1]
    assert min(found[1]) > 0
    (one, waits_for_one), (four, waits_for_four) = took
    assert four < 1.6 * one
    assert waits_for_four < 2 * waits_for_one  # its rounds depend on the processor's rounding: 1.63 on an AMD


def test_candidates_are_told_apart_in_one_copy(
    tiny_model: Callable[..., VictimModel], crops: Tensor, card: Any
) -> None:
    model = tiny_model().to("cuda:0")
    seen = seen_by("token-separation", model, crops[:1].to(model.mean), crops)
    assert isinstance(seen, Observation)
    mlp, spans = Mlp.of(first_block(model)), Spans.of(seen.gradients[FC1][0], seen.gradients[FC2][0], 17)
    candidates = torch.randn(20, len(spans.u), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = card.waits.copy()
    assert _distinct(mlp, spans.take(None), candidates.to("cuda:0")[None], torch.inf, 2.0).shape[1] == 20
    waits = card.waits - before
    assert {kind: n for (kind, _), n in waits.items() if kind in ("item", "download")} == {"download": 1}
