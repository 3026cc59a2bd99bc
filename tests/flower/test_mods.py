"""Mods of a Flower client and the strategy of a server, on messages as Flower makes them."""

import copy
import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import privlab
from privlab.base import PrivlabError
from privlab.threat import Client

flwr = pytest.importorskip("flwr.app")

from flwr.common.constant import ErrorCode  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402

from privlab.flower import AuditingStrategy, AuditMod, RecordingStrategy, RecordMod  # noqa: E402

SGD = Client(lr=0.01, steps=2)

CONTEXT = flwr.Context(run_id=1, node_id=7, node_config={}, state=flwr.RecordDict(), run_config={})


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process the identity without which the server of a newer Flower makes no message."""
    if importlib.util.find_spec("flwr.supercore.task_identity") is not None:
        identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
        for name in ("task_id", "run_id", "node_id"):
            monkeypatch.setattr(identity, f"_{name}", 1)


def asked(arrays: Any, kind: str = "train", **config: Any) -> Any:
    """Return a server's message as FedAvg makes it."""
    content = {"arrays": arrays, "config": flwr.ConfigRecord({"server-round": 3} | config)}
    return flwr.Message(flwr.RecordDict(content), dst_node_id=7, message_type=kind)


def answered(message: Any, arrays: Any) -> Any:
    """Return a client's reply as Flower's examples make it."""
    content = {"arrays": arrays, "metrics": flwr.MetricRecord({"num-examples": 1})}
    return flwr.Message(flwr.RecordDict(content), reply_to=message)


@pytest.fixture
def trains(vit: VisionTransformer, photographs: Callable[[int, int], Tensor]) -> Callable[..., Any]:
    """Return a client that trains by plain PyTorch on a photograph of label 1."""
    images = photographs(1, 64)

    def train(message: Any, context: Any) -> Any:
        own = copy.deepcopy(vit)
        own.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(own.parameters(), lr=SGD.lr)
        for _ in range(SGD.total_steps):
            optimiser.zero_grad()
            F.cross_entropy(own((images - 0.5) / 0.5), torch.tensor([1])).backward()
            optimiser.step()
        return answered(message, flwr.ArrayRecord(own.state_dict()))

    return train


@pytest.fixture
def sent(vit: VisionTransformer) -> Any:
    """Return the message that asks for round 3."""
    return asked(flwr.ArrayRecord(vit.state_dict()))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return what was logged, each message one line."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level("INFO", logger="flwr")

    def lines() -> str:
        assert not any("\n" in record.message for record in caplog.records)
        return "\n".join(record.message for record in caplog.records)

    return lines


def refuses(message: Any, context: Any) -> Any:
    return flwr.Message(flwr.Error(code=ErrorCode.UNKNOWN, reason="no disk"), reply_to=message)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "node-7.jsonl").read_text("utf-8").splitlines()]


def test_a_record_is_what_came_and_what_left(
    vit: VisionTransformer, sent: Any, trains: Callable[..., Any], tmp_path: Path
) -> None:
    reply = RecordMod(tmp_path)(sent, CONTEXT, trains)
    place = tmp_path / "round-3" / "node-7"
    before, after = (load_file(place / f"{name}.safetensors") for name in ("before", "after"))
    left = reply.content.array_records["arrays"].to_torch_state_dict()
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())
    assert before.keys() == after.keys() == left.keys()
    assert all(torch.equal(value, after[name]) for name, value in left.items())
    assert not torch.equal(before["pos_embed"], after["pos_embed"])


def test_a_second_federation_replaces_no_record_of_the_first(
    vit: VisionTransformer, sent: Any, trains: Callable[..., Any], tmp_path: Path
) -> None:
    RecordMod(tmp_path)(sent, CONTEXT, trains)
    first = (tmp_path / "round-3" / "node-7" / "after.safetensors").read_bytes()
    RecordMod(tmp_path)(sent, CONTEXT, trains)
    assert sorted(path.name for path in (tmp_path / "round-3").iterdir()) == ["node-7", "node-7-2"]
    assert (tmp_path / "round-3" / "node-7" / "after.safetensors").read_bytes() == first


