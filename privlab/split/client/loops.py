"""The client's loops: training, with checkpoints in step with the server's and crash recovery, and inference."""

import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError, Progress, full_precision
from privlab.split.client.client import Client, Lost, Patience, Remote, Traffic
from privlab.split.client.data import Batches, Dataset
from privlab.split.client.learner import Learner
from privlab.split.protocol.secret import batch_draws
from privlab.victims import hash_of

CHECKPOINT = "client.safetensors"


@dataclass(frozen=True)
class StepDone:
    """The result of a step."""

    step: int
    loss: float
    hits: int
    images: int
    durable: int
    seconds: float


@dataclass(eq=False)
class Trainer:
    """Trains a learner against a server.

    The client keeps one checkpoint, of the last step that it knows to be durable on the server. After a crash on either
    side, both continue from the last step that both have: no step is applied twice, and the weights are the same as
    without the crash.

    Args:
        learner: the client's half.
        client: the address of the server.
        folder: the folder of the client's checkpoint, `client.safetensors`.
        facts: plain data to keep in the checkpoint.
        session: the id of a session to resume; empty for a new one.
    """

    learner: Learner
    client: Client
    folder: Path
    _: KW_ONLY
    facts: dict[str, Any] = field(default_factory=dict)
    session: str = ""

    def __post_init__(self) -> None:
        self._path, self._saved = self.folder / CHECKPOINT, self.learner.step
        self._patience = Patience(self.client.retry_for, self.client.tell)

    def train(self, batches: Batches, steps: int, on_step: Callable[[StepDone], None] = lambda done: None) -> None:
        """Train until the learner has done `steps` steps in all.

        Args:
            batches: the images and labels of each step.
            steps: the number of steps in all, those of earlier runs included.
            on_step: called with the result of each step.

        Raises:
            PrivlabError: if the server refuses a request, or does not answer in time.
        """
        while True:
            try:
                return self._train(batches, steps, on_step)
            except Lost as lost:
                self._patience.wait(lost)

    def _train(self, batches: Batches, steps: int, on_step: Callable[[StepDone], None]) -> None:
        learner, saved = self.learner, self._saved
        known = sorted({learner.step, saved}, reverse=True)
        weights = learner.initial_weights() if learner.contract.own_weights and 0 in known else None
        opened = self.client.session(learner.contract, session=self.session, steps=known, saved=saved, weights=weights)
        with full_precision(), opened as remote:
            self._begin(remote)
            while learner.step < steps:
                on_step(self._step(remote, batches))
            remote.save()
            if remote.durable == learner.step != self._saved:
                self._save(remote)
                remote.save()  # tells the server that it may remove its older checkpoint

    def _begin(self, remote: Remote) -> None:
        """Restore the step after which the server continues."""
        self._patience.meet()  # a server that opens sessions and ends them at once does not make it wait for ever
        learner = self.learner
        if remote.step != learner.step:
            learner.restore(self._path)
        if remote.step == 0 and not learner.contract.own_weights:
            self._check_same_weights(remote)
        if remote.id != self.session:
            self.session = remote.id
            self._save(remote)

    def _step(self, remote: Remote, batches: Batches) -> StepDone:
        began, learner = time.perf_counter(), self.learner
        step = learner.step + 1
        images, labels = batches[step]
        features = learner.begin(images, labels)
        gradient = learner.grade(remote.forward(step, features))
        learner.finish(remote.backward(step, gradient))
        if remote.durable == step:
            self._save(remote)
        self._patience.reset()
        seconds = time.perf_counter() - began
        loss, hits = float(learner.losses[-1]), int(learner.hits[-1])
        return StepDone(step, loss, hits, len(images), remote.durable, seconds)

    def _save(self, remote: Remote) -> None:
        self.learner.save(self._path, self.facts | {"session": self.session})
        remote.saved = self._saved = self.learner.step

    def _check_same_weights(self, remote: Remote) -> None:
        ours = hash_of(self.learner.backbone().state_dict())
        if ours != remote.weights_sha256:
            raise PrivlabError(
                "The server's backbone has other weights than this client's model (another --weights, --seed or "
                "--img-size?). Give both the same, or send them along with --upload."
            )


