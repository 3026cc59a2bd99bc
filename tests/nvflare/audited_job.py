"""Runs NVFlare's simulator: three clients, one round, each update audited, and recorded if it leaves."""

import sys
from pathlib import Path

from audits import AuditAdam, AuditEight, AuditOne  # beside this script
from net import Net  # beside this script
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.base_fed_job import BaseFedJob
from nvflare.job_config.api import FilterType
from nvflare.job_config.script_runner import ScriptRunner

from privlab.nvflare import RecordFilter

if __name__ == "__main__":
    out = sys.argv[1]
    job = BaseFedJob(Net(), "job")
    persistor = job.comp_ids["persistor_id"]
    job.to_server(FedAvg(num_clients=3, num_rounds=1, persistor_id=persistor, ignore_result_error=True))
    job.set_app_packages(["privlab"])
    clients = (AuditOne, "sgd 1"), (AuditEight, "sgd 8"), (AuditAdam, "adamw 1")
    for number, (audit, arguments) in enumerate(clients, 1):
        site = f"site-{number}"
        job.to(ScriptRunner(str(Path(__file__).with_name("audited_client.py")), arguments), site)
        for chain in (FilterType.TASK_DATA, FilterType.TASK_RESULT):
            job.to(audit(), site, filter_type=chain, tasks=["train"])
            job.to(RecordFilter(f"{out}/updates"), site, filter_type=chain, tasks=["train"])
    job.simulator_run(f"{out}/workspace", threads=3)