def test_only_rounds_of_training_are_recorded_and_audited(
    vit: VisionTransformer, trains: Callable[..., Any], tmp_path: Path, photographs: Callable[[int, int], Tensor]
) -> None:
    mods = RecordMod(tmp_path / "r"), AuditMod(vit, SGD, tmp_path / "a", images=lambda _: photographs(1, 64))
    for mod in mods:
        assert mod(asked(flwr.ArrayRecord(vit.state_dict()), "evaluate"), CONTEXT, trains).has_content()
        assert mod(asked(flwr.ArrayRecord(vit.state_dict())), CONTEXT, refuses).error.reason == "no disk"
    assert [*tmp_path.iterdir()] == []
    mods[0](asked(flwr.ArrayRecord(vit.state_dict()), "train.mine"), CONTEXT, trains)
    assert [path.name for path in tmp_path.glob("r/*")] == ["round-3"]


def numbered(message: Any, context: Any) -> Any:
    return answered(message, flwr.ArrayRecord([np.zeros(2, np.float32)]))


def empty(message: Any, context: Any) -> Any:
    return flwr.Message(flwr.RecordDict({}), reply_to=message)


def same(message: Any, context: Any) -> Any:
    return answered(message, message.content.array_records["arrays"])


def part(message: Any, context: Any) -> Any:
    return answered(message, flwr.ArrayRecord({"head.bias": message.content.array_records["arrays"]["head.bias"]}))


