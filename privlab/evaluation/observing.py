"""Observe: what the clients of one batch feed and release in one setting, and what the adversary sees of it."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import PrivlabError, draw_for
from privlab.evaluation.batch import Batch, Seen
from privlab.evaluation.case import shuffles
from privlab.release import observe, observe_features, observe_updates, released_parameters, send, served
from privlab.threat import (
    Capability,
    Client,
    ClientData,
    DishonestAttack,
    Draws,
    Features,
    Feed,
    GradientDefense,
    Observation,
    Release,
    Stack,
    Update,
)
from privlab.victims import VictimModel


@dataclass(frozen=True, eq=False)
class Clients:
    """The clients of a run: what they release, under which defenses, and how they draw.

    `key` is the text that seeds what a defense draws once for a model, such as the hash of its weights. `server` is the
    attack that chooses the weights that the clients get; None for a server that follows the protocol.
    """

    release: Release
    defense: Stack
    seed: int
    draw: int
    key: str
    server: DishonestAttack | None = None

    def feed(self, model: VictimModel, batch: Batch, setting: str) -> Batch:
        """Return the batch with what its clients feed and send in a setting.

        Args:
            model: the victim's model.
            batch: the private images with their labels.
            setting: "a", "b" or "c"; the reference of b is what was fed.
        """
        draws, sent = self._draws(batch), None
        if isinstance(self.release, Update):  # the client feeds what the defense draws again in each step
            feed = Feed.undefended(batch.images, model.patch)
        else:
            feed = self.defense.feed(batch.images, model.patch, draws.images, self._images(batch), draws.model)
        if isinstance(self.release, Features):
            sent = send(model, feed, self.defense, draws, self.release.cut_layer)
        return replace(batch, setting=setting, feed=feed, sent=sent)

    def observe(
        self,
        model: VictimModel,
        batch: Batch,
        parameters: Iterable[str] | None = None,
        public: Float[Tensor, "m c h w"] | None = None,
    ) -> Seen:
        """Return what the adversary sees of the releases of a batch.

        Args:
            model: the victim's model, or a variant of it with another first block.
            batch: the private images with their labels; `feed` is computed where the batch does not have it.
            parameters: the names of the gradients or updates that the attacks read; None for all that are released.
            public: images of the adversary's own; None if it has none.
        """
        batch = batch if batch.feed is not None else self.feed(model, batch, "c")
        if self.server is not None:
            client = self.release.client if isinstance(self.release, Update) else None
            made = replace(self, server=None).observe(
                with_chosen_weights(model, self.server, self._images(batch), client), batch, parameters, public
            )
            return replace(made, grants=made.grants | {Capability.CHOOSES_WEIGHTS})
        if isinstance(self.release, Features):
            assert batch.sent is not None
            own = batch.images[:0] if public is None else public
            return observe_features(model, batch.sent, self.defense, own, self.release.cut_layer)
        B = self._images(batch)
        if isinstance(self.release, Update):
            client = share_out(self.release.client, B)
            draws = batch.release_draws(self.seed, self.draw, client.images)
            names = None if parameters is None else {*parameters, "head.weight", "head.bias"}
            images, labels = batch.images.split(client.images), batch.labels.split(client.images)
            data = [ClientData(*each) for each in zip(images, labels, draws, strict=True)]
            return observe_updates(model, client, data, names, self.defense.parts)
        draws = batch.release_draws(self.seed, self.draw, B)
        names = sorted(released_parameters(model)) if parameters is None else list(parameters)
        return self._gradients(model, batch, names, draws, public)

    def _gradients(
        self,
        model: VictimModel,
        batch: Batch,
        parameters: list[str],
        draws: Sequence[Generator],
        public: Float[Tensor, "m c h w"] | None,
    ) -> Observation:
        """Observe gradients of B images each; one by one where patches were shuffled.

        A product over a batch rounds otherwise than that of one image, and closed forms enlarge the difference: re-
        assembly may then put the same image in another order in the company of other images.
        """
        feed, labels, B = batch.fed, batch.labels, self._images(batch)
        b = len(labels)
        size = B if shuffles(self.release, model, self.defense) else b
        seen = [
            observe(
                model,
                feed.take(slice(i, i + size)),
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


def with_chosen_weights(
    model: VictimModel, server: DishonestAttack, images: int, client: Client | None = None
) -> VictimModel:
    """Return a copy of a model with the weights that a dishonest server chooses for it.

    Args:
        model: the honest model, which is left as it is.
        server: the attack that chooses the weights.
        images: the images of one release, at least 1.
        client: the public settings of clients that train; None where they release gradients.

    Raises:
        PrivlabError: if a weight that was chosen is not one of the model's, or has another shape.
    """
    # Weights of what a client adds to the model, such as LoRA's, are chosen too.
    twin = copy.deepcopy(model if client is None else served(model, client))
    held = dict(twin.vit.named_parameters()) | ({} if twin.unk_embed is None else {"unk_embed": twin.unk_embed})
    for name, tensor in server.choose(twin, images, client).items():
        if name not in held or held[name].shape != tensor.shape:
            right = "no such parameter" if name not in held else f"{tuple(held[name].shape)}"
            raise PrivlabError(
                f"Attack '{server.name}' chose {name} of {tuple(tensor.shape)}. Found {right} in the model."
            )
        with torch.no_grad():
            held[name].copy_(tensor)
    return twin


def share_out(client: Client, images: int) -> Client:
    """Return the clients of one release of this many images: as its settings say, or fewer where images are.

    Clients have equally many images, so that their mean is that of federated averaging: of a number that K clients
    cannot share, the most that can.
    """
    K = next(k for k in range(min(client.clients, images), 0, -1) if images % k == 0)
    return replace(client, clients=K, images=images // K)


def unsound_release(release: Release, filters: Sequence[GradientDefense] = ()) -> str:
    """Return why a release is not attacked that is zero or not finite: a gradient, or the update of a client."""
    problem = "what is released is zero or not finite"
    if filters:
        by = "+".join(part.name for part in filters)
        return f"{problem}: {by} left nothing of what the attacks read, or the client trained nothing or diverged"
    if not isinstance(release, Update):
        return problem
    client = release.client
    return (
        f"{problem}: the client trained nothing or diverged in {client.total_steps} steps from a rate of {client.lr:g}."
        " Take another client.lr, or set client.clip."
    )
