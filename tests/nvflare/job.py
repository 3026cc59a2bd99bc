"""Runs NVFlare's simulator: one client, one round, its update recorded below the folder that is given."""

import sys
from pathlib import Path

from net import Net  # beside this script
from nvflare.app_opt.pt.job_config.fed_avg import FedAvgJob
from nvflare.job_config.api import FilterType
from nvflare.job_config.script_runner import ScriptRunner

from privlab.nvflare import RecordFilter

if __name__ == "__main__":
    out = sys.argv[1]
    job = FedAvgJob(name="job", n_clients=1, num_rounds=1, initial_model=Net())
    job.set_app_packages(["privlab"])
    job.to_clients(ScriptRunner(script=str(Path(__file__).with_name("client.py"))))
    for chain in (FilterType.TASK_DATA, FilterType.TASK_RESULT):
        job.to_clients(RecordFilter(f"{out}/updates"), filter_type=chain, tasks=["train"])
    job.simulator_run(f"{out}/workspace", n_clients=1)
