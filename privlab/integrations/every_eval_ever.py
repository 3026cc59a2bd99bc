"""Writes a run as records of Every Eval Ever (github.com/evaleval/every_eval_ever), a shared format of evaluations."""

from typing import Any

import pandas as pd

from privlab.benchmark.page import SCHEMA_VERSION
from privlab.grids import KNOWN
from privlab.report.run import Run

_EXACT = 200.0
"""What is written for an infinite PSNR, in dB: float32 images that differ in one pixel have less."""


def evaluation_records(run: Run) -> list[dict[str, Any]]:
    """Return one record for each case of a run: the mean of every metric in the worst case, with its interval.

    The records follow version 0.3.0 of `eval.schema.json`. JSON has no infinity: an infinite PSNR is written as 200 dB.
    What was not measured is left out.

    Example:
        >>> import privlab
        >>> run = privlab.attack("cifar_vit", attacks="patch-gradient", metrics="psnr", limit=2, progress=False)
        >>> [record["model_info"]["name"] for record in evaluation_records(run)]
        ['cifar_vit under none']
    """
    table = run.details().data
    return [_record(run, row) for row in table[table["row"] == "worst"].to_dict("records")]


def _record(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    facts = run.results.facts
    name, case = f"{row['victim']} under {row['defense']}", row["case"]
    weights = run.records.loc[run.records.victim == row["victim"], "weights_sha256"].iloc[0]
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": f"privlab/{name}, {case}/{facts['written']}",
        "evaluation_timestamp": facts["written"],
        "retrieved_timestamp": facts["written"],
        "source_metadata": {
            "source_name": "a run of privlab",
            "source_type": "evaluation_run",
            "source_organization_name": "unknown",
            "evaluator_relationship": "other",
        },
        "eval_library": {"name": "privlab", "version": facts["privlab"]},
        "model_info": {
            "name": name,
            "id": f"privlab/{row['victim']}+{row['defense']}",
            "additional_details": {
                "weights_sha256": str(weights),
                "verdict": run.verdict,
                "model_availability": "unknown",
                "deployment_type": "self_deployed",
            },
        },
        "evaluation_results": [
            _result(run, row, metric, case) for metric in run.results.layout.columns if not pd.isna(row[metric])
        ],
    }


def _result(run: Run, row: dict[str, Any], metric: str, case: str) -> dict[str, Any]:
    known, source = KNOWN[metric], run.results.facts["images"]["source"]
    low, high = known.range
    uncertainty: dict[str, Any] = {"num_samples": int(row["images"])}
    if not pd.isna(row[f"{metric}_low"]):
        uncertainty["confidence_interval"] = {
            "lower": min(row[f"{metric}_low"], _EXACT),
            "upper": min(row[f"{metric}_high"], _EXACT),
            "confidence_level": run.results.layout.interval,
            "method": "Student's t over images",
        }
    return {
        "evaluation_name": f"{case}: {metric}, worst case over all attacks",
        "source_data": {"dataset_name": source, "source_type": "other"},
        "metric_config": {
            "metric_name": metric,
            "evaluation_description": known.source,
            "lower_is_better": known.direction == "higher leaks",
            "score_type": "continuous",
            "min_score": _bound(low),
            "max_score": _bound(high),
        },
        "score_details": {"score": min(row[metric], _EXACT), "uncertainty": uncertainty},
    }


def _bound(value: float) -> float | str:
    """Return a number as JSON has it: the schema writes an infinite bound as a word."""
    return {float("inf"): "Infinity", float("-inf"): "-Infinity"}.get(value, value)
