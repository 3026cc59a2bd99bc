"""Observe: what the clients of one batch feed and release in one setting, and what the adversary sees of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from privlab.base import draw_for
from privlab.evaluation.batch import Batch, Seen
from privlab.evaluation.case import shuffles
from privlab.evaluation.records import Record
from privlab.release import observe, observe_features, observe_updates, released_parameters, send
from privlab.threat import (
    Client,
    ClientData,
    Draws,
    Features,
    Feed,
    GradientDefense,
    Observation,
    Release,
    Sent,
    Stack,
    Update,
)
from privlab.victims import VictimModel


@dataclass(frozen=True, eq=False)
class Trial:
    """One batch in one setting: what is fed and sent, what a reconstruction is compared with, and what is released.

    `seen` is what the adversary sees; None before it is observed. `facts` are what the rows of each image state of the
    release. `known` marks the slots that the adversary knows to hold their own patch; None where `seen` does not say.
    """

    setting: str
    batch: Batch
    feed: Feed
    reference: Float[Tensor, "b c h w"]
    sent: Sent | None = None  # None: gradients are released
    seen: Seen | None = None
    facts: Sequence[Record] = ()
    known: Bool[Tensor, "b n"] | None = None

    def take(self, rows: Sequence[int], seen: Seen) -> "Trial":
        """Return the trial of some of the images, of which `seen` is what the adversary sees; of features, of all."""
        if len(rows) == len(self.batch.named):
            return replace(self, seen=seen)
        return Trial(
            self.setting,
            self.batch.take(rows),
            self.feed.take(rows),
            self.reference[rows],
            seen=seen,
            facts=[self.facts[i] for i in rows],
            known=None if self.known is None else self.known[rows],
        )


@dataclass(frozen=True, eq=False)
class Clients:
    """The clients of a run: what they release, under which defenses, and how they draw.

    `key` is the text that seeds what a defense draws once for a model, such as the hash of its weights.
    """

    release: Release
    defense: Stack
    seed: int
    draw: int
    key: str

    def trial(self, model: VictimModel, batch: Batch, setting: str) -> Trial:
        """Return what the clients feed and send, and the reference of the setting (MJP, section 5.4).

        Args:
            model: the victim's model.
            batch: the private images.
            setting: "a", "b" or "c"; the reference of b is what was fed.
        """
        draws = self._draws(batch)
        if isinstance(self.release, Update):  # the client feeds what the defense draws anew in each step
            feed = Feed.undefended(batch.images, model.patch)
        else:
            feed = self.defense.feed(batch.images, model.patch, draws.images, self._images(batch), draws.model)
        sent = None
        if isinstance(self.release, Features):
            sent = send(model, feed, self.defense, draws, self.release.cut_layer)
        return Trial(setting, batch, feed, feed.images if setting == "b" else batch.images, sent)

    def observe(
        self,
        model: VictimModel,
        trial: Trial,
        parameters: Iterable[str] | None = None,
        public: Float[Tensor, "m c h w"] | None = None,
    ) -> Seen:
        """Return what the adversary sees of the releases of a batch.

        Args:
            model: the victim's model, or a variant of it with another first block.
            trial: the private images with their labels, which the clients know, and what is fed and sent.
            parameters: the names of the gradients or updates that the attacks read; None for all that are released.
            public: images of the adversary's own; None if it has none.
        """
        if isinstance(self.release, Features):
            assert trial.sent is not None
            own = trial.batch.images[:0] if public is None else public
            return observe_features(model, trial.sent, self.defense, own, self.release.cut_layer)
        batch, B = trial.batch, self._images(trial.batch)
        if isinstance(self.release, Update):
            client = share_out(self.release.client, B)
            draws = batch.release_draws(self.seed, self.draw, client.images)
            images, labels = batch.images.split(client.images), batch.labels.split(client.images)
            data = [ClientData(*each) for each in zip(images, labels, draws, strict=True)]
            names = None if parameters is None else {*parameters, "head.weight", "head.bias"}
            return observe_updates(model, client, data, names, self.defense.parts)
        draws = batch.release_draws(self.seed, self.draw, B)
        names = sorted(released_parameters(model)) if parameters is None else list(parameters)
        return self._gradients(model, trial, names, draws, public)

    def _gradients(
        self,
        model: VictimModel,
        trial: Trial,
        parameters: list[str],
        draws: Sequence[Generator],
        public: Float[Tensor, "m c h w"] | None,
    ) -> Observation:
        """Observe gradients of B images each; one by one where patches were shuffled.

        A product over a batch rounds otherwise than that of one image, and closed forms enlarge the difference: re-
        assembly may then put the same image in another order in the company of other images.
        """
        labels, B = trial.batch.labels, self._images(trial.batch)
        b = len(labels)
        size = B if shuffles(self.release, model, self.defense) else b
        seen = [
            observe(
                model,
                trial.feed.take(slice(i, i + size)),
                labels[i : i + size],
                parameters,
                self.defense.parts,
                draws[i // B : (i + size) // B],
                B,
                public,
            )
            for i in range(0, b, size)
        ]
        gradients = {name: torch.cat([one.gradients[name] for one in seen]) for name in seen[0].gradients}
        return replace(seen[0], gradients=gradients)

    def _images(self, batch: Batch) -> int:
        """Return how many images are released together: those of the release, or all where there are fewer."""
        return len(batch.named) if isinstance(self.release, Features) else min(self.release.images, len(batch.named))

    def _draws(self, batch: Batch) -> Draws:
        """Return the clients' generators: one for each image, one for the batch, and one for the model."""
        return Draws(
            images=batch.draws(self.seed, "defense", self.draw),
            batch=draw_for(self.seed, batch.together, "batch", self.draw),
            model=draw_for(self.seed, self.key, "key", self.draw),
        )


def share_out(client: Client, images: int) -> Client:
    """Return the clients of one release of this many images: as its settings say, or fewer where images are.

    Clients have equally many images, so that their mean is that of federated averaging: of a number that K clients
    cannot share, the most that can.
    """
    K = next(k for k in range(min(client.clients, images), 0, -1) if images % k == 0)
    return replace(client, clients=K, images=images // K)


def unsound_release(release: Release, filters: Sequence[GradientDefense] = ()) -> str:
    """Return why a release is not attacked that is zero or not finite: a gradient, or the update of a client."""
    told = "what is released is zero or not finite"
    if filters:
        by = "+".join(part.name for part in filters)
        return f"{told}: {by} left nothing of what the attacks read, or the client trained nothing or diverged"
    if not isinstance(release, Update):
        return told
    client = release.client
    return (
        f"{told}: the client trained nothing or diverged in {client.total_steps} steps from a rate of {client.lr:g}. "
        "Take another client.lr, or set client.clip."
    )
