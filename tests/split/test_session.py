"""T with its optimiser: each step is applied once, and what is restored goes on as if nothing had been."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from privlab.base import PrivlabError
from privlab.split.protocol.backbone import Backbone, own_parameters
from privlab.split.protocol.checkpoint import SessionCheckpoints, private_folder, read, write
from privlab.split.protocol.contract import Contract, Refusal
from privlab.split.protocol.wire import chunks, pack, pack_state, unpack, unpack_state
from privlab.split.server.session import Limits, Session


@pytest.fixture
def session(tiny: Any) -> Callable[..., Session]:
    """Return a maker of sessions: the terms' options ↦ a session of the tiny victim."""
    return lambda **options: Session(Backbone(tiny.tiny().model, torch.float32), tiny.contract(**options))


def batch(seed: int) -> Tensor:
    return torch.randn(2, 17, 32, generator=torch.Generator().manual_seed(seed))


def stepped(session: Session, steps: range) -> list[Tensor]:
    """Apply steps, and return all answers."""
    answers = []
    for step in steps:
        answers += [session.forward(step, batch(step)), session.backward(step, batch(-step))]
    return answers


def weights(session: Session) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in session.backbone.state_dict().items()}


def test_a_step_is_the_gradient_and_one_step_of_the_optimiser(session: Callable[..., Session]) -> None:
    ours = session(optimizer="sgd", lr=0.1, momentum=0.5)
    naive = copy.deepcopy(ours.backbone)
    features, gradient = batch(1).requires_grad_(), batch(2)
    outputs = naive(features)
    outputs.backward(gradient)
    assert torch.equal(ours.forward(1, batch(1)), outputs)
    assert torch.equal(ours.backward(1, gradient), features.grad)
    with torch.no_grad():
        for mine, theirs in zip(ours.backbone.parameters(), naive.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs - 0.1 * theirs.grad)
    assert all(parameter.grad is None for parameter in ours.backbone.parameters())


def test_a_step_sent_again_is_answered_again_and_not_applied(session: Callable[..., Session], same: Any) -> None:
    ours = session()
    answers = stepped(ours, range(1, 4))
    before = weights(ours)
    for _ in range(2):
        assert torch.equal(ours.forward(3, batch(3)), answers[4])
        assert torch.equal(ours.backward(3, batch(-3)), answers[5])
    assert ours.step == 3
    assert same(weights(ours), before)


def test_a_forward_sent_again_before_its_backward_is_computed_again(session: Callable[..., Session], same: Any) -> None:
    once, twice = session(), session()
    stepped(once, range(1, 2))
    twice.forward(1, batch(99))
    stepped(twice, range(1, 2))
    assert same(weights(once), weights(twice))


def test_an_inference_changes_nothing(session: Callable[..., Session], same: Any) -> None:
    once, with_pause = session(), session()
    stepped(once, range(1, 3))
    stepped(with_pause, range(1, 2))
    before = weights(with_pause)
    outputs = with_pause.infer(batch(7))
    assert not outputs.requires_grad
    assert same(weights(with_pause), before)
    with_pause.forward(2, batch(2))
    assert torch.equal(with_pause.infer(batch(7)), outputs)
    with_pause.backward(2, batch(-2))
    assert same(weights(once), weights(with_pause))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_is_restored_goes_on_bit_by_bit(
    at: int, optimizer: str, session: Callable[..., Session], same: Any, tmp_path: Path
) -> None:
    whole, first, second = (session(optimizer=optimizer) for _ in range(3))
    answers = stepped(whole, range(1, 6))
    stepped(first, range(1, at + 1))
    write(tmp_path / "checkpoint", first.tensors(), {"step": at})
    tensors, facts = read(tmp_path / "checkpoint")
    second.restore(facts["step"], tensors)
    assert second.step == at
    again = stepped(second, range(max(at, 1), 6))  # the last step may be sent again
    assert all(torch.equal(a, b) for a, b in zip(again, answers[-len(again) :], strict=True))
    assert same(weights(second), weights(whole))
    assert same(second.tensors(), whole.tensors())


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda s: s.forward(2, batch(2)), "Step 4 is due. Found a forward of step 2"),
        (lambda s: s.forward(5, batch(5)), "Step 4 is due. Found a forward of step 5"),
        (lambda s: s.backward(4, batch(4)), "Step 4 has no forward"),
        (lambda s: s.backward(2, batch(2)), "Step 2 has no forward"),
        (lambda s: s.forward(3, batch(99)), "Step 3 was applied with another features: it is not applied twice"),
        (lambda s: s.backward(3, batch(99)), "Step 3 was applied with another gradient: it is not applied twice"),
    ],
)
def test_steps_out_of_order_are_refused_and_change_nothing(
    act: Callable[[Session], Any], says: str, session: Callable[..., Session], same: Any
) -> None:
    ours = session()
    stepped(ours, range(1, 4))
    before = weights(ours)
    with pytest.raises(Refusal, match=says) as refused:
        act(ours)
    assert refused.value.status == "FAILED_PRECONDITION"
    assert same(weights(ours), before)


