"""`privlab bench`: what it prints, and what it refuses; how fast anything is, no test says."""

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from privlab.base import PrivlabError
from privlab.benchmarks import split
from privlab.benchmarks.common import Bench
from privlab.benchmarks.main_job import MainJob, run_main_job
from privlab.cli import elsewhere

RATIOS = [
    "observe_patch_gradient_over_step",
    "breaching_over_privlab_april",
    "breaching_solve_over_privlab_solve",
    "breaching_linear_solves_over_privlab_solve",
    "score_over_observe",
    "mjp_full_over_step",
    "breaching_matching_step_over_privlab",
]
MAIN_JOB = ["eight_images_wall_over_step_wall", "busy_over_quiet"]
PERMUTATION = [
    "dense_over_index_row",
    "dense_over_index_column",
    "index_row_over_copies",
    "index_column_over_copies",
    "index_both_over_copies",
    "both_over_row_then_column",
    "permutation_over_forward",
    "key_encryption_seconds",
    "pe_assignment_ms_per_image",
    "pe_assignment_placed",
]
SMALL = ("--model", "vit_ti", "--images", "2", "--repeats", "1", "--device", "cpu")
needs_grpc = pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="needs the extra split")
TINY = ("--model", "vit_ti", "--batch", "2", "--repeats", "1", "--device", "cpu")


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that attack 400 images, and the main job on a model of the README, take longer than this suite has."""
    monkeypatch.setattr("privlab.benchmarks.attack._peak_rss", lambda model, n: 20_000 + n)
    jobs = {("vit_ti_mjp", "cpu", False): MainJob(16.0, 20.0), ("vit_ti_mjp", "cpu", True): MainJob(50.0, 25.0)}
    monkeypatch.setattr("privlab.benchmarks.attack.run_main_job", lambda model, device, busy: jobs[model, device, busy])


def assert_consistent(result: dict[str, Any]) -> None:
    """Every figure has a target, and every stage's speed is the inverse of its time."""
    assert all(result[name] is not None for name in result["targets"])
    seconds, speed = result["seconds_per_image"], result["images_per_second"]
    assert seconds.keys() == speed.keys()
    assert all(speed[name] == pytest.approx(1 / seconds[name]) for name in seconds)
    assert result["setup"]["hardware"]["device"] == "cpu"


@pytest.mark.slow
def test_json_holds_ratios_medians_and_setup(cli: Callable[..., Any], peaks: None) -> None:
    told = cli("bench", "attack", *SMALL, "--json")
    assert told.status == 0
    result = json.loads(told.out)
    keys = [*RATIOS, "peak_rss_400_over_40", *MAIN_JOB]
    assert list(result)[: len(keys)] == keys
    assert result["busy_over_quiet"] == 1.25
    step = result["seconds_per_image"]["training step"]
    assert result["eight_images_wall_over_step_wall"] == pytest.approx(2 / step)
    assert all(result[name] > 0 for name in RATIOS)
    assert result["peak_rss_400_over_40"] == pytest.approx(20_400 / 20_040)
    assert set(result["targets"]) == {*RATIOS, "peak_rss_400_over_40", *MAIN_JOB}
    assert {"training step", "solve (april)", "breaching: APRIL"} <= set(result["seconds_per_image"])
    assert_consistent(result)
    assert result["setup"]["model"] == "vit_ti"


@pytest.mark.slow
def test_the_main_job_runs_in_a_process_of_its_own_beside_a_busy_one() -> None:
    took = run_main_job("cifar_vit", "cpu", busy=True, images=1)
    assert took.wall > 0.5
    assert took.processor > 0.5  # Python and torch were imported there
    with pytest.raises(PrivlabError, match=r"'privlab.*--model.*cifar_vt.*'.*0.*2"):
        run_main_job("cifar_vt", "cpu", busy=False)


@pytest.mark.slow
def test_table_shows_the_same(cli: Callable[..., Any]) -> None:
    told = cli("bench", "attack", *SMALL, "--no-memory", "--no-main-job")
    assert told.status == 0
    for word in (*RATIOS, "training step", "images per second", "≤ 0.7"):
        assert word in told.out
    assert "peak_rss" not in told.out
    assert "bench attack" in told.err


def test_victim_that_the_attacks_cannot_take(cli: Callable[..., Any]) -> None:
    error = cli("bench", "attack", *SMALL, "--model", "vit_ti_nope", "--no-memory", "--no-main-job").error
    assert "pos_embed" in error or "position embedding" in error


@pytest.mark.slow
def test_permutation_has_every_figure_as_a_key(cli: Callable[..., Any]) -> None:
    told = cli("bench", "permutation", *TINY, "--json")
    assert told.status == 0
    result = json.loads(told.out)
    assert list(result)[: len(PERMUTATION)] == PERMUTATION
    assert all(result[name] > 0 for name in PERMUTATION)
    assert set(result["targets"]) == set(PERMUTATION)
    assert_consistent(result)
    assert result["pe_assignment_ms_per_image"] == pytest.approx(
        1000 * result["seconds_per_image"]["pe-assignment (vit_ti)"]
    )
    assert result["setup"]["batch"] == 2


