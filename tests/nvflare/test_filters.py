"""Filters of an NVFlare client: on messages as NVFlare makes them, and in its simulator."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from privlab.base import PrivlabError
from privlab.runs.own_update import LEAKS
from privlab.threat import Client

dxo = pytest.importorskip("nvflare.apis.dxo")

from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey  # noqa: E402
from nvflare.apis.fl_constant import ReservedKey  # noqa: E402
from nvflare.apis.fl_context import FLContext  # noqa: E402
from nvflare.apis.shareable import Shareable  # noqa: E402
from nvflare.app_common.app_constant import AppConstants  # noqa: E402

from privlab.nvflare import AuditFilter, RecordFilter  # noqa: E402

State = dict[str, Tensor]


@pytest.fixture
def update(vit: VisionTransformer, photographs: Callable[[int, int], Tensor]) -> tuple[State, State]:
    """Return the weights before and after one step on a photograph."""
    own = copy.deepcopy(vit)
    F.cross_entropy(own((photographs(1, 64) - 0.5) / 0.5), torch.tensor([1])).backward()
    torch.optim.SGD(own.parameters(), lr=0.01).step()
    return vit.state_dict(), {name: value.detach() for name, value in own.state_dict().items()}


@pytest.fixture
def context() -> FLContext:
    """Return the context of a client."""
    made = FLContext()
    made.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False, sticky=False)
    return made


def passes(own: Any, context: FLContext, chain: str, kind: str, state: State) -> State:
    """Let a filter process a message of round 4, and return the weights that it hands on."""
    own.set_prop(FilterContextKey.CHAIN_TYPE, chain)
    message = dxo.DXO(kind, data={name: value.numpy() for name, value in state.items()}).update_shareable(Shareable())
    message.set_header(AppConstants.CURRENT_ROUND, 4)
    return {name: torch.from_numpy(v) for name, v in dxo.from_shareable(own.process(message, context)).data.items()}


IN, OUT, FULL = FilterChainType.TASK_DATA_CHAIN, FilterChainType.TASK_RESULT_CHAIN, dxo.DataKind.WEIGHTS


@pytest.mark.parametrize("kind", [FULL, dxo.DataKind.WEIGHT_DIFF])
def test_weights_and_differences_are_recorded_and_pass_unchanged(
    update: tuple[State, State], context: FLContext, tmp_path: Path, kind: str
) -> None:
    before, after = update
    passes(RecordFilter(str(tmp_path)), context, IN, FULL, before)
    sent = after if kind == FULL else {name: value - before[name] for name, value in after.items()}
    left = passes(RecordFilter(str(tmp_path)), context, OUT, kind, sent)
    assert all(torch.equal(value, sent[name]) for name, value in left.items())
    old, new = (load_file(tmp_path / "round-4" / "site-1" / f"{name}.safetensors") for name in ("before", "after"))
    assert all(torch.equal(value, before[name]) for name, value in old.items())
    for name, value in new.items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=1e-7)


def test_a_result_without_its_task_is_one_line(
    update: tuple[State, State], context: FLContext, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    passes(RecordFilter(str(tmp_path)), context, OUT, FULL, update[1])
    assert "privlab: round-4, site-1: no update recorded. 'before' and 'after' must be weights of" in caplog.text
    assert [*tmp_path.iterdir()] == []


def test_an_update_that_leaks_is_blocked(
    vit: VisionTransformer,
    update: tuple[State, State],
    context: FLContext,
    tmp_path: Path,
    photographs: Callable[[int, int], Tensor],
) -> None:
    before, after = update
    own = AuditFilter(vit, Client(lr=0.01), str(tmp_path), lambda: photographs(1, 64))
    passes(own, context, IN, FULL, before)
    with pytest.raises(ContentBlockedException, match=LEAKS):
        passes(own, context, OUT, FULL, after)
    with pytest.raises(ContentBlockedException, match="weights"):
        passes(own, context, OUT, FULL, {"head.bias": after["head.bias"]})
    more = AuditFilter(vit, Client(lr=0.01), str(tmp_path), lambda: photographs(1, 64), max_psnr=300.0)
    passes(more, context, OUT, FULL, after)
    lines = [json.loads(line) for line in (tmp_path / "site-1.jsonl").read_text("utf-8").splitlines()]
    assert [line["withheld"] is None for line in lines] == [False, False, True]
    assert {"round": "round-4", "site": "site-1", "image": 0}.items() <= lines[0].items()


def test_a_client_does_not_train_on_weights_that_somebody_chose(
    vit: VisionTransformer, context: FLContext, tmp_path: Path
) -> None:
    state, fc1 = dict(vit.state_dict()), "blocks.0.mlp.fc1.weight"
    bins = state | {fc1: state[fc1][:1].expand_as(state[fc1]).contiguous()}
    own = AuditFilter(vit, Client(lr=0.01), str(tmp_path))
    with pytest.raises(ContentBlockedException, match=r"does not train: the server's weights are suspicious"):
        passes(own, context, IN, FULL, bins)
    with pytest.raises(ContentBlockedException, match=r"cannot be audited: .* Found NaN or infinity in head.bias"):
        passes(own, context, IN, FULL, state | {"head.bias": torch.full((10,), float("nan"))})
    assert len((tmp_path / "site-1.jsonl").read_text("utf-8").splitlines()) == 2
    passes(own, context, IN, FULL, state)
    passes(AuditFilter(vit, Client(lr=0.01), str(tmp_path), check_weights=False), context, IN, FULL, bins)


def test_bundled_photographs_are_decoded_only_where_the_client_gives_none(
    vit: VisionTransformer,
    context: FLContext,
    tmp_path: Path,
    photographs: Callable[[int, int], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("privlab.nvflare.filters.sample_images", lambda made: pytest.fail("they were decoded"))
    state = dict(vit.state_dict())
    passes(AuditFilter(vit, Client(lr=0.01), str(tmp_path), lambda: photographs(1, 64)), context, IN, FULL, state)
    passes(AuditFilter(vit, Client(lr=0.01), str(tmp_path), check_weights=False), context, IN, FULL, state)


def test_an_audit_without_images_needs_one_image(vit: VisionTransformer, tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"needs client\.images=1"):
        AuditFilter(vit, Client(images=2), str(tmp_path))


def simulate(script: str, folder: Path) -> str:
    """Run a script beside this file that runs NVFlare's simulator below a folder, and return what it prints."""
    command = (sys.executable, "-W", "ignore", str(Path(__file__).with_name(script)), str(folder))
    environment = os.environ | {"AUDITS": str(folder / "audits")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_simulator_blocks_the_update_that_leaks_and_averages_the_others(tmp_path: Path) -> None:
    said = simulate("audited_job.py", tmp_path)
    assert "ContentBlockedException: privlab withheld the update: " + LEAKS in said
    assert "Ignore the result from site-1 at round None. Result error code: TASK_RESULT_FILTER_ERROR" in said
    files = sorted((tmp_path / "audits").iterdir())
    one, eight, adam = (json.loads(file.read_text("utf-8")) for file in files)  # a line each
    expected = {"round": "round-0", "site": "site-1", "image": 0, "limits": None, "leaks": True, "withheld": LEAKS}
    assert expected.items() <= one.items()
    assert one["psnr"] > 40
    for line, site, limits in (
        (eight, "site-2", "8 images in one update"),
        (adam, "site-3", "adamw scales each entry separately"),
    ):
        assert {"site": site, "limits": limits, "leaks": False, "withheld": None}.items() <= line.items()
        assert line["psnr"] < 20
    places = sorted((tmp_path / "updates" / "round-0").iterdir())
    assert [place.name for place in places] == ["site-2", "site-3"]  # nothing of the first client left it
    left = [load_file(place / "after.safetensors") for place in places]
    saved = torch.load(tmp_path / "workspace" / "server" / "simulate_job" / "app_server" / "FL_global_model.pt")
    for name, value in saved["model"].items():
        torch.testing.assert_close(value, (left[0][name] + left[1][name]) / 2, rtol=0, atol=1e-6)


def test_without_nvflare_the_extra_is_named() -> None:
    code = "import sys; sys.modules['nvflare'] = None\nimport privlab.nvflare"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert done.stderr.endswith("PrivlabError: privlab.nvflare needs NVFlare: pip install 'privlab[nvflare]'.\n")
