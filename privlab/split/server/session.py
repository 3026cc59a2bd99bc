"""The sessions of a server, each one client's T whose steps are applied exactly once: opened, resumed, limited."""

import hmac
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

import psutil
import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError, check_range
from privlab.release import Recorder, SessionRecorder
from privlab.split.defaults import BATCH, DISK_MIB, IDLE_SECONDS, MESSAGE_MIB, SESSIONS
from privlab.split.protocol.backbone import Backbone, check_cut
from privlab.split.protocol.checkpoint import SessionCheckpoints, optimizer_state, read, restore_optimizer, write
from privlab.split.protocol.contract import SESSION_ID, Contract, Refusal
from privlab.split.protocol.split_pb2 import Open, Opened, Reply, Request, Saved, Tensors
from privlab.split.protocol.wire import HEADER_BYTES, is_finite, pack, unpack, unpack_state
from privlab.victims import Victim, hash_of

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


VERSION = 2
"""The version of the protocol: since 2, a contract may state a cut layer. A request states the least that it needs."""

_MOST_STEPS = 16
"""The most steps after which a client may offer to continue; privlab's own offers two."""
_MOST_STORED = 1000
"""The most sessions with checkpoints in the folder of a server, beyond which no new one is opened."""
_KEPT = 4
"""The most checkpoints of a session at once: three that are kept, and one that is being written."""
_NAME_LENGTH = 12
"""Characters of a session's identity that name it in logs and folders."""


