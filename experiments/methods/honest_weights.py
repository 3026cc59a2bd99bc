"""How often does the audit of a server's weights refuse honest ones? `privlab study honest-weights`."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor

from privlab.base import draw_for, write_whole
from privlab.evaluation import Batch, batch_of
from privlab.experiments.methods.sent_weights import audit_row
from privlab.images import open_images
from privlab.release import train_round
from privlab.report.intervals import clopper_pearson
from privlab.runs.sent_weights import MOST_IMAGES, audit_of_round
from privlab.threat import Client
from privlab.victims import Victim, victim

_STARTS = ("cifar_vit_mjp", "cifar_vit_mjp27", "cifar_vit_nope", "cifar_vit", "cifar_vit_early", "random")
_CLIENTS = (
    Client(optimiser="sgd", lr=0.001, steps=5, images=8),
    Client(optimiser="sgd", lr=0.03, momentum=0.9, steps=3, images=8),
    Client(optimiser="sgd", lr=0.1, momentum=0.9, steps=3, images=8),
    Client(optimiser="sgd", lr=0.3, steps=3, images=8),
    Client(optimiser="adam", lr=1e-3, steps=3, images=8),
    Client(optimiser="adam", lr=3e-4, steps=5, images=8, weight_decay=1e-4),
    Client(optimiser="adamw", lr=3e-4, steps=5, images=8, weight_decay=0.1),
    Client(optimiser="adamw", lr=1e-4, steps=1, images=8),
)
_ROUNDS = 8
"""Rounds of each of six starts and eight clients: 384 in all. No limit was chosen on any of them."""

_ARCHITECTURES = (
    *("vit_relpos_small_patch16_rpn_224", "vit_srelpos_small_patch16_224", "vit_relpos_medium_patch16_cls_224"),
    *("vit_small_patch16_384", "vit_small_patch32_384", "vit_small_patch16_18x2_224", "deit3_medium_patch16_224"),
    *("vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2", "vit_medium_patch16_clip_224"),
    *("vit_dwee_patch16_reg1_gap_256", "vit_pwee_patch16_reg1_gap_256", "vit_dpwee_patch16_reg1_gap_256"),
    *("vit_little_patch16_reg1_gap_256", "vit_dlittle_patch16_reg1_gap_256", "vit_medium_patch16_reg4_gap_256"),
    *("vit_betwixt_patch16_reg4_gap_256", "vit_betwixt_patch32_clip_224", "vit_base_patch32_clip_224"),
)
"""Architectures of timm that are drawn at random, at 56 or 64 pixels; none is one of `sent-weights`."""

_PHOTOGRAPHS = 64


@dataclass(frozen=True)
class HonestWeightsStudy:
    """Audit the weights of honest rounds of training and of random architectures, on which no limit was chosen.

    Args:
        images: a source of photographs: the clients train on 64 of them, in batches of eight. Their labels are used
            if the source has them.
        every: each such photograph of the source is taken, ≥ 1, as a source may be sorted.
        offset: how many photographs of the source are left out, ≥ 0.
        seed: chooses the batches and the images on which weights are tested.
    """

    images: str = "samples"
    every: int = 1
    offset: int = 0
    seed: int = 0

    def __call__(self, out: Path) -> list[dict[str, Any]]:
        """Run what `facts.json` of a folder lacks, write each row there, and return all rows.

        The rows are those of `privlab study sent-weights`, with the kinds "round" and "random".
        """
        out.mkdir(parents=True, exist_ok=True)
        path = out / "facts.json"
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        done = {row["name"] for row in rows}
        for more in self._parts(done):
            rows += more
            text = json.dumps(rows, indent=1)
            write_whole(path, lambda part, text=text: part.write_text(text, encoding="utf-8"))
        return rows

    def _parts(self, done: set[str]) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of each run of training, and of each architecture, that is not done."""
        batch = self._batch(victim("cifar_vit"), _PHOTOGRAPHS)
        classes = [i if image.label is None else image.label for i, image in enumerate(batch.named)]
        labels = torch.tensor(classes) % 10
        for start in _STARTS:
            for number, client in enumerate(_CLIENTS):
                name = f"{start}, client {number}"
                if f"{name}, round {_ROUNDS}" not in done:
                    base = victim("cifar_vit", weights="random") if start == "random" else victim(start)
                    yield _rounds(name, base, client, batch.images, labels, draw_for(self.seed, name, "rounds"))
        for name in _ARCHITECTURES:
            if name not in done:
                size = 56 if "patch14" in name else 64
                drawn = victim(f"timm:{name}", weights="random", img_size=size, classes=10)
                found = audit_of_round(drawn.model, self._batch(drawn, MOST_IMAGES).images)
                yield [audit_row("random", name, found)]

    def _batch(self, base: Victim, count: int) -> Batch:
        source = open_images(self.images, every=self.every, offset=self.offset, limit=count)
        return batch_of(source, base.preprocessing)


def _rounds(
    name: str,
    base: Victim,
    client: Client,
    images: Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    draw: Generator,
) -> list[dict[str, Any]]:
    """Return a row for each round of a client, whose weights are tested on images that the draw chooses.

    `loss` is that of all photographs after the round: a model that guesses has ln 10.
    """
    model, rows = copy.deepcopy(base.model), []
    for place in range(1, _ROUNDS + 1):
        before = train_round(model, client, images, labels, draw)
        chosen = torch.randperm(len(labels), generator=draw)[:MOST_IMAGES]
        row = audit_row("round", f"{name}, round {place}", audit_of_round(model, images[chosen], before))
        with torch.no_grad():
            rows.append(row | {"loss": float(F.cross_entropy(model(images), labels))})
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a line for rounds, for random architectures and for both: how many are refused, and the 95 % interval."""
    lines = []
    for kinds in (("round",), ("random",), ("round", "random")):
        members = [row for row in rows if row["kind"] in kinds]
        refused = sum(row["by_test"] or row["by_statistics"] for row in members)
        low, high = clopper_pearson(refused, len(members)) if members else (0.0, 1.0)
        counted = max((row["readable"] for row in members), default=0.0)
        lines.append(
            {
                "weights": " and ".join(kinds),
                "number": str(len(members)),
                "refused": str(refused),
                "95 % interval of the share": f"{100 * low:.2f} to {100 * high:.2f} %",
                "most patches counted": f"{100 * counted:.1f} %",
            }
        )
    return lines