def infer(
    learner: Learner,
    client: Client,
    data: Dataset,
    *,
    session: str = "",
    progress: Progress = lambda done, total: None,
) -> Float[Tensor, "n y"]:
    """Return the class probabilities of each image, computed by the learner and the T of a session.

    Permutations and noise are drawn again from the operating system's CSPRNG; P_C is the learner's. A server that
    disconnects gets the same features again: other draws of one image would average out.

    Args:
        learner: the client's half, after as many steps as the session's T.
        client: the address of the server.
        data: the n images.
        session: the id of the training session whose T is used; empty for the initial T.
        progress: called with the number of images answered and that of all images.

    Raises:
        PrivlabError: if the server refuses a request, or does not answer in time.
    """
    patience = Patience(client.retry_for, client.tell)
    contract, step = learner.contract, learner.step
    weights = learner.initial_weights() if contract.own_weights and step == 0 else None
    fresh = secrets.token_hex(32)
    while True:
        opened = client.session(contract, session=session, steps=[step], saved=step, weights=weights)
        try:
            with full_precision(), opened as remote:
                patience.meet()
                return _answers(learner, remote, data, fresh, progress)
        except Lost as lost:
            patience.wait(lost)


def _answers(learner: Learner, remote: Remote, data: Dataset, fresh: str, progress: Progress) -> Float[Tensor, "n y"]:
    size, answers = learner.contract.max_batch, []
    for start in range(0, len(data), size):
        images = data.pixels(slice(start, start + size))
        with torch.no_grad():
            sent = learner.send(images, batch_draws(learner.secret, start, len(images), fresh))
        answers.append(learner.predict(remote.infer(sent.features), sent).cpu())
        progress(start + len(images), len(data))
    return torch.cat(answers)


def training_summary(learner: Learner, batches: Batches, traffic: Traffic, seconds: float, done: int) -> dict[str, Any]:
    """Return loss and accuracy by epoch, over the whole run, and the speed and traffic of this client's own steps.

    Args:
        learner: the client's half after training, with the losses and hits of all steps.
        batches: the images of each step.
        traffic: the messages of this client.
        seconds: the time that this client trained.
        done: the number of steps that this client did, without those before it resumed.
    """
    epochs = -(-learner.step // batches.per_epoch)
    images = sum(batches.images_in(step) for step in range(learner.step - done + 1, learner.step + 1))
    return {
        "steps": learner.step,
        "epochs": [_epoch(learner, batches, epoch) for epoch in range(epochs)],
        "key_bits": learner.key_bits,
        "images_per_second": _rate(images, seconds),
        **_traffic(traffic, seconds),
    }


def inference_summary(
    data: Dataset, probabilities: Float[Tensor, "n y"], classes: Mapping[int, str], traffic: Traffic, seconds: float
) -> dict[str, Any]:
    """Return the answer for each image, and the accuracy over the images with a label, None if there are none.

    Args:
        data: the n images with their labels.
        probabilities: the class probabilities of each image.
        classes: the names of the classes by their numbers; a class without a name has None.
        traffic: the messages of this client.
        seconds: the time that the inference took.
    """
    best = probabilities.max(1)
    known = data.labels >= 0
    hits = (best.indices == data.labels)[known].double()
    rows = zip(data.names, data.labels.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return {
        "predictions": [
            {
                "image": name,
                "label": label if label >= 0 else None,
                "predicted": predicted,
                "class": classes.get(predicted),
                "probability": probability,
            }
            for name, label, predicted, probability in rows
        ],
        "accuracy": float(hits.mean()) if len(hits) else None,
        "images_per_second": _rate(len(data), seconds),
        **_traffic(traffic, seconds),
    }


def _epoch(learner: Learner, batches: Batches, epoch: int) -> dict[str, Any]:
    """Return the mean loss and the accuracy of an epoch, each image measured before the update of that step."""
    steps = slice(epoch * batches.per_epoch, min((epoch + 1) * batches.per_epoch, learner.step))
    sizes = torch.tensor([batches.images_in(i + 1) for i in range(steps.start, steps.stop)], dtype=torch.float64)
    loss = float((learner.losses[steps] * sizes).sum() / sizes.sum())
    return {"epoch": epoch + 1, "loss": loss, "accuracy": float(learner.hits[steps].sum() / sizes.sum())}


def _traffic(traffic: Traffic, seconds: float) -> dict[str, Any]:
    waited = traffic.waited
    return {
        "seconds": seconds,
        "bytes_sent": traffic.sent,
        "bytes_received": traffic.received,
        "latency_ms_median": 1000 * statistics.median(waited) if waited else None,
        "latency_ms_worst": 1000 * max(waited) if waited else None,
    }


def _rate(images: int, seconds: float) -> float | None:
    return images / seconds if images else None
