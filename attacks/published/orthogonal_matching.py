"""`orthogonal-matching`: the image whose gradients are as long as what is released, and orthogonal to it."""

# Known are the model and o_l of each layer, which CENSOR draws at random, as long as the layer's gradient g_l and
# orthogonal to it. Sought is the image x (v values), and its label.
# 1. `_equations_of` gives the 2 L equations log ‖g_l(x)‖ = log ‖o_l‖ and √p_l cos(g_l(x), o_l) = 0.
# 2. For each label `_levenberg_marquardt` searches from noise for an x that fulfils them.
# 3. The x of least error over all labels and starts is returned.

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, grad, jacrev

from privlab.attacks.solvers import twice_derivable
from privlab.base import AtLeast1, Checked, PrivlabError, draw_for
from privlab.threat import Capability, Observation
from privlab.victims import hash_of

START_STD = 0.3  # standard deviation of the images that the search starts from, in normalised pixels

SOLVED = 1e-5
"""The root mean square of the equations' errors below which they are fulfilled; of random gradients it is about 1."""

ROWS_AT_ONCE = 32  # the rows of the Jacobian that are computed together

Equations = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class OrthogonalMatching(Checked):
    """Solve log ‖g_l(x)‖ = log ‖o_l‖ and √p_l cos(g_l(x), o_l) = 0 for all L released parameters.

    Idea: What the client releases of a layer is random, but it is as long as the layer's gradient, and orthogonal to
    it. These are two equations for each layer, whatever was drawn. The attack searches for an image whose gradients
    fulfil all of them, with a prior on images.

    Steps: guess an image → gradients of its length, orthogonal → search for the image

    Algorithm: Under `censor` o_l is random except for these 2 L equations, which are all that a release reveals. p_l is
    the number of entries, and √p_l cos of a random o_l is about 1. The unknowns are the values of the image; its label
    is tried, one class after the other. Levenberg-Marquardt may solve them where there are more equations than values;
    with fewer it ends near its start. Releases of the same image in other rounds add equations (`of_rounds`).

    Where `projection` is "code", o_l·g_l is not 0, and the second equation is not fulfilled.

    Exact if: no condition is known: it is a search without a guarantee. An image of 48 values came back exactly from
    the 160 equations of one release.

    Fails if: the image has more values than there are equations: L parameters give 2 L of them, which are 112 for
    `cifar_vit`, whose images have 3,072 values.

    Cost: Minutes an image: every class is tried (`cifar_vit`, 32 pixels).

    Studies: published

    Args:
        steps: the most steps of each search.
        starts: the most searches for each class, from noise; the first that fulfils the equations ends them, else the
            best one counts.
        seed: seed of the noise.

    Source: [@zhang2025censor; @geiping2020inverting]
    """

    name: ClassVar[str] = "orthogonal-matching"
    paper: ClassVar[str] = "ours, against CENSOR (Zhang et al. 2025)"
    order: ClassVar[int] = 180
    short: ClassVar[Mapping[str, Any]] = {"steps": 1}
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.KNOWS_WEIGHTS, Capability.KNOWS_DEFENSE, Capability.GRADIENT_DEFENSE, Capability.BATCH_SIZE_ONE}
    )
    knows: ClassVar[frozenset[str]] = frozenset({"censor"})
    undefended: ClassVar[str] = "patch-gradient"
    parameters: ClassVar[tuple[str, ...]] = ("*",)
    effort: ClassVar[str] = "full"
    search: ClassVar[bool] = True

    steps: AtLeast1 = 20
    starts: AtLeast1 = 1
    seed: int = 0

    def beyond(self, seen: Observation) -> str | None:
        """Return the numbers of equations and of values if the equations of a release do not determine the image."""
        equations, values = 2 * len(_released(seen)), _values(seen)
        return None if equations > values else f"{equations} equations of a release for {values} values of an image"

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed."""
        return self.of_rounds([seen])

    def of_rounds(self, rounds: Sequence[Observation]) -> Float[Tensor, "b c h w"]:
        """Reconstruct images from several releases of each.

        Args:
            rounds: observations of the same images in the same order; their weights and draws may differ.

        Raises:
            PrivlabError: if there is none, or they have different numbers of releases.
        """
        counts = {len(next(iter(seen.gradients.values()))) for seen in rounds}
        if len(counts) != 1:
            raise PrivlabError(f"of_rounds takes rounds of the same images. Found {sorted(counts)} releases.")
        parts = [(_equations_of(seen), seen) for seen in rounds]
        found = []
        for i in range(counts.pop()):
            # Each round of the same image adds 2 L equations, with its weights and its draws.
            own = [equations({name: seen.gradients[name][i] for name in _released(seen)}) for equations, seen in parts]
            key = hash_of({name: each[i] for name, each in rounds[0].gradients.items()})
            found.append(self._solve(lambda c, x, own=own: torch.cat([each(c, x) for each in own]), rounds[0], key))
        model = rounds[0].model
        images = torch.stack(found).view(-1, *model.image_shape).to(model.mean)
        return (images * model.std + model.mean).clamp(0, 1)

    def _solve(self, equations: Equations, seen: Observation, key: str) -> Float[Tensor, " v"]:
        """Return the normalised image that fulfils the equations best."""
        mean, best, least = seen.model.mean, torch.zeros(()), float("inf")
        # No label is revealed. A wrong one leaves equations that are not fulfilled, so that
        # the error also decides on the label.
        for start, label in product(range(self.starts), range(seen.model.vit.num_classes)):
            draw = draw_for(self.seed, key, self.name, start)
            x = (START_STD * torch.randn(_values(seen), generator=draw, dtype=mean.dtype)).to(mean.device)
            x, error = _levenberg_marquardt(partial(equations, label), x, self.steps)
            if error < least:
                best, least = x, error
            if least < SOLVED:
                break
        return best


def _released(seen: Observation) -> list[str]:
    return [name for name, _ in seen.model.vit.named_parameters() if name in seen.gradients]


def _values(seen: Observation) -> int:
    return math.prod(seen.model.image_shape)


def _equations_of(seen: Observation) -> Callable[[dict[str, Tensor]], Equations]:
    """Return the map from the released gradients of an image to its equations, by label and values."""
    vit = twice_derivable(seen.model.vit)
    names, shape = _released(seen), seen.model.image_shape
    own: dict[str, Tensor] = {name: each for name, each in vit.named_parameters() if name in names}

    # The cross-entropy of one normalised image: the gradient by all released parameters is g(x).
    def loss(parameters: dict[str, Tensor], x: Tensor, label: int) -> Tensor:
        return -functional_call(vit, parameters, (x.view(1, *shape),))[0].log_softmax(0)[label]

    def of_release(released: dict[str, Tensor]) -> Equations:
        # o_l as a unit vector, and log ‖o_l‖ (L numbers), are computed once for each release.
        o = {name: each.flatten() / each.norm().clamp_min(_tiny(each)) for name, each in released.items()}
        length = torch.stack([released[name].norm().clamp_min(_tiny(released[name])) for name in names]).log()

        def equations(label: int, x: Float[Tensor, " v"]) -> Float[Tensor, " e"]:
            # The first L residuals compare lengths. The other L are √p_l cos, which is about 1 for a random direction
            # of p_l entries, so that all equations have similar weights.
            g = grad(loss)(own, x, label)
            norm = torch.stack([g[name].norm().clamp_min(_tiny(x)) for name in names])
            dot = torch.stack([g[name].flatten() @ o[name] for name in names])
            root = torch.tensor([own[name].numel() ** 0.5 for name in names]).to(norm)
            return torch.cat([norm.log() - length, root * dot / norm])

        return equations

    return of_release


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny ** 0.5


def _levenberg_marquardt(
    equations: Callable[[Tensor], Tensor], z: Float[Tensor, " u"], steps: int
) -> tuple[Float[Tensor, " u"], float]:
    """Return the z at the end of a search, and the root mean square of its equations' errors."""
    r, damping, jacobian = equations(z), 0.1, jacrev(equations, chunk_size=ROWS_AT_ONCE)
    for _ in range(steps):
        # J is e × v, with fewer equations than values as a rule. So the usual step −(Jᵀ J + λ I)⁻¹ Jᵀ r is computed as
        # −Jᵀ (J Jᵀ + λ I)⁻¹ r, which solves a system of e unknowns.
        J, right = jacobian(z).double(), r.double()
        JJ = J @ J.T
        # λ is relative to the mean diagonal of J Jᵀ. It grows fivefold until a step lowers the
        # error. If none does, the search ends.
        for _ in range(6):
            damped = JJ + damping * JJ.diagonal().mean() * torch.eye(len(JJ), dtype=JJ.dtype, device=JJ.device)
            there = z - (J.T @ torch.linalg.solve(damped, right)).to(z)
            new = equations(there)
            if new.square().sum() < r.square().sum():
                break
            damping *= 5
        else:
            break
        z, r, damping = there, new, damping / 4
        if float(r.square().mean().sqrt()) < SOLVED / 100:
            break
    return z, float(r.square().mean().sqrt())
