"""Peers that mean harm: callers without the token, clients that do not read or ask for too much, a false server."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from privlab.base import PrivlabError
from privlab.release import Recorder
from privlab.split.client.client import Client
from privlab.split.client.loops import infer
from privlab.split.protocol.checkpoint import private_folder
from privlab.split.protocol.contract import Refusal
from privlab.split.protocol.split_pb2 import Contract as Terms
from privlab.split.protocol.split_pb2 import Open, Opened, Reply, Request, Tensors
from privlab.split.protocol.wire import pack, unpack_state
from privlab.split.server.entrance import Entrance
from privlab.split.server.server import METHOD, SERVICE
from privlab.split.server.session import Limits

grpc = pytest.importorskip("grpc")

HEALTH = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
FEATURES = torch.linspace(-1, 1, 2 * 17 * 32).view(2, 17, 32)
NO_STEP = 2**40
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""How an HTTP/2 connection begins."""


def opening(tiny: Any, **changes: Any) -> bytes:
    """Return the request that opens a session."""
    terms = Terms(**asdict(tiny.contract()))
    return Request(open=Open(**({"version": 1, "steps": [0]} | changes), contract=terms)).SerializeToString()


# Callers without the token


def test_silent_health_checks_lock_nobody_out(server: Any, client: Any, tiny: Any) -> None:
    """Each held a thread of the server until its message came, which never did."""
    silence = threading.Event()

    def nothing() -> Iterator[bytes]:
        silence.wait(60)
        yield from ()

    with server(limits=Limits(sessions=2)) as (running, _), grpc.insecure_channel(running.address) as channel:
        check = channel.stream_unary(HEALTH)
        for _ in range(32):
            assert check.future(nothing()).result(30) == SERVING  # before any request has come
        with client(running).session(tiny.contract()) as remote:
            assert remote.forward(1, FEATURES.clone()).isfinite().all()
        silence.set()


@pytest.mark.parametrize("path", [HEALTH, METHOD, f"/{SERVICE}/Other", "/grpc.health.v1.Health/Watch"])
def test_no_message_of_a_caller_without_the_token_is_read(path: str, server: Any, tiny: Any) -> None:
    sent: list[int] = []
    ended = threading.Event()

    def large() -> Iterator[bytes]:
        for i in range(8):
            sent.append(i)
            yield bytes(2**24)
        ended.wait(30)

    with server() as (running, _), grpc.insecure_channel(running.address) as channel:
        try:
            assert list(channel.stream_stream(path)(large(), timeout=30)) == [SERVING]
        except grpc.RpcError as error:
            status = error.code().name  # pyright: ignore[reportAttributeAccessIssue]
            assert status == "UNAUTHENTICATED"
        ended.set()
    assert len(sent) < 8  # the server answered while they were still being sent


def test_refusals_are_logged_at_a_limited_rate(server: Any) -> None:
    with server() as (running, events):
        for _ in range(300):
            running._log("refused", None, reason="x" * 10**6)
        time.sleep(1.1)
        running._log("refused", None, reason="x")
    refused = [event for event in events if event["event"] == "refused"]
    left_out = sum(event.get("complaints", 0) for event in events)
    assert left_out >= 100
    assert len(refused) + left_out == 301
    assert max(len(event["reason"]) for event in refused) == 2000


def still_open(connections: list[socket.socket]) -> int:
    """Return how many connections the server has not closed."""
    count = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            while connection.recv(2**16):
                pass
        except BlockingIOError:
            count += 1
        except OSError:
            pass
    return count


@pytest.mark.parametrize("first", [b"", HTTP2, HTTP2[:20]], ids=["nothing", "a connection", "a part of one"])
def test_connections_have_a_ceiling_and_a_deadline(first: bytes, server: Any, client: Any, tiny: Any) -> None:
    """Connections that say nothing, or no more than that they speak HTTP/2, took a file descriptor each for minutes."""
    with ExitStack() as closing, server(limits=Limits(sessions=2, idle=4.0)) as (running, _):
        connections = []
        for _ in range(150):
            connections.append(closing.enter_context(socket.create_connection(("127.0.0.1", running.port), 5)))
            connections[-1].sendall(first)
        until = time.monotonic() + 3  # before a connection is closed for its silence
        while still_open(connections) > 128 and time.monotonic() < until:
            time.sleep(0.1)
        assert still_open(connections) <= 128
        until = time.monotonic() + 20
        while still_open(connections) and time.monotonic() < until:
            time.sleep(0.1)
        assert still_open(connections) == 0
        with client(running).session(tiny.contract()) as remote:
            assert remote.forward(1, FEATURES.clone()).isfinite().all()