def test_a_gradient_that_overflows_is_refused_before_it_is_applied(session: Callable[..., Session], same: Any) -> None:
    ours = session()
    with torch.no_grad():
        for parameter in ours.backbone.parameters():
            parameter.mul_(50)
    before = weights(ours)
    ours.forward(1, batch(1))
    with pytest.raises(Refusal, match=r"1.*gradient") as refused:
        ours.backward(1, torch.full((2, 17, 32), 3e38))
    assert refused.value.status == "OUT_OF_RANGE"
    assert ours.step == 0
    assert same(weights(ours), before)


def test_the_victim_stays_as_it_is(tiny: Any, session: Callable[..., Session]) -> None:
    victim = tiny.tiny()
    before = copy.deepcopy(victim.model.state_dict())
    stepped(Session(Backbone(victim.model, torch.float64), tiny.contract(dtype="float64")), range(0))
    learner = tiny.Learner(victim.model, tiny.stack_of("none", ()), tiny.contract(), tiny.SECRET)
    learner.grade(learner.begin(*tiny.batches()[1]))
    learner.finish(torch.zeros(6, 17, 32))
    assert all(torch.equal(before[name], tensor) for name, tensor in victim.model.state_dict().items())
    assert not any(p.requires_grad for p in victim.model.parameters())


def test_server_and_client_share_the_parameters_out(tiny: Any) -> None:
    model = tiny.tiny().model
    theirs = {f"vit.{name}" for name, _ in Backbone(model, torch.float32).named_parameters()}
    ours = set(own_parameters(model))
    assert theirs.isdisjoint(ours)
    assert theirs | ours == {name for name, _ in model.named_parameters()}
    assert "vit.blocks.1.mlp.fc2.bias" in theirs
    assert {"vit.cls_token", "vit.pos_embed", "vit.patch_embed.proj.weight", "vit.norm.bias", "vit.head.weight"} <= ours


