"""The sessions of a server: opened, resumed, limited in number and memory; each has one client at a time."""

import hmac
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

import psutil
import torch

from privlab.base import PrivlabError, check_range
from privlab.release import Recorder
from privlab.split.protocol.backbone import Backbone, check_cut
from privlab.split.protocol.checkpoint import SessionCheckpoints, read
from privlab.split.protocol.contract import Contract, Refusal
from privlab.split.protocol.split_pb2 import Open
from privlab.split.protocol.wire import HEADER_BYTES
from privlab.split.server.session import Live, Session
from privlab.victims import Victim, hash_of

VERSION = 2
"""The version of the protocol: since 2, a contract may state a cut layer. A request states the least that it needs."""

_ID = re.compile(r"[0-9a-f]{64}")
_NAME_LENGTH = 12
"""Characters of a session's identity that name it in logs and folders."""


@dataclass(frozen=True)
class Limits:
    """The most that clients may use: sessions at once, images in a batch, bytes of memory for all sessions and in
    one message, seconds of silence.

    Raises:
        PrivlabError: if a limit is not positive.
    """  # noqa: D205

    sessions: int = 8
    batch: int = 256
    memory: int = field(default_factory=lambda: psutil.virtual_memory().total * 4 // 5)
    message: int = 2**28
    idle: float = 300.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_range(value > 0, f"The limit '{name}'", "above 0", value)


@dataclass(eq=False)
class Sessions:
    """The sessions of a server: those with a connected client, and those on disk, in FOLDER/NAME.

    Args:
        victim: the model that holds T's initial weights, from which clients without weights of their own start.
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
        need = contract.session_bytes(sum(p.numel() for p in blocks.parameters()), len(blocks))
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

    def _find(self, asked: str, steps: Sequence[int]) -> str | None:
        """Return the id of a session that is on disk or in use, or None if a new one has to be opened."""
        if asked and not _ID.fullmatch(asked):
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
                raise Refusal("RESOURCE_EXHAUSTED", f"All {self.limits.sessions} sessions are taken: try again later.")
            left = self.limits.memory - sum(self._taken.values())
            if need > left:
                sizes = f"{need / 2**20:.0f} MiB, and {left / 2**20:.0f} MiB are left"
                raise Refusal("RESOURCE_EXHAUSTED", f"The session would take about {sizes}: use a smaller batch.")
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
        record = None if self.recorder is None else self.recorder.session(name, facts)
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
