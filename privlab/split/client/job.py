"""The task of a client, as plain data that its checkpoint holds, and the objects made from it."""

import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from privlab.base import PrivlabError, PrivlabWarning, check_name, configure, read_options
from privlab.defenses import defenses
from privlab.images import Data, open_images
from privlab.split.client.learner import Learner
from privlab.split.client.loops import CHECKPOINT
from privlab.split.protocol import checkpoint
from privlab.split.protocol.backbone import check_cut
from privlab.split.protocol.contract import Contract
from privlab.split.protocol.secret import new_secret
from privlab.threat import Stack
from privlab.victims import Victim, check_classifies, victim


@dataclass(frozen=True, kw_only=True)
class SplitJob:
    """The options of a training or an inference that determine its result.

    `labels` is a CSV file, None for the source's own, or "predicted" for the victim's predictions on plain images.

    Raises:
        PrivlabError: if a value is out of its range.
    """

    model: str
    images: tuple[str, ...]
    weights: str = "auto"
    img_size: int | None = None
    defense: str = "none"
    options: tuple[str, ...] = ()
    limit: int | None = None
    split: str | None = None
    labels: str | None = None
    classes: int | None = None
    epochs: int = 1
    batch_size: int = 32
    optimizer: str = "adamw"
    lr: float = 1e-4
    momentum: float = 0.9
    weight_decay: float = 0.0
    dtype: str = "float32"
    seed: int = 0
    upload: bool = False
    cut_layer: int = 0

    @classmethod
    def of(cls, values: dict[str, Any]) -> "SplitJob":
        """Return the job that `asdict` turned into plain data, after a round trip through JSON."""
        known: dict[str, Any] = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        for name in known.keys() & {"images", "options"}:  # JSON turned tuples into lists
            known[name] = tuple(known[name])
        return cls(**known)

    def source(self) -> Data:
        """Open the images."""
        source = self.images[0] if len(self.images) == 1 else list(self.images)
        labels = None if self.labels == "predicted" else self.labels
        return open_images(source, limit=self.limit, split=self.split, labels=labels)


@dataclass(frozen=True, eq=False)
class Started:
    """A job with its victim and learner; `session` is that of an earlier run; a checkpoint holds `facts`."""

    job: SplitJob
    victim: Victim
    learner: Learner
    facts: dict[str, Any]
    session: str = ""


def stack_of(names: str, options: tuple[str, ...]) -> Stack:
    """Return the stack of the defenses whose names are joined by +, with their options.

    Raises:
        PrivlabError: if a name or an option is unknown.
    """
    installed, parts = defenses(), names.split("+")
    for name in parts:
        check_name("defense", name, installed)
    kinds = [installed[name] for name in parts]
    read_options(options, kinds)
    return Stack(tuple(configure(kind, options) for kind in kinds))


def start_job(job: SplitJob, device: torch.device) -> Started:
    """Begin a job with a fresh secret.

    Raises:
        PrivlabError: if the victim, a defense or the terms of the contract are impossible.
    """
    return _make(job, new_secret(), device)


def resume_job(folder: Path, device: torch.device) -> Started:
    """Resume a job from the checkpoint in a client's folder.

    Raises:
        PrivlabError: if there is no checkpoint, or it cannot be read.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        raise PrivlabError(f"'{folder}' holds no {CHECKPOINT}: give the --out of `privlab split train`.")
    _, facts = checkpoint.read(path, only_facts=True)
    job = SplitJob.of(facts["job"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivlabWarning)  # such as random weights: the first run warned of them
        made = _make(job, facts["secret"], device)
    made.learner.restore(path)
    return Started(job, made.victim, made.learner, facts, facts["session"])


def _make(job: SplitJob, secret: str, device: torch.device) -> Started:
    stack = stack_of(job.defense, job.options)
    subject = victim(job.model, weights=job.weights, img_size=job.img_size, seed=job.seed)
    check_classifies(subject.model)
    check_cut(subject.model, job.cut_layer)
    terms = ("dtype", "optimizer", "lr", "momentum", "weight_decay", "cut_layer")
    contract = Contract(
        model=subject.architecture,
        width=subject.model.vit.embed_dim,
        max_tokens=subject.model.vit.num_prefix_tokens + subject.model.vit.patch_embed.num_patches,
        max_batch=job.batch_size,
        own_weights=job.upload,
        **{name: getattr(job, name) for name in terms},
    )
    learner = Learner(subject.model, stack, contract, secret, classes=job.classes, seed=job.seed, device=device)
    if learner.columns is not None:  # T must be keyed by P_C, which the server must not learn
        learner.contract = replace(contract, own_weights=True)
    return Started(job, subject, learner, {"job": asdict(job), "secret": secret})
