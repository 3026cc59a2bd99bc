"""Servers at their limits: out of memory, silent clients, faults of their own, other machines, and none there."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from privlab.base import PrivlabError
from privlab.split.client.client import Lost, Rebuffed
from privlab.split.server.session import Limits

FEATURES = torch.linspace(-1, 1, 2 * 17 * 32).view(2, 17, 32)


def test_sessions_are_limited_in_memory(server: Any, client: Any, tiny: Any) -> None:
    with (
        server(limits=Limits(memory=2**20)) as (running, _),
        pytest.raises(PrivlabError, match=r"MiB.*1.*MiB"),
        client(running).session(tiny.contract()),
    ):
        pass


def test_a_silent_client_is_saved_and_sent_away_and_may_come_back(server: Any, client: Any, tiny: Any) -> None:
    contract = tiny.contract()
    with server(limits=Limits(idle=0.3)) as (running, events):
        with client(running).session(contract) as mine:
            outputs = mine.forward(1, FEATURES.clone())
            answer = mine.backward(1, FEATURES.clone())
            mine.forward(2, FEATURES.clone())
            until = time.monotonic() + 30
            while events[-1]["event"] != "refused" and time.monotonic() < until:
                time.sleep(0.01)
            with pytest.raises(Lost, match=r"0\.3.*session"):
                mine.backward(2, FEATURES.clone())
        assert {"event": "saved", "session": mine.id[:12], "step": 1} in events
        with client(running).session(contract, session=mine.id, steps=[1]) as again:
            assert again.step == again.durable == 1
            assert torch.equal(again.forward(1, FEATURES.clone()), outputs)
            assert torch.equal(again.backward(1, FEATURES.clone()), answer)


def test_a_server_that_fails_at_a_request_goes_on_with_the_others(
    server: Any, client: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from privlab.split.server.session import Session

    whole = Session.forward

    def short_of_memory(self: Session, step: int, features: Tensor) -> Tensor:
        if len(features) == 1:
            raise MemoryError("out of memory:\nall of it")
        return whole(self, step, features)

    monkeypatch.setattr(Session, "forward", short_of_memory)
    with server() as (running, events), client(running).session(tiny.contract()) as other:
        with (
            pytest.raises(PrivlabError, match=r"\(MemoryError\)"),
            client(running).session(tiny.contract()) as mine,
        ):
            mine.forward(1, FEATURES[:1])
        assert other.forward(1, FEATURES.clone()).isfinite().all()
    failed = [event["reason"] for event in events if event["event"] == "failed"]
    assert failed == ["MemoryError: out of memory: all of it"]


def test_another_machine_needs_tls(server: Any, tiny: Any) -> None:
    with (
        pytest.raises(PrivlabError, match=r"--host.*0\.0\.0\.0.*TLS"),
        server(host="0.0.0.0"),
    ):
        pass
    with pytest.raises(PrivlabError, match=r"--server.*192\.0\.2\.1:5.*TLS"):
        tiny.Client("192.0.2.1:5", tiny.TOKEN)
    with pytest.raises(PrivlabError, match=r"--server.*HOST:PORT.*'here'"):
        tiny.Client("here", tiny.TOKEN)


def test_two_servers_do_not_share_a_state_or_a_port(server: Any, tmp_path: Path) -> None:
    with server() as (running, _):
        with pytest.raises(PrivlabError, match="Another server uses --state"), server():
            pass
        other = {"state": tmp_path / "other", "port": running.port}
        with pytest.raises(PrivlabError, match=f"Cannot listen on 127.0.0.1:{running.port}"), server(**other):
            pass


def test_a_server_that_another_thread_stops_leaves_autocast_as_it_was(server: Any) -> None:
    """Torch counts autocast's contexts in each thread; one that is never left keeps stale casts of weights."""
    with ThreadPoolExecutor(1) as other, server() as (running, _):
        other.submit(running.stop).result()
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert nesting == 1


def test_a_server_that_is_gone_is_told(server: Any, client: Any, tiny: Any) -> None:
    with server() as (running, _):
        pass
    with pytest.raises(Lost, match="cannot be reached") as lost, client(running).session(tiny.contract()):
        pass
    assert not isinstance(lost.value, Rebuffed)
