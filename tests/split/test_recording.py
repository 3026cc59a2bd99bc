"""What a curious server keeps is what it was sent, and keeping it never stands in the way of serving."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from privlab.base import PrivlabError, PrivlabWarning
from privlab.release import Recorder, read_recording, recorded_cut_layer, recorded_sessions

FEATURES = torch.linspace(-1, 1, 2 * 17 * 32).view(2, 17, 32)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Write a recording of two sessions, and return its folder."""
    recorder = Recorder(tmp_path / "rec", {"model": "m"}, on_stop=pytest.fail)
    for name in ("b", "a"):
        session = recorder.session(name, {"contract": {"width": 32}})
        session.step(2, 2 * FEATURES, None)
        session.step(1, FEATURES, -FEATURES)
        session.inference(3 * FEATURES.double())
        session.inference(4 * FEATURES)
    return tmp_path / "rec"


def test_batches_come_back_in_order(recording: Path) -> None:
    batches = list(read_recording(recording))
    assert [(b.session, b.kind, b.number) for b in batches] == [
        (session, kind, number) for session in "ab" for kind in ("step", "infer") for number in (1, 2)
    ]
    first, second, third, fourth = batches[:4]
    assert torch.equal(first.features, FEATURES)
    assert first.gradient is not None
    assert torch.equal(first.gradient, -FEATURES)
    assert torch.equal(second.features, 2 * FEATURES)
    assert second.gradient is third.gradient is None
    assert torch.equal(third.features, 3 * FEATURES.double())
    assert torch.equal(fourth.features, 4 * FEATURES)


def test_one_session_or_one_kind_can_be_read_alone(recording: Path) -> None:
    assert {b.session for b in read_recording(recording / "a")} == {"a"}
    assert [b.kind for b in read_recording(recording / "a", "infer")] == ["infer", "infer"]


def test_a_session_says_what_it_was(recording: Path) -> None:
    about = recorded_sessions(recording)
    assert list(about) == [str(recording / "a"), str(recording / "b")]
    first = about[str(recording / "a")]
    assert first["format"] == "privlab-recording"
    assert (first["version"], first["model"], first["contract"]) == (1, "m", {"width": 32})


def test_a_resumed_session_goes_on_numbering(recording: Path) -> None:
    again = Recorder(recording, {}, on_stop=pytest.fail).session("a", {})
    again.inference(FEATURES)
    again.step(2, 2 * FEATURES, FEATURES)
    assert [b.number for b in read_recording(recording / "a", "infer")] == [1, 2, 3]
    assert [b.gradient is None for b in read_recording(recording / "a", "step")] == [False, False]
    assert json.loads((recording / "a" / "session.json").read_text())["model"] == "m"


@pytest.mark.parametrize("damage", [b"", b"torn", b"\xff" * 50])
def test_a_torn_file_is_left_out_with_a_warning(damage: bytes, recording: Path) -> None:
    (recording / "a" / "step-00000001.safetensors").write_bytes(damage)
    with pytest.warns(PrivlabWarning, match=r"Left out '.*a/step-00000001\.safetensors'"):
        batches = list(read_recording(recording))
    assert len(batches) == 7


def test_a_file_of_something_else_is_left_out_with_a_warning(recording: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weights": FEATURES}, recording / "a" / "step-00000001.safetensors")
    save_file({"features": FEATURES[0]}, recording / "a" / "step-00000002.safetensors")
    save_file({"features": FEATURES.int()}, recording / "a" / "infer-00000001.safetensors")
    with pytest.warns(PrivlabWarning) as warned:
        batches = list(read_recording(recording / "a"))
    assert [b.number for b in batches] == [2]
    said = [str(w.message) for w in warned]
    assert "'features'" in said[0]
    assert "expected b × t × d floats, found (17, 32) of torch.float32" in said[1]
    assert "found (2, 17, 32) of torch.int32" in said[2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no JSON"),
        ("[]", "must hold an object in JSON. Found list"),
        ('{"format": "privlab-recording"}', "cannot be read as a recording: KeyError: 'version'"),
        (
            '{"format": "privlab-recording", "version": 2, "session": "a"}',
            "must be privlab-recording, version 1. Found privlab-recording, version 2",
        ),
    ],
)
def test_a_recording_of_another_kind_is_refused(text: str, says: str, recording: Path) -> None:
    (recording / "a" / "session.json").write_text(text)
    with pytest.raises(PrivlabError) as refused:
        read_recording(recording)
    assert says in str(refused.value)


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"`privlab.*--record`"):
        read_recording(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PrivlabError, match=r"--record '.*file/x' cannot be made"):
        Recorder(tmp_path / "file" / "x", {}, on_stop=pytest.fail)