@pytest.mark.parametrize(("source", "pause"), [("127.0.0.2", 0.0), ("127.0.0.1", 0.002)], ids=["elsewhere", "here"])
def test_a_client_gets_in_during_a_flood_of_connections(source: str, pause: float, server: Any, tiny: Any) -> None:
    """Connections that are opened again and again filled the ceiling, for as long as somebody opened them.

    A client at the address of the flood has the time in which 128 further connections come to show its token.
    """
    ended = threading.Event()
    opened: list[int] = []

    def flood(port: int) -> None:
        until = time.monotonic() + 30
        with ExitStack() as closing:
            while not ended.is_set() and time.monotonic() < until and len(opened) < 20_000:
                with suppress(OSError):
                    connection = closing.enter_context(socket.create_connection(("127.0.0.1", port), 5, (source, 0)))
                    connection.sendall(HTTP2)
                    opened.append(1)
                time.sleep(pause)
                if len(opened) % 200 == 0:
                    closing.pop_all().close()

    with server(limits=Limits(sessions=2)) as (running, events), futures.ThreadPoolExecutor(1) as thread:
        flooding = thread.submit(flood, running.port)
        try:
            until = time.monotonic() + 20
            while len(opened) < 400 and time.monotonic() < until:
                time.sleep(0.01)
            for _ in range(3):
                with tiny.Client(running.address, tiny.TOKEN, timeout=20.0).session(tiny.contract()) as remote:
                    time.sleep(0.3)  # while strangers' connections are closed, this one stays
                    assert remote.forward(1, FEATURES.clone()).isfinite().all()
        finally:
            ended.set()
        flooding.result(30)
    assert len(opened) >= 400
    assert any("without the token" in str(event) for event in events)


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:5000", "ipv6:%5B::ffff:127.0.0.1%5D:5000"])
def test_a_caller_is_known_by_its_address_and_port(peer: str) -> None:
    entrance = Entrance(most=0)
    entrance.show(peer)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller, listening.accept()[0]:
            assert entrance.make_room(port) == 1
            assert caller.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port)) as caller, listening.accept()[0]:
            entrance.show(f"ipv4:127.0.0.1:{caller.getsockname()[1]}")
            assert entrance.make_room(port) == 0


# Clients with the token


def test_very_many_steps_are_refused(server: Any, stream: Any, tiny: Any) -> None:
    with server() as (running, _):
        status, details = stream(running.address, opening(tiny, steps=[NO_STEP] * 10**6))
        assert (status, "At most 16 steps" in details) == ("INVALID_ARGUMENT", True)


def test_a_client_that_does_not_read_is_sent_away(server: Any, client: Any, tiny: Any) -> None:
    """It never takes its replies; with the smallest window of HTTP/2, the server cannot send them."""
    features = torch.linspace(-1, 1, 6 * 17 * 32).view(6, 17, 32)
    infer = Request(infer=pack("features", features)).SerializeToString()
    gone = threading.Event()

    def asking() -> Iterator[bytes]:
        yield opening(tiny)
        yield from [infer] * 2000  # 26 MB of replies
        gone.wait(30)

    with server(limits=Limits(sessions=1, idle=0.5)) as (running, events):
        options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        with grpc.insecure_channel(running.address, options) as channel:
            metadata = (("authorization", f"Bearer {tiny.TOKEN}"),)
            call = channel.stream_stream(METHOD)(asking(), metadata=metadata)
            until = time.monotonic() + 30
            while not any("not read" in str(event) for event in events) and time.monotonic() < until:
                time.sleep(0.05)
            gone.set()
            call.cancel()
        assert any("not read" in str(event) for event in events)
        until = time.monotonic() + 30
        while not any(event["event"] == "closed" for event in events) and time.monotonic() < until:
            time.sleep(0.05)
        with client(running).session(tiny.contract()) as next_one:
            assert next_one.step == 0


