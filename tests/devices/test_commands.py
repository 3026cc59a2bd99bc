"""Whole commands on a card: `--device cuda` from the images to the records, and the bench."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from privlab.attacks import ATTACKS, MjpFull, PatchGradient
from privlab.release import observe, released_parameters
from privlab.report.tables import load_results
from privlab.threat import Observation
from privlab.victims import VictimModel, april_twin

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")

SMALL = ("--model", "cifar_vit", "--weights", "random")
BREACHING: dict[str, Any] = {name: ATTACKS[name] for name in ATTACKS if name.startswith("breaching:")}
RUNS = {name for name, kind in BREACHING.items() if not kind.obstacle}


@pytest.mark.slow
def test_a_run_computes_on_the_card(cli: Callable[..., Any], card: Any, cache: object, tmp_path: Path) -> None:
    given = ("--setting", "a", "--attack", "patch-gradient", "--metrics", "psnr,ssim", "--limit", "1")
    done = cli("attack", *SMALL, *given, "--device", "cuda", "--out", tmp_path / "run")
    assert done.status == 0
    records = load_results(tmp_path / "run").records
    assert set(records.status) == {"ok"}
    assert set(records.device) == {"cuda:0"}
    assert "patch-gradient" in set(records.attack)


@pytest.mark.slow
def test_the_bench_times_the_card(
    cli: Callable[..., Any], card: Any, cache: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event:
        def __init__(self, *, enable_timing: bool) -> None: ...
        def record(self, stream: object) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, end: "Event") -> float:
            return 2.0

    class Short:  # of the searches, which other tests take to the card
        parameters = MjpFull.parameters

        def __call__(self, seen: Observation) -> object:
            return PatchGradient()(seen)

    monkeypatch.setattr("privlab.benchmarks.searches.MjpFull", Short)
    monkeypatch.setattr("privlab.benchmarks.searches.MjpSubspace", Short)
    monkeypatch.setattr("privlab.benchmarks.searches._BUDGETS", {"cuda": (1, 2)})
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 2**20)
    given = ("--model", "cifar_vit", "--images", "2", "--repeats", "1", "--device", "cuda")
    told = cli("bench", "attack", *given, "--no-memory", "--no-main-job", "--json").json
    assert told["setup"]["hardware"]["gpu"] == "a card"
    whole = {name: each for name, each in told["seconds_per_image"].items() if ": a " not in name}
    assert set(whole.values()) == {0.001}
    assert told["mjp_full_over_step"] == 1.0
    assert set(told["peak_gpu_memory_mib"].values()) == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RUNS))
def test_breachings_attacks_get_tensors_of_the_card(
    tiny_model: Callable[..., VictimModel], crops: torch.Tensor, card: Any, name: str
) -> None:
    kind = BREACHING[name]
    model = tiny_model(unknown=False).float()
    model = (april_twin(model) if "april" in name else model).to("cuda:0")
    seen = observe(model, crops[:1].to(model.mean), torch.tensor([3], device="cuda:0"), released_parameters(model))
    takes = "optim.max_iterations" in kind.config_types()
    assert kind(config=(("optim.max_iterations", 1),) if takes else ())(seen).is_cuda