def test_packed_tensors_are_a_safetensors_file(tiny: Any) -> None:
    state = Backbone(tiny.tiny().model, torch.float32).state_dict() | {
        "double": batch(1).double(),
        "scalar": torch.ones(()),
    }
    back = load(pack_state(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in state.items())


def test_what_is_packed_comes_back(tiny: Any) -> None:
    contract, state = tiny.contract(), Backbone(tiny.tiny().model, torch.float32).state_dict()
    assert torch.equal(unpack(pack("features", batch(1).mT.contiguous().mT), "features", contract), batch(1))
    parts = chunks(pack_state(state))
    assert parts[-1] == b""
    back = unpack_state(b"".join(parts), state, torch.float32)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_a_checkpoint_is_whole_private_and_of_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = private_folder(tmp_path / "private") / "step"
    write(path, {"a": batch(1)}, {"n": 1})
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for place in ("split.protocol.checkpoint.save_file", "base.files.sync"):
        with monkeypatch.context() as broken:
            broken.setattr(f"privlab.{place}", full_disk)
            with pytest.raises(PrivlabError, match=r"written.*No"):
                write(path, {"a": batch(2)}, {"n": 2})
        tensors, facts = read(path)
        assert torch.equal(tensors["a"], batch(1))
        assert facts == {"n": 1}
        assert [p.name for p in path.parent.iterdir()] == ["step"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PrivlabError, match="cannot be read"):
        read(path)
    path.write_bytes(pack("features", batch(1)))
    with pytest.raises(PrivlabError, match="checkpoint"):
        read(path)
    with pytest.raises(PrivlabError, match="No such file"):
        read(tmp_path / "none")


def full_disk(*arguments: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


def test_checkpoints_are_kept_as_told(tmp_path: Path) -> None:
    stored = SessionCheckpoints(tmp_path / "session")
    assert stored.steps() == []
    for step in (2, 10, 4):
        write(stored.path(step), {"a": batch(step)}, {"step": step})
    assert stored.steps() == [10, 4, 2]
    assert torch.equal(read(stored.path(4))[0]["a"], batch(4))
    assert read(stored.path(10), only_facts=True) == ({}, {"step": 10})
    stored.keep({4, 6})
    assert stored.steps() == [4]
    with pytest.raises(PrivlabError, match="cannot be made"):
        private_folder(tmp_path / "session" / "step-00000004.safetensors" / "x")


def test_a_server_whose_disk_is_full_goes_on_and_keeps_what_it_called_durable(
    server: Any, client: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Any
) -> None:
    (tmp_path / "client").mkdir()
    learner, durable = tiny.learner(), []
    with server(checkpoint_every=2) as (running, events):
        trainer = tiny.Trainer(learner, client(running), tmp_path / "client")

        def fill(done: Any) -> None:
            durable.append(done.durable)
            if done.step == 5:
                monkeypatch.setattr("privlab.split.server.session.write", refuse)

        trainer.train(tiny.batches(), tiny.STEPS, fill)
    torch.testing.assert_close(learner.losses.tolist(), alone(learner.contract, tiny.STEPS), rtol=0, atol=1e-4)
    assert durable[-1] == 4
    assert {event["durable"] for event in events if event["event"] == "not saved"} == {4}
    (folder,) = (path for path in (tmp_path / "state").iterdir() if path.is_dir())
    assert SessionCheckpoints(folder).steps() == [4]
    assert read(tmp_path / "client" / "client.safetensors")[1]["step"] == 4


def refuse(path: Path, tensors: object, facts: object) -> None:
    raise PrivlabError("full")


def test_an_unreadable_checkpoint_is_passed_over(server: Any, client: Any, tiny: Any, tmp_path: Path) -> None:
    with server() as (running, _), client(running).session(tiny.contract(), saved=1) as remote:
        for step in (1, 2):
            remote.forward(step, batch(step))
            remote.backward(step, batch(-step))
            remote.save()
    (folder,) = (path for path in (tmp_path / "state").iterdir() if path.is_dir())
    assert SessionCheckpoints(folder).steps() == [2, 1]
    (folder / "step-00000002.safetensors").write_bytes(b"torn")
    with server() as (running, events):
        with client(running).session(tiny.contract(), session=remote.id, steps=[2, 1]) as again:
            assert again.step == 1
        assert "unreadable" in {event["event"] for event in events}


@pytest.mark.parametrize("name", ["sessions", "batch", "memory", "message", "idle"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(PrivlabError, match=f"The limit '{name}' must be above 0. Found 0"):
        Limits(**{name: 0.0 if name == "idle" else 0})  # pyright: ignore[reportArgumentType]


def test_the_estimate_of_a_sessions_memory_grows_with_what_it_holds() -> None:
    small = Contract("m", 32, 17, 6)
    assert small.session_bytes(1000, 2) == 4 * 4000 + 6 * 17 * 32 * 4 * 56
    sgd = Contract("m", 32, 17, 6, optimizer="sgd", dtype="float64")
    assert sgd.session_bytes(1000, 2) == 3 * 8000 + 6 * 17 * 32 * 8 * 56


def test_every_parameter_is_on_one_side_of_any_cut(tiny: Any) -> None:
    model = tiny.tiny().model.requires_grad_(True)
    for cut_layer in (0, 1):
        theirs = {f"vit.{name}" for name, _ in Backbone(model, torch.float32, cut_layer).named_parameters()}
        ours = set(own_parameters(model, cut_layer))
        assert theirs | ours == {name for name, _ in model.named_parameters()}
        assert not theirs & ours
        assert {name.split(".")[2] for name in theirs if ".blocks." in name} == {*"01"[cut_layer:]}
    with pytest.raises(PrivlabError, match=r"server.*2"):
        Backbone(model, torch.float32, 2)
