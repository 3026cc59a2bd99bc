"""Whose image is behind a release: it is made again, and compared with what each candidate would have released."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.base import PrivlabError, full_precision
from privlab.evaluation import Batch, Case, Clients, defense_of
from privlab.images import NamedImage
from privlab.threat import Observation, Stack
from privlab.victims import Victim

Gradients = Mapping[str, Tensor]

_AT_A_TIME = 32

_MOST_KEPT = 2**31
"""Bytes of candidates' releases that are kept for the next case of the same client."""


def unreleased(spec: Case) -> str:
    """Return why the release of a case is not compared with those of candidates; empty if it is."""
    if spec.features_released:
        return "features are released"
    return "several images are released as one" if spec.together is not None else ""


@dataclass(eq=False)
class Releases:
    """Compares releases with those of candidates; it keeps the candidates' for the next case, unless they are large."""

    _key: tuple[Any, ...] = ()
    _kept: list[Mapping[str, Tensor]] = field(default_factory=list)

    def similarities(
        self,
        spec: Case,
        base: Victim,
        private: Sequence[NamedImage],
        own: Int[Tensor, " b"],
        candidates: Float[Tensor, "m c h w"],
    ) -> dict[tuple[str, str], Float[Tensor, "b m"]]:
        """Return how near the release G is to g_j by attack and feature: G as sent, g_j of candidate j, undefended.

        G is drawn again as the run drew it, over all released parameters. The adversary knows the model, the client's
        settings and the functions of `COMPARED`, and takes the victim's prediction for a candidate's label. "release"
        is the attack; "control:flat" is the defended release of one colour with the private image's label, which shows
        what the label alone reveals; "control:other" is the release of the next private image.

        Args:
            spec: the case, of one victim, setting and draw.
            base: its victim.
            private: the private images, whose labels are the client's.
            own: the place of each among the candidates.
            candidates: as the victim is fed.

        Raises:
            PrivlabError: if there is one private image, of which no other can be taken.
        """
        if len(private) < 2:
            raise PrivlabError(f"Releases are compared of two images or more. Found {len(private)}.")
        model, stack = base.model, defense_of(spec, base, spec.settings[0])
        images = candidates[own].to(model.mean)
        labels = torch.tensor([image.label for image in private], device=model.mean.device)
        flat = model.mean.expand_as(images)
        sent = {
            name: _released(spec, base, Batch([*private], x, labels), stack)
            for name, x in (("release", images), ("control:flat", flat))
        }
        names = sorted(sent["release"])
        near: dict[tuple[str, str], list[Tensor]] = {(a, f): [] for a in sent for f in COMPARED}
        for of in self._candidates(spec, base, candidates):
            # a defense may withhold parameters, and E_unk is in no update of a client without one
            both = {name: of[name] for name in names if name in of}
            for feature, nearness in COMPARED.items():
                for attack in sent:
                    near[attack, feature].append(nearness(sent[attack], both).cpu())
        found = {key: torch.cat(parts, 1) for key, parts in near.items()}
        return found | {("control:other", f): found["release", f].roll(1, 0) for f in COMPARED}

    def _candidates(self, spec: Case, base: Victim, candidates: Tensor) -> Iterator[Mapping[str, Tensor]]:
        """Yield what each candidate would release without a defense, for a few of them at a time."""
        key = (base.weights.sha256, base.name, spec.client, id(candidates))
        if key != self._key:
            self._kept, self._key = [], ()
        if self._key:
            yield from self._kept
            return
        parts = candidates.split(_AT_A_TIME)
        for n, part in enumerate(parts):
            x = part.to(base.model.mean)
            with torch.no_grad(), full_precision():
                labels = base.model(x).argmax(1)
            named = [NamedImage(f"{n}/{i}", f"{n}/{i}", None) for i in range(len(x))]
            of = _released(spec, base, Batch(named, x, labels), Stack(()))
            if len(candidates) * sum(g[0].nbytes for g in of.values()) <= _MOST_KEPT:
                self._kept.append(of)
            yield of
        self._key = key if len(self._kept) == len(parts) else ()


def _released(spec: Case, base: Victim, batch: Batch, stack: Stack) -> Mapping[str, Float[Tensor, "b ..."]]:
    """Return what a client releases of each image, by the names of parameters; it draws as it does in a run."""
    clients = Clients(spec.release, stack, spec.seed, spec.draw, base.weights.sha256)
    seen = clients.observe(base.model, batch)
    assert isinstance(seen, Observation)
    return seen.gradients


def _cosines(x: Gradients, y: Gradients) -> Float[Tensor, "b k"]:
    """Return the cosines of releases over the parameters of y; float32 would be off by 1e-4 at a million entries."""
    products, lengths = torch.zeros(()), [torch.zeros(()), torch.zeros(())]
    for name in y:
        u, v = (of[name].flatten(1).double() for of in (x, y))
        products = products.to(u) + u @ v.mT
        lengths = [length.to(w) + w.square().sum(1) for length, w in zip(lengths, (u, v), strict=True)]
    return products / (lengths[0][:, None] * lengths[1]).sqrt().clamp_min(1e-30)


def _signs(x: Gradients, y: Gradients) -> Float[Tensor, "b k"]:
    """Return the cosines of releases with signs of others."""
    return _cosines(x, {name: g.sign() for name, g in y.items()})


def _orthogonality(x: Gradients, y: Gradients) -> Float[Tensor, "b k"]:
    """Return −Σ cos², over parameters: a release that was made orthogonal to a gradient in each of them has zero."""
    squares = [_cosines(x, {name: g}).square() for name, g in y.items()]
    return -torch.stack(squares).sum(0)


COMPARED: Mapping[str, Callable[[Gradients, Gradients], Float[Tensor, "b k"]]] = {
    "release": _cosines,
    "release, signs": _signs,
    "release, orthogonality": _orthogonality,
}
"""How near releases are to what candidates would have released, by the name of what is compared."""
