"""Processes are killed in the middle of a step; what comes out is, bit by bit, what an undisturbed run leaves."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from privlab.base import PrivlabError
from privlab.split.client.client import Remote
from privlab.split.protocol.checkpoint import SessionCheckpoints, read

CLIENTS = "client.safetensors"
KILLS = int(os.environ.get("PRIVLAB_KILLS", "8"))
"""The number of kills of each side; docs/security.md states those of 50."""
LONGEST = {"client": 0.3, "server": 0.5}
"""The longest that a process lives, in seconds. A client that nothing disturbs needs about 0.2, and one that lost its
server waits for up to a second before it tries again."""


def servers_state(state: Path) -> tuple[dict[str, Tensor], int]:
    """Return the last checkpoint of the one session of a server, and how many steps it has."""
    (folder,) = (path for path in state.iterdir() if path.is_dir())
    return session_state(folder)


def session_state(folder: Path) -> tuple[dict[str, Tensor], int]:
    """Return the last checkpoint of a session, and how many steps it has."""
    stored = SessionCheckpoints(folder)
    return read(stored.path(stored.steps()[0]))[0], stored.steps()[0]


@pytest.fixture
def undisturbed(server: Any, client: Any, tiny: Any, tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what an undisturbed run leaves: the server's tensors, and the client's."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    with server(state=tmp_path / "quiet", checkpoint_every=4) as (running, _):
        tiny.Trainer(tiny.learner(), client(running), folder).train(tiny.batches(), tiny.STEPS)
    return servers_state(tmp_path / "quiet")[0], read(folder / CLIENTS)[0]


@pytest.fixture
def check(undisturbed: Any, same: Callable[..., bool], tmp_path: Path, tiny: Any) -> Callable[[Path], None]:
    """Check that a run which was disturbed left the same, in the folder of its client and in `state`."""

    def compare(folder: Path) -> None:
        tensors, steps = servers_state(tmp_path / "state")
        assert steps == tiny.STEPS
        assert same(tensors, undisturbed[0])
        assert same(read(folder / CLIENTS)[0], undisturbed[1])

    return compare


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have something happen once, at a step's `forward` or `backward`: before it is asked, or when it is under way."""

    def at(step: int, half: str, when: str, happens: Callable[[], Any]) -> None:
        asked, done = getattr(Remote, half), []

        def disturbed(remote: Remote, now: int, tensor: Tensor) -> Tensor:
            if now != step or done:
                return asked(remote, now, tensor)
            done.append(True)
            if when == "before":
                happens()
                return asked(remote, now, tensor)
            if when == "after":  # the server has applied the step and written its checkpoint; its reply is lost
                asked(remote, now, tensor)
                happens()
                return asked(remote, now, tensor)
            put = remote._requests.put
            monkeypatch.setattr(remote, "_requests", Happening(put, happens))
            return asked(remote, now, tensor)

        monkeypatch.setattr(Remote, half, disturbed)

    return at


class Happening:
    """A queue of requests: right after the next one is sent, something happens."""

    def __init__(self, put: Callable[[Any], None], happens: Callable[[], Any]) -> None:
        self._put, self._happens = put, [happens]

    def put(self, request: Any) -> None:  # noqa: D102
        self._put(request)
        if self._happens:
            self._happens.pop()()


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6, 8])
@pytest.mark.parametrize(
    ("half", "when"), [("forward", "before"), ("backward", "before"), ("backward", "under way"), ("backward", "after")]
)
def test_a_server_killed_in_the_middle_of_a_step_and_restarted(
    step: int, half: str, when: str, spawn: Any, killer: Any, tiny: Any, check: Any, tmp_path: Path
) -> None:
    """Before the first checkpoint (4), between two, and at the step of one (8)."""
    first = spawn("serve", state=tmp_path / "state")
    address = first.line()
    told: list[str] = []

    def restart() -> None:
        first.kill()
        spawn("serve", state=tmp_path / "state", port=int(address.rpartition(":")[2]))

    killer(step, half, when, restart)
    folder = tmp_path / "client"
    folder.mkdir()
    trainer = tiny.Trainer(tiny.learner(), tiny.Client(address, tiny.TOKEN, tell=told.append), folder)
    trainer.train(tiny.batches(), tiny.STEPS)
    check(folder)
    assert len(told) == 1
    assert "Trying again for 60 seconds" in told[0]


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6])
def test_weights_that_the_client_brought_outlive_the_server(
    step: int, spawn: Any, server: Any, client: Any, killer: Any, tiny: Any, tmp_path: Path
) -> None:
    """Before the first checkpoint they are brought again; after it, they come from there."""
    quiet, learner = (tiny.learner("row-permutation+column-permutation") for _ in range(2))
    for name in ("quiet", "client"):
        (tmp_path / name).mkdir()
    with server(state=tmp_path / "other", checkpoint_every=4) as (running, _):
        tiny.Trainer(quiet, client(running), tmp_path / "quiet").train(tiny.batches(), tiny.STEPS)
    first = spawn("serve", state=tmp_path / "state")
    address = first.line()

    def restart() -> None:
        first.kill()
        spawn("serve", state=tmp_path / "state", port=int(address.rpartition(":")[2]))

    killer(step, "backward", "before", restart)
    tiny.Trainer(learner, tiny.Client(address, tiny.TOKEN), tmp_path / "client").train(tiny.batches(), tiny.STEPS)
    assert torch.equal(learner.losses, quiet.losses)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "half"), [(2, "backward"), (6, "forward"), (6, "backward"), (9, "backward")])