@dataclass(frozen=True)
class Limits:
    """The most that clients may use: sessions at once, images in a batch, bytes of memory for all sessions and in
    one message, seconds of silence, bytes on disk of one session: its checkpoints, and also its recording.

    Raises:
        PrivlabError: if a limit is not positive.
    """  # noqa: D205

    sessions: int = SESSIONS
    batch: int = BATCH
    memory: int = field(default_factory=lambda: psutil.virtual_memory().total * 4 // 5)
    message: int = MESSAGE_MIB * 2**20
    idle: float = IDLE_SECONDS
    disk: int = DISK_MIB * 2**20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_range(value > 0, f"The limit '{name}'", "above 0", value)


@dataclass(eq=False)
class Sessions:
    """The sessions of a server: those with a connected client, and those on disk, in FOLDER/NAME.

    Args:
        victim: the model that holds T's initial weights, from which clients without their own weights start.
        folder: the folder of the checkpoints.
        limits: the most that clients may use.
        every: the number of steps between two checkpoints.
        device: where T computes.
        log: called with the name of each event, the session's name and facts.
        recorder: records what the server sees; None records nothing.
    """

    victim: Victim
    folder: Path
    limits: Limits
    every: int
    device: torch.device
    log: Callable[..., None]
    recorder: Recorder | None

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._taken: dict[str, int] = {}
        self._hashes: dict[tuple[str, int], str] = {}

    @contextmanager
    def open_session(self, request: Open, saved: int) -> Iterator[Live]:
        """Open a new session, or one from disk, as a context; write its checkpoint at the end.

        Raises:
            Refusal: if this server does not accept the contract, a limit is reached, there is no such session, it has
                another client, or it cannot continue after any of the client's steps.
        """
        contract = self._check(request)
        steps = list(request.steps) or [0]
        id_ = self._find(request.session, steps) or secrets.token_hex(32)
        blocks = self.victim.model.vit.blocks[contract.cut_layer :]
        parameters = sum(p.numel() for p in blocks.parameters())
        need = contract.session_bytes(parameters, len(blocks))
        self._check_disk(id_, _KEPT * contract.checkpoint_bytes(parameters))
        with self._place(id_, need):
            live = self._live(id_, steps, contract, saved)
            self.log("opened" if live.after == 0 else "resumed", live.name, step=live.after, memory=need)
            try:
                yield live
            except Refusal as refusal:
                refusal.session = live.name
                raise
            finally:
                live.close()

    def _check(self, request: Open) -> Contract:
        """Return the contract if this server accepts it."""
        if not 1 <= request.version <= VERSION:
            raise Refusal("FAILED_PRECONDITION", f"The protocol is version {VERSION}. Found {request.version}.")
        if len(request.steps) > _MOST_STEPS:
            raise Refusal("INVALID_ARGUMENT", f"At most {_MOST_STEPS} steps are offered. Found {len(request.steps)}.")
        contract = Contract.of(request.contract)
        try:
            check_cut(self.victim.model, contract.cut_layer)
        except PrivlabError as error:
            raise Refusal("INVALID_ARGUMENT", str(error)) from None
        name, width = self.victim.architecture, self.victim.model.vit.embed_dim
        if (contract.model, contract.width) != (name, width):
            found = f"{contract.model[:60]} of width {contract.width}"
            raise Refusal("INVALID_ARGUMENT", f"This server holds {name} of width {width}. Asked for: {found}.")
        if contract.max_batch > self.limits.batch:
            most = f"at most {self.limits.batch} images in a batch. Asked for: {contract.max_batch}"
            raise Refusal("RESOURCE_EXHAUSTED", f"This server takes {most}.")
        if contract.message_bytes + HEADER_BYTES > self.limits.message:
            most = f"{self.limits.message / 2**20:.0f} MiB. A batch would need {contract.message_bytes / 2**20:.0f}"
            raise Refusal("RESOURCE_EXHAUSTED", f"This server takes messages of at most {most}.")
        return contract

    def _check_disk(self, id_: str, need: int) -> None:
        """Refuse a session whose checkpoints would take too much of the disk, and a new one too many."""
        if need > self.limits.disk:
            sizes = f"{need / 2**20:.0f} MiB on disk; a session may take {self.limits.disk / 2**20:.0f}"
            raise Refusal("RESOURCE_EXHAUSTED", f"The session's checkpoints would take about {sizes}.")
        if not self._checkpoints(id_).folder.exists():
            stored = sum(1 for path in self.folder.iterdir() if path.is_dir())
            if stored >= _MOST_STORED:
                raise Refusal("RESOURCE_EXHAUSTED", f"This server keeps {stored} sessions: delete old ones in --state.")

    def _find(self, asked: str, steps: Sequence[int]) -> str | None:
        """Return the id of a session that is on disk or in use, or None if a new one has to be opened."""
        if asked and not SESSION_ID.fullmatch(asked):
            raise Refusal(
                "INVALID_ARGUMENT", f"A session's id has 64 hexadecimal digits. Found {len(asked)} characters."
            )
        if asked and (asked in self._taken or hmac.compare_digest(self._id_on_disk(asked), asked)):
            return asked
        if 0 not in steps:
            raise Refusal(
                "NOT_FOUND", "This server knows no such session: is --state the folder that it was begun with?"
            )
        return None

    def _id_on_disk(self, asked: str) -> str:
        stored = self._checkpoints(asked)
        for step in stored.steps():
            try:
                return str(read(stored.path(step), only_facts=True)[1]["session"])
            except (PrivlabError, KeyError) as error:
                self.log("unreadable", asked[:_NAME_LENGTH], step=step, reason=str(error))
        return ""

    @contextmanager
    def _place(self, id_: str, need: int) -> Iterator[None]:
        """Reserve a place and memory for a session, or refuse it."""
        with self._lock:
            if id_ in self._taken:
                raise Refusal("ABORTED", "The session is in another client's hands: one client at a time.")
            if len(self._taken) >= self.limits.sessions:
                raise Refusal("ABORTED", f"All {self.limits.sessions} sessions are taken: try again later.")
            left = self.limits.memory - sum(self._taken.values())
            if need > left:
                sizes = f"{need / 2**20:.0f} MiB, and {left / 2**20:.0f} MiB are left"
                message = f"The session would take about {sizes}: use a smaller batch"
                if need > self.limits.memory:
                    raise Refusal("RESOURCE_EXHAUSTED", f"{message}.")
                raise Refusal("ABORTED", f"{message}, or try again later.")  # other sessions have the rest
            self._taken[id_] = need
        try:
            yield
        finally:
            with self._lock:
                del self._taken[id_]

    def _live(self, id_: str, steps: Sequence[int], contract: Contract, saved: int) -> Live:
        """Return the session after the first of the client's steps from which it can continue."""
        session, stored = Session(self._backbone(contract), contract), self._checkpoints(id_)
        for step in steps:
            if step == 0 or self._restore(session, stored, step):
                stored.keep([kept for kept in stored.steps() if kept <= session.step])
                break
        else:
            found = f"{stored.steps()}. The client offers {list(steps)[:8]}"
            raise Refusal("FAILED_PRECONDITION", f"The session can go on after steps {found}.")
        name, weights_sha256 = id_[:_NAME_LENGTH], self._hash(contract)
        facts = {"contract": asdict(contract), "weights_sha256": weights_sha256}
        record = None if self.recorder is None else self.recorder.session(name, facts, self.limits.disk)
        return Live(id_, name, session, step, stored, saved, self.every, weights_sha256, self.log, record)

    def _restore(self, session: Session, stored: SessionCheckpoints, step: int) -> bool:
        """Return whether the session was restored to a step, or to the next, which the client may then send again."""
        for candidate in (step, step + 1):
            if candidate not in stored.steps():
                continue
            try:
                tensors, facts = read(stored.path(candidate))
            except PrivlabError as error:
                self.log("unreadable", stored.folder.name, step=candidate, reason=str(error))
                continue
            if Contract.of(facts["contract"]) != session.contract:
                raise Refusal(
                    "FAILED_PRECONDITION", f"The session was begun with {facts['contract']}: resume with that."
                )
            session.restore(candidate, tensors)
            return True
        return False

    def _checkpoints(self, id_: str) -> SessionCheckpoints:
        return SessionCheckpoints(self.folder / id_[:_NAME_LENGTH])

    def _backbone(self, contract: Contract) -> Backbone:
        return Backbone(self.victim.model, contract.torch_dtype, contract.cut_layer).to(self.device)

    def _hash(self, contract: Contract) -> str:
        kind = (contract.dtype, contract.cut_layer)
        if kind not in self._hashes:
            self._hashes[kind] = hash_of(self._backbone(contract).state_dict())
        return self._hashes[kind]
