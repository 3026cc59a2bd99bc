"""Which settings of a client explain its update: what is not stated is fitted, and no private image is needed."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from privlab.attacks import PatchUpdate
from privlab.attacks.solvers import fit_decay, slot_gradients, slot_rows
from privlab.base import collect_warnings, full_precision
from privlab.release import is_explained, undecayed, update_on
from privlab.release.explained import logit_gradients, residual, soft_targets
from privlab.release.grey_levels import grey_level_error
from privlab.threat import Client, Observation

_BIAS = "head.bias"
_MOMENTUM = 0.9  # the momentum that is tried first where another one is stated: that of nearly all who use any
_MOMENTA = (_MOMENTUM, 0.8, 0.95, 0.5)
"""Those that are tried as they are; others are found where what the client moves grows with them."""

_MOST_STEPS = 20  # the most steps that are tried where others are stated
_NEAR = 0.05  # how far a fitted number may be rounded, relative to it
_NEAR_LEVELS = 0.2  # the rms distance from grey levels, in levels, below which nearly every value is nearest to its own
_MOST_LABELS = 5  # the most of other settings with which a label is fitted too
_LEAST_COSINE = 0.9  # between the update of the head's bias and that of the right image and label under other settings
_CLIPPED_STEPS = (1, 2, 3, 4, 5)  # numbers of steps that are tried with clipping, beside the stated one
_CLIP_ROUNDS = 3
"""Times that a clip is corrected: later gradients point elsewhere, so that steps do not add up in length."""

_ROUNDS = 8
"""Times that a rate, a momentum or a decay is corrected: later steps depend on it in other ways than the first one."""

_EXACT = 1e-3  # a residual below which settings are those of the client: rounding and fitted numbers leave as much
_FLOOR = 1e-4  # residuals below this are alike
_LEAST_SHARE = 0.01  # the least probability of a class that a fitted label states
_DIGITS = (1, 2, 3)
"""The digits to which a fitted number is rounded if that explains the update as well: people state such numbers."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """Settings of a client and a target with which an image explains an update, and the residual that they leave.

    `target` is a class index, or a probability of each class where no label and no smoothing explains the update.
    `of_head` is how many times as far the head moved as these settings say, where it has another rate.
    """

    client: Client
    target: int | Float[Tensor, "1 y"]
    residual: float
    of_head: float = 1.0

    @property
    def explains(self) -> bool:
        """Whether the residual is small enough."""
        return is_explained(self.residual, self.client)

    def settings(self, stated: Client) -> dict[str, Any]:
        """Return the settings that differ from the stated ones, by name, and a fitted label by class."""
        values, others = asdict(self.client), asdict(stated)
        found: dict[str, Any] = {name: value for name, value in values.items() if value != others[name]}
        found.pop("epochs", None)  # steps stand in their place
        if isinstance(self.target, Tensor):
            shares = {c: round(float(y), 4) for c, y in enumerate(self.target[0]) if y >= _LEAST_SHARE}
            found["label"] = dict(sorted(shares.items(), key=lambda share: -share[1])[:16])
        return found

    def score(self, stated: Client) -> float:
        """Return the residual, and more for each setting that is not the stated one: of two that fit, the simpler."""
        changed = self.settings(stated)
        label = changed.pop("label", None)
        cost = 1.0 + 2 * len(changed.keys() - {"nesterov"}) - ("label_smoothing" in changed)
        if label is not None:
            cost *= 3 if _is_plausible(label) else 10
        return (self.residual + _FLOOR) * cost


def _is_plausible(label: Mapping[int, float]) -> bool:
    """Return whether a fitted label has few classes, as MixUp and CutMix make it; a shorter step gives others."""
    return len(label) <= 4 and sum(label.values()) > 1 - _LEAST_SHARE


@dataclass(frozen=True, eq=False)
class ClientFit:
    """The settings of a client of one image that explain its update `seen`, whose head shows the class `label`.

    The image of the closed form needs no setting but that SGD was used, without dropout: momentum, rates and averages
    of weights are one linear map of the steps, and decay is fitted. So the client can be run again on it, and settings
    with which it gives the update are how it trained.
    """

    seen: Observation
    label: int

    @property
    def stated(self) -> Client:
        """Return the settings that were stated."""
        assert self.seen.client is not None
        return self.seen.client

    @cached_property
    def start(self) -> Client:
        """Return the settings from which others are tried: the stated ones, with SGD in place of Adam and AdamW."""
        stated = self.stated
        return stated if stated.optimiser == "sgd" else replace(stated, optimiser="sgd", weight_decay=0.0)

    @cached_property
    def image(self) -> Tensor | None:
        """Return the image of the closed form, of grey levels where these are near; None where it finds none."""
        lacking = {"pos_embed", "patch_embed.proj.weight"} - self.seen.gradients.keys()
        seen = replace(self.seen, client=self.start)
        if lacking or self.start.dropout or self.start.drop_path or PatchUpdate().beyond(seen) is not None:
            return None
        with full_precision(), collect_warnings([]):  # what weakens the attack is said where it runs
            image = PatchUpdate(decay="fitted")(seen)
            near = float(grey_level_error(image).rms[0]) < _NEAR_LEVELS
            return (image * 255).round() / 255 if near else image

    def simplest(self) -> Fitted | None:
        """Return the simplest settings that explain the update; None where none does.

        The client is run again with the stated settings and label; with a label that the update of the head's bias
        shows (`soft_targets`): smoothed, mixed or of several classes; with another decay, rate, momentum, number of
        steps, schedule or number format. Of Adam and AdamW nothing is tried but SGD.
        """
        if _BIAS not in self.seen.gradients or self.image is None:
            return None
        start = self.start
        found = [each for client in {start, self.decayed(start)} for each in self._tried(client)]

        def best() -> Fitted:
            return min(found, key=lambda each: (not each.explains, each.score(start)))

        if not best().explains:
            found += self._of_other_losses()
        if not best().explains:
            alone = self._without_head(self.decayed(start))
            if alone is not None and alone.residual < _EXACT:
                return alone
        if best().residual >= _EXACT:
            others = [next(self._tried(self.decayed(client))) for client in self._others()]
            others.sort(key=lambda each: each.score(start))
            found += others
            if best().residual >= _EXACT:  # a label takes more runs
                found += [each for one in others[:_MOST_LABELS] for each in self._tried(one.client)]
        label = best().settings(start).get("label")
        if not best().explains or (label is not None and not _is_plausible(label)):
            found += [next(self._tried(self.decayed(client))) for client in self._clipped()]
        return self._rounded(best()) if best().explains else self._without_head(best().client)

    def _left(self, client: Client, target: int | Tensor, *, with_bias: bool = True) -> float:
        """Return the residual that a client leaves of the update."""
        assert self.image is not None
        return residual(replace(self.seen, client=client), self.image, target, with_bias=with_bias)

    def made(self, client: Client) -> Mapping[str, Tensor]:
        """Return the update of a client on the image."""
        assert self.image is not None
        return update_on(self.seen.model, client, self.image, self.label)

    @cached_property
    def _lost(self) -> float | None:
        """Return the share of the weights that decay took, as it is fitted; None where it is that of the start."""
        lost = decay_shown(self.seen)
        decays = abs(lost - (1 - self.start.kept_share)) > _FLOOR * share_of_weights(self.seen)
        return lost if decays else None

    def decayed(self, client: Client) -> Client:
        """Return a client with the decay that the update shows."""
        return client if self._lost is None else replace(client, weight_decay=decay_that_takes(client, self._lost))

    def _tried(self, client: Client) -> Iterator[Fitted]:
        """Yield what a client leaves with its label; if that is much, with smoothing or any fitted label."""
        yield (hard := Fitted(client, self.label, self._left(client, self.label)))
        assert self.image is not None
        if hard.residual < _EXACT or (y := soft_targets(replace(self.seen, client=client), self.image)) is None:
            return
        classes = y.shape[1]
        rest = y[0].sort().values[:-1]
        if client.loss == "cross-entropy" and classes > 2:
            smoothing = float(rest.mean()) * classes
            if 0 < smoothing < 1 and float((rest - rest.mean()).abs().sum()) < _LEAST_SHARE:
                own = replace(client, label_smoothing=round(smoothing, 4))
                top = int(y[0].argmax())
                yield Fitted(own, top, self._left(own, top))
        plain = replace(client, label_smoothing=0.0)
        yield Fitted(plain, y, self._left(plain, y))

    def _of_other_losses(self) -> Iterator[Fitted]:
        """Yield the client with cross-entropy, and with a loss for each class and the weights of labels that it needs.

        In one step of the latter e = C ∂ℓ/∂z is σ where the image does not have a class, and w (σ − 1) where it does.
        """
        assert self.image is not None
        if self.start.loss != "cross-entropy":
            yield from self._tried(self.decayed(self.start.with_loss("cross-entropy")))
        for client in {self.start, self.decayed(self.start)}:
            h = logit_gradients(replace(self.seen, client=client), self.image)
            if h is None or client.total_steps > 1:
                return
            with torch.no_grad():
                sigmoid = self.seen.model(self.image).double().sigmoid()
            weights = (h.shape[1] * h / (sigmoid - 1)).where(h < 0, torch.ones_like(h))[0].tolist()
            client = client.with_loss("binary")
            if any(abs(weight - 1) > _LEAST_SHARE for weight in weights):
                client = replace(client, pos_weight=tuple(float(f"{weight:.4g}") for weight in weights))
            yield Fitted(client, (h < 0).to(h), self._left(client, (h < 0).to(h)))

    def _clipped(self) -> Iterator[Client]:
        """Yield clients that clip each gradient to the norm with which some number of steps moves as far."""
        size = math.sqrt(_squares(u[0] for u in self.seen.gradients.values()))
        for steps in sorted({self.start.total_steps, *_CLIPPED_STEPS}):
            clip = size / (self.start.lr * steps)
            for _ in range(_CLIP_ROUNDS):
                made = self.made(replace(self.start, steps=steps, epochs=None, clip=clip))
                clip *= size / math.sqrt(_squares(made[name] for name in self.seen.gradients))
            yield replace(self.start, steps=steps, epochs=None, clip=clip)

    def _without_head(self, client: Client) -> Fitted | None:
        """Return the settings that explain all of the update but the head's, which may have another rate."""
        left = self._left(client, self.label, with_bias=False)
        if not is_explained(left, client):
            return None
        made, held = self.made(client)[_BIAS].double(), self.seen.gradients[_BIAS][0].double()
        if not float(cosine_similarity(held, made, dim=0)) > _LEAST_COSINE:
            return None
        return Fitted(client, self.label, left, float((held * made).sum() / made.square().sum()))

    def _others(self) -> Iterator[Client]:
        """Yield clients with other settings, the likeliest first; some move the head's bias as far as the update."""
        client = self.start
        if (reach := self._reach(self.decayed(client))) is None:
            return
        steady, several = replace(client, momentum=0.0, nesterov=False), client.total_steps > 1
        if client.autocast == "float32":
            yield replace(client, autocast="bf16")
        if several and not client.dampening:
            common = [replace(steady, momentum=_MOMENTUM, nesterov=True)]
            common += [replace(steady, momentum=μ) for μ in (*_MOMENTA, 0.0)]
            yield from (each for each in common if each != client)
        if several:
            yield replace(client, schedule="constant" if client.schedule == "cosine" else "cosine")
        families = [lambda reach: at_rate(client, client.lr * reach / client.reach)]
        if several and not client.dampening:
            families += [lambda reach: _with_momentum(steady, reach, nesterov=False)]
            families += [lambda reach: _with_momentum(steady, reach, nesterov=True)]
        for family in families:
            if (found := self._matched(family, reach)) is not None:
                yield found
        for one in {client, client if client.dampening else replace(steady, momentum=_MOMENTUM)}:
            found = self._matched(lambda reach, one=one: _with_steps(one, reach), reach)
            T = client.total_steps if found is None else found.total_steps
            yield from (
                replace(one, steps=n, epochs=None)
                for n in range(max(1, T - 1), min(T + 4, _MOST_STEPS + 1))
                if n != client.total_steps
            )

    def _matched(self, family: Callable[[float], Client | None], reach: float) -> Client | None:
        """Return the client of a family that moves the head's bias as far as the update does; None if there is none.

        What a client of more reach moves grows, but less than in proportion, as gradients change on the way: secants of
        the logarithms find the reach, from the given one.
        """
        own, aim, points = family(reach), math.log(reach), list[tuple[float, float]]()
        for _ in range(_ROUNDS):
            ratio = None if own is None else self._reach(self.decayed(own))
            if own is None or ratio is None:
                return None
            off = math.log(ratio / own.reach)  # how much further the update went
            if abs(off) < _FLOOR:
                break
            points.append((math.log(own.reach), off))
            (x, y), (x0, y0) = points[-1], points[-2] if len(points) > 1 else (points[-1][0] - 1, off + 1)
            slope = min(-0.05, (y - y0) / (x - x0)) if x != x0 else -1.0
            aim = x - max(-1.0, min(1.0, off / slope))
            own, last = family(math.exp(aim)), own
            if own == last:
                break
        return own

    def _reach(self, client: Client) -> float | None:
        """Return `Client.reach` times ⟨Û, U⟩ / ⟨Û, Û⟩, with U what gradients moved of the head's bias, Û the client's.

        Other parameters' gradients change more on the way. None where the two have little in common.
        """
        held, made = (
            undecayed(self.seen.model, {_BIAS: u}, client)[_BIAS]
            for u in (self.seen.gradients[_BIAS][0], self.made(client)[_BIAS])
        )
        if not float(cosine_similarity(held, made, dim=0)) > _LEAST_COSINE:
            return None
        return client.reach * float((made * held).sum() / made.square().sum())

    def _rounded(self, found: Fitted) -> Fitted:
        """Return the fitted settings with each number rounded as far as they explain the update as well."""
        for name in ("lr", "momentum", "weight_decay", "label_smoothing", "clip"):
            value = getattr(found.client, name)
            if value == getattr(self.start, name):
                continue
            for digits in _DIGITS:
                near = round(value, digits) if name == "momentum" else float(f"{value:.{digits}g}")
                if abs(near - value) > _NEAR * value or not 0 <= near < math.inf:
                    continue
                own = at_rate(found.client, near) if name == "lr" else replace(found.client, **{name: near})
                left = self._left(own, found.target)
                if left <= 1.1 * found.residual + _EXACT / 10:
                    found = Fitted(own, found.target, left)
                    break
        return found


