"""A federation of Flower, simulated: each client trains on one photograph by SGD, and its updates are audited."""

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torchvision.utils import save_image

from privlab.base import PrivlabError, check_range
from privlab.images import open_images
from privlab.threat import Client
from privlab.victims import Victim, victim


@dataclass(frozen=True)
class FederationStudy:
    """Simulate rounds of a federation in which each client has one photograph and the same settings.

    Each client audits its update before it leaves (`AuditMod`). Client and server keep what left (`RecordMod`,
    `RecordingStrategy`).

    Args:
        model: name of the victim.
        weights: "auto", "pretrained", "random", or a file.
        img_size: side of the input, in pixels; None for the model's own.
        images: a source of photographs, such as "samples" or a folder.
        limit: clients, ≥ 1; client i has photograph i and label i.
        rounds: rounds of the federation, ≥ 1.
        steps: steps of SGD in each round, ≥ 1.
        learning_rate: of SGD, > 0.
        weight_decay: of SGD, ≥ 0.
        max_psnr: PSNR in dB above which an update is withheld, > 0.
        seed: seed of random weights.

    Raises:
        PrivlabError: if a value is out of its range.
    """

    model: str
    weights: str = "auto"
    img_size: int | None = None
    images: str = "samples"
    limit: int = 2
    rounds: int = 1
    steps: int = 5
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    max_psnr: float = 20.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError if a count is out of range; the client's settings check themselves."""
        check_range(self.limit >= 1, "limit", "a positive number", self.limit)
        check_range(self.rounds >= 1, "rounds", "a positive number", self.rounds)

    @property
    def client(self) -> Client:
        """Return the settings of a client."""
        return Client(lr=self.learning_rate, weight_decay=self.weight_decay, steps=self.steps)

    def __call__(self, out: Path) -> list[dict[str, Any]]:
        """Run the simulation and return the lines of the audits.

        Below `out` are `server/round-R/node-N` and `clients/round-R/node-N` with an update each, `audit/node-N.jsonl`,
        and `images/node-N.png`, the photograph of a client as the model is fed it.

        Raises:
            PrivlabError: without the extra `flower`, for a folder with another run, fewer photographs than clients, or
                a simulation in which no client finished a round.
        """
        if (out / "audit").exists():
            raise PrivlabError(f"'{out}' holds another run: name another --out.")
        os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when flwr is imported
        from privlab.flower import AuditMod, RecordingStrategy, RecordMod  # isort: skip

        from flwr.app import ArrayRecord, Context
        from flwr.clientapp import ClientApp
        from flwr.serverapp import Grid, ServerApp
        from flwr.serverapp.strategy import FedAvg
        from flwr.simulation import run_simulation

        base = victim(self.model, weights=self.weights, img_size=self.img_size, seed=self.seed)
        photographs = self._photographs(base)
        vit = copy.deepcopy(base.model.vit).requires_grad_(True)

        def mine(context: Context) -> Float[Tensor, "1 c h w"]:
            return photographs[int(context.node_config["partition-id"])][None]

        audit = AuditMod(vit, self.client, out / "audit", images=mine, max_psnr=self.max_psnr)
        app = ClientApp(mods=[RecordMod(out / "clients"), audit])
        app.train()(_trainer(vit, self.client, photographs, base.model.normalise, out / "images"))
        server = ServerApp()

        @server.main()
        def run(grid: Grid, context: Context) -> None:
            few = {"min_train_nodes": self.limit, "min_available_nodes": self.limit, "fraction_evaluate": 0.0}
            strategy = RecordingStrategy(FedAvg(**few), out / "server")
            strategy.start(grid, ArrayRecord(vit.state_dict()), num_rounds=self.rounds)

        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, app, self.limit, backend_config=resources)
        files = sorted((out / "audit").glob("*.jsonl"))
        if not files:
            raise PrivlabError("No client finished a round: Flower's messages above say why.")
        return [json.loads(line) for path in files for line in path.read_text("utf-8").splitlines()]

    def _photographs(self, base: Victim) -> Float[Tensor, "m c h w"]:
        """Return the clients' images, rounded to eight bits, so that a file can hold them."""
        source = open_images(self.images)
        pixels = [image.pixels for image, _ in zip(source, range(self.limit), strict=False) if image.pixels is not None]
        if len(pixels) < self.limit:
            raise PrivlabError(
                f"Each client needs a photograph. Found {len(pixels)} of {self.limit} in '{self.images}'."
            )
        return (torch.stack([base.preprocessing(each) for each in pixels]) * 255).round() / 255


def _trainer(
    vit: VisionTransformer,
    client: Client,
    images: Float[Tensor, "m c h w"],
    normalise: Callable[[Tensor], Tensor],
    folder: Path,
) -> Callable[..., Any]:
    """Return the training of a client as an app of Flower has it: plain PyTorch on timm's model."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

    def train(msg: Message, context: Context) -> Message:
        own = int(context.node_config["partition-id"])
        folder.mkdir(parents=True, exist_ok=True)
        save_image(images[own], folder / f"node-{context.node_id}.png")
        vit.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(vit.parameters(), lr=client.lr, weight_decay=client.weight_decay)
        for _ in range(client.total_steps):
            optimiser.zero_grad()
            F.cross_entropy(vit(normalise(images[own : own + 1])), torch.tensor([own])).backward()
            optimiser.step()
        content = {"arrays": ArrayRecord(vit.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=msg)

    return train


def to_rows(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each update: what the audit found, and its share of the time of training and audit.

    Args:
        lines: what a study returned.
    """
    return [
        {
            "round": line["round"],
            "node": str(line["node"]),
            "psnr": round(line["psnr"], 2) if isinstance(line.get("psnr"), float) else line.get("psnr"),
            "outcome": "sent" if line["withheld"] is None else f"withheld: {line['withheld']}",
            "seconds": round(line["seconds"], 4),
            "seconds_round": round(line["seconds_round"], 4),
            "share_of_time": round(line["seconds"] / (line["seconds"] + line["seconds_round"]), 4),
        }
        for line in lines
    ]