@pytest.mark.slow
def test_train_has_every_figure_as_a_key(cli: Callable[..., Any]) -> None:
    told = cli("bench", "train", "--model", "cifar_vit", "--batch", "2", "--steps", "1", "--repeats", "1", "--json")
    assert told.status == 0
    result = json.loads(told.out)
    assert list(result)[: len(result["targets"])] == list(result["targets"])
    seconds = result["seconds_per_image"]
    assert result["mjp_over_classify"] == pytest.approx(seconds["mjp"] / seconds["classify"])
    assert result["classify_over_mp3"] == pytest.approx(seconds["classify"] / seconds["mp3"])
    assert result["classify_over_bare"] == pytest.approx(seconds["bare timm loop"] / seconds["classify"])
    assert_consistent(result)


@pytest.mark.slow
@needs_grpc
def test_split_trains_the_same_model_on_both_sides(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server in a process of its own; 100 and 1000 batches would take longer than this suite has."""
    monkeypatch.setattr("privlab.benchmarks.split._EARLY_STEP", 2)
    monkeypatch.setattr("privlab.benchmarks.split._LATE_STEP", 4)
    told = cli("bench", "split", *TINY, "--json")
    assert told.status == 0
    result = json.loads(told.out)
    assert list(result)[:3] == ["split_over_single_throughput", "split_loss_gap", "server_rss_1000_over_100"]
    assert result["split_over_single_throughput"] > 0
    assert result["split_loss_gap"] <= 1e-4
    assert 1 <= result["server_rss_1000_over_100"] < 1.5
    assert_consistent(result)


@needs_grpc
def test_the_loss_gap_is_between_the_wire_and_training_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wire that says other losses than those of a plain loop over timm's model, AdamW and cross-entropy."""
    said = [7.0, 6.5, 8.0]

    def train(name: str, learner: Any, batches: Any, steps: int, every: int, on_step: Callable[[Any], None]) -> None:
        from privlab.split.client.loops import StepDone

        seen.append(batches[1])
        for step, loss in enumerate(said, 1):
            on_step(StepDone(step=step, loss=loss, hits=0, images=2, durable=0, seconds=1.0))

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(split, "_train", train)
    subject = split._subject("tiny")
    pair = split._side_by_side(subject, "none", 2, 3, torch.device("cpu"), lambda step: None)
    model, losses, (images, labels) = copy.deepcopy(subject.model).requires_grad_(True), [], seen[0]
    optimiser = torch.optim.AdamW(model.vit.parameters(), lr=1e-4, weight_decay=0)
    for _ in said:
        losses.append(torch.nn.functional.cross_entropy(model(images), labels))
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    gaps = [abs(one - float(other.detach())) for one, other in zip(said, losses, strict=True)]
    assert pair.loss_gap == pytest.approx(max(gaps), abs=1e-5)
    assert pair.seconds["training step, split"] == [1.0] * 3
    assert len(pair.seconds["training step, one process"]) == 3


def test_split_without_its_extra(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'privlab[split]'" in cli("bench", "split", *TINY).error


@needs_grpc
def test_split_with_an_unknown_defense(cli: Callable[..., Any]) -> None:
    error = cli("bench", "split", *TINY, "--no-memory", "--defense", "row-permutatio").error
    assert error.startswith("Unknown defense 'row-permutatio'. Did you mean row-permutation")


def test_without_a_clone_it_says_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "CLONE", tmp_path)
    with pytest.raises(PrivlabError, match="runs in a clone"):
        elsewhere._benches()


def test_what_a_bench_could_not_measure_is_said(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def table(**options: Any) -> Bench:
        assert options.pop("progress")
        assert options == {
            **{"model": "deit_s", "n_images": 40, "images_dir": None, "repeats": 3, "large": False, "device": "auto"}
        }
        return Bench({"pipeline_over_bare": 1.5}, {"pipeline_over_bare": "≤ 1.25"}, {}, {"absent": {"ray": "no Ray"}})

    monkeypatch.setattr("privlab.benchmarks.table.bench_table", table)
    told = cli("bench", "table", "--no-large")
    assert told.status == 0
    assert "1.500" in told.out
    assert "ray is not measured: no Ray." in told.err
    result = json.loads(cli("bench", "table", "--no-large", "--json").out)
    assert (result["pipeline_over_bare"], result["setup"]["absent"]) == (1.5, {"ray": "no Ray"})


@pytest.mark.parametrize(
    ("bench", "option"),
    [
        ("permutation", "--memory"),
        ("permutation", "--images"),
        ("permutation", "--defense"),
        ("split", "--images"),
        ("attack", "--defense"),
        ("table", "--batch"),
        ("table", "--memory"),
    ],
)
def test_an_option_that_a_bench_does_not_take_is_refused_by_name(
    cli: Callable[..., Any], bench: str, option: str
) -> None:
    error = cli("bench", bench, option).error
    assert error.startswith("No such option")
    assert option in error


@pytest.mark.parametrize("name", ["attack", "permutation", "split", "table"])
def test_every_bench_has_help(cli: Callable[..., Any], name: str) -> None:
    told = cli("bench", name, "--help")
    assert told.status == 0
    assert all(option in told.out for option in ("--json", "--debug", "--repeats", "--device"))