def _squares(parts: Iterable[Tensor]) -> float:
    return sum(float(part.double().square().sum()) for part in parts)


def _with_steps(client: Client, reach: float) -> Client:
    """Return the client with the number of steps whose reach is nearest."""
    clients = [replace(client, steps=T, epochs=None) for T in range(1, _MOST_STEPS + 1)]
    return min(clients, key=lambda each: abs(each.reach - reach))


def _with_momentum(client: Client, reach: float, *, nesterov: bool) -> Client | None:
    """Return the client with the momentum of this reach, which grows with it; None if there is none."""
    low, high = 1e-6, 0.999
    own = [replace(client, momentum=μ, nesterov=nesterov) for μ in (low, high)]
    if not own[0].reach <= reach <= own[1].reach:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if replace(own[0], momentum=middle).reach < reach else (low, middle)
    return replace(own[0], momentum=high)


def share_of_weights(seen: Observation, update: Mapping[str, Tensor] | None = None) -> float:
    """Return the norm of an update, or of the first one that is observed, in norms of the weights before it."""
    moved = {name: u[0] for name, u in seen.gradients.items()} if update is None else update
    size = _squares(moved[name] for name in seen.gradients)
    whole = _squares(weights_before(seen, name) for name in seen.gradients)
    return math.sqrt(size / whole) if whole else math.inf


def weights_before(seen: Observation, name: str) -> Tensor:
    """Return the weights before of a parameter, or E_unk."""
    unknown = seen.model.unk_embed
    return (unknown if name == "unk_embed" and unknown is not None else seen.model.vit.get_parameter(name)).detach()


def at_rate(client: Client, rate: float) -> Client:
    """Return the client with another learning rate, and the same schedule from there."""
    return replace(client, lr=rate, lr_min=min(rate, client.lr_min * rate / client.lr))


def decay_that_takes(client: Client, lost: float) -> float:
    """Return the weight decay at which the client loses this share of its weights; 0 where they grew."""
    found = 1e-6
    for _ in range(_ROUNDS):  # 1 − c is nearly linear in λ
        found *= max(lost, 0.0) / (1 - replace(client, weight_decay=found).kept_share) if found else 0.0
    return found


def decay_shown(seen: Observation, rounds: int = 12) -> float:
    """Return the share of the weights that decay took, as the update shows it after so many Gauss-Newton steps."""
    E = slot_rows(seen.model, seen.model.vit.get_parameter("pos_embed").detach().double())
    update = {name: u[0] for name, u in seen.gradients.items()}
    return fit_decay(seen.model, update, slot_gradients(seen)[0].double(), E, rounds)
