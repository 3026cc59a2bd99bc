"""Whatever a client does wrong ends in one line on its side, and in nothing at all on the others'."""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from privlab.base import PrivlabError
from privlab.split.client.client import Lost
from privlab.split.protocol.contract import Contract
from privlab.split.protocol.split_pb2 import Contract as Terms
from privlab.split.protocol.split_pb2 import Open, Request, Save, Tensors
from privlab.split.protocol.wire import pack, pack_state
from privlab.split.server.server import Server
from privlab.split.server.session import Limits

NORM = "blocks.0.norm1.weight"
FEATURES = torch.linspace(-1, 1, 2 * 17 * 32).view(2, 17, 32)


def opening(contract: Contract, **changes: Any) -> bytes:
    fields = {"version": 1, "session": "", "steps": [0]}
    terms = Terms(**{name: changes.pop(name, value) for name, value in asdict(contract).items()})
    return Request(open=Open(**(fields | changes), contract=terms)).SerializeToString()


def forward(data: bytes, step: int = 1) -> bytes:
    return Request(forward=Tensors(step=step, data=data)).SerializeToString()


def backward(data: bytes, step: int = 1) -> bytes:
    return Request(backward=Tensors(step=step, data=data)).SerializeToString()


@pytest.fixture(scope="module")
def hardened(serving: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server with small limits; each event is one line."""
    limits = Limits(sessions=3, batch=8, message=2**18, memory=2**25)
    with serving(tmp_path_factory.mktemp("small") / "state", limits=limits) as (running, events):
        yield running
    assert all("\n" not in str(event) for event in events)


@pytest.fixture
def small(hardened: Server, client: Callable[..., Any], tiny: Any) -> Iterator[Server]:
    """Yield that server; a client that was there before anything went wrong ends its step well."""
    with client(hardened).session(tiny.contract()) as bystander:
        outputs = bystander.forward(1, FEATURES.clone())
        yield hardened
        assert torch.equal(bystander.forward(1, FEATURES.clone()), outputs)
        assert bystander.backward(1, FEATURES.clone()).isfinite().all()
        bystander.save()
        assert bystander.durable == 1


def test_a_good_stream_is_served(small: Server, stream: Any, tiny: Any) -> None:
    features, gradient = pack("features", FEATURES), pack("gradient", FEATURES)
    good = [opening(tiny.contract()), forward(features), backward(gradient), forward(features, 2)]
    assert stream(small.address, *good, Request(save=Save()).SerializeToString()) == ("OK", "5 replies")


@pytest.mark.parametrize(
    ("token", "says"),
    [(None, "No bearer token"), ("Bearer wrong", "Wrong token"), ("Bearer ", "Wrong token"), ("t" * 40, "Wrong token")],
)
def test_without_the_token_nothing_is_served(
    token: str | None, says: str, small: Server, stream: Any, tiny: Any
) -> None:
    status, details = stream(small.address, opening(tiny.contract()), token=token)
    assert status == "UNAUTHENTICATED"
    assert says in details


def test_a_wrong_token_is_an_error_of_one_line(small: Server, client: Any, tiny: Any) -> None:
    with (
        pytest.raises(PrivlabError, match="--token-file"),
        client(small, token="x" * 40).session(tiny.contract()),
    ):
        pass


def test_health_is_told_without_a_token_and_nothing_else(small: Server, tiny: Any) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(small.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "privlab.split.v1.Split"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as watched:
            next(stub.Watch(health_pb2.HealthCheckRequest()))
    assert watched.value.code() is grpc.StatusCode.UNAUTHENTICATED  # pyright: ignore[reportAttributeAccessIssue]


def raw(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def with_one(value: float) -> Tensor:
    return FEATURES.index_put((torch.tensor(1), torch.tensor(3), torch.tensor(7)), torch.tensor(value))


BAD_TENSORS = {
    "empty": (b"", "not safetensors"),
    "random": (bytes(range(256)), "not safetensors"),
    "truncated": (pack("features", FEATURES)[:-1], "not safetensors"),
    "longer": (pack("features", FEATURES) + b"\0", "not safetensors"),
    "huge header": (struct.pack("<Q", 2**63) + b"{}", "not safetensors"),
    "overflow": (
        raw({"features": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 0]}}),
        "not safetensors",
    ),
    "not a number": (pack("features", with_one(torch.nan)), "NaN or infinity"),
    "infinity": (pack("features", with_one(-torch.inf)), "NaN or infinity"),
    "double": (pack("features", FEATURES.double()), "must be torch.float32. Found torch.float64"),
    "half": (save({"features": FEATURES.half()}), "must be torch.float32. Found torch.float16"),
    "integers": (
        save({"features": torch.ones(2, 17, 32, dtype=torch.int32)}),
        "must be torch.float32. Found torch.int32",
    ),
    "other name": (pack("feature", FEATURES), "must be features. Found feature"),
    "two tensors": (pack_state({"features": FEATURES, "x": 2 * FEATURES}), "must be features. Found features, x"),
    "no tensor": (raw({}), "must be features. Found none"),
    "two dimensions": (pack("features", FEATURES[0]), r"must have shape (b ≤ 6, t ≤ 17, d = 32). Found (17, 32)"),
    "no image": (pack("features", FEATURES[:0]), "Found (0, 17, 32)"),
    "too many images": (pack("features", FEATURES.repeat(4, 1, 1)), "Found (8, 17, 32)"),
    "too many tokens": (pack("features", FEATURES.repeat(1, 2, 1)), "Found (2, 34, 32)"),
    "narrower": (pack("features", FEATURES[..., :31]), "Found (2, 17, 31)"),
    "wider": (pack("features", FEATURES.repeat(1, 1, 2)), "Found (2, 17, 64)"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_features_off_the_contract_are_refused(case: str, small: Server, stream: Any, tiny: Any) -> None:
    data, says = BAD_TENSORS[case]
    for request in (forward(data), Request(infer=data).SerializeToString()):
        status, details = stream(small.address, opening(tiny.contract()), request)
        assert status == "INVALID_ARGUMENT"
        assert says in details
        assert "\n" not in details


@pytest.mark.parametrize(
    ("gradient", "says"),
    [
        (
            pack("gradient", FEATURES[:1]),
            "'gradient' must have the shape of the outputs, (2, 17, 32). Found (1, 17, 32)",
        ),
        (pack("gradient", with_one(torch.nan)), "NaN or infinity"),
        (pack("features", FEATURES), "must be gradient. Found features"),
    ],
)
def test_gradients_off_the_contract_are_refused(
    gradient: bytes, says: str, small: Server, stream: Any, tiny: Any
) -> None:
    good = (opening(tiny.contract()), forward(pack("features", FEATURES)))
    status, details = stream(small.address, *good, backward(gradient))
    assert status == "INVALID_ARGUMENT"
    assert says in details


CONTRACTS = {
    "model": ("vit_huge", "INVALID_ARGUMENT", "holds VisionTransformer of width 32. Asked for: vit_huge"),
    "width": (64, "INVALID_ARGUMENT", "of width 32. Asked for: VisionTransformer of width 64"),
    "max_tokens": (0, "INVALID_ARGUMENT", "max_tokens must be in [1, 65536]. Found 0"),
    "max_batch": (9, "RESOURCE_EXHAUSTED", "at most 8 images in a batch. Asked for: 9"),
    "dtype": ("float16", "INVALID_ARGUMENT", "Unknown dtype 'float16'"),
    "optimizer": ("lbfgs", "INVALID_ARGUMENT", "Unknown optimizer 'lbfgs'"),
    "lr": (float("nan"), "INVALID_ARGUMENT", "lr must be above 0 and finite. Found nan"),
    "momentum": (1.0, "INVALID_ARGUMENT", "momentum must be in [0, 1). Found 1.0"),
    "weight_decay": (-0.1, "INVALID_ARGUMENT", "weight_decay must be at least 0"),
    "version": (3, "FAILED_PRECONDITION", "The protocol is version 2. Found 3"),
    "session": ("../../etc", "INVALID_ARGUMENT", "64 hexadecimal digits. Found 9 characters"),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_terms_that_do_not_hold_here_are_refused(name: str, small: Server, stream: Any, tiny: Any) -> None:
    value, status, says = CONTRACTS[name]
    found, details = stream(small.address, opening(tiny.contract(), **{name: value}))
    assert (found, says in details, "\n" in details) == (status, True, False), details


def test_batches_beyond_the_message_limit_are_refused_at_the_start(small: Server, stream: Any, tiny: Any) -> None:
    status, details = stream(small.address, opening(tiny.contract(), max_batch=8, max_tokens=400))
    assert status == "RESOURCE_EXHAUSTED"
    assert "messages of at most 0 MiB. A batch would need 0" in details


def test_an_oversized_message_is_refused_before_it_is_read(small: Server, stream: Any, tiny: Any) -> None:
    status, details = stream(small.address, opening(tiny.contract()), forward(bytes(2**18)))
    assert status == "RESOURCE_EXHAUSTED"
    assert "larger than max" in details


@pytest.mark.parametrize(
    ("messages", "status", "says"),
    [
        ([b"\xff\xff\xff"], "INVALID_ARGUMENT", "The 3 bytes are not a request"),
        ([b""], "FAILED_PRECONDITION", "A stream begins with open. Found 'None'"),
        ([forward(b"")], "FAILED_PRECONDITION", "A stream begins with open. Found 'forward'"),
        (["open", "open"], "INVALID_ARGUMENT", "Expected forward, backward, infer or save. Found 'open'"),
        (["open", b""], "INVALID_ARGUMENT", "Expected forward, backward, infer or save. Found 'None'"),
        (["open", b"\x08\x80"], "INVALID_ARGUMENT", "The 2 bytes are not a request"),
        (["open", forward(pack("features", FEATURES), 2)], "FAILED_PRECONDITION", "Step 1 is due. Found a forward of"),
        (["open", backward(pack("gradient", FEATURES))], "FAILED_PRECONDITION", "Step 1 has no forward"),
        (["open", Request(weights=b"x").SerializeToString()], "FAILED_PRECONDITION", "No weights are expected"),
    ],
)  # fmt: skip
def test_messages_out_of_order_are_refused(
    messages: list[Any], status: str, says: str, small: Server, stream: Any, tiny: Any
) -> None:
    start = opening(tiny.contract())
    found, details = stream(small.address, *(start if message == "open" else message for message in messages))
    assert found == status
    assert says in details


def weights(tiny: Any, **changes: Tensor) -> dict[str, Tensor]:
    return tiny.learner("none", own_weights=True).initial_weights() | changes


@pytest.mark.parametrize(
    ("parts", "status", "says"),
    [
        (lambda w: [forward(pack("features", FEATURES))], "FAILED_PRECONDITION", "promises T's initial weights first"),
        (lambda w: [b"x" * 100, b""], "INVALID_ARGUMENT", "not safetensors"),
        (lambda w: [b"x" * 200_000] * 7, "INVALID_ARGUMENT", "T's initial weights take at most"),
        (lambda w: [pack_state({NORM: w[NORM]}), b""], "INVALID_ARGUMENT", "must be"),
        (lambda w: [pack_state(w | {NORM: torch.ones(31)}), b""], "INVALID_ARGUMENT", "(32,). Found (31,)"),
        (lambda w: [pack_state(w | {NORM: torch.full((32,), torch.nan)}), b""], "INVALID_ARGUMENT", "NaN"),
    ],
)  # fmt: skip
def test_initial_weights_off_the_contract_are_refused(
    parts: Callable[..., list[bytes]], status: str, says: str, small: Server, stream: Any, tiny: Any
) -> None:
    start = opening(tiny.contract("column-permutation"))
    pieces = [part for whole in parts(weights(tiny)) for part in ([whole] if len(whole) < 2**17 else cut(whole))]
    messages = [p if says.startswith("promises") else Request(weights=p).SerializeToString() for p in pieces]
    found, details = stream(small.address, start, *messages)
    assert found == status
    assert says in details


def cut(data: bytes) -> list[bytes]:
    return [data[i : i + 2**17] for i in range(0, len(data), 2**17)]


def test_a_session_is_in_one_clients_hands_at_a_time(small: Server, client: Any, tiny: Any) -> None:
    contract = tiny.contract()
    with client(small).session(contract) as first:
        first.forward(1, FEATURES.clone())
        with (
            pytest.raises(Lost, match="in another client's hands"),
            client(small).session(contract, session=first.id, steps=[0]),
        ):
            pass
        assert first.backward(1, FEATURES.clone()).isfinite().all()


def test_sessions_are_limited_in_number(small: Server, client: Any, tiny: Any) -> None:
    contract = tiny.contract()
    with (
        client(small).session(contract),
        client(small).session(contract),  # and the bystander
        pytest.raises(Lost, match=r"3.*later"),
        client(small).session(contract),
    ):
        pass
    with client(small).session(contract) as later:
        assert later.step == 0


def test_a_session_that_is_not_known_is_not_begun_anew_unasked(small: Server, client: Any, tiny: Any) -> None:
    with (
        pytest.raises(PrivlabError, match="knows no such session"),
        client(small).session(tiny.contract(), session="ab" * 32, steps=[5]),
    ):
        pass
    with client(small).session(tiny.contract(), session="ab" * 32, steps=[5, 0]) as fresh:
        assert fresh.id != "ab" * 32
        assert fresh.step == 0


def test_a_guess_that_shares_the_beginning_of_an_id_is_not_known(small: Server, client: Any, tiny: Any) -> None:
    with client(small).session(tiny.contract()) as mine:
        mine.forward(1, FEATURES.clone())
        mine.backward(1, FEATURES.clone())
    guess = mine.id[:12] + "0" * 52
    with (
        pytest.raises(PrivlabError, match="knows no such session"),
        client(small).session(tiny.contract(), session=guess, steps=[1]),
    ):
        pass
    with client(small).session(tiny.contract(), session=mine.id, steps=[1]) as again:
        assert again.step == 1


def test_a_session_is_resumed_under_its_own_terms(small: Server, client: Any, tiny: Any) -> None:
    with client(small).session(tiny.contract()) as mine:
        mine.forward(1, FEATURES.clone())
        mine.backward(1, FEATURES.clone())
    with (
        pytest.raises(PrivlabError, match=r"was begun with .*'lr': 0.01"),
        client(small).session(tiny.contract(lr=0.5), session=mine.id, steps=[1]),
    ):
        pass
    with (
        pytest.raises(PrivlabError, match=r"\[1\].*offers.*\[7.*5\]"),
        client(small).session(tiny.contract(), session=mine.id, steps=[7, 5]),
    ):
        pass


def test_training_that_diverges_is_told(small: Server, client: Any, tiny: Any) -> None:
    with client(small).session(tiny.contract(lr=1e30)) as mine:
        mine.forward(1, FEATURES.clone())
        mine.backward(1, FEATURES.clone())
        with pytest.raises(PrivlabError, match=r"2.*T\(features\)"):
            mine.forward(2, FEATURES.clone())


def test_a_cut_that_leaves_the_server_no_block_is_refused(
    hardened: Server, stream: Callable[..., tuple[str, str]], tiny: Any
) -> None:
    asked = opening(tiny.contract(cut_layer=2), version=2)
    refused = "The server holds one of the 2 blocks or more: the cut layer must be in 0 … 1. Found 2."
    assert stream(hardened.address, asked) == ("INVALID_ARGUMENT", refused)


def test_terms_with_a_cut_are_of_version_two_and_all_others_of_version_one(tiny: Any) -> None:
    """A server of version 1 overlooks the cut: it must refuse it. It serves the contracts that it knows."""
    assert (tiny.contract().version, tiny.contract(cut_layer=1).version) == (1, 2)
    with pytest.raises(PrivlabError, match=r"cut_layer.*0"):
        tiny.contract(cut_layer=-1)
