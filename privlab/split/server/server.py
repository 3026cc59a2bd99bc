"""The server of split learning: it holds T and sees features and gradients, but never an image or a label."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType

import grpc
import torch
from filelock import FileLock, Timeout
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from privlab.base import PrivlabError, check_range, one_line, refuse_links, versions, without_tf32
from privlab.release import Recorder
from privlab.split.protocol.checkpoint import private_folder
from privlab.split.protocol.contract import Refusal
from privlab.split.protocol.security import HEALTH, RequireToken, ServerTls, is_loopback
from privlab.split.protocol.split_pb2 import Reply, Request
from privlab.split.protocol.wire import Inbox
from privlab.split.server.entrance import Entrance
from privlab.split.server.session import Limits, Live, Sessions
from privlab.victims import Victim

SERVICE = "privlab.split.v1.Split"
METHOD = f"/{SERVICE}/Session"

Event = Callable[[dict[str, object]], None]
"""Called with each event: "event", "session" if the event has one, and facts."""

_POLL_SECONDS = 0.2
"""Seconds that a session waits for a message before it checks whether the server is stopping."""
_SPARE_THREADS = 8  # for refusals and health checks while all sessions are taken
_SPARE_CONNECTIONS = 512
"""How many connections are open at most, beyond one for each session; further ones are closed at once."""
_STRANGERS = 128
"""The most connections from one address whose callers have not shown the token; the oldest make room for others."""
_ROOM_SECONDS = 0.02
"""Seconds after which room is made again: within them, one address can hardly fill the spare connections."""
_SILENT_SECONDS = 10
"""Seconds after which a connection is closed that does not finish its handshake, or has no call under way."""
_LONGEST_FACT = 2000
"""The most characters of a fact in the log."""
_COMPLAINTS = frozenset({"refused", "failed", "unreadable", "not saved"})
_COMPLAINTS_PER_SECOND = 50
"""Events that clients can cause at will, and how many of them are logged in a second; the others are counted."""


class Server:
    """A server on a real port, as a context: it listens inside the context and stops gracefully at its end.

    Args:
        victim: the model that holds T's initial weights.
        token: the bearer token that clients must send.
        state: the folder of the checkpoints, for one server at a time.
        host: the address to listen on; an address that other machines can reach needs TLS.
        port: the port to listen on; 0 takes a free one.
        tls: certificate and key; with `client_ca`, clients need a certificate too.
        limits: the most that clients may use.
        checkpoint_every: the number of steps between two checkpoints, at least 1.
        record: the folder in which an honest-but-curious server records what it sees; None records nothing.
        device: where T computes.
        on_event: called with each event.

    Raises:
        PrivlabError: if it cannot listen there, another server uses `state`, this folder holds links, or other machines
            could connect without TLS.
    """

    def __init__(
        self,
        victim: Victim,
        *,
        token: str,
        state: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ServerTls | None = None,
        limits: Limits | None = None,
        checkpoint_every: int = 100,
        record: Path | None = None,
        device: torch.device | str = "cpu",
        on_event: Event = lambda event: None,
    ) -> None:
        if tls is None and not is_loopback(host):
            raise PrivlabError(f"--host {host} is open to other machines, which needs TLS: --tls-cert and --tls-key.")
        check_range(checkpoint_every >= 1, "--checkpoint-every", "at least 1", checkpoint_every)
        self.host, self.port, self.limits = host, port, limits or Limits()
        self._tls, self._on_event = tls, on_event
        self._folder, self._stopping, self._last_word = private_folder(state), threading.Event(), 0.0
        refuse_links(self._folder)
        facts = {"model": victim.architecture, "weights": victim.weights.origin, "versions": versions()}
        recorder = None
        if record is not None:
            recorder = Recorder(record, facts, on_stop=lambda why: self._log("warning", None, reason=why))
        device = torch.device(device)
        self._sessions = Sessions(victim, self._folder, self.limits, checkpoint_every, device, self._log, recorder)
        self._threads = ThreadPoolExecutor(self.limits.sessions + _SPARE_THREADS, "session")
        self._unread, self._lock = dict[grpc.ServicerContext, float](), threading.Lock()
        self._second, self._complaints = 0, 0
        self._entrance = Entrance(_STRANGERS)
        self._grpc, self._open = self._build(token), ExitStack()

    @property
    def address(self) -> str:
        """Return HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __enter__(self) -> "Server":
        with ExitStack() as undo:
            try:
                undo.enter_context(FileLock(self._folder / "lock", timeout=0))
            except Timeout:
                raise PrivlabError(f"Another server uses --state '{self._folder}': give each its own.") from None
            self.port = self._bind()
            undo.enter_context(without_tf32())  # autocast is off in the threads of sessions
            self._grpc.start()
            self._open = undo.pop_all()
        threading.Thread(target=self._cancel_unread, name="unread", daemon=True).start()
        threading.Thread(target=self._make_room, name="entrance", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self, grace: float = 30.0) -> None:
        """Let each client finish its current step within `grace` seconds, write checkpoints, and close."""
        self._last_word = time.monotonic() + grace
        self._stopping.set()
        self._grpc.stop(grace + 1).wait()
        self._threads.shutdown()
        self._open.close()

    def _build(self, token: str) -> grpc.Server:
        silent = int(1000 * min(_SILENT_SECONDS, self.limits.idle))
        options = [
            ("grpc.max_allowed_incoming_connections", self.limits.sessions + _SPARE_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", silent),
            ("grpc.max_connection_idle_ms", silent),
            ("grpc.max_receive_message_length", self.limits.message),
            ("grpc.max_metadata_size", 2**13),
            ("grpc.max_concurrent_streams", self.limits.sessions + _SPARE_THREADS),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ]
        guard = RequireToken(token, lambda why: self._log("refused", None, reason=why))
        most = self.limits.sessions + _SPARE_THREADS
        server = grpc.server(self._threads, interceptors=[guard], options=options, maximum_concurrent_rpcs=most)
        session = grpc.stream_stream_rpc_method_handler(self._session, response_serializer=Reply.SerializeToString)
        # A stream of requests that is never iterated over: no message of a caller without the token is received.
        health = grpc.stream_unary_rpc_method_handler(self._health)
        for path, handler in ((METHOD, session), (HEALTH, health)):
            service, method = path.strip("/").split("/")
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        return server

    def _bind(self) -> int:
        try:
            if self._tls is None:
                return self._grpc.add_insecure_port(self.address)
            return self._grpc.add_secure_port(self.address, self._tls.credentials())
        except RuntimeError as error:
            reason = "is another program there? Give another --port, or --host"
            raise PrivlabError(f"Cannot listen on {self.address}: {reason}.") from error

    def _session(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Reply]:
        """Serve one stream, in a separate thread."""
        self._entrance.show(context.peer())
        inbox = Inbox(requests)
        try:
            for reply in self._replies(inbox):
                self._unread[context] = time.monotonic()
                yield reply  # gRPC goes on here when the client has room for the reply
                self._unread.pop(context, None)
        except Refusal as refusal:
            self._log("refused", refusal.session, status=refusal.status, reason=str(refusal))
            context.abort(grpc.StatusCode[refusal.status], str(refusal))
        except Exception as error:  # mostly out of memory: the other sessions continue
            what = one_line(error, kind=True)
            self._log("failed", None, reason=what)
            reason = f"The server failed at this request ({type(error).__name__}): its log says more."
            context.abort(grpc.StatusCode.INTERNAL, reason)
        finally:
            self._unread.pop(context, None)
            inbox.close()

    def _make_room(self) -> None:
        """Close connections from an address that has many without the token, until the server stops."""
        while not self._stopping.wait(_ROOM_SECONDS):
            if closed := self._entrance.make_room(self.port):
                self._log("refused", None, reason=f"{closed} connections of an address that has many without the token")

    def _cancel_unread(self) -> None:
        """End the streams of clients that do not read their replies, until the server stops."""
        while not self._stopping.wait(_POLL_SECONDS):
            latest = time.monotonic() - self.limits.idle
            for context, since in [*self._unread.items()]:
                if since < latest:
                    self._unread.pop(context, None)
                    self._log("refused", None, reason=f"a reply was not read for {self.limits.idle:g} seconds")
                    context.cancel()

    def _replies(self, inbox: Inbox) -> Iterator[Reply]:
        first = self._next(inbox, None)
        if first is None:
            return
        if first.WhichOneof("kind") != "open":
            raise Refusal("FAILED_PRECONDITION", f"A stream begins with open. Found '{first.WhichOneof('kind')}'.")
        with self._sessions.open_session(first.open, first.saved) as live:
            yield live.opening()
            while (request := self._next(inbox, live)) is not None:
                reply = live.answer(request)
                if reply is not None:
                    yield reply

    def _next(self, inbox: Inbox, live: Live | None) -> Request | None:
        """Return the client's next request, or None if the client has disconnected."""
        data = self._wait(inbox, live)
        if data is None:
            return None
        try:
            return Request.FromString(data)
        except DecodeError:
            raise Refusal("INVALID_ARGUMENT", f"The {len(data)} bytes are not a request of split learning.") from None

    def _wait(self, inbox: Inbox, live: Live | None) -> bytes | None:
        silent_since = now = time.monotonic()
        while now - silent_since <= self.limits.idle:
            under_way = live is not None and live.session.pending_features is not None
            if self._stopping.is_set() and not (under_way and now < self._last_word):
                raise Refusal("UNAVAILABLE", "The server is stopping; the session can be resumed.")
            try:
                return inbox.get(_POLL_SECONDS)
            except futures.TimeoutError:
                now = time.monotonic()
            except Exception:  # gRPC raises a bare Exception if the client has disconnected
                return None
        said = f"Nothing came for {self.limits.idle:g} seconds"
        raise Refusal("DEADLINE_EXCEEDED", f"{said}: the session was saved, and can be resumed.")

    def _health(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Return whether the server serves, whatever service is asked for: the request is not read."""
        answer = health_pb2.HealthCheckResponse
        status = answer.NOT_SERVING if self._stopping.is_set() else answer.SERVING
        return answer(status=status).SerializeToString()

    def _log(self, event: str, session: str | None, **facts: object) -> None:
        """Log an event; complaints are limited in rate, since anybody who reaches the port can cause them."""
        if event in _COMPLAINTS and not self._may_complain():
            return
        facts = {name: value[:_LONGEST_FACT] if isinstance(value, str) else value for name, value in facts.items()}
        self._on_event({"event": event} | ({} if session is None else {"session": session}) | facts)

    def _may_complain(self) -> bool:
        """Return whether another complaint is logged in this second, and log how many were not in an earlier one."""
        with self._lock:
            second, left_out = int(time.monotonic()), 0
            if second != self._second:
                left_out = max(0, self._complaints - _COMPLAINTS_PER_SECOND)
                self._second, self._complaints = second, 0
            self._complaints += 1
            may = self._complaints <= _COMPLAINTS_PER_SECOND
        if left_out:
            self._on_event({"event": "not logged", "complaints": left_out})
        return may


def serve(server: Server, *, started: Callable[[Server], None] = lambda server: None) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully; a second signal ends the program at once."""
    stop = threading.Event()

    def heard(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        stop.set()

    before = {each: signal.signal(each, heard) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        with server:
            started(server)
            stop.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
