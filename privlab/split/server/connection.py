"""A session while a client is connected: it answers requests and writes checkpoints and records."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from privlab.base import PrivlabError
from privlab.release import SessionRecorder
from privlab.split.protocol.checkpoint import SessionCheckpoints
from privlab.split.protocol.contract import Refusal
from privlab.split.protocol.split_pb2 import Opened, Reply, Request, Saved, Tensors
from privlab.split.protocol.wire import HEADER_BYTES, pack, unpack, unpack_state
from privlab.split.server.session import Session

__all__ = ["Live"]


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
        kind = request.WhichOneof("kind")
        self._note_saved(request.saved)
        if kind == "weights":
            return self._receive(request.weights)
        if self._uploaded is not None:
            raise Refusal("FAILED_PRECONDITION", f"The contract promises T's initial weights first. Found '{kind}'.")
        if kind == "forward":
            return self._forward(request.forward)
        if kind == "backward":
            return self._backward(request.backward)
        if kind == "infer":
            features = self._tensor(request.infer, "features")
            if self.record is not None:
                self.record.inference(features)
            return self._reply(inferred=pack("outputs", self.session.infer(features)))
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
            self.stored.write(step, self.session.tensors(), self._facts(step))
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

    def _forward(self, request: Tensors) -> Reply:
        outputs = self.session.forward(request.step, self._tensor(request.data, "features"))
        reply = self._reply()
        reply.outputs.step, reply.outputs.data = request.step, pack("outputs", outputs)
        return reply

    def _backward(self, request: Tensors) -> Reply:
        pending, before = self.session.pending_features, self.session.step
        gradient = self._tensor(request.data, "gradient")
        answer = self.session.backward(request.step, gradient)
        if self.session.step > before:
            if self.record is not None and pending is not None:
                self.record.step(self.session.step, pending, gradient)
            if self.session.step % self.every == 0:
                self.checkpoint()
        reply = self._reply()
        reply.gradient.step, reply.gradient.data = request.step, pack("gradient", answer)
        return reply

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

    def _note_saved(self, step: int) -> None:
        if step > self.saved:
            self.saved = step
            self._prune()

    def _prune(self) -> None:
        self.stored.keep({self.durable, self.saved, self.saved + 1})

    def _tensor(self, data: bytes, name: str) -> torch.Tensor:
        contract = self.session.contract
        return unpack(data, name, contract).to(next(self.session.backbone.parameters()).device)

    def _reply(self, **kind: object) -> Reply:
        return Reply(durable=self.durable, **kind)  # pyright: ignore[reportArgumentType]

    def _facts(self, step: int) -> dict[str, object]:
        return {"session": self.id_, "step": step, "contract": asdict(self.session.contract)}
