"""`fedavg-matching`: images whose round of local training moves the weights as the released update does."""

# Known are θ_0, the client's settings, and the update of a round of SGD on m images. Sought are these images.
# 1. Labels follow from the update of the head.
# 2. A point of the search holds the images of each of e passes, e × m × c × h × w. `Round` runs the client on them with
# second derivatives, and `Simulation` compares its update with the released one.
# 3. `descend` minimises that distance, and `join_passes` averages the images that belong together.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.baselines.rounds import Round, labels_of_round
from privlab.attacks.gradients.gradient_matching import mismatch, search_identity
from privlab.attacks.rows import least_cost
from privlab.attacks.solvers import OPTIMISERS, descend, total_variation, twice_derivable, values_and_slopes
from privlab.base import AtLeast0, Checked, NotNegative, Positive, PrivlabError, draw_for
from privlab.release import each_release, undecayed
from privlab.threat import Capability, Observation
from privlab.victims import hash_of

_OTHER_LABEL = 1e6
"""Squared distance, as if all pixels were wrong many times over, that separates images of other labels."""


@dataclass(frozen=True)
class FedavgMatching(Checked):
    """Run the client's whole round on candidate images, and minimise the distance of its update to the released one.

    Idea: The client's settings are public, so the adversary can repeat the client's training on candidate images. The
    attack changes these images until the whole round moves the weights as the released update does. Each pass over the
    data has its own candidates, which must agree on what no order of images changes.

    Steps: labels from the head → run the round on candidates → match the update, join passes

    Algorithm:

    1. Labels are inferred from the update of the head (`labels_of_round`).
    2. Each pass over the data has its own candidates, because each has its own order. They go through all
       steps of SGD as the public settings say (`Round`), and 1 − cos(update, released update) is minimised by them,
       plus `tv` times their total variation, plus `invariance` times how far the passes disagree on what no order
       changes: the mean and the maximum of each pixel over the images (`agree`).
    3. The candidates of each pass are assigned to those of the first one, and averaged.

    Where no order distinguishes passes, for one image or one step in each pass, all passes share their candidates.

    Exact if: no condition is known: it is a search without a guarantee. At the true images, in the client's order, its
    distance is zero except for rounding.

    Fails if: the client does not use SGD, or uses dropout. Each evaluation runs the whole round with second
    derivatives. It knows no filter, and takes labels in one order, the same in all passes.

    Studies: baselines

    Args:
        optimiser: "lbfgs" or "adam".
        steps: the most steps of the optimiser.
        lr: root mean square of the entries of the (first) step, in pixels; that of Adam shrinks to zero.
        tv: weight of the total variation.
        invariance: weight of the disagreement of passes.
        start: "noise", uniform in [0, 1], or "grey".
        seed: seed of the noise.

    Source: Dimitrov et al. (TMLR 2022): simulation, a prior that no order of epochs changes, and matching at the end.
    The functions of which passes must agree, all weights, and labels in one order for all passes are ours.
    [@dimitrov2022fedavg]
    """

    name: ClassVar[str] = "fedavg-matching"
    paper: ClassVar[str] = "Data Leakage in Federated Averaging (Dimitrov et al., TMLR 2022)"
    order: ClassVar[int] = 250
    short: ClassVar[Mapping[str, Any]] = {"steps": 1}
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.KNOWS_WEIGHTS, Capability.CLIENT_UPDATE, Capability.CLASS_LABELS}
    )
    parameters: ClassVar[tuple[str, ...]] = ("*",)
    effort: ClassVar[str] = "full"
    named_only: ClassVar[bool] = True
    search: ClassVar[bool] = True
    updates_of: ClassVar[tuple[str, ...]] = ("sgd",)

    optimiser: Annotated[str, OPTIMISERS] = "lbfgs"
    steps: AtLeast0 = 200
    lr: Positive = 0.05
    tv: NotNegative = 0.01
    invariance: NotNegative = 1.0
    start: Annotated[str, ("noise", "grey")] = "noise"
    seed: int = 0

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients trained on.

        Raises:
            PrivlabError: if there is no update of a client, it does not train by SGD or draws dropout, its labels
                is not known, or all its images would start equal.
        """
        # All clients are searched at once. The noise of each start has a seed that depends on the client's update.
        simulation = Simulation.of(seen, self.tv, self.invariance)
        if self.start == "grey" and simulation.round.client.images > 1:
            count = simulation.round.client.images
            raise PrivlabError(f"start=grey cannot separate the {count} images of one update. Use noise.")
        points = torch.stack([self._start(simulation, update) for update in each_release(seen)]).to(seen.model.mean)
        optimiser = OPTIMISERS[self.optimiser](self.lr)
        best, _ = descend(optimiser, points, simulation, self.steps, search_identity(seen, self))
        # A last pass that is cut short has images that were never fed. Only whole passes are joined.
        whole = simulation.round.whole_passes
        found = [
            join_passes(simulation.images(point)[:whole], labels)
            for point, labels in zip(best, simulation.labels, strict=True)
        ]
        return torch.cat(found).clamp(0, 1)

    def _start(self, simulation: "Simulation", update: Mapping[str, Tensor]) -> Float[Tensor, " q"]:
        """Return where the search for the images of one client starts."""
        shape = (simulation.round.passes, simulation.round.client.images, *simulation.round.model.image_shape)
        if self.start == "grey":
            return torch.full(shape, 0.5).flatten()
        draw = draw_for(self.seed, hash_of(dict(sorted(update.items()))), self.name)
        return torch.rand(shape, generator=draw, dtype=torch.float64).flatten()


@dataclass(frozen=True, eq=False)
class Simulation:
    """How well candidates explain the update of each client; `descend` calls it with points and their numbers.

    A point holds the images of each pass. `targets` are the released updates without decay, over their norms.
    """

    round: Round
    targets: Sequence[Mapping[str, Float[Tensor, "1 ..."]]]
    labels: Sequence[Int[Tensor, " m"]]
    tv: float
    invariance: float

    @classmethod
    def of(cls, seen: Observation, tv: float, invariance: float) -> "Simulation":
        """Return the comparison with the released updates of an observation.

        Args:
            seen: the observation of clients.
            tv: weight of the total variation; at 0 it is not computed.
            invariance: weight of the disagreement of passes.

        Raises:
            PrivlabError: if there is no client, its round cannot be run again, or labels are not known.
        """
        client, model = seen.client, seen.model
        if client is None:
            raise PrivlabError("fedavg-matching needs the update of a client. Found a gradient: see gradient-matching.")
        names = sorted(name for name in seen.gradients if name != "unk_embed")
        # Decay is undone on both sides: `Round` returns −(θ_T − c θ_0). The target has norm
        # one over all parameters together.
        targets, labels = [], []
        for update in each_release(seen):
            moved = {name: each.to(model.mean) for name, each in undecayed(model, update, client).items()}
            norm = torch.stack([moved[name].norm() for name in names]).norm()
            targets.append({name: moved[name][None] / norm for name in names})
            labels.append(torch.tensor(labels_of_round(model, update, client), device=model.mean.device))
        return cls(Round(twice_derivable(model), client, names), targets, labels, tv, invariance)

    def images(self, point: Float[Tensor, " q"]) -> Float[Tensor, "e m c h w"]:
        """Return the images of a point."""
        return point.view(self.round.passes, self.round.client.images, *self.round.model.image_shape)

    def __call__(
        self, points: Float[Tensor, "s q"], numbers: Int[Tensor, " s"]
    ) -> tuple[Float[Tensor, " s"], Float[Tensor, "s q"]]:
        """Return the objective and its slope at the points of clients with these numbers, one after the other."""
        return values_and_slopes(self._value, points, numbers)

    def _value(self, points: Float[Tensor, "1 q"], numbers: Int[Tensor, " 1"]) -> Float[Tensor, " 1"]:
        i = int(numbers)
        images = self.images(points[0])
        # 1 − cos of the update that the candidates make and the released one.
        made = {name: each[None] for name, each in self.round(images, self.labels[i]).items()}
        value = mismatch(made, self.targets[i])
        if self.tv:
            value = value + self.tv * total_variation(images.flatten(0, 1)).mean()
        # The order of the images in a pass is not known. Passes must agree on what does not depend on it.
        if self.invariance and len(images) > 1:
            value = value + self.invariance * agree(images)
        return value


def agree(images: Float[Tensor, "e m c h w"]) -> Float[Tensor, ""]:
    """Return how far passes disagree on what no order of their images changes, a mean square over pixels and pairs.

    That is the mean and the maximum of each pixel over the images of a pass; of pairs of passes, each counts twice.
    """
    # Twice the variance over passes is the mean squared difference of all ordered pairs, each with itself included.
    told = torch.stack([images.mean(1), images.amax(1)], 1)
    return 2 * told.var(0, correction=0).mean()


def join_passes(images: Float[Tensor, "e m c h w"], labels: Int[Tensor, " m"]) -> Float[Tensor, "m c h w"]:
    """Return the mean over passes of images that belong together: those of the least total distance to the first pass.

    Args:
        images: those of each pass.
        labels: the class index of each image, the same in all passes; images of other labels never belong together.
    """
    first = images[0].flatten(1)
    apart = _OTHER_LABEL * (labels[:, None] != labels).to(first)
    joined = [images[0]]
    for other in images[1:]:
        # Images of different labels never match. The least total squared distance to the first pass assigns the others.
        cost = torch.cdist(first, other.flatten(1)).square() + apart
        joined.append(other[least_cost(cost)[1]])
    return torch.stack(joined).mean(0)