def test_a_full_server_is_tried_again(server: Any, tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    waits: list[str] = []
    waiting = threading.Event()

    def note(message: str) -> None:
        waits.append(message)
        waiting.set()

    with server(limits=Limits(sessions=1)) as (running, _), futures.ThreadPoolExecutor(1) as thread:
        patient = tiny.Client(running.address, tiny.TOKEN, retry_for=30.0, tell=note)
        learner = tiny.learner()
        trainer = tiny.Trainer(learner, patient, tmp_path / "client")
        with tiny.Client(running.address, tiny.TOKEN).session(tiny.contract()):
            training = thread.submit(trainer.train, tiny.batches(), 2)
            assert waiting.wait(30)
        training.result(30)
    assert "later" in waits[0]
    assert learner.step == 2


def test_a_session_takes_no_more_of_the_disk_than_allowed(server: Any, stream: Any, tiny: Any) -> None:
    with server(limits=Limits(disk=2**16)) as (running, _):
        status, details = stream(running.address, opening(tiny))
    assert (status, "on disk" in details) == ("RESOURCE_EXHAUSTED", True)


def test_a_recording_ends_where_its_disk_does(tmp_path: Path) -> None:
    said: list[str] = []
    session = Recorder(tmp_path / "seen", {}, on_stop=said.append).session("a", {}, 3 * FEATURES.nbytes)
    for step in range(1, 10):
        session.step(step, FEATURES, None)
    assert len(list((tmp_path / "seen" / "a").glob("step-*"))) == 2
    assert len(said) == 1


def test_a_state_that_others_may_enter_is_refused(server: Any, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(PrivlabError, match=r"must have mode 0700\. Found 0755"):
        private_folder(tmp_path / "open")
    with pytest.raises(PrivlabError, match="0700"), server(state=tmp_path / "open"):
        pass


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_state_with_a_way_out_is_refused(kind: str, server: Any, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "lock").symlink_to(tmp_path / "mine") if kind == "link" else os.mkfifo(state / "lock")
    with pytest.raises(PrivlabError, match=kind), server(state=state):
        pass
    assert not (tmp_path / "mine").exists()


# A server that means harm


@contextmanager
def false_server(answers: Callable[[Request], bytes | None]) -> Iterator[str]:
    """Serve each request with the bytes that a function returns; None ends the stream."""

    def session(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for request in requests:
            if (answer := answers(Request.FromString(request))) is None:
                context.abort(grpc.StatusCode.ABORTED, "\x1b[2Jcome back " + "x" * 4000)
            yield answer

    serving = grpc.server(futures.ThreadPoolExecutor(4))
    handler = grpc.stream_stream_rpc_method_handler(session)
    serving.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Session": handler}),))
    port = serving.add_insecure_port("127.0.0.1:0")
    serving.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        serving.stop(0).wait()


def opened(**changes: Any) -> bytes:
    return Reply(opened=Opened(**({"session": "a" * 64, "step": 0} | changes))).SerializeToString()


WRONG: dict[str, Callable[[Request], bytes | None]] = {
    "noise": lambda request: b"\xff" * 100,
    "another reply": lambda request: Reply(inferred=b"x").SerializeToString(),
    "a name that leads elsewhere": lambda request: opened(session="../../home"),
    "a name of a million characters": lambda request: opened(session="a" * 10**6),
    "a step that was not offered": lambda request: opened(step=NO_STEP),
    "a reply that is too large": lambda request: bytes(2**24),
    "outputs of another shape": lambda request: (
        opened()
        if request.WhichOneof("kind") == "open"
        else Reply(outputs=Tensors(step=1, data=pack("outputs", FEATURES[:, :1]))).SerializeToString()
    ),
    "outputs that are not numbers": lambda request: (
        opened()
        if request.WhichOneof("kind") == "open"
        else Reply(outputs=Tensors(step=1, data=pack("outputs", FEATURES * torch.inf))).SerializeToString()
    ),
    "no tensors": lambda request: (
        opened()
        if request.WhichOneof("kind") == "open"
        else Reply(outputs=Tensors(step=1, data=bytes(10**4))).SerializeToString()
    ),
    "never": lambda request: None,
    "opened, and then never": lambda request: opened() if request.WhichOneof("kind") == "open" else None,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_false_server_ends_in_one_line(name: str, tiny: Any) -> None:
    with false_server(WRONG[name]) as address:
        patient = Client(address, tiny.TOKEN, timeout=10.0)
        with pytest.raises(PrivlabError) as ended, patient.session(tiny.contract()) as remote:
            remote.forward(1, FEATURES.clone())
    assert str(ended.value).isprintable()
    assert len(str(ended.value)) < 3000


def test_a_server_that_opens_sessions_and_ends_them_is_given_up(tiny: Any, tmp_path: Path) -> None:
    with false_server(WRONG["opened, and then never"]) as address:
        patient = Client(address, tiny.TOKEN, timeout=10.0, retry_for=0.5)
        learner = tiny.learner(own_weights=True)  # so that the hash of the weights is not asked for
        with pytest.raises(PrivlabError, match="--retry-for"):
            tiny.Trainer(learner, patient, tmp_path).train(tiny.batches(), 1)


def test_a_server_that_disconnects_gets_the_same_features_again(tiny: Any) -> None:
    """Each time it got other draws of the same images: a defense by noise averaged out, as often as it disconnected."""
    seen: list[bytes] = []

    def answers(request: Request) -> bytes | None:
        if request.WhichOneof("kind") == "open":
            return opened()
        seen.append(request.infer)
        return None if len(seen) < 3 else Reply(inferred=pack("outputs", FEATURES)).SerializeToString()

    learner = tiny.learner("row-permutation", own_weights=False)
    with false_server(answers) as address:
        patient = Client(address, tiny.TOKEN, timeout=10.0, retry_for=1.0)
        with pytest.raises(PrivlabError, match="must be"):  # of another shape
            infer(learner, patient, tiny.batches().data)
    assert len(seen) == 3
    assert len({*seen}) == 1


def test_names_and_shapes_are_bounded_before_they_are_read() -> None:
    """Eleven MiB of tensors without a number took nine seconds and 280 MiB; a message may have 256 MiB."""
    entries = {str(i): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(2**15)}
    header = json.dumps(entries).encode()
    data = len(header).to_bytes(8, "little") + header
    with pytest.raises(Refusal, match="names and shapes take at most 1048576 bytes"):
        unpack_state(data, {"features": FEATURES}, torch.float32)


def test_no_proxy_sees_the_token(server: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a proxy in the environment, even 127.0.0.1 was reached through it, without TLS."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.5)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        with server() as (running, _):
            with tiny.Client(running.address, tiny.TOKEN, timeout=20.0).session(tiny.contract()) as remote:
                assert remote.step == 0
            with pytest.raises(TimeoutError):
                proxy.accept()
