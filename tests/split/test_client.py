"""The client's side: data, inference, patience, and several clients at once."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.images import Preprocessing, open_images
from privlab.split.client.client import Lost, Patience, Rebuffed, Traffic
from privlab.split.client.data import Batches, load
from privlab.split.client.loops import infer, inference_summary, training_summary
from privlab.threat import Draws

DEFENSES = ["none", "row-permutation", "column-permutation", "row-permutation+column-permutation"]
CUT = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3, 1.0, "bicubic")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Write three images in each of two class folders, and one that is none."""
    rng = np.random.default_rng(1)
    for name in ("a/0", "a/1", "a/2", "b/0", "b/1", "b/2"):
        path = tmp_path / "pictures" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)
    (tmp_path / "pictures" / "b" / "9.png").write_bytes(b"no image")
    return tmp_path / "pictures"


def test_images_are_kept_in_eight_bits_without_loss(pictures: Path) -> None:
    data = load(open_images(pictures), CUT)
    assert data.names == ("a/0.png", "a/1.png", "a/2.png", "b/0.png", "b/1.png", "b/2.png")
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert list(data.failed) == ["b/9.png"]
    want = torch.stack([CUT(image.pixels) for image in open_images(pictures) if image.pixels])
    assert torch.equal(data.pixels(slice(None)), want)
    other = load(open_images(pictures, limit=5), CUT)
    assert other.sha256 != data.sha256 == load(open_images(pictures), CUT).sha256


def test_a_source_without_an_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.png").write_bytes(b"no image")
    with pytest.raises(PrivlabError, match="No image can be read"):
        load(open_images(tmp_path), CUT)


def test_every_epoch_takes_every_image_once_in_an_order_of_its_own(tiny: Any) -> None:
    batches = Batches(tiny.batches().data, 6)
    assert batches.per_epoch == 4
    epochs = [[batches[4 * epoch + i] for i in range(1, 5)] for epoch in range(2)]
    data = batches.data
    want = {(image.numpy().tobytes(), int(y)) for image, y in zip(data.pixels(slice(None)), data.labels, strict=True)}
    assert len(want) == 20
    for epoch in epochs:
        assert [len(images) for images, _ in epoch] == [6, 6, 6, 2]
        assert {(x.numpy().tobytes(), int(y)) for xs, ys in epoch for x, y in zip(xs, ys, strict=True)} == want
    assert [batches.images_in(step) for step in range(1, 9)] == [6, 6, 6, 2] * 2
    assert Batches(batches.data, 50).images_in(3) == len(Batches(batches.data, 50)[3][0]) == 20
    assert not torch.equal(epochs[0][0][0], epochs[1][0][0])
    assert torch.equal(Batches(batches.data, 6)[3][0], epochs[0][2][0])
    assert not torch.equal(Batches(batches.data, 6, seed=1)[3][0], epochs[0][2][0])


@pytest.mark.parametrize("defense", DEFENSES)
def test_answers_are_those_of_the_model_itself(defense: str, server: Any, client: Any, tiny: Any) -> None:
    learner = tiny.learner(defense, dtype="float64")
    data = tiny.batches().data
    with server() as (running, _):
        asking = client(running)
        answers = infer(learner, asking, data)
    want = tiny.tiny().model.double()(data.pixels(slice(None)).double()).softmax(1)
    assert_close(answers, want, rtol=0, atol=1e-12)
    assert len(asking.traffic.waited) == 4
    size = 20 * 17 * 32 * 8
    assert size < asking.traffic.received < size + 4 * 200


def test_what_is_asked_twice_is_permuted_otherwise(server: Any, client: Any, tiny: Any, tmp_path: Path) -> None:
    from privlab.release import read_recording

    learner, data = tiny.learner("row-permutation"), tiny.batches().data
    with server(record=tmp_path / "rec") as (running, _):
        first, second = (infer(learner, client(running), data) for _ in range(2))
    assert_close(first, second)
    seen = [b.features for b in read_recording(tmp_path / "rec")]
    assert len(seen) == 8
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i] if a.shape == b.shape)


