"""A federation of Flower: two clients of one photograph each, and a server that audits each update it gets.

Run it as `python job.py FOLDER`, which simulates it. The server writes to FOLDER/updates, and leaves out the updates
from which a private image was reconstructed. The exit status is 3 then. With the file pyproject.toml in this folder,
the server and each client are processes of Flower instead; FOLDER is then an environment variable of the server.
"""

import os
import sys
from pathlib import Path

import skimage.data
import timm
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import privlab
from privlab.flower import AuditingStrategy

PHOTOGRAPHS = (skimage.data.astronaut, skimage.data.coffee)

client = ClientApp()
server = ServerApp()


def model() -> torch.nn.Module:
    """Return the model of the federation."""
    return timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train for two steps of SGD on the client's photograph, and return the weights."""
    number = int(context.node_config.get("partition-id", 0))
    photograph = torch.from_numpy(PHOTOGRAPHS[number]()).permute(2, 0, 1)[None] / 255
    image = F.interpolate(photograph, (64, 64), mode="area")
    vit = model()
    vit.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(vit.parameters(), lr=0.01)
    for _ in range(2):
        optimiser.zero_grad()
        F.cross_entropy(vit((image - 0.5) / 0.5), torch.tensor([number])).backward()
        optimiser.step()
    content = {"arrays": ArrayRecord(vit.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Run one round, in which each update is audited before it is aggregated."""
    strategy = AuditingStrategy(
        FedAvg(fraction_evaluate=0.0),
        Path(os.environ["FOLDER"]) / "updates",
        "timm:vit_tiny_patch16_224",
        client=privlab.Client(lr=0.01, steps=2),
        img_size=64,
    )
    strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=1)


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    folder = Path(sys.argv[1]).resolve()
    os.environ["FOLDER"] = str(folder)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, len(PHOTOGRAPHS), backend_config=resources)
    audits = [privlab.load(path) for path in (folder / "updates").glob("round-1/node-*/audit")]
    for audit in audits:
        audit.to_html(audit.path / "evidence.html")
        print(audit.path.parent.name, audit.verdict)
    sys.exit(3 if any(audit.leaks for audit in audits) else 0)
