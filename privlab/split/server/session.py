"""One client's T on the server, whose steps are applied exactly once, and its answers while a client is connected."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError
from privlab.release import SessionRecorder
from privlab.split.protocol.backbone import Backbone
from privlab.split.protocol.checkpoint import SessionCheckpoints, optimizer_state, restore_optimizer, write
from privlab.split.protocol.contract import Contract, Refusal
from privlab.split.protocol.split_pb2 import Opened, Reply, Request, Saved, Tensors
from privlab.split.protocol.wire import HEADER_BYTES, is_finite, pack, unpack, unpack_state

_LAST = "last."
"""How the names of the tensors begin that the last step exchanged, which get the same answer if they come again."""


class Session:
    """T and its optimiser, after `step` steps.

    A step is `forward`, then `backward`, both with its number. The last applied step may be sent again and gets the
    same answer; a forward whose backward never comes has no effect.
    """

    def __init__(self, backbone: Backbone, contract: Contract) -> None:
        self.backbone, self.contract = backbone, contract
        self.optimizer = contract.optimizer_of(p for p in backbone.parameters() if p.requires_grad)
        self.step = 0
        self._last: dict[str, Tensor] = {}
        self._under_way: tuple[int, Tensor, Tensor] | None = None

    @property
    def pending_features(self) -> Float[Tensor, "b t d"] | None:
        """Return the features of a forward that waits for its backward."""
        return None if self._under_way is None else self._under_way[1].detach()

    def forward(self, step: int, features: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return T(features).

        Raises:
            Refusal: if the step is not due, was applied with other features, or its outputs are not finite.
        """
        if step == self.step and self._last:
            _check_same(step, "features", features, self._last["features"])
            return self._last["outputs"]
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
        if step == self.step and self._last:
            _check_same(step, "gradient", gradient, self._last["gradient"])
            return self._last["answer"]
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
        exchanged = {"features": features.detach(), "outputs": outputs.detach()}
        self._last = exchanged | {"gradient": gradient, "answer": answer}
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
        last = {f"{_LAST}{name}": tensor for name, tensor in self._last.items()}
        return weights | optimizer_state(self.optimizer) | last

    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned after `step` steps."""
        weights = {n.removeprefix("backbone."): t for n, t in tensors.items() if n.startswith("backbone.")}
        self.backbone.load_state_dict(weights)
        restore_optimizer(self.optimizer, tensors)
        self.step, self._under_way = step, None
        device = next(self.backbone.parameters()).device
        self._last = {n.removeprefix(_LAST): t.to(device) for n, t in tensors.items() if n.startswith(_LAST)}


def _check_finite(step: int, what: str, tensor: Tensor) -> None:
    if not is_finite(tensor):
        raise Refusal("OUT_OF_RANGE", f"At step {step}, {what} is not finite: training diverges. Lower the rate.")


def _check_same(step: int, name: str, found: Tensor, applied: Tensor) -> None:
    if not torch.equal(found, applied):
        raise Refusal("FAILED_PRECONDITION", f"Step {step} was applied with another {name}: it is not applied twice.")


@dataclass(eq=False)
class Live:
    """A session that a client is connected to.

    `after` is the step after which the client continues; `durable` the last step that survives a crash of this server;
    `saved` the last step of which the client keeps a checkpoint. The server keeps its checkpoint of that step too, in
    case the client returns to it.
    """

    id_: str
    name: str
    session: Session
    after: int
    stored: SessionCheckpoints
    saved: int
    every: int
    weights_sha256: str
    log: Callable[..., None]
    record: SessionRecorder | None

    def __post_init__(self) -> None:
        self.durable = self.session.step
        contract = self.session.contract
        self._uploaded: bytearray | None = bytearray() if contract.own_weights and self.session.step == 0 else None
        size = sum(t.numel() for t in self.session.backbone.state_dict().values())
        self._upload_most = size * contract.torch_dtype.itemsize + HEADER_BYTES * 16

    def opening(self) -> Reply:
        """Return the answer to the request that opened the session."""
        opened = Opened(
            session=self.id_, step=self.after, weights_sha256=self.weights_sha256, checkpoint_every=self.every
        )
        return Reply(durable=min(self.durable, self.after), opened=opened)

    def answer(self, request: Request) -> Reply | None:
        """Return the reply to a request, or None for a part of the initial weights, which has no reply.

        Raises:
            Refusal: if the request is out of order, or its tensors violate the contract.
        """
        kind, session = request.WhichOneof("kind"), self.session
        if request.saved > self.saved:
            self.saved = request.saved
            self._prune()
        if kind == "weights":
            return self._receive(request.weights)
        if self._uploaded is not None:
            raise Refusal("FAILED_PRECONDITION", f"The contract promises T's initial weights first. Found '{kind}'.")
        if kind == "forward":
            outputs = session.forward(request.forward.step, self._tensor(request.forward.data, "features"))
            return self._reply(outputs=Tensors(step=request.forward.step, data=pack("outputs", outputs)))
        if kind == "backward":
            return self._backward(request.backward)
        if kind == "infer":
            features = self._tensor(request.infer, "features")
            if self.record is not None:
                self.record.inference(features)
            return self._reply(inferred=pack("outputs", session.infer(features)))
        if kind == "save":
            self.checkpoint()
            return self._reply(saved=Saved())
        raise Refusal("INVALID_ARGUMENT", f"Expected forward, backward, infer or save. Found '{kind}'.")

    def checkpoint(self) -> None:
        """Write a checkpoint of the session; on a full disk it continues, and the older checkpoint stays durable."""
        step = self.session.step
        if step == self.durable:
            return
        try:
            facts = {"session": self.id_, "step": step, "contract": asdict(self.session.contract)}
            write(self.stored.path(step), self.session.tensors(), facts)
        except PrivlabError as error:
            self.log("not saved", self.name, step=step, durable=self.durable, reason=str(error))
            return
        self.durable = step
        self._prune()
        self.log("saved", self.name, step=step)

    def close(self) -> None:
        """Write the checkpoint, and the record of a step whose backward never came."""
        if self.record is not None and (pending := self.session.pending_features) is not None:
            self.record.step(self.session.step + 1, pending, None)
        self.checkpoint()
        self.log("closed", self.name, step=self.session.step, durable=self.durable)

    def _backward(self, request: Tensors) -> Reply:
        pending, before = self.session.pending_features, self.session.step
        gradient = self._tensor(request.data, "gradient")
        answer = self.session.backward(request.step, gradient)
        if self.session.step > before:
            if self.record is not None and pending is not None:
                self.record.step(self.session.step, pending, gradient)
            if self.session.step % self.every == 0:
                self.checkpoint()
        return self._reply(gradient=Tensors(step=request.step, data=pack("gradient", answer)))

    def _receive(self, part: bytes) -> None:
        """Collect the initial weights; the last part is empty."""
        if self._uploaded is None:
            raise Refusal("FAILED_PRECONDITION", "No weights are expected: the contract says so, or they are here.")
        self._uploaded += part
        if len(self._uploaded) > self._upload_most:
            most = f"at most {self._upload_most} bytes. Found {len(self._uploaded)} or more"
            raise Refusal("INVALID_ARGUMENT", f"T's initial weights take {most}.")
        if not part:
            backbone = self.session.backbone
            state = unpack_state(bytes(self._uploaded), backbone.state_dict(), self.session.contract.torch_dtype)
            backbone.load_state_dict(state)
            self._uploaded = None

    def _prune(self) -> None:
        self.stored.keep({self.durable, self.saved, self.saved + 1})

    def _tensor(self, data: bytes, name: str) -> Tensor:
        contract = self.session.contract
        return unpack(data, name, contract).to(next(self.session.backbone.parameters()).device)

    def _reply(self, **kind: object) -> Reply:
        return Reply(durable=self.durable, **kind)  # pyright: ignore[reportArgumentType]
