"""What `log_mlflow` and `log_wandb` log, into stand-ins or the packages, and what `evaluation_records` writes."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import privlab
from privlab.base import PrivlabError
from privlab.defenses import Mjp
from privlab.integrations import evaluation_records, log_mlflow, log_wandb

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
QUICK: dict[str, Any] = {"attacks": ["patch-gradient"], "metrics": ["psnr"], "progress": False}
KEY = "cifar_vit_mjp27, setting a, none/patch-gradient/psnr"


@pytest.fixture(scope="module")
def run(photographs: Any, tmp_path_factory: pytest.TempPathFactory) -> privlab.Run:
    out = tmp_path_factory.mktemp("run")
    return privlab.attack("cifar_vit_mjp27", photographs(3, 32), [3, 5, 7], settings="a", out=out, **QUICK)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> MagicMock:
    """Put a module in the place of an experiment tracker, which notes its calls."""
    module = MagicMock()
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_mlflow_is_given_parameters_means_verdict_and_files(run: privlab.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = stand_in(monkeypatch, "mlflow")
    log_mlflow(run)
    parameters, means, tags = (call.args[0] for call in (
        mlflow.log_params.call_args, mlflow.log_metrics.call_args, mlflow.set_tags.call_args
    ))  # fmt: skip
    assert (parameters["settings"], parameters["seed"], "client" in parameters) == (["a"], 0, False)
    table = run.table().set_index("attack").psnr
    assert means[KEY.replace(",", "_")] == table["patch-gradient"] > 60
    assert len(means) == len(table)
    assert tags["verdict"] == run.verdict
    assert "Few images" in tags["flags"]
    files = [Path(call.args[0]).name for call in mlflow.log_artifact.call_args_list]
    assert files == [*sorted(file.name for file in run.path.glob("strips/*.png")), "run.json"]
    assert len(files) == 4


def test_wandb_is_given_the_same(run: privlab.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = stand_in(monkeypatch, "wandb")
    log_wandb(run)
    assert wandb.run.config.update.call_args.args[0]["models"] == ["cifar_vit_mjp27"]
    summary = wandb.run.summary.update.call_args.args[0]
    assert summary[KEY] > 60
    assert summary["verdict"] == run.verdict
    assert len(wandb.run.log.call_args.args[0]["strips"]) == 3
    assert wandb.run.log_artifact.call_args.args[0] == str(run.path / "run.json")


def test_a_grid_logs_the_settings_that_its_cases_share(
    photographs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defenses = [Mjp(gamma=g) for g in (0.25, 0.5)]
    images = photographs(1, 32)
    grid = privlab.grid("cifar_vit_mjp27", images, [3], defense=defenses, settings="c", out=tmp_path / "g", **QUICK)
    mlflow = stand_in(monkeypatch, "mlflow")
    log_mlflow(grid)
    parameters = mlflow.log_params.call_args.args[0]
    assert parameters["settings"] == ["c"]
    assert "options" not in parameters
    means = mlflow.log_metrics.call_args.args[0]
    assert len(means) == len(grid.table())
    assert len({name.split("/")[0] for name in means}) == 2


def test_records_of_every_eval_ever_have_the_scores_of_the_worst_case(run: privlab.Run) -> None:
    """The fields that its schema requires, and no other at the top; numbers that JSON can write."""
    (record,) = json.loads(json.dumps(evaluation_records(run), allow_nan=False))
    needed = {"schema_version", "evaluation_id", "retrieved_timestamp", "source_metadata", "model_info"}
    assert record.keys() == needed | {"eval_library", "evaluation_results", "evaluation_timestamp"}
    assert {"name", "id"} <= record["model_info"].keys()
    details = record["model_info"]["additional_details"]
    assert {"model_availability", "deployment_type"} <= details.keys()
    assert details["verdict"] == run.verdict
    (result,) = record["evaluation_results"]
    assert result.keys() == {"evaluation_name", "source_data", "metric_config", "score_details"}
    assert result["metric_config"] | {"evaluation_description": ""} == {
        "metric_name": "psnr", "evaluation_description": "", "lower_is_better": True, "score_type": "continuous",
        "min_score": 0.0, "max_score": "Infinity",
    }  # fmt: skip
    table = run.details().data.set_index("attack").loc["worst case"]
    assert result["score_details"]["score"] == table.psnr
    assert result["score_details"]["uncertainty"]["num_samples"] == 3
    assert result["score_details"]["uncertainty"]["confidence_interval"]["lower"] == table.psnr_low


def test_a_package_that_is_missing_is_named_with_its_extra(run: privlab.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, log in {"mlflow": log_mlflow, "wandb": log_wandb}.items():
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(PrivlabError, match=rf"privlab\[{name}\]"):
            log(run)


def test_wandb_must_have_begun_a_run(run: privlab.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "wandb").run = None
    with pytest.raises(PrivlabError, match=r"wandb\.init"):
        log_wandb(run)


@pytest.mark.filterwarnings("ignore")
def test_mlflow_itself_keeps_all_of_it(run: privlab.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as active:
        log_mlflow(run)
    kept = mlflow.get_run(active.info.run_id).data
    assert kept.params["seed"] == "0"
    assert kept.metrics[KEY.replace(",", "_")] > 60
    assert kept.tags["verdict"] == run.verdict
    assert len(list(tmp_path.rglob("strips/*.png"))) == 3


@pytest.mark.filterwarnings("ignore")
def test_wandb_itself_takes_all_of_it(run: privlab.Run, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=tmp_path, project="privlab") as active:
        log_wandb(run)
        assert active.config["seed"] == 0
        assert active.summary["verdict"] == run.verdict
    assert len(list(tmp_path.rglob("*.png"))) == 3