def test_a_server_records_what_the_client_sends(server: Any, client: Any, tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    learner = tiny.learner("row-permutation")
    with server(record=tmp_path / "rec") as (running, _):
        tiny.Trainer(learner, client(running), tmp_path / "client").train(tiny.batches(), 3)
        with client(running).session(tiny.contract()) as other:
            other.infer(FEATURES.clone())
            other.forward(1, 2 * FEATURES)
    fresh, steps = tiny.learner("row-permutation"), list(read_recording(tmp_path / "rec", "step"))
    mine = [b for b in steps if b.gradient is not None]
    assert [b.number for b in mine] == [1, 2, 3]
    assert torch.equal(mine[0].features, fresh.begin(*tiny.batches()[1]))
    assert mine[0].gradient is not None
    assert mine[0].gradient.shape == mine[0].features.shape
    (left,) = (b for b in steps if b.gradient is None)
    assert torch.equal(left.features, 2 * FEATURES)
    (asked,) = read_recording(tmp_path / "rec", "infer")
    assert torch.equal(asked.features, FEATURES)
    about = recorded_sessions(tmp_path / "rec")[str(tmp_path / "rec" / asked.session)]
    assert about["contract"]["width"] == 32
    assert about["model"] == "VisionTransformer"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a real disk with room for two small steps; skip where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root can mount a disk of its own")
    command = [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def check_training_goes_on(server: Any, client: Any, tiny: Any, alone: Any, record: Path, tmp_path: Path) -> None:
    """Train with a recording that cannot be kept; the server says so once, and the loss is what it should be."""
    (tmp_path / "client").mkdir()
    learner = tiny.learner()
    with server(record=record) as (running, events):
        tiny.Trainer(learner, client(running), tmp_path / "client").train(tiny.batches(), tiny.STEPS)
    (warning,) = (event["reason"] for event in events if event["event"] == "warning")
    assert warning.startswith("Recording stopped: ")
    assert "No space left" in warning
    assert warning.endswith("The sessions go on.")
    torch.testing.assert_close(learner.losses.tolist(), alone(learner.contract, tiny.STEPS), rtol=0, atol=1e-4)


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tiny_disk: Path, server: Any, client: Any, tiny: Any, alone: Any, tmp_path: Path
) -> None:
    check_training_goes_on(server, client, tiny, alone, tiny_disk / "rec", tmp_path)
    assert 0 < len(list(read_recording(tiny_disk / "rec"))) < tiny.STEPS


def test_a_disk_that_fills_up_at_any_file_ends_the_recording_and_nothing_else(
    server: Any, client: Any, tiny: Any, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write_bytes = [], Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if ".tmp-" not in path.name or len(written) < 3:
            written.append(path)
            return write_bytes(path, data)
        write_bytes(path, data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    check_training_goes_on(server, client, tiny, alone, tmp_path / "rec", tmp_path)
    assert len(list(read_recording(tmp_path / "rec"))) == 2
    assert not list((tmp_path / "rec").rglob(".tmp-*"))


def test_sessions_of_one_cut_have_it_and_others_are_refused(recording: Path) -> None:
    """Contracts of before there was a choice state none: 0."""
    assert recorded_cut_layer(recording) == 0
    Recorder(recording, {}, on_stop=pytest.fail).session("c", {"contract": {"cut_layer": 3}})
    assert recorded_cut_layer(recording / "c") == 3
    with pytest.raises(PrivlabError, match=r"0.*3.*session"):
        recorded_cut_layer(recording)


def test_a_server_records_the_cut_and_what_was_sent_behind_it(
    server: Any, client: Any, tiny: Any, tmp_path: Path
) -> None:
    learner = tiny.learner("none", cut_layer=1)
    images, _ = tiny.batches()[1]
    with server(record=tmp_path / "seen") as (running, _):
        tiny.Trainer(learner, client(running), tmp_path).train(tiny.batches(), 1)
    assert recorded_cut_layer(tmp_path / "seen") == 1
    (batch,) = read_recording(tmp_path / "seen")
    model = tiny.tiny().model
    torch.testing.assert_close(batch.features, model.vit.blocks[0](model.embed(images)))
