"""The client's side of the connection: a session as a context, requests as calls, failures as one-line errors."""

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field

import grpc
from google.protobuf.message import DecodeError
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError, printable
from privlab.split.defaults import RETRY_SECONDS
from privlab.split.protocol.contract import SESSION_ID, Contract
from privlab.split.protocol.security import ClientTls, is_loopback, split_address
from privlab.split.protocol.split_pb2 import Contract as ContractMessage
from privlab.split.protocol.split_pb2 import Open, Reply, Request, Save, Tensors
from privlab.split.protocol.wire import Inbox, chunks, pack, pack_state, unpack
from privlab.split.server.server import METHOD

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Seconds before the second attempt, and the most between any two."""


class Lost(PrivlabError):
    """The server does not answer now: it may have been restarted, or another stream still holds the session."""


class Rebuffed(Lost):
    """The server closed the connection at once: at the first attempt, it probably needs another kind of connection."""


@dataclass
class Traffic:
    """Bytes of the messages sent and received, and the seconds that each message with tensors waited for its reply."""

    sent: int = 0
    received: int = 0
    waited: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Client:
    """The address of a server, and how to connect to it; `traffic` counts the messages of all sessions.

    Args:
        address: HOST:PORT.
        token: the bearer token of the server.
        tls: the authority to trust, and the client's own certificate; without it, the server must be on this machine.
        timeout: seconds to wait for one reply.
        retry_for: seconds to try again if the server does not answer.
        tell: called with the reason when it begins to wait.

    Raises:
        PrivlabError: if the address has another form, or belongs to another machine and `tls` is missing.
    """

    address: str
    token: str = field(repr=False)
    tls: ClientTls | None = None
    timeout: float = 600.0
    retry_for: float = RETRY_SECONDS
    tell: Callable[[str], None] = lambda message: None
    traffic: Traffic = field(default_factory=Traffic, init=False, repr=False)

    def __post_init__(self) -> None:
        host, _ = split_address(self.address)
        if self.tls is None and not is_loopback(host):
            raise PrivlabError(f"--server {self.address} is another machine, which needs TLS: give --tls-ca.")

    @contextmanager
    def session(
        self,
        contract: Contract,
        *,
        session: str = "",
        steps: Sequence[int] = (0,),
        saved: int = 0,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Iterator["Remote"]:
        """Open a session, or resume one after the first of `steps` that the server knows too.

        Args:
            contract: the terms of the session.
            session: the id of a session to resume; empty for a new one.
            steps: the steps after which the client can continue, the best first; 0 allows a new session.
            saved: the last step of which the client keeps a checkpoint.
            weights: T's initial weights by timm's names, if the contract says that the client brings them.

        Raises:
            PrivlabError: if the server refuses a request; `Lost` if trying again may help.
        """
        with self._channel(contract) as channel:
            remote = Remote(channel, self, contract, saved)
            try:
                remote.open(session, steps)
                if weights is not None and remote.step == 0:
                    remote.upload(weights)
                yield remote
            finally:
                remote.close()

    def _channel(self, contract: Contract) -> grpc.Channel:
        options = [
            ("grpc.max_receive_message_length", 2 * contract.message_bytes + 2**20),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.enable_retries", 0),
        ]
        if self.tls is None:  # features and token would go through `http_proxy` in clear, even to this machine
            return grpc.insecure_channel(self.address, [*options, ("grpc.enable_http_proxy", 0)])
        return grpc.secure_channel(self.address, self.tls.credentials(), options)


class Remote:
    """T as the client sees it: `id` names the session, which continues after `step`; a crash leaves step `durable`."""

    def __init__(self, channel: grpc.Channel, client: Client, contract: Contract, saved: int) -> None:
        self.contract, self.timeout, self.traffic, self.saved = contract, client.timeout, client.traffic, saved
        self.id, self.weights_sha256 = "", ""
        self.step = self.durable = 0
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = channel.stream_stream(METHOD)
        self._call = call(iter(self._requests.get, None), metadata=(("authorization", f"Bearer {client.token}"),))
        self._replies = Inbox(self._call)

    def open(self, session: str, steps: Sequence[int]) -> None:
        """Open or resume a session as `Client.session` does; `id`, `step` and the hash are then the server's."""
        contract = ContractMessage(**asdict(self.contract))
        request = Request(open=Open(version=self.contract.version, session=session, steps=steps, contract=contract))
        opened = self._ask(request).opened
        if not SESSION_ID.fullmatch(opened.session) or opened.step not in steps:
            raise PrivlabError(f"The server answers with a session or a step ({opened.step}) that was not asked for.")
        self.id, self.step, self.weights_sha256 = opened.session, opened.step, opened.weights_sha256

    def upload(self, weights: Mapping[str, Tensor]) -> None:
        """Send T's initial weights."""
        for part in chunks(pack_state(weights)):
            self._send(Request(weights=part))

    def forward(self, step: int, features: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return T(features): the first half of a step."""
        request = Request(forward=Tensors(step=step, data=pack("features", features)))
        return self._tensor(self._exchange(request).outputs.data, "outputs", features)

    def backward(self, step: int, gradient: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return ∂ℓ/∂features, given ∂ℓ/∂outputs: the second half of a step, in which the server changes T."""
        request = Request(backward=Tensors(step=step, data=pack("gradient", gradient)))
        return self._tensor(self._exchange(request).gradient.data, "gradient", gradient)

    def infer(self, features: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return T(features) without training T; the server sees the features."""
        return self._tensor(self._exchange(Request(infer=pack("features", features))).inferred, "outputs", features)

    def save(self) -> None:
        """Ask the server to write a checkpoint; `durable` then says whether it did."""
        self._ask(Request(save=Save()))

    def close(self) -> None:
        """End the stream: the server writes its checkpoint and releases the session."""
        self._requests.put(None)
        with suppress(grpc.RpcError, futures.TimeoutError):
            self._replies.get(min(self.timeout, 10.0))
        self._call.cancel()
        self._replies.close()

    def _exchange(self, request: Request) -> Reply:
        """Return the reply to a request, and record how long it took."""
        began = time.perf_counter()
        reply = self._ask(request)
        self.traffic.waited.append(time.perf_counter() - began)
        return reply

    def _ask(self, request: Request) -> Reply:
        self._send(request)
        try:
            data = self._replies.get(self.timeout)
        except futures.TimeoutError:
            raise Lost(f"The server did not answer within {self.timeout:g} seconds.") from None
        except grpc.RpcError as error:
            raise _translate(error) from None
        if data is None:
            raise Lost("The server ended the session.")
        self.traffic.received += len(data)
        try:
            reply = Reply.FromString(data)
        except DecodeError:
            raise PrivlabError(f"The server's {len(data)} bytes are not a reply of split learning.") from None
        self.durable = reply.durable
        return reply

    def _send(self, request: Request) -> None:
        request.saved = self.saved
        data = request.SerializeToString()
        self.traffic.sent += len(data)
        self._requests.put(data)

    def _tensor(self, data: bytes, name: str, like: Tensor) -> Tensor:
        tensor = unpack(data, name, self.contract)
        if tensor.shape != like.shape:
            raise PrivlabError(f"The server's '{name}' must be {tuple(like.shape)}. Found {tuple(tensor.shape)}.")
        return tensor.to(like.device)


def _translate(error: grpc.RpcError) -> PrivlabError:
    """Return the error that says to the user what a failed call means."""
    status = error.code().name  # pyright: ignore[reportAttributeAccessIssue]
    details = printable(" ".join(str(error.details()).split()))  # pyright: ignore[reportAttributeAccessIssue]
    busy = status == "RESOURCE_EXHAUSTED" and "oncurrent RPC limit" in details  # as gRPC itself says
    if busy or status in ("ABORTED", "DEADLINE_EXCEEDED", "CANCELLED") or "RST_STREAM" in details:
        return Lost(details)
    if status != "UNAVAILABLE":
        return PrivlabError(details if status == "UNAUTHENTICATED" else f"The server refuses ({status}): {details}")
    return _unreachable(details)


def _unreachable(details: str) -> PrivlabError:
    if "WRONG_VERSION_NUMBER" in details:
        return PrivlabError("The server speaks no TLS: leave --tls-ca out, or start it with --tls-cert and --tls-key.")
    if "CERTIFICATE_VERIFY_FAILED" in details:
        reason = details.partition("CERTIFICATE_VERIFY_FAILED: ")[2].partition(":")[0]
        return PrivlabError(f"The server's certificate is not accepted by --tls-ca: {reason}.")
    if "Hostname Verification" in details or "not in peer certificate" in details:
        return PrivlabError("The server's certificate is for another host: use a name of it in --server.")
    if "handshake failed" in details.lower():
        return PrivlabError(f"The TLS handshake failed: {details}")
    if "failed to connect" in details and "refused" not in details:
        return Rebuffed(
            "The server hung up before a word: does it want TLS (--tls-ca), or a client's certificate that its "
            f"authority signed (--tls-cert, --tls-key)? {details.rpartition(': ')[2]}."
        )
    return Lost(f"The server cannot be reached: {details}")


class Patience:
    """Pauses between attempts that double in length, for up to `seconds` in a row without success.

    Args:
        seconds: the time without success after which `wait` raises.
        tell: called with the reason at the first of several waits in a row.
    """

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self._seconds, self._tell = seconds, tell
        self._met, self._tries, self._until = False, 0, 0.0

    def meet(self) -> None:
        """Note that the server has answered: it does not need another kind of connection."""
        self._met = True

    def reset(self) -> None:
        """Reset the time and the pauses: the server has done what it was asked for."""
        self._met, self._tries = True, 0

    def wait(self, lost: Lost) -> None:
        """Wait before the next attempt.

        Raises:
            PrivlabError: if the time is over, or the server needs another kind of connection.
        """
        if isinstance(lost, Rebuffed) and not self._met:
            raise lost
        if self._tries == 0:
            self._until = time.monotonic() + self._seconds
            self._tell(f"{lost} Trying again for {self._seconds:g} seconds.")
        left = self._until - time.monotonic()
        if left <= 0:
            raise PrivlabError(f"{lost} Tried for {self._seconds:g} seconds (--retry-for).") from None
        time.sleep(min(_FIRST_PAUSE * 2**self._tries, _LONGEST_PAUSE, left))
        self._tries += 1
