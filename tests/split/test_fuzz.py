"""Ten thousand frames of rubbish against a live server, in a process of its own: it goes on serving."""

import ast
import random
import re
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from privlab.split.protocol.contract import Refusal
from privlab.split.protocol.split_pb2 import Contract as Terms
from privlab.split.protocol.split_pb2 import Open, Request, Save, Tensors
from privlab.split.protocol.wire import pack, unpack
from privlab.split.server.server import METHOD

FEATURES = torch.linspace(-1, 1, 2 * 17 * 32).view(2, 17, 32)
REFUSALS = {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "NOT_FOUND", "OUT_OF_RANGE"}


def good_frames(tiny: Any) -> list[bytes]:
    """Return one request of each kind that a server answers well, the opening first."""
    terms = {f: getattr(tiny.contract(), f) for f in Terms.DESCRIPTOR.fields_by_name}
    requests = [
        Request(open=Open(version=1, steps=[0], contract=Terms(**terms))),
        Request(forward=Tensors(step=1, data=pack("features", FEATURES))),
        Request(backward=Tensors(step=1, data=pack("gradient", FEATURES))),
        Request(infer=pack("features", FEATURES)),
        Request(save=Save(), saved=1),
        Request(weights=b"x"),
    ]
    return [request.SerializeToString() for request in requests]


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """Return a frame with bits flipped, bytes put in or cut out, or nothing but noise."""
    kind, at = rng.randrange(5), rng.randrange(len(frame) + 1)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return frame[:at]
    if kind == 2:
        return frame[:at] + rng.randbytes(rng.randrange(1, 20)) + frame[at:]
    if kind == 3:
        return frame[:at] + frame[at + rng.randrange(1, 50) :]
    changed = bytearray(frame)
    for _ in range(rng.randrange(1, 8)):
        # the first bytes hold the structure: most flips go there
        changed[min(int(rng.expovariate(0.02)), len(changed) - 1)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def http2(rng: random.Random) -> bytes:
    """Return the start of an HTTP/2 connection, and a frame of any type, length and content; or nothing but noise."""
    noise = rng.randbytes(rng.randrange(1, 500))
    if rng.randrange(4) == 0:
        return noise
    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
    length = rng.choice([len(noise), rng.randrange(2**24)]).to_bytes(3, "big")
    return start + length + bytes([rng.randrange(12), rng.randrange(256)]) + rng.randbytes(4) + noise


@pytest.mark.slow
def test_ten_thousand_frames_of_rubbish_leave_the_server_serving(
    spawn: Any, tiny: Any, alone: Any, tmp_path: Path
) -> None:
    """7600 first frames of a stream, 400 after one to three good ones, 2000 below gRPC; each ends its stream."""
    import grpc

    served = spawn("serve", state=tmp_path / "state", sessions=12, message=2**18, every=1000)
    address, rng, good = served.line(), random.Random(7), good_frames(tiny)
    streams = [[mutated(rng.choice(good), rng)] for _ in range(7600)]
    streams += [[*good[: rng.choice([1, 2, 3])], mutated(rng.choice(good), rng)] for _ in range(400)]
    began = time.monotonic()
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(4) as threads:
        call, metadata = channel.stream_stream(METHOD), (("authorization", f"Bearer {tiny.TOKEN}"),)

        def send(messages: list[bytes]) -> str:
            try:
                list(call(iter(messages), metadata=metadata, timeout=30))
            except grpc.RpcError as error:
                return error.code().name  # pyright: ignore[reportAttributeAccessIssue]
            return "OK"

        statuses = Counter(threads.map(send, streams))
    for _ in range(2000):
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5) as raw:
            raw.sendall(http2(rng))
    seconds = time.monotonic() - began
    assert statuses.keys() <= REFUSALS | {"OK"}, statuses
    assert statuses["INVALID_ARGUMENT"] > 2000
    told = [line for line in served.err.splitlines() if not re.match(r"[EWI]\d{4} ", line)]  # but for gRPC's own log
    events = Counter(ast.literal_eval(line)["event"] for line in told)
    assert events.keys() - {"not logged"} == {"opened", "refused", "saved", "closed"}
    assert events["opened"] == events["closed"] > 400
    (tmp_path / "client").mkdir()
    learner = tiny.learner()
    tiny.Trainer(learner, tiny.Client(address, tiny.TOKEN), tmp_path / "client").train(tiny.batches(), tiny.STEPS)
    assert_close(learner.losses.tolist(), alone(learner.contract, tiny.STEPS), rtol=0, atol=1e-4)
    assert seconds < 60


@given(data=st.binary(max_size=400))
def test_random_bytes_do_not_get_past_the_reader(data: bytes, tiny: Any) -> None:
    with pytest.raises(Refusal, match=r"not safetensors|must be features") as refused:
        unpack(data, "features", tiny.contract())
    assert "\n" not in str(refused.value)
