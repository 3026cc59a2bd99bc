"""Step by step: what clients release, and the scores of what an attack made of it."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from privlab import release as released
from privlab.base import PrivlabError, draw_for
from privlab.evaluation import Batch, Trial, batch_key, completed, score_images
from privlab.evaluation.client_updates import observe_clients, share_out
from privlab.evaluation.setup import learned_metric
from privlab.images import NamedImage
from privlab.release import released_parameters, served, trained_parameters
from privlab.release.checked import images_for, labels_for, model_of
from privlab.threat import (
    Client,
    Draws,
    FeatureObservation,
    Feed,
    Observation,
    Reconstruction,
    Stack,
)
from privlab.victims import Victim, VictimModel, hash_of
from privlab.victims.closed_form import check_names

Part = Any
"""An attack or a defense: its name, or an instance of any dataclass that has its method."""


@dataclass(frozen=True)
class Gradient:
    """What federated learning releases: the gradient of the mean loss of `batch` images."""

    batch: int = 1


@dataclass(frozen=True)
class Features:
    """What split learning releases: the tokens after `cut_layer` blocks, of `batch` images at a time."""

    cut_layer: int = 0
    batch: int = 16


@dataclass(frozen=True)
class Update:
    """What a federation's client releases: how far a round of local training moved the weights."""

    client: Client = field(default_factory=Client)


def observe(
    victim: Victim | VictimModel,
    images: Any,  # noqa: ANN401
    labels: Any = None,  # noqa: ANN401
    parameters: Iterable[str] | None = None,
    *,
    release: Gradient | Features | Update = Gradient(),
    defense: Part | Sequence[Part] = (),
    public: Any = None,  # noqa: ANN401
    seed: int = 0,
    draw: int = 0,
) -> Observation | FeatureObservation:
    """Return what the adversary sees of clients: what they release, and what the threat model grants.

    Args:
        victim: the clients' model; it is left as it is.
        images: b × c × h × w private images in [0, 1], or bytes.
        labels: the class index of each image; None for the model's own prediction.
        parameters: names of the gradients that are kept; None for all. Features have none.
        release: what the clients release.
        defense: one defense, or several, in the order in which they act.
        public: images of the adversary's own, as `images`; None if it has none.
        seed: seed of the defense's draws, which depend on each image's content too.
        draw: number of the draw; each gives other random numbers for the same image.

    Raises:
        PrivlabError: if images, labels or the defense do not fit the model or the release.

    Example:
        >>> import torch, privlab
        >>> from privlab.attacks import PatchGradient
        >>> seen = privlab.observe(privlab.victim("cifar_vit"), torch.rand(1, 3, 32, 32))
        >>> PatchGradient()(seen).shape
        torch.Size([1, 3, 32, 32])
    """
    check_names(parameters)
    model = model_of(victim)
    x = images_for(model, images)
    batch = _batch(model, x, labels)
    parts = defense if isinstance(defense, Sequence) and not isinstance(defense, str) else [defense]
    stack = Stack(tuple(completed(part, "defense") for part in parts))
    key = draw_for(seed, hash_of(model.state_dict()), "key", draw)
    draws = Draws(batch.draws(seed, "defense", draw), draw_for(seed, batch.together, "batch", draw), key)
    own = x[:0] if public is None else images_for(model, public, "public images")
    if isinstance(release, Update):
        client = share_out(release.client, min(release.client.released_images, len(x)))
        model = served(model, client)
        names = trained_parameters(model, client) if parameters is None else parameters
        trial = Trial("c", Feed.undefended(x, model.patch), x)
        secret = batch.release_draws(seed, draw, client.images)
        return observe_clients(model, client, trial, batch, list(names), secret, stack.parts)
    size = release.batch if isinstance(release, Gradient) else len(x)
    if len(x) % size:
        raise PrivlabError(f"Gradient(batch={size}) needs a multiple of {size} images. Found {len(x)}.")
    feed = stack.feed(x, model.patch, draws.images, size, key)
    if isinstance(release, Features):
        sent = released.send(model, feed, stack, draws, release.cut_layer)
        return released.observe_features(model, sent, stack, own, release.cut_layer)
    names = released_parameters(model) if parameters is None else parameters
    secret = batch.release_draws(seed, draw, size)
    return released.observe(
        model, feed, batch.labels, sorted(names), stack.parts, secret, size, own if len(own) else None
    )


def _batch(model: VictimModel, x: Float[Tensor, "b c h w"], labels: Any) -> Batch:  # noqa: ANN401
    """Return images with labels; each image is known by the hash of its values."""
    if labels is None:
        with torch.no_grad():
            labels = model(x).argmax(1) if model.classes else torch.zeros(len(x), dtype=torch.long)
    hashes = [hashlib.sha256(image.cpu().contiguous().numpy().tobytes()).hexdigest() for image in x]
    named = [NamedImage(f"image-{i}", sha256, None) for i, sha256 in enumerate(hashes)]
    return Batch(named, x, labels_for(model, labels, len(x)), batch_key(hashes))


def score(
    found: Reconstruction | Float[Tensor, "b c h w"],
    images: Float[Tensor, "b c h w"],
    metrics: Sequence[str] = ("mse", "psnr", "ssim"),
) -> pd.DataFrame:
    """Return the scores of reconstructions, a row for each image and a column for each metric.

    Args:
        found: what an attack returned.
        images: the private images in [0, 1], in the same order.
        metrics: names of metrics, as `privlab list metrics` shows them.

    Raises:
        PrivlabError: for an unknown metric, other shapes, or weights of LPIPS that cannot be had.

    Example:
        >>> import torch, privlab
        >>> privlab.score(torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 8, 8), ["mse"])
           mse  levels_wrong
        0  1.0         192.0
    """
    shown = Reconstruction.of(found).images
    if shown.shape != images.shape:
        raise PrivlabError(
            f"images must have the shape of what was found, {tuple(shown.shape)}. Found {tuple(images.shape)}."
        )
    learned = {name: learned_metric(name, None, None, shown.device) for name in metrics}
    own = {name: metric for name, metric in learned.items() if metric is not None}
    return pd.DataFrame(score_images(shown, images.to(shown), metrics, own))
