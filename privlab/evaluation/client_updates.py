"""The updates of clients in the pipeline: how they are observed, and how much of one a reconstruction explains."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Generator, Tensor

from privlab.evaluation.batch import Batch, Seen, Trial, taken
from privlab.release import labels_that_rise, observe_updates, undecayed
from privlab.release.explained import explained_share, residual, residual_of_clients, soft_targets, tells_images
from privlab.release.update_files import label_of_update
from privlab.threat import Client, ClientData, Defense, FeatureDefense, GradientDefense, Observation, Stack
from privlab.victims import VictimModel

_LABELS = 3  # labels that are tried where none is told


def share_out(client: Client, images: int) -> Client:
    """Return the clients of one release of this many images: as its settings say, or fewer where images are.

    Clients have equally many images, so that their mean is that of federated averaging: of a number that K clients
    cannot share, the most that can.
    """
    K = next(k for k in range(min(client.clients, images), 0, -1) if images % k == 0)
    return replace(client, clients=K, images=images // K)


def observe_clients(
    model: VictimModel,
    client: Client,
    trial: Trial,
    batch: Batch,
    parameters: Collection[str],
    draws: Sequence[Generator],
    defense: Sequence[Defense | FeatureDefense | GradientDefense] = (),
) -> Observation:
    """Observe the updates of the clients of a batch, or the mean of those of K clients each.

    Args:
        model: the server's model.
        client: the public settings; the images of each client are those that follow the ones of the last client.
        trial: its feed holds the private images, which a defense of images changes anew in each step.
        batch: the images, whose labels the clients know.
        parameters: those whose updates the attacks read; the head's, by which reconstructions are explained, are added.
        draws: the secret generator of each client.
        defense: the defenses at work, which act on the update.
    """
    of = zip(trial.feed.images.split(client.images), batch.labels.split(client.images), draws, strict=True)
    clients = [ClientData(images, labels, draw) for images, labels, draw in of]
    return observe_updates(model, client, clients, {*parameters, "head.weight", "head.bias"}, defense)


def explained_by(seen: Seen, images: Float[Tensor, "k c h w"], i: int) -> float | None:
    """Return the share of a release that reconstructions explain, of clients with one image each; None for others.

    None too where the attacks read the head alone, which many images explain, where a defense of images made draws that
    nobody can repeat, and where filters leave no entry exact.

    The adversary can compute it: it takes public settings, and the label that the update tells. Of a mean of several
    clients, and where the head's bias is not released, the classes are tried whose logits of an image rise most
    (`labels_that_rise`), of a mean of K beside the K whose biases moved most as those of labels. The largest share
    counts.

    `images` are the reconstructions of release i, those of all its clients.

    Args:
        seen: the observation of several releases.
        images: the reconstructions of one release, those of all its clients.
        i: the number of the release.
    """
    if not isinstance(seen, Observation) or seen.client is None or seen.client.images > 1:
        return None
    if not seen.client.has_labels or not tells_images(seen) or Stack(tuple(seen.defense)).changes_images:
        return None
    own = taken(seen, [i])
    label = label_of_update(own) if len(images) == 1 else None
    update = {name: u[0] for name, u in own.gradients.items()}
    labels = [[label] if label is not None else labels_that_rise(seen.model, update, x[None], _LABELS) for x in images]
    if len(images) > 1:
        if "head.bias" in update:  # of a mean of K it falls at their labels, and rises nearly everywhere else
            bias = undecayed(seen.model, {"head.bias": update["head.bias"]}, seen.client)["head.bias"]
            fall = bias.argsort()[: len(images)].tolist()
            labels = [list(dict.fromkeys([*rise, *fall])) for rise in labels]
        return explained_share(residual_of_clients(own, images, labels))
    targets: list[int | Tensor] = [*labels[0]]
    if seen.client.loss == "binary" and (several := soft_targets(own, images)) is not None:
        targets.append(several)  # an image may have any number of classes
    return explained_share(min(residual(own, images, each) for each in targets))


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
