"""`privlab study split-privacy`: Table 6 of Permutation Equivariance (CVPR 2024) on images that a user names.

For each defense a client is fine-tuned with it, its test accuracy is measured with the defense active, and the features
of the test images are attacked: by the paper's decoder, and by adversaries that know the defense. The training images
are the adversary's. A row permutation does not change the training (Corollary 4.3): a method and its "+" share their
client.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Generator, Tensor

from privlab.base import check_name
from privlab.evaluation import Case, defense_of
from privlab.experiments.studies.data import (
    FineTuning,
    Images,
    check_folder,
    fresh_head,
    load_split,
    loss_of,
    new_draws,
)
from privlab.experiments.training.loop import train
from privlab.experiments.training.plan import Compute, Plan
from privlab.grids import specify
from privlab.release import predictions, send
from privlab.runs import execute
from privlab.stores import RunDirectory
from privlab.threat import Stack
from privlab.victims import Victim, VictimModel, victim
from privlab.victims import weights as stored

METHODS: dict[str, str] = {
    "SL": "none",
    "GN": "gaussian-noise",
    "GN+": "gaussian-noise+row-permutation",
    "LP": "low-pass",
    "LP+": "low-pass+row-permutation",
    "BS": "batch-shuffle",
    "BS+": "batch-shuffle+row-permutation",
}
"""The rows of Table 6; "+" means with row permutation."""

PUBLISHED: dict[str, tuple[float, float, float, float]] = {
    "SL": (91.9, 0.645, 16.25, 0.933),
    "GN": (88.8, 0.457, 15.47, 0.663),
    "GN+": (88.8, 0.167, 8.068, 0.187),
    "LP": (90.1, 0.450, 14.71, 0.614),
    "LP+": (90.2, 0.110, 5.687, 0.154),
    "BS": (90.8, 0.148, 8.180, 0.176),
    "BS+": (91.1, 0.143, 7.613, 0.167),
}
"""Accuracy in %, SSIM, PSNR in dB and F-SIM as printed in Table 6: CelebA, 40 attributes, an MAE decoder."""

PAPER = "inversion-mae"


@dataclass(frozen=True, kw_only=True)
class Study:
    """The images of the study and how clients are trained on them.

    Args:
        images: a folder with `train` and `test`, each with a folder per class; with `attributes`, both may be flat.
        model: name of a victim, fine-tuned from `weights`.
        attributes: a CSV file with the column `file` and a column of 0 and 1 (or −1 and 1) for each attribute, as in
            CelebA, instead of classes. Accuracy is then the share of attributes that are predicted right.
        adaptive: names of the attacks beside the paper's decoder.
        options: [NAME.]KEY=VALUE of attacks and defenses, as `--set` takes them.
    """

    images: Path
    model: str
    weights: str = "auto"
    img_size: int | None = None
    attributes: Path | None = None
    methods: tuple[str, ...] = tuple(METHODS)
    adaptive: tuple[str, ...] = ("least-squares", "pe-assignment", "inversion-set")
    options: tuple[str, ...] = ()
    embedding: str | None = None
    steps: int = 300
    batch: int = 32
    learning_rate: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError for an unknown method, or a folder without `train` and `test`."""
        for method in self.methods:
            check_name("method", method, METHODS)
        check_folder(self.images)

    def specification(self, method: str, weights: str) -> Case:
        """Return the run that attacks the test images under a method."""
        return specify(
            self.model,
            "c",
            attack=[PAPER, *self.adaptive],
            images=self.images / "test",
            metrics=["mse", "psnr", "ssim", *(["f_sim"] if self.embedding else [])],
            weights=weights,
            img_size=self.img_size,
            defense=METHODS[method],
            release="features",
            options=[option for option in self.options if _concerns(option, METHODS[method])],
            public=[self.images / "train"],
            public_limit=100_000,
            client_batch=self.batch,
            embedding=self.embedding,
            seed=self.seed,
        )


def study(
    plan: Study, out: Path, *, device: str = "cpu", say: Callable[[str], None] = lambda line: None
) -> pd.DataFrame:
    """Train, attack and score every method; what is already done in `out` is not repeated.

    Args:
        plan: the images, the methods, the attacks, and how clients are trained.
        out: folder of the trained clients (`clients/DEFENSE`) and of the runs (`runs/METHOD`).
        device: device of the training and of the attacks.
        say: is called with a line for each step.

    Raises:
        PrivlabError: if the images do not fit, or a part of the study fails.
    """
    base = victim(plan.model, weights=plan.weights, img_size=plan.img_size, seed=plan.seed)
    splits = {part: load_split(plan.images, part, base.preprocessing, plan.attributes) for part in ("train", "test")}
    rows = []
    for method in plan.methods:
        trained = METHODS[method].removesuffix("+row-permutation")
        say(f"{method}: training the client")
        client = _client(plan, base, trained, splits["train"], out / "clients" / trained, device)
        say(f"{method}: attacking")
        run = out / "runs" / method.replace("+", "-plus")
        records = _records(plan.specification(method, str(client)), run, device)
        defended = victim(plan.model, weights=client, img_size=plan.img_size)
        stack = defense_of(plan.specification(method, str(client)), defended, "c")
        rows.append(_row(method, records, _accuracy(defended, stack, splits["test"], plan)))
    return pd.DataFrame(rows)