def test_a_trained_run_answers_as_it_learnt(server: Any, client: Any, tiny: Any, tmp_path: Path) -> None:
    """The answers after training are those of the model whose halves are put together again."""
    learner, data = tiny.learner("row-permutation", dtype="float64"), tiny.batches().data
    with server() as (running, _):
        trainer = tiny.Trainer(learner, client(running), tmp_path)
        trainer.train(tiny.batches(), tiny.STEPS)
        answers = infer(learner, client(running), data, session=trainer.session)
        from privlab.split.protocol.checkpoint import SessionCheckpoints, read

        stored = SessionCheckpoints(tmp_path / "state" / trainer.session[:12])
        tensors = read(stored.path(tiny.STEPS))[0]
    model = learner.model
    state = {f"vit.{n.removeprefix('backbone.')}": t for n, t in tensors.items() if n.startswith("backbone.")}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    assert_close(answers, model(data.pixels(slice(None)).double()).softmax(1), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_several_clients_train_at_once_and_do_not_meet(server: Any, client: Any, tiny: Any, tmp_path: Path) -> None:
    learners = [tiny.learner(defense, lr=lr) for defense, lr in zip(DEFENSES, (0.01, 0.02, 0.03, 0.04), strict=True)]
    alone = [tiny.learner(learner.stack.name, lr=learner.contract.lr) for learner in learners]
    with server() as (running, events):
        threads = [
            threading.Thread(target=trained, args=(learner, client(running), tmp_path / str(i), tiny))
            for i, learner in enumerate(learners)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for i, learner in enumerate(alone):
            trained(learner, client(running), tmp_path / f"alone{i}", tiny)
    for learner, other in zip(learners, alone, strict=True):
        assert learner.step == tiny.STEPS
        assert torch.equal(learner.losses, other.losses)
    assert len({event["session"] for event in events if event["event"] == "opened"}) == 8


def trained(learner: Any, client: Any, folder: Path, tiny: Any) -> None:
    folder.mkdir()
    tiny.Trainer(learner, client, folder).train(tiny.batches(), tiny.STEPS)


@pytest.mark.slow
def test_a_client_waits_for_a_server_that_is_not_up_yet(spawn: Any, tiny: Any, tmp_path: Path) -> None:
    first = spawn("serve", state=tmp_path / "state")
    address = first.line()
    first.kill()
    told: list[str] = []

    def tell(message: str) -> None:
        told.append(message)
        spawn("serve", state=tmp_path / "state", port=int(address.rpartition(":")[2]))

    learner = tiny.learner()
    trained_by = tiny.Trainer(learner, tiny.Client(address, tiny.TOKEN, tell=tell), tmp_path)
    trained_by.train(tiny.batches(), 2)
    assert learner.step == 2
    assert len(told) == 1
    assert "cannot be reached" in told[0]


def test_patience_ends() -> None:
    told: list[str] = []
    patience = Patience(0.3, told.append)
    began = time.monotonic()
    with pytest.raises(PrivlabError, match=r"0\.3.*\(--retry-for\)") as ended:
        wait_for_ever(patience)
    assert not isinstance(ended.value, Lost)
    assert 0.3 <= time.monotonic() - began < 5
    assert told == ["gone Trying again for 0.3 seconds."]


def wait_for_ever(patience: Patience) -> None:
    while True:
        patience.wait(Lost("gone"))


def test_patience_begins_anew_when_the_server_has_answered() -> None:
    told: list[str] = []
    patience = Patience(0.25, told.append)
    for _ in range(3):
        patience.wait(Lost("gone"))
        patience.reset()
        time.sleep(0.1)
    assert len(told) == 3


def test_being_sent_away_at_once_is_final_at_first_and_a_mishap_later() -> None:
    patience = Patience(5.0, lambda message: None)
    with pytest.raises(Rebuffed):
        patience.wait(Rebuffed("no"))
    patience.reset()
    patience.wait(Rebuffed("no"))


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield the address of something that takes connections and never says a word."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_never_answers_is_given_up(silent: str, tiny: Any) -> None:
    with (
        pytest.raises(Lost, match=r"0\.2.*seconds"),
        tiny.Client(silent, tiny.TOKEN, timeout=0.2).session(tiny.contract()),
    ):
        pass


def test_a_summary_is_the_mean_over_images(tiny: Any) -> None:
    learner, batches = tiny.learner(), tiny.batches()
    learner.step = 6  # one epoch of 6 + 6 + 6 + 2 images, and two steps of the next
    learner.losses = torch.tensor([1.0, 2.0, 3.0, 10.0, 4.0, 6.0], dtype=torch.float64)
    learner.hits = torch.tensor([6, 3, 0, 1, 3, 0])
    traffic = Traffic(sent=10, received=20, waited=[0.1, 0.2, 0.6])
    summary = training_summary(learner, batches, traffic, 2.0, 4)
    assert summary["epochs"][0] == {"epoch": 1, "loss": pytest.approx((6 * 6 + 20) / 20), "accuracy": 0.5}
    assert summary["epochs"][1] == {"epoch": 2, "loss": 5.0, "accuracy": 0.25}
    assert summary["steps"] == 6
    assert (summary["bytes_sent"], summary["bytes_received"]) == (10, 20)
    assert (summary["latency_ms_median"], summary["latency_ms_worst"]) == (200, 600)
    assert summary["images_per_second"] == (6 + 2 + 6 + 6) / 2


def test_accuracy_is_that_of_the_images_with_a_label(tiny: Any) -> None:
    from dataclasses import replace

    data = tiny.batches().data
    data = replace(data, labels=torch.tensor([0, 0, 1, -1] + [-1] * 16))
    answers = torch.zeros(20, 7).index_fill(1, torch.tensor(0), 1.0)
    summary = inference_summary(data, answers, {0: "zero"}, Traffic(), 1.0)
    assert summary["accuracy"] == pytest.approx(2 / 3)
    assert summary["predictions"][3] == {"image": "3", "label": None, "predicted": 0, "class": "zero", "probability": 1}
    none = replace(data, labels=torch.full((20,), -1))
    assert inference_summary(none, answers, {}, Traffic(), 1.0)["accuracy"] is None


def test_a_defense_on_images_acts_before_the_embedding(tiny: Any) -> None:
    learner = tiny.learner("blur")
    images = tiny.batches()[1][0]
    draws = Draws(images=[torch.Generator()] * 6, batch=torch.Generator(), model=torch.Generator())
    assert not torch.allclose(learner.send(images, draws).features, tiny.learner("none").send(images, draws).features)
