"""A job of NVFlare: three clients send differences, one as it is, two behind a filter; what left them is audited.

Run it as `python job.py FOLDER`. The exit status is 3 if a private image was reconstructed.
"""

import sys
from pathlib import Path

from gaussian import Gaussian  # a file in this folder
from net import Net  # a file in this folder
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_opt.pt.job_config.fed_avg import FedAvgJob
from nvflare.client.config import TransferType
from nvflare.job_config.api import FilterType
from nvflare.job_config.script_runner import ScriptRunner

import privlab
from privlab import defenses
from privlab.nvflare import RecordFilter

FILTERS = {
    "site-1": (None, "none"),
    "site-2": (PercentilePrivacy(percentile=10, gamma=0.01), defenses.PercentilePrivacy(percentile=10, gamma=0.01)),
    "site-3": (Gaussian(clip=1.0, multiplier=0.01), defenses.GradientNoise(clip=1.0, multiplier=0.01)),
}
"""Of each client, the filter of its results, and the defense that the audit knows of."""

if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    job = FedAvgJob(name="job", n_clients=len(FILTERS), num_rounds=1, initial_model=Net())
    job.set_app_packages(["privlab"])  # it is installed at the clients, and not copied into the job
    for site, (privacy, _) in FILTERS.items():
        script = str(Path(__file__).with_name("client.py"))
        job.to(ScriptRunner(script, params_transfer_type=TransferType.DIFF), site)
        record = RecordFilter(str(folder / "updates"))
        job.to(record, site, filter_type=FilterType.TASK_DATA, tasks=["train"])
        if privacy is not None:
            job.to(privacy, site, filter_type=FilterType.TASK_RESULT, tasks=["train"])
        job.to(record, site, filter_type=FilterType.TASK_RESULT, tasks=["train"])  # the last one sees what leaves
    job.export_job(str(folder / "exported"))  # what `nvflare job submit` takes
    job.simulator_run(str(folder / "workspace"))

    leaks = []
    for site, (_, defense) in FILTERS.items():
        update = folder / "updates" / "round-0" / site
        audit = privlab.audit_update(
            update / "before.safetensors",
            update / "after.safetensors",
            model="timm:vit_tiny_patch16_224",
            img_size=64,
            client=privlab.Client(lr=0.01),
            defense=defense,
            out=folder / "audits" / site,
        )
        audit.to_html(folder / f"{site}.html")
        print(site, audit.verdict)
        leaks.append(audit.leaks)
    sys.exit(3 if any(leaks) else 0)
