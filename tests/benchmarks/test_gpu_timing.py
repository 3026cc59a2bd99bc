"""How benches time and weigh a stage on a GPU: by its own events and its own memory, on a pretended one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from privlab.benchmarks.common import Bench, median_seconds, peak_gpu_memory, time_stage

GPU = torch.device("cuda", 0)


@dataclass
class Pretended:
    """A GPU with a queue: `clock` is its time in ms when the work so far will be done, and `calls` what was asked."""

    clock: float = 5.0
    held: int = 0
    peak: int = 0
    calls: list[str] = field(default_factory=list)

    def work(self, ms: float, mib: int = 0) -> Callable[[], None]:
        """Return a stage that returns at once, with its work in the queue."""

        def stage() -> None:
            self.calls.append("stage")
            self.clock += ms
            self.peak = max(self.peak, self.held + mib * 2**20)

        return stage


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """Return a pretended GPU that answers for torch.cuda; the wall clock must not be asked."""
    made = Pretended(held=3 * 2**20, peak=10**9)

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at: float | None = None
            self.reached = False

        def record(self, stream: Any) -> None:
            assert stream == ("stream of", GPU)
            made.calls.append("record")
            self.at = made.clock

        def synchronize(self) -> None:
            made.calls.append("wait")
            self.reached = True

        def elapsed_time(self, end: "Event") -> float:
            assert end.reached  # torch raises, too
            assert self.at is not None
            assert end.at is not None
            return end.at - self.at

    def reset(device: torch.device) -> None:
        made.peak = made.held

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: ("stream of", device))
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: made.calls.append("wait"))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", reset)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: made.peak)
    monkeypatch.setattr("privlab.benchmarks.common.time.perf_counter", lambda: pytest.fail("the wall clock was asked"))
    return made


def test_a_stage_is_timed_between_two_events(gpu: Pretended) -> None:
    assert time_stage(gpu.work(250), GPU) == pytest.approx(0.25)
    assert gpu.calls == ["wait", "record", "stage", "record", "wait"]


def test_the_first_round_warms_up(gpu: Pretended) -> None:
    times = iter([9000.0, 20.0, 40.0, 30.0])

    def stage() -> None:
        gpu.clock += next(times)

    assert median_seconds({"a": stage}, 3, GPU, lambda: None) == {"a": pytest.approx(0.03)}


def test_peak_memory_is_that_of_each_stage(gpu: Pretended) -> None:
    stages = {"large": gpu.work(1, mib=500), "small": gpu.work(1, mib=20)}
    assert peak_gpu_memory(stages, GPU) == {"large": 503.0, "small": 23.0}
    assert peak_gpu_memory(stages, torch.device("cpu")) == {}


def test_the_table_and_the_json_show_it() -> None:
    bench = Bench({"r": 1.0}, {"r": "—"}, {"step": 0.01}, {}, gpu_memory={"step": 503.4})
    assert bench.as_dict()["peak_gpu_memory_mib"] == {"step": 503.4}
    stages = bench.tables()[0]
    assert [str(column.header) for column in stages.columns][-1] == "peak MiB"
    assert list(stages.columns[-1].cells) == ["503"]
    without = Bench({"r": 1.0}, {"r": "—"}, {"step": 0.01}, {})
    assert "peak_gpu_memory_mib" not in without.as_dict()
    assert len(without.tables()[0].columns) == 3
