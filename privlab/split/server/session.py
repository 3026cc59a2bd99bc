"""One client's T on the server, with its optimiser: every step is applied exactly once."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.split.protocol.backbone import Backbone
from privlab.split.protocol.checkpoint import optimizer_state, restore_optimizer
from privlab.split.protocol.contract import Contract, Refusal

__all__ = ["Session"]


@dataclass(frozen=True, eq=False)
class _Exchange:
    """The tensors of a step, kept so that a step that is sent again gets the same answer."""

    step: int
    features: Float[Tensor, "b t d"]
    outputs: Float[Tensor, "b t d"]
    gradient: Float[Tensor, "b t d"]
    answer: Float[Tensor, "b t d"]


class Session:
    """T and its optimiser, after `step` steps.

    A step is `forward`, then `backward`, both with its number. The last applied step may be sent again and gets the
    same answer; a forward whose backward never comes has no effect.
    """

    def __init__(self, backbone: Backbone, contract: Contract) -> None:
        self.backbone, self.contract = backbone, contract
        self.optimizer = contract.optimizer_of(p for p in backbone.parameters() if p.requires_grad)
        self.step = 0
        self._last: _Exchange | None = None
        self._under_way: tuple[int, Tensor, Tensor] | None = None

    @property
    def under_way(self) -> bool:
        """Return whether a forward waits for its backward."""
        return self._under_way is not None

    @property
    def pending_features(self) -> Float[Tensor, "b t d"] | None:
        """Return the features of a forward that waits for its backward."""
        return None if self._under_way is None else self._under_way[1].detach()

    def forward(self, step: int, features: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return T(features).

        Raises:
            Refusal: if the step is not due, was applied with other features, or its outputs are not finite.
        """
        if step == self.step and (last := self._last) is not None:
            _check_same(step, "features", features, last.features)
            return last.outputs
        if step != self.step + 1:
            raise Refusal("FAILED_PRECONDITION", f"Step {self.step + 1} is due. Found a forward of step {step}.")
        features.requires_grad_()
        outputs = self.backbone(features)
        _check_finite(step, "T(features)", outputs)
        self._under_way = step, features, outputs
        return outputs.detach()

    def backward(self, step: int, gradient: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return ∂ℓ/∂features, given ∂ℓ/∂outputs, and change T by one step of the optimiser.

        Raises:
            Refusal: if the step has no forward, was applied with another gradient, or the gradient has another shape
                or leads to one that is not finite.
        """
        if step == self.step and (last := self._last) is not None:
            _check_same(step, "gradient", gradient, last.gradient)
            return last.answer
        if self._under_way is None or self._under_way[0] != step:
            raise Refusal("FAILED_PRECONDITION", f"Step {step} has no forward: send its features first.")
        _, features, outputs = self._under_way
        if gradient.shape != outputs.shape:
            shapes = f"{tuple(outputs.shape)}. Found {tuple(gradient.shape)}"
            raise Refusal("INVALID_ARGUMENT", f"'gradient' must have the shape of the outputs, {shapes}.")
        self._under_way = None
        outputs.backward(gradient)
        answer = features.grad
        assert answer is not None
        try:
            _check_finite(step, "the gradient of the features", answer)
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()
        self._last = _Exchange(step, features.detach(), outputs.detach(), gradient, answer)
        self.step = step
        return answer

    def infer(self, features: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return T(features) without changing T.

        Raises:
            Refusal: if the outputs are not finite.
        """
        with torch.no_grad():
            outputs = self.backbone(features)
        _check_finite(self.step, "T(features)", outputs)
        return outputs

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a later session needs to continue: weights, averages, the last exchange."""
        weights = {f"backbone.{name}": tensor for name, tensor in self.backbone.state_dict().items()}
        return weights | optimizer_state(self.optimizer) | self._exchange()

    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned after `step` steps."""
        weights = {n.removeprefix("backbone."): t for n, t in tensors.items() if n.startswith("backbone.")}
        self.backbone.load_state_dict(weights)
        restore_optimizer(self.optimizer, tensors)
        self.step, self._under_way = step, None
        device = next(self.backbone.parameters()).device
        last = {n.removeprefix("last."): t.to(device) for n, t in tensors.items() if n.startswith("last.")}
        self._last = _Exchange(step, **last) if last else None

    def _exchange(self) -> dict[str, Tensor]:
        names = ("features", "outputs", "gradient", "answer")
        return {} if self._last is None else {f"last.{name}": getattr(self._last, name) for name in names}


def _check_finite(step: int, what: str, tensor: Tensor) -> None:
    low, high = tensor.detach().aminmax()
    if not bool(low.isfinite() & high.isfinite()):
        raise Refusal("OUT_OF_RANGE", f"At step {step}, {what} is not finite: training diverges. Lower the rate.")


def _check_same(step: int, name: str, found: Tensor, applied: Tensor) -> None:
    if not torch.equal(found, applied):
        raise Refusal("FAILED_PRECONDITION", f"Step {step} was applied with another {name}: it is not applied twice.")
