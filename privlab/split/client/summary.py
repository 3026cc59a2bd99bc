"""The results of a training or an inference, as plain data."""

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.split.client.client import Traffic
from privlab.split.client.data import Batches, Dataset
from privlab.split.client.learner import Learner


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
    """Return the mean loss and the accuracy of an epoch, each image measured before the update of its own step."""
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
