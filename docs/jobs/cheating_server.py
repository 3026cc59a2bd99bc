"""A federation of Flower whose server cheats: it sends weights that read patches, and the clients do not train on them.

Run it as `python cheating_server.py FOLDER`, which simulates it. Each client has one photograph, and `AuditMod` tests
the weights before it trains. The exit status is 3 if every client noticed.
"""

import json
import sys
from pathlib import Path

import skimage.data
import timm
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from privlab import Client
from privlab.flower import AuditMod

FOLDER = Path(sys.argv[1]).resolve()
STEEP = 1000.0  # lets a GELU be a step at zero


def model() -> torch.nn.Module:
    """Return the model of the federation."""
    return timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)


def my_images(context: Context) -> torch.Tensor:
    """Return the photograph of a client."""
    photograph = (skimage.data.astronaut, skimage.data.coffee)[int(context.node_config["partition-id"])]()
    return F.interpolate(torch.from_numpy(photograph).permute(2, 0, 1)[None] / 255, (64, 64), mode="area")


# the five lines of a client that notices; `train` is what it did before
audit = AuditMod(model(), Client(lr=0.01), FOLDER / "audit", images=my_images)
client = ClientApp(mods=[audit])


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train; a client that notices never comes here."""
    raise AssertionError("a client trained on the weights of a server that cheats")


server = ServerApp()


@server.main()
def cheat(grid: Grid, context: Context) -> None:
    """Send an MLP whose neurons count into bins by one projection of a token (Fowl et al. 2022)."""
    state = model().state_dict()
    direction = torch.randn(state["blocks.0.mlp.fc1.weight"].shape[1])
    state["blocks.0.mlp.fc1.weight"][:] = STEEP * direction
    state["blocks.0.mlp.fc1.bias"][:] = STEEP * torch.linspace(-3, 3, 768) * direction.norm()
    state["blocks.0.mlp.fc2.weight"][:] = state["blocks.0.mlp.fc2.weight"][:, :1] / STEEP
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(state), num_rounds=1)


if __name__ == "__main__":
    run_simulation(server, client, 2, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    files = sorted((FOLDER / "audit").glob("*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    for line in lines:
        print(line)
    sys.exit(3 if len(lines) == 2 and all("suspicious" in line["withheld"] for line in lines) else 0)