@dataclass(frozen=True, eq=False)
class _Client(FineTuning):
    """The recipe of a client that trains with its defenses active."""

    stack: Stack

    def loss(self, model: Any, batch: tuple[Tensor, Tensor], draw: Generator) -> Tensor:  # noqa: ANN401
        images, labels = batch
        draws = new_draws(draw, len(images))
        feed = self.stack.feed(images, model.patch, draws.images, len(images), draws.model)
        sent = self.stack.send(model.embed(feed.images), model.vit.num_prefix_tokens, draws)
        logits = model.head(sent.restore(model.backbone(sent.features)))
        return loss_of(logits, labels)


def _client(plan: Study, base: Victim, defense: str, images: Images, out: Path, device: str) -> Path:
    """Return the weights of a client that is fine-tuned with a defense; it is trained if the file does not exist."""
    path = out / "client.safetensors"
    if path.exists():
        return path
    model = _with_head(base, images.labels, plan.seed).requires_grad_(True).to(device)
    stack = defense_of(plan.specification(_method(defense), plan.weights), base, "c")
    identity = f"split-privacy {plan.images} {base.weights.sha256} {stack!r}"
    recipe = _Client(model, identity, images.to(device), stack)
    schedule = Plan(steps=plan.steps, batch_size=plan.batch, learning_rate=plan.learning_rate, seed=plan.seed)
    train(recipe, schedule, compute=Compute(device=device), out=out)
    stored.save(model.vit.state_dict(), path)
    return path


def _method(defense: str) -> str:
    return next(method for method, stacked in METHODS.items() if stacked == defense)


def _with_head(base: Victim, labels: Tensor, seed: int) -> VictimModel:
    """Return a copy of the victim's model with a fresh head for the labels."""
    classes = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    model = copy.deepcopy(base.model)
    head = fresh_head(model.vit.embed_dim, classes, seed)
    model.vit.head, model.vit.num_classes = head, classes
    return model


def _concerns(option: str, defense: str) -> bool:
    """Return whether an option belongs to an attack or to this defense, and not to another defense."""
    name = option.partition("=")[0].rpartition(".")[0]
    defenses = {part for stacked in METHODS.values() for part in stacked.split("+")}
    return name not in defenses or name in defense.split("+")


def _records(spec: Case, run: Path, device: str) -> pd.DataFrame:
    """Return the records of a run, which is executed unless it is finished."""
    facts = run / "run.json"
    if facts.exists() and json.loads(facts.read_bytes()).get("status") == "finished":
        return RunDirectory(run).store.frame()
    return execute(spec, device=device, out=run, overwrite=True).records


def _accuracy(base: Victim, stack: Stack, images: Images, plan: Study) -> float:
    """Return the share of right predictions, or attributes, of the test images with the defense active."""
    right = []
    for i, pixels in enumerate(images.pixels.split(plan.batch)):
        draws = new_draws(Generator().manual_seed(plan.seed + i), len(pixels))
        feed = stack.feed(pixels, base.model.patch, draws.images, len(pixels), draws.model)
        logits = predictions(base.model, send(base.model, feed, stack, draws))
        labels = images.labels[i * plan.batch :][: len(pixels)]
        right.append((logits > 0) == (labels > 0) if labels.ndim == 2 else logits.argmax(1) == labels)
    return float(torch.cat(right).double().mean())


def _row(method: str, records: pd.DataFrame, accuracy: float) -> dict[str, object]:
    """Return the means of the paper's decoder, and those of the best adaptive attack on each image."""
    scored = records.loc[(records.geometry == "in_place") & (records.status == "ok")]
    failed = int((records[records.geometry == "in_place"].status != "ok").sum())
    paper = scored.loc[scored.attack == PAPER]
    others = scored.loc[~scored.attack.str.startswith("control:") & (scored.attack != PAPER)]
    worst = others.loc[others.groupby("image_sha256").psnr.idxmax()]
    row: dict[str, object] = {"method": method, "accuracy": accuracy, "images": len(paper), "failed": failed}
    for name, rows in (("paper", paper), ("adaptive", worst)):
        row |= {f"{name}_{metric}": rows[metric].mean() for metric in ("ssim", "psnr", "f_sim")}
    placed = others.loc[others.attack == "pe-assignment", "placement_accuracy"]
    best = worst.attack.mode()
    return row | {"adaptive_attack": best.iloc[0] if len(best) else None, "placement_accuracy": placed.mean()}


def to_markdown(table: pd.DataFrame) -> str:
    """Return the table in the layout of Table 6, the paper's numbers beside ours."""
    head = (
        "| | acc. % (paper) | decoder: SSIM (paper) | PSNR (paper) | F-SIM (paper) "
        "| adaptive: SSIM | PSNR | F-SIM | best attack | rows placed |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for row in table.to_dict("records"):
        acc, ssim, psnr, f_sim = PUBLISHED[str(row["method"])]
        lines.append(
            f"| {row['method']} | {100 * row['accuracy']:.1f} ({acc}) | {_number(row['paper_ssim'], 3)} ({ssim}) "
            f"| {_number(row['paper_psnr'], 2)} ({psnr}) | {_number(row['paper_f_sim'], 3)} ({f_sim}) "
            f"| {_number(row['adaptive_ssim'], 3)} | {_number(row['adaptive_psnr'], 2)} "
            f"| {_number(row['adaptive_f_sim'], 3)} | {row['adaptive_attack']} "
            f"| {_number(row['placement_accuracy'], 3)} |"
        )
    return "\n".join(lines)


def _number(value: float, decimals: int) -> str:
    return "n/a" if pd.isna(value) else f"{value:.{decimals}f}"
