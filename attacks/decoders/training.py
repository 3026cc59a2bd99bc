"""Learned model inversion: a network is trained on what the adversary's own images become under the defense.

The adversary knows the defense's algorithm and runs the client's embedding on public images (queries). Keys and
draws of its releases are its own, and new in every batch: whatever the network learns holds for keys that it never saw.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor, nn

from privlab.attacks.decoders.networks import OwnRelease
from privlab.base import Checked, PrivlabError, full_precision, warn
from privlab.patches import permute
from privlab.release import AnyDefense, send
from privlab.threat import Draws, Stack
from privlab.training import Plan, Recipe, keep, kept, train
from privlab.victims import VictimModel, cache_folder, hash_of

LEAST_IMAGES = 200  # number of public images below which a decoder is poor

Network = TypeVar("Network", bound=nn.Module)
Seen: TypeAlias = Any  # an observation, of gradients or of features, of which the released tensors do not count
Pairs: TypeAlias = tuple[Float[Tensor, "r ..."], Float[Tensor, "r c h w"]]


class Trained(Checked, Generic[Network]):
    """An attack whose network is trained once for each victim, defense and set of public images, and cached.

    A subclass has the methods `made` and `recipe`, and says in `form` what its networks are.

    Args:
        steps: number of training steps.
        batch_size: number of public images in a step.
        learning_rate: the largest learning rate, reached after a warm-up and followed by a cosine decay to zero.
        augment: whether public images are mirrored and rolled at random.
        seed: seed of the network's first weights, of its training and of the adversary's own draws.
    """

    kind: ClassVar[str]
    """What the name of a network's file begins with."""

    steps: int
    batch_size: int
    learning_rate: float
    augment: bool
    seed: int

    def form(self, seen: Seen) -> tuple[str, ...]:
        """Return the name and version of this kind of network, and the options that `key` does not read."""
        raise NotImplementedError

    def made(self, seen: Seen) -> Network:
        """Return an untrained network."""
        raise NotImplementedError

    def recipe(self, seen: Seen, network: Network) -> Recipe:
        """Return how an untrained network is trained; it may be fitted to its examples first."""
        raise NotImplementedError

    @property
    def plan(self) -> Plan:
        """Return how the network is trained: a warm-up of a tenth of the steps or 50, then a cosine decay to zero."""
        rate, warmup = self.learning_rate, min(50, self.steps // 10)
        return Plan(self.steps, self.batch_size, learning_rate=rate, weight_decay=0.01, warmup=warmup, seed=self.seed)

    def key(self, seen: Seen) -> str:
        """Return the SHA-256, in hexadecimal, of all that shapes the network."""
        model, (name, *more) = seen.model, self.form(seen)
        victim = hash_of(model.state_dict() | {"mean": model.mean, "std": model.std})
        defense = repr(Stack(tuple(seen.defense)))
        parts = (name, victim, defense, repr(self), *more, hash_of({"public": _public(seen)}))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def network(self, seen: Seen) -> Network:
        """Return the network of this victim, defense, public images and options: from the cache, or trained and cached.

        Warns:
            PrivlabWarning: for few public images, and if the stored file is damaged or foreign, or cannot be written.
        """
        if (count := len(_public(seen))) < LEAST_IMAGES:
            warn(f"A decoder trained on {count} public images is poor: its low score is no evidence of privacy.")
        # A stored network is used only if its file names the same key; the file's name holds a part of it.
        key = self.key(seen)
        path = cache_folder("decoders") / f"{self.kind}-{key[:32]}.safetensors"
        if (state := kept(path, key)) is not None:
            network = self._seeded(seen)
            network.load_state_dict(state)
            return network.eval()
        if path.exists():
            warn(f"The decoder in {path} is damaged or foreign. It will be trained again.")
        network = self.trained(seen)
        try:
            keep(path, key, network.state_dict())
        except PrivlabError as error:
            warn(f"The decoder cannot be kept in {path} ({error}): it will be trained again.")
        return network

    def trained(self, seen: Seen) -> Network:
        """Train a new network on the victim's device."""
        network = self._seeded(seen)
        with full_precision():
            train(self.recipe(seen, network), self.plan)
        return network

    def _seeded(self, seen: Seen) -> Network:
        """Return an untrained network under the seed of torch's generator, whose state is restored."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            return self.made(seen).to(seen.model.mean.device)


def _public(seen: Seen) -> Float[Tensor, "m c h w"]:
    assert seen.public is not None  # the capability auxiliary_images says so
    return seen.public


def make_release(
    model: VictimModel,
    defense: Sequence[AnyDefense],
    images: Float[Tensor, "b c h w"],
    draw: Generator,
    cut_layer: int = 0,
) -> OwnRelease:
    """Return what a client with this defense would send of these images, with keys and noise drawn from `draw`.

    Args:
        model: the victim, whose embedding and first ℓ blocks make the features.
        defense: the defenses in the order in which they act; an empty sequence is the undefended client.
        images: one batch of the client, in [0, 1].
        draw: source of b + 2 seeds: of a generator for each image, one for the batch, and one for the model's key.
        cut_layer: ℓ, the number of blocks that the client holds.
    """
    stack = Stack(tuple(defense))
    # Each batch draws new seeds, so that the network cannot learn a key by heart.
    seeds = torch.randint(2**62, (len(images) + 2,), generator=draw).tolist()
    batch, key, *of_images = (Generator().manual_seed(seed) for seed in seeds)
    draws = Draws(images=of_images, batch=batch, model=key)
    # The client's two stages: defenses on images give what is fed to the embedding,
    # those on features give what is sent.
    feed = stack.feed(images, model.patch, draws.images, len(images), draws.model)
    sent = send(model, feed, stack, draws, cut_layer)
    return OwnRelease(
        sent.features.float(), sent.source, images.float(), permute(images, feed.order, model.patch).float()
    )


def mirrored_and_rolled(images: Float[Tensor, "b c h w"], draw: Generator) -> Float[Tensor, "b c h w"]:
    """Return images of which half are mirrored, at random, and all are rolled by one random shift."""
    mirrored = (torch.rand(len(images), 1, 1, 1, generator=draw) < 0.5).to(images.device)
    shifts = [int(torch.randint(side, (), generator=draw)) for side in images.shape[2:]]
    return torch.where(mirrored, images.flip(3), images).roll(shifts, (2, 3))


class PairTrained(Trained[Network]):
    """An attack whose network is trained on pairs: what own releases of public images tell, and these images."""

    releases: int

    def own_pairs(
        self, public: Float[Tensor, "m c h w"], at_a_time: int, draw: Generator, release: Callable[[Tensor], Pairs]
    ) -> Pairs:
        """Return what public images release, in turn until there are `releases` of them.

        Args:
            public: images of the adversary.
            at_a_time: how many are released together.
            draw: of the mirroring and rolling, once each image came as it is.
            release: returns what the network reads of some images, and what it shall return.
        """
        found = []
        for rows in torch.arange(self.releases).split(at_a_time):
            images = public[(rows % len(public)).to(public.device)]
            # The first pass over the public images shows them as they are; later passes are mirrored and rolled.
            again = int(rows[0]) >= len(public)
            found.append(release(mirrored_and_rolled(images, draw) if again and self.augment else images))
        inputs, images = (torch.cat(parts) for parts in zip(*found, strict=True))
        return inputs, images


@dataclass(eq=False)
class PairTraining:
    """The training recipe from inputs to images, in the same order, by the mean squared error of the images."""

    model: nn.Module
    inputs: Float[Tensor, "r ..."]
    images: Float[Tensor, "r c h w"]

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, rows: Tensor, draw: Generator) -> Pairs:
        """Return some inputs, and their images."""
        rows = rows.to(self.images.device)
        return self.inputs[rows], self.images[rows]

    def loss(self, model: nn.Module, batch: Pairs, draw: Generator) -> Tensor:
        """Return the mean squared error of the images of a batch.

        Args:
            model: the model.
            batch: as `batch` returns it.
            draw: not used, because the objective is not random.
        """
        inputs, images = batch
        return F.mse_loss(model(inputs), images)
