"""`log_mlflow` and `log_wandb`: a run as parameters, means, verdict, strips and `run.json` in an experiment tracker."""

import math
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from privlab.base import PrivlabError
from privlab.report.run import Run
from privlab.report.tables import flag_lines


def log_mlflow(run: Run) -> None:
    """Log a run into MLflow's active run; if there is none, MLflow starts one.

    The parameters are the settings that all cases have in common, and the metrics the means of its table. `verdict`
    and `flags` are tags. The strips and `run.json` are artifacts.

    Raises:
        PrivlabError: if MLflow is not installed.
    """
    mlflow = _package("mlflow")
    mlflow.log_params(_parameters(run))
    mlflow.log_metrics({re.sub(r"[^\w\-. :/]", "_", name): mean for name, mean in _means(run).items()})
    mlflow.set_tags(_conclusions(run))
    for strip in _strips(run):
        mlflow.log_artifact(str(strip), "strips")
    mlflow.log_artifact(str(run.path / "run.json"))


def log_wandb(run: Run) -> None:
    """Log a run into the run of Weights & Biases that `wandb.init` began.

    Its configuration gets the settings that all cases have in common, and its summary the means of its table,
    `verdict` and `flags`. The strips are logged as images, and `run.json` as an artifact.

    Raises:
        PrivlabError: if wandb is not installed, or `wandb.init` was not called.
    """
    wandb = _package("wandb")
    if wandb.run is None:
        raise PrivlabError("log_wandb logs into a run that has begun: call wandb.init() first.")
    wandb.run.config.update(_parameters(run))
    wandb.run.summary.update(_means(run) | _conclusions(run))
    wandb.run.log({"strips": [wandb.Image(str(strip), caption=strip.stem) for strip in _strips(run)]})
    wandb.run.log_artifact(str(run.path / "run.json"), name=f"privlab-{wandb.run.id}", type="privlab-run")


def _package(name: str) -> Any:  # noqa: ANN401
    try:
        return import_module(name)
    except ImportError as error:
        raise PrivlabError(f"log_{name} needs the package {name}: pip install 'privlab[{name}]'.") from error


def _parameters(run: Run) -> dict[str, Any]:
    """Return the settings of a run, or those that all cases of a grid have in common, without those left open."""
    facts = run.results.facts
    if "specification" in facts:
        common = facts["specification"]
    else:
        first, *others = (job["specification"] for case in facts["cases"] for job in case["jobs"])
        common = {name: value for name, value in first.items() if all(other[name] == value for other in others)}
    return {name: value for name, value in common.items() if value not in (None, [])}


def _means(run: Run) -> dict[str, float]:
    """Return the means of each case and attack as "CASE/ATTACK/METRIC", without those that were not measured."""
    return {
        f"{row.label}/{row.attack}/{metric}": score.mean
        for row in run.results.rows
        for metric, score in row.scores.items()
        if row.kind != "published" and not math.isnan(score.mean)
    }


def _conclusions(run: Run) -> dict[str, str]:
    return {"verdict": run.verdict, "flags": "\n".join(flag_lines(run.flags))}


def _strips(run: Run) -> list[Path]:
    return sorted(run.path.glob("strips/*.png"))