MISTAKES = {
    "numbered": (numbered, "must have the names of their parameters. Found numbers, as a list of arrays gives them"),
    "empty": (empty, "An update is read from one ArrayRecord. Found 0 in what the client sends: send ArrayRecord("),
    "same": (same, "Nothing was trained: "),
    "part": (part, "weights"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_recorded_is_one_line_and_disturbs_nothing(
    sent: Any, tmp_path: Path, said: Callable[[], str], name: str
) -> None:
    client, line = MISTAKES[name]
    assert RecordMod(tmp_path)(sent, CONTEXT, client).has_content()
    assert said().startswith("privlab: round 3, node 7: no update recorded. ")
    assert line in said()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_audited_does_not_leave(
    vit: VisionTransformer, sent: Any, tmp_path: Path, name: str, photographs: Callable[[int, int], Tensor]
) -> None:
    client, line = MISTAKES[name]
    reply = AuditMod(vit, SGD, tmp_path, images=lambda _: photographs(1, 64))(sent, CONTEXT, client)
    assert not reply.has_content()
    assert reply.error.code == ErrorCode.MOD_FAILED_PRECONDITION
    assert str(reply.error.reason).startswith("privlab withheld the update: it cannot be audited: ")
    assert line in str(reply.error.reason)
    assert lines_of(tmp_path)[0]["withheld"].startswith("it cannot be audited")


def test_an_update_that_leaks_is_withheld_and_the_line_stays_with_the_client(
    vit: VisionTransformer,
    sent: Any,
    trains: Callable[..., Any],
    tmp_path: Path,
    photographs: Callable[[int, int], Tensor],
    said: Callable[[], str],
) -> None:
    images = photographs(1, 64)
    reply = AuditMod(vit, SGD, tmp_path, images=lambda _: images)(sent, CONTEXT, trains)
    assert not reply.has_content()
    assert reply.error.code == ErrorCode.MOD_FAILED_PRECONDITION
    reason = "an image of the client can be reconstructed from it"
    assert reply.error.reason == f"privlab withheld the update: {reason}"
    assert reply.metadata.dst_node_id == sent.metadata.src_node_id
    (line,) = lines_of(tmp_path)
    assert {"round": 3, "node": 7, "image": 0, "leaks": True, "withheld": reason}.items() <= line.items()
    assert line["psnr"] > 60
    assert line["seconds"] > 0
    assert line["seconds_round"] > 0
    assert "privlab audit: round 3, node 7, psnr " in said()


def manipulated(vit: VisionTransformer) -> Any:
    """Return the message of a server that lets all neurons of an MLP have the same weights, as bins do."""
    state = dict(vit.state_dict())
    fc1 = "blocks.0.mlp.fc1.weight"
    return asked(flwr.ArrayRecord(state | {fc1: state[fc1][:1].expand_as(state[fc1]).contiguous()}))


def never(message: Any, context: Any) -> Any:
    raise AssertionError("it trained")


@pytest.mark.parametrize("with_images", [True, False])
def test_a_client_does_not_train_on_weights_that_somebody_chose(
    vit: VisionTransformer,
    trains: Callable[..., Any],
    tmp_path: Path,
    photographs: Callable[[int, int], Tensor],
    said: Callable[[], str],
    with_images: bool,
) -> None:
    images = (lambda _: photographs(2, 64)) if with_images else None
    reply = AuditMod(vit, SGD, tmp_path, images=images)(manipulated(vit), CONTEXT, never)
    assert reply.error.code == ErrorCode.MOD_FAILED_PRECONDITION
    reason = "the server's weights are suspicious: do not train on these weights; parallel rows is 1"
    assert reply.error.reason == f"privlab did not train: {reason}"
    assert lines_of(tmp_path) == [{"round": 3, "node": 7, "withheld": reason}]
    assert f"privlab: round 3, node 7: not trained, {reason}" in said()
    AuditMod(vit, SGD, tmp_path, images=images, check_weights=False)(manipulated(vit), CONTEXT, trains)
    assert "seconds_round" in lines_of(tmp_path)[1]  # it trained


def test_bundled_photographs_are_decoded_only_where_the_client_gives_none(
    vit: VisionTransformer,
    trains: Callable[..., Any],
    sent: Any,
    tmp_path: Path,
    photographs: Callable[[int, int], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("privlab.flower.mods.sample_images", lambda made: pytest.fail("they were decoded"))
    AuditMod(vit, SGD, tmp_path, images=lambda _: photographs(1, 64))(sent, CONTEXT, trains)
    AuditMod(vit, SGD, tmp_path, check_weights=False)(sent, CONTEXT, trains)
    assert len(lines_of(tmp_path)) == 2


def test_a_client_does_not_train_on_weights_that_cannot_be_audited(
    vit: VisionTransformer, tmp_path: Path, photographs: Callable[[int, int], Tensor]
) -> None:
    wrapped = {f"net.{name}": tensor for name, tensor in vit.state_dict().items()}
    broken = dict(vit.state_dict()) | {"head.bias": torch.full((10,), float("nan"))}
    mods = [AuditMod(vit, SGD, tmp_path, images=lambda _, side=side: photographs(1, side)) for side in (64, 32)]
    for mod, state, line in (
        (mods[0], wrapped, "needs the weights by timm's names. Found net."),
        (mods[0], {"head.bias": torch.ones(3)}, "Found head.bias (3,)"),
        (mods[0], broken, "must be finite. Found NaN or infinity in head.bias"),
        (mods[1], vit.state_dict(), "must be of shape (3, 64, 64)"),
    ):
        reason = str(mod(asked(flwr.ArrayRecord(dict(state))), CONTEXT, never).error.reason)
        assert reason.startswith("privlab did not train: the server's weights cannot be audited: ")
        assert line in reason


def test_an_update_below_the_threshold_leaves_as_it_is(
    vit: VisionTransformer,
    sent: Any,
    trains: Callable[..., Any],
    tmp_path: Path,
    photographs: Callable[[int, int], Tensor],
) -> None:
    mod = AuditMod(vit, SGD, tmp_path, images=lambda _: photographs(1, 64), max_psnr=300.0)
    replies: list[Any] = []
    for _ in range(2):
        assert mod(sent, CONTEXT, lambda m, c: replies.append(trains(m, c)) or replies[-1]) is replies[-1]
    assert [line["withheld"] for line in lines_of(tmp_path)] == [None, None]


def test_the_certificate_withholds_without_images(
    vit: VisionTransformer, sent: Any, trains: Callable[..., Any], tmp_path: Path
) -> None:
    assert AuditMod(vit, SGD, tmp_path)(sent, CONTEXT, trains).has_error()
    assert lines_of(tmp_path)[0]["explained"] > 0.9999
    with pytest.raises(PrivlabError, match=r"client.images=1"):
        AuditMod(vit, Client(images=8), tmp_path)


def test_a_mod_within_changes_what_is_audited(
    vit: VisionTransformer,
    sent: Any,
    trains: Callable[..., Any],
    tmp_path: Path,
    photographs: Callable[[int, int], Tensor],
) -> None:
    """Noise that a mod behind it adds is in the update that the audit sees."""

    def noisy(message: Any, context: Any) -> Any:
        state = trains(message, context).content.array_records["arrays"].to_torch_state_dict()
        draw = torch.Generator().manual_seed(0)
        return answered(
            message, flwr.ArrayRecord({n: v + torch.randn(v.shape, generator=draw) for n, v in state.items()})
        )

    mod = AuditMod(vit, SGD, tmp_path, images=lambda _: photographs(1, 64))
    assert mod(sent, CONTEXT, noisy).has_content()
    assert lines_of(tmp_path)[0]["psnr"] < 20


def test_the_line_of_a_folder_that_cannot_be_is_an_error(
    vit: VisionTransformer, sent: Any, trains: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PrivlabError, match=r"node-7\.jsonl"):
        AuditMod(vit, SGD, tmp_path / "file")(sent, CONTEXT, trains)


class Sends(FedAvg):
    """FedAvg that asks one node, without a grid."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        """Return one message."""
        return iter([asked(arrays)])


def test_a_server_keeps_what_each_client_sent_and_aggregates_as_before(
    vit: VisionTransformer, trains: Callable[..., Any], tmp_path: Path
) -> None:
    grid = create_autospec(Grid, instance=True)
    strategy = RecordingStrategy(Sends(fraction_evaluate=0.0), tmp_path)
    strategy.summary()
    (message,) = strategy.configure_train(5, flwr.ArrayRecord(vit.state_dict()), flwr.ConfigRecord(), grid)
    reply = trains(message, CONTEXT)
    broken = refuses(message, CONTEXT)
    arrays, metrics = strategy.aggregate_train(5, iter([reply, broken]))
    assert arrays is not None
    assert metrics is not None
    place = tmp_path / "round-5" / "node-7"
    assert [path.name for path in tmp_path.rglob("node-*")] == ["node-7"]
    assert torch.equal(load_file(place / "before.safetensors")["pos_embed"], vit.state_dict()["pos_embed"])
    assert torch.equal(load_file(place / "after.safetensors")["pos_embed"], arrays.to_torch_state_dict()["pos_embed"])
    assert [*strategy.configure_evaluate(5, arrays, flwr.ConfigRecord(), grid)] == []
    assert strategy.aggregate_evaluate(5, []) is None


@pytest.fixture
def round_on_a_photograph(photographs: Callable[[int, int], Tensor]) -> Callable[..., tuple[Any, Any]]:
    """Return what lets a strategy send cifar_vit to a client of one photograph, and aggregate what it returns."""

    def run(strategy: AuditingStrategy, *, change: float = 0.0) -> tuple[Any, Any]:
        own = privlab.victim("cifar_vit").model.vit.requires_grad_(True)
        grid = create_autospec(Grid, instance=True)
        (message,) = strategy.configure_train(1, flwr.ArrayRecord(own.state_dict()), flwr.ConfigRecord(), grid)
        F.cross_entropy(own(photographs(1, 32)), torch.tensor([3])).backward()
        torch.optim.SGD(own.parameters(), lr=0.01).step()
        with torch.no_grad():
            own.get_parameter("head.bias").add_(change)
        return strategy.aggregate_train(1, [answered(message, flwr.ArrayRecord(own.state_dict()))])

    return run


AUDIT = {"client": Client(lr=0.01), "normalisation": "none", "attack": "patch-update"}


@pytest.mark.parametrize("refuse", [True, False])
def test_a_server_leaves_out_the_update_that_leaks_or_says_so(
    refuse: bool, round_on_a_photograph: Callable[..., tuple[Any, Any]], said: Callable[[], str], tmp_path: Path
) -> None:
    strategy = AuditingStrategy(Sends(fraction_evaluate=0.0), tmp_path, "cifar_vit", refuse=refuse, **AUDIT)
    arrays, _ = round_on_a_photograph(strategy)
    assert (arrays is None) == refuse
    assert "leaks: yes, a private image was reconstructed" in said()
    assert ("left out" in said()) == refuse
    assert privlab.load(tmp_path / "round-1" / "node-7" / "audit").leaks


def test_an_update_that_cannot_be_audited_is_left_out(
    round_on_a_photograph: Callable[..., tuple[Any, Any]], said: Callable[[], str], tmp_path: Path
) -> None:
    strategy = AuditingStrategy(Sends(fraction_evaluate=0.0), tmp_path, "cifar_vit", **AUDIT)
    assert round_on_a_photograph(strategy, change=float("nan"))[0] is None
    assert "must be finite" in said()
    (tmp_path / "round-1").write_text("no folder", encoding="utf-8")
    assert round_on_a_photograph(strategy)[0] is None
    assert "left out, it cannot be recorded" in said()


def test_without_flower_the_extra_is_named() -> None:
    code = "import sys; sys.modules['flwr'] = None\nimport privlab.flower"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert done.stderr.endswith("PrivlabError: privlab.flower needs Flower: pip install 'privlab[flower]'.\n")
