"""The updates of clients in the pipeline: how they are observed, and how much of one a reconstruction explains."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Generator, Tensor

from privlab.evaluation.batch import Batch, Seen, Trial, taken
from privlab.release import labels_that_rise, observe_updates
from privlab.release.residual import explained_share, residual, tells_images
from privlab.release.update_files import label_of_update
from privlab.threat import Client, ClientData, Defense, FeatureDefense, GradientDefense, Observation, Stack
from privlab.victims import VictimModel

__all__ = ["explained_by", "observe_clients", "unsound_release"]

_LABELS = 3
"""Labels that are tried where none is told."""


def observe_clients(
    model: VictimModel,
    client: Client,
    trial: Trial,
    batch: Batch,
    parameters: Collection[str],
    draws: Sequence[Generator],
    images_per_release: int,
    defense: Sequence[Defense | FeatureDefense | GradientDefense] = (),
) -> Observation:
    """Observe the update of each client of B images; a last one may have fewer than its settings say.

    Args:
        model: the server's model.
        client: the public settings.
        trial: its feed holds the private images, which a defense of images changes anew in each step.
        batch: the images, whose labels the clients know.
        parameters: those whose updates the attacks read; the head's, by which reconstructions are explained, are added.
        draws: the secret generator of each client.
        images_per_release: B.
        defense: the defenses at work, which act on the update.
    """
    B = images_per_release
    of = zip(trial.feed.images.split(B), batch.labels.split(B), draws, strict=True)
    clients = [ClientData(images, labels, draw) for images, labels, draw in of]
    names = {*parameters, "head.weight", "head.bias"}
    return observe_updates(model, replace(client, images=B), clients, names, defense)


def explained_by(seen: Seen, image: Float[Tensor, "1 c h w"], i: int) -> float | None:
    """Return the share of an update of one image that a reconstruction explains; None for other releases.

    None too where the attacks read the head alone, which many images explain, where a defense of images made draws that
    nobody can repeat, and where filters leave no entry exact.

    The adversary can compute it: it takes public settings, and the label that the update tells. Where the head's bias
    is not released, the classes are tried whose logits rise most (`labels_that_rise`), and the largest share counts.

    Args:
        seen: the observation of several clients.
        image: the reconstruction.
        i: the number of the client.
    """
    if not isinstance(seen, Observation) or seen.client is None or seen.images_per_release > 1:
        return None
    if not seen.client.has_labels or not tells_images(seen) or Stack(tuple(seen.defense)).changes_images:
        return None
    own = taken(seen, [i])
    label, update = label_of_update(own), {name: u[0] for name, u in own.gradients.items()}
    labels = labels_that_rise(seen.model, update, image, _LABELS) if label is None else [label]
    return explained_share(min(residual(own, image, each) for each in labels))


def unsound_release(client: Client | None, filters: Sequence[GradientDefense] = ()) -> str:
    """Return why a release is not attacked that is zero or not finite: a gradient, or the update of a client."""
    told = "what is released is zero or not finite"
    if filters:
        by = "+".join(part.name for part in filters)
        return f"{told}: {by} left nothing of what the attacks read, or the client trained nothing or diverged"
    if client is None:
        return told
    return (
        f"{told}: the client trained nothing or diverged in {client.total_steps} steps from a rate of {client.lr:g}. "
        "Take another client.lr, or set client.clip."
    )
