"""Inference through the server: it sees permuted features, and the client alone sees the answers."""

import secrets
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import full_precision
from privlab.split.client.client import Client, Lost, Remote, Traffic
from privlab.split.client.data import Dataset
from privlab.split.client.learner import Learner
from privlab.split.client.patience import Patience
from privlab.split.protocol.secret import batch_draws

__all__ = ["infer"]


def infer(
    learner: Learner,
    client: Client,
    data: Dataset,
    *,
    session: str = "",
    traffic: Traffic | None = None,
    retry_for: float = 60.0,
    tell: Callable[[str], None] = lambda message: None,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> Float[Tensor, "n y"]:
    """Return the class probabilities of each image, computed by the learner and the T of a session.

    Permutations and noise are drawn anew from the operating system's CSPRNG; P_C is the learner's.

    Args:
        learner: the client's half, after as many steps as the session's T.
        client: the address of the server.
        data: the n images.
        session: the id of the training session whose T is used; empty for the initial T.
        traffic: counts the messages.
        retry_for: seconds to try again if the server does not answer.
        tell: called with the reason when it begins to wait.
        progress: called with the number of images answered and that of all images.

    Raises:
        PrivlabError: if the server refuses a request, or does not answer in time.
    """
    patience = Patience(retry_for, tell)
    weights = learner.initial_weights() if learner.contract.own_weights and learner.step == 0 else None
    while True:
        opened = client.session(
            learner.contract,
            session=session,
            steps=[learner.step],
            saved=learner.step,
            weights=weights,
            traffic=traffic,
        )
        try:
            with full_precision(), opened as remote:
                patience.reset()
                return _answers(learner, remote, data, progress)
        except Lost as lost:
            patience.wait(lost)


def _answers(
    learner: Learner, remote: Remote, data: Dataset, progress: Callable[[int, int | None], None]
) -> Float[Tensor, "n y"]:
    fresh, size, answers = secrets.token_hex(32), learner.contract.max_batch, []
    for start in range(0, len(data), size):
        images = data.pixels(slice(start, start + size))
        with torch.no_grad():
            sent = learner.send(images, batch_draws(learner.secret, start, len(images), fresh))
        answers.append(learner.predict(remote.infer(sent.features), sent).cpu())
        progress(start + len(images), len(data))
    return torch.cat(answers)