def test_a_client_killed_in_the_middle_of_a_step_and_resumed(
    step: int, half: str, spawn: Any, server: Any, client: Any, tiny: Any, check: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "client"
    folder.mkdir()
    with server(checkpoint_every=4) as (running, events):
        doomed = spawn("train", address=running.address, folder=folder, stop_at=step, half=half)
        doomed.line("there")
        assert doomed.kill() == -signal.SIGKILL
        learner = tiny.learner()
        learner.restore(folder / CLIENTS)
        assert learner.step == (step - 1) // 4 * 4
        session = read(folder / CLIENTS)[1]["session"]
        tiny.Trainer(learner, client(running), folder, session=session).train(tiny.batches(), tiny.STEPS)
    check(folder)
    assert [event["event"] for event in events if event["event"] in ("opened", "resumed")][-1] == (
        "resumed" if step > 4 else "opened"
    )


@pytest.mark.slow
def test_a_client_killed_at_random_moments(
    spawn: Any, server: Any, client: Any, tiny: Any, same: Any, undisturbed: Any, tmp_path: Path
) -> None:
    """The client is killed again and again, and goes on from its file, which is always whole."""
    moments, done, runs = random.Random(0), 0, 0
    while done < KILLS:
        folder, state = tmp_path / f"client-{runs}", tmp_path / f"state-{runs}"
        folder.mkdir()
        with server(state=state, checkpoint_every=4) as (running, _):
            status = None
            while status != 0:
                doomed = spawn("train", address=running.address, folder=folder)
                if done < KILLS:
                    doomed.line("started")
                    doomed.process.join(moments.uniform(0, LONGEST["client"]))
                    doomed.process.kill()
                status = doomed.wait()
                assert status in (0, -signal.SIGKILL), doomed.err
                done += status != 0
                if (folder / CLIENTS).exists():
                    assert read(folder / CLIENTS)[0]
        tensors, facts = read(folder / CLIENTS)
        assert same(tensors, undisturbed[1])
        (kept,) = (path for path in state.iterdir() if path.is_dir() and facts["session"].startswith(path.name))
        assert same(session_state(kept)[0], undisturbed[0])  # killed early, it left other sessions behind
        runs += 1


@pytest.mark.slow
def test_a_server_killed_at_random_moments(spawn: Any, tiny: Any, same: Any, undisturbed: Any, tmp_path: Path) -> None:
    """The server is killed again and again while a client trains, which tries again until the next one answers."""
    moments, done, runs = random.Random(1), 0, 0
    while done < KILLS:
        folder, state = tmp_path / f"client-{runs}", tmp_path / f"state-{runs}"
        folder.mkdir()
        serving = spawn("serve", state=state)
        address = serving.line()
        training = spawn("train", address=address, folder=folder, retry_for=600.0)
        training.line("step")  # a server that hangs up at the very first attempt is not tried again
        while training.process.is_alive():
            training.process.join(moments.uniform(0, LONGEST["server"]))
            if done < KILLS and training.process.is_alive():
                assert serving.kill() == -signal.SIGKILL
                done += 1
                for session in (path for path in state.iterdir() if path.is_dir()):
                    stored = SessionCheckpoints(session)
                    assert all(read(stored.path(step))[0] for step in stored.steps())
                serving = spawn("serve", state=state, port=int(address.rpartition(":")[2]))
                serving.line()
        assert training.wait() == 0, training.err
        serving.kill()
        tensors, facts = read(folder / CLIENTS)
        assert same(tensors, undisturbed[1])
        (kept,) = (path for path in state.iterdir() if path.is_dir() and facts["session"].startswith(path.name))
        assert same(session_state(kept)[0], undisturbed[0])  # killed early, it left other sessions behind
        runs += 1


@pytest.mark.slow
def test_both_killed_and_started_again(spawn: Any, tiny: Any, check: Any, tmp_path: Path) -> None:
    folder = tmp_path / "client"
    folder.mkdir()
    first = spawn("serve", state=tmp_path / "state")
    address = first.line()
    doomed = spawn("train", address=address, folder=folder, stop_at=7, half="backward")
    doomed.line("there")
    first.kill()
    doomed.kill()
    spawn("serve", state=tmp_path / "state", port=int(address.rpartition(":")[2])).line()
    learner = tiny.learner()
    learner.restore(folder / CLIENTS)
    session = read(folder / CLIENTS)[1]["session"]
    tiny.Trainer(learner, tiny.Client(address, tiny.TOKEN), folder, session=session).train(tiny.batches(), tiny.STEPS)
    check(folder)


@pytest.mark.slow
def test_a_client_that_is_killed_lets_its_session_go_and_the_others_go_on(
    spawn: Any, server: Any, client: Any, tiny: Any, tmp_path: Path
) -> None:
    (tmp_path / "client").mkdir()
    with server() as (running, events), client(running).session(tiny.contract()) as other:
        doomed = spawn("train", address=running.address, folder=tmp_path / "client", stop_at=3, half="backward")
        doomed.line("there")
        doomed.kill()
        features = tiny.learner().begin(*tiny.batches()[1])
        other.forward(1, features)
        other.backward(1, features)
        closed = wait_for(events, "closed")
    assert closed["step"] == closed["durable"] == 2


def wait_for(events: list[dict[str, Any]], name: str) -> dict[str, Any]:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if found := [event for event in events if event["event"] == name]:
            return found[0]
        time.sleep(0.01)
    raise AssertionError(f"no {name} in {events}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_stop_finishes_the_step_and_ends_well(
    number: int, spawn: Any, killer: Any, tiny: Any, check: Any, tmp_path: Path
) -> None:
    """The step in progress is finished: the signal comes between its forward and its backward."""
    first = spawn("serve", state=tmp_path / "state", every=1000)
    address = first.line()
    folder = tmp_path / "client"
    folder.mkdir()

    def stop() -> None:
        os.kill(first.process.pid, number)

    killer(6, "backward", "before", stop)
    trainer = tiny.Trainer(tiny.learner(), tiny.Client(address, tiny.TOKEN, retry_for=0.0), folder)
    with pytest.raises(PrivlabError, match=r"is stopping|cannot be reached|is not there"):
        trainer.train(tiny.batches(), tiny.STEPS)
    done = trainer.learner.step
    assert 6 <= done < tiny.STEPS  # a busy machine may bring the signal a step later
    assert first.wait() == 0
    assert servers_state(tmp_path / "state")[1] == done
    spawn("serve", state=tmp_path / "state", port=int(address.rpartition(":")[2])).line()
    trainer.train(tiny.batches(), tiny.STEPS)
    check(folder)


def test_nothing_durable_is_lost_and_nothing_is_kept_for_ever(
    server: Any, client: Any, tiny: Any, tmp_path: Path
) -> None:
    """The server keeps the checkpoint that the client has one for, and its newest: never less, seldom more."""
    seen: list[tuple[int, list[int]]] = []
    (tmp_path / "client").mkdir()
    with server(checkpoint_every=2) as (running, _):
        trainer = tiny.Trainer(tiny.learner(), client(running), tmp_path / "client")
        state = tmp_path / "state"

        def look(done: Any) -> None:
            (folder,) = [path for path in state.iterdir() if path.is_dir()] or [state / "none"]
            seen.append((done.durable, SessionCheckpoints(folder).steps()))

        trainer.train(tiny.batches(), tiny.STEPS, look)
    assert all(durable == 0 or durable in steps for durable, steps in seen)
    assert max(len(steps) for _, steps in seen) == 2
    assert [durable for durable, _ in seen] == [0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
