"""Step by step: what clients release, and the scores of what an attack made of it."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError
from privlab.evaluation import Batch, Clients, batch_key, completed, labelled, score_images
from privlab.evaluation.setup import learned_metric
from privlab.images import Chunk, NamedImage
from privlab.release.checked import images_for, labels_for, model_of
from privlab.threat import (
    FeatureObservation,
    Gradient,
    Observation,
    Reconstruction,
    Release,
    Stack,
)
from privlab.victims import Victim, VictimModel, hash_of
from privlab.victims.closed_form import check_names

Part = Any
"""An attack or a defense: its name, or an instance of any dataclass that has its method."""


def observe(
    victim: Victim | VictimModel,
    images: Any,  # noqa: ANN401
    labels: Any = None,  # noqa: ANN401
    parameters: Iterable[str] | None = None,
    *,
    release: Release | None = None,
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
        release: what the clients release; None for the gradient of each image.
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
    release = Gradient() if release is None else release
    clients = Clients(release, stack, seed, draw, hash_of(model.state_dict()))
    own = None if public is None else images_for(model, public, "public images")
    if isinstance(release, Gradient) and len(x) % release.batch:
        raise PrivlabError(
            f"Gradient(batch={release.batch}) needs a multiple of {release.batch} images. Found {len(x)}."
        )
    trial = clients.trial(model, batch, "c")
    return clients.observe(model, trial, None if parameters is None else sorted(parameters), own)


def _batch(model: VictimModel, x: Float[Tensor, "b c h w"], labels: Any) -> Batch:  # noqa: ANN401
    """Return images with labels; each image is known by the hash of its values."""
    hashes = [hashlib.sha256(image.cpu().contiguous().numpy().tobytes()).hexdigest() for image in x]
    named = tuple(NamedImage(f"image-{i}", sha256, None) for i, sha256 in enumerate(hashes))
    if labels is None:
        return labelled(Chunk(named, x, ()), model, predicted=True)[0]
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
