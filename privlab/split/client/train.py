"""The client's training loop: steps through the server, checkpoints in step with the server's, crash recovery."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privlab.base import PrivlabError, full_precision
from privlab.split.client.client import Client, Lost, Remote, Traffic
from privlab.split.client.data import Batches
from privlab.split.client.learner import Learner
from privlab.split.client.patience import Patience
from privlab.victims import hash_of

__all__ = ["CHECKPOINT", "StepDone", "Trainer"]

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
        retry_for: seconds to try again if the server does not answer.
        tell: called with the reason when it begins to wait.
    """

    def __init__(
        self,
        learner: Learner,
        client: Client,
        folder: Path,
        *,
        facts: dict[str, Any] | None = None,
        session: str = "",
        retry_for: float = 60.0,
        tell: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.learner, self.session, self.traffic = learner, session, Traffic()
        self._client, self._path, self._facts = client, folder / CHECKPOINT, facts or {}
        self._patience = Patience(retry_for, tell)
        self._saved = learner.step

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
        learner = self.learner
        known = sorted({learner.step, self._saved}, reverse=True)
        weights = learner.initial_weights() if learner.contract.own_weights and 0 in known else None
        session = self._client.session(
            learner.contract,
            session=self.session,
            steps=known,
            saved=self._saved,
            weights=weights,
            traffic=self.traffic,
        )
        with full_precision(), session as remote:
            self._begin(remote)
            while learner.step < steps:
                on_step(self._step(remote, batches))
            remote.save()
            if remote.durable == learner.step != self._saved:
                self._save(remote)
                remote.save()  # tells the server that it may remove its older checkpoint

    def _begin(self, remote: Remote) -> None:
        """Restore the step after which the server continues."""
        self._patience.reset()
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
        self.learner.save(self._path, self._facts | {"session": self.session})
        remote.saved = self._saved = self.learner.step

    def _check_same_weights(self, remote: Remote) -> None:
        ours = hash_of(self.learner.backbone().state_dict())
        if ours != remote.weights_sha256:
            raise PrivlabError(
                "The server's backbone has other weights than this client's model (another --weights, --seed or "
                "--img-size?). Give both the same, or send them along with --upload."
            )
