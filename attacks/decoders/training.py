"""Learned model inversion: a decoder is trained on what the adversary's own images become under the defense.

The adversary knows the defense's algorithm and runs the client's embedding on images of its own (queries). Keys and
draws of its releases are its own, and new in every batch: whatever the decoder learns holds for keys that it never saw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor, nn

from privlab.attacks.decoders.networks import DECODERS, Decoder, OwnRelease, Shape
from privlab.attacks.decoders.store import identity_of, kept_decoder, seeded, warn_of_few
from privlab.base import draw_for, full_precision
from privlab.patches import permute
from privlab.release import AnyDefense, send
from privlab.threat import Draws, FeatureObservation, Observation, Stack
from privlab.training import Plan, train
from privlab.victims import VictimModel, hash_of

FORMAT = "privlab-decoder/1"

Network = TypeVar("Network", bound=nn.Module)
Pairs: TypeAlias = tuple[Float[Tensor, "r ..."], Float[Tensor, "r c h w"]]


class Trained:
    """The options of an attack whose network is trained on the adversary's own images.

    Args:
        steps: number of training steps.
        batch_size: number of public images in a step.
        learning_rate: the largest learning rate, reached after a warm-up and followed by a cosine decay to zero.
        seed: seed of the network's first weights, of its training and of the adversary's own draws.
    """

    steps: int
    batch_size: int
    learning_rate: float
    seed: int

    @property
    def plan(self) -> Plan:
        """Return how the network is trained: a warm-up of a tenth of the steps or 50, then a cosine decay to zero."""
        rate, warmup = self.learning_rate, min(50, self.steps // 10)
        return Plan(self.steps, self.batch_size, learning_rate=rate, weight_decay=0.01, warmup=warmup, seed=self.seed)


class DecoderTrained(Trained):
    """The options of an attack that trains one of `DECODERS`.

    Args:
        width: width of the decoder's tokens, or number of its channels; a multiple of 32.
        depth: number of its blocks.
        augment: whether public images are mirrored and rolled at random.
    """

    kind: ClassVar[str]
    width: int
    depth: int
    augment: bool


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
    seeds = torch.randint(2**62, (len(images) + 2,), generator=draw).tolist()
    batch, key, *of_images = (Generator().manual_seed(seed) for seed in seeds)
    draws = Draws(images=of_images, batch=batch, model=key)
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


class Inversion:
    """The training recipe of a decoder: from releases of public images back to these images."""

    def __init__(self, seen: FeatureObservation, attack: DecoderTrained) -> None:
        self.seen, self.attack = seen, attack
        make, shape = DECODERS[attack.kind], Shape.of(seen.model)
        self.model = seeded(attack.plan.seed, lambda: make(shape, attack.width, attack.depth))
        self.model.to(seen.model.mean.device).whiten.fit(self._rows())

    def __len__(self) -> int:
        return len(self.seen.public)

    def batch(self, rows: Tensor, draw: Generator) -> OwnRelease:
        """Return a new release of some public images."""
        seen, public = self.seen, self.seen.public
        images = public[rows.to(public.device)].to(seen.model.mean)
        if self.attack.augment:
            images = mirrored_and_rolled(images, draw)
        return make_release(seen.model, seen.defense, images, draw, seen.cut_layer)

    def loss(self, model: nn.Module, batch: OwnRelease, draw: Generator) -> Tensor:
        """Return the objective of the decoder on one release (`Decoder.objective`).

        Args:
            model: the decoder; it makes the forward pass.
            batch: as `batch` returns it.
            draw: not used, because the objective is not random.
        """
        return self.model.objective(model, batch)

    def _rows(self) -> Float[Tensor, "m d"]:
        """Return the rows of some releases under several keys; the whitening takes its statistics from them."""
        draw = draw_for(self.attack.plan.seed, "", "whitening")
        batches = torch.randperm(len(self), generator=draw)[:256].split(32)
        return torch.cat([self.batch(rows, draw)[0].flatten(0, 1) for rows in batches])


def train_decoder(seen: FeatureObservation, attack: DecoderTrained) -> Decoder:
    """Train a decoder on releases of public images, on the victim's device.

    Args:
        seen: a release, of which the model, the defense, the public images and the cut layer count.
        attack: says the kind and size of the decoder, and how it is trained.

    Raises:
        PrivlabError: whatever `privlab.training.train` raises.
    """
    recipe = Inversion(seen, attack)
    _train(recipe, attack.plan)
    return recipe.model


def decoder_for(seen: FeatureObservation, attack: DecoderTrained) -> Decoder:
    """Return the decoder of this victim, defense, public images and options: from the cache, or trained and cached.

    Args:
        seen: a release, of which the features do not count; the decoder is poor with fewer than 200 public images.
        attack: says the kind and size of the decoder, and how it is trained.

    Warns:
        PrivlabWarning: for few public images, and if the stored file is damaged or foreign, or cannot be written.
    """
    warn_of_few(seen.public)
    make, shape = DECODERS[attack.kind], Shape.of(seen.model)
    return kept_decoder(
        attack.kind,
        decoder_key(seen, attack),
        lambda: make(shape, attack.width, attack.depth),
        lambda: train_decoder(seen, attack),
    ).to(seen.model.mean.device)


def decoder_key(seen: FeatureObservation, attack: DecoderTrained) -> str:
    """Return the SHA-256, in hexadecimal, of all that shapes a decoder; `decoder_for` stores it under that name."""
    cut = (f"cut layer {seen.cut_layer}",) if seen.cut_layer else ()  # 0 has the keys of before there was a choice
    return identity_of(seen.model, seen.defense, FORMAT, repr(attack), hash_of({"public": seen.public}), *cut)


class PairTrained(Trained):
    """An attack whose network is trained on pairs: what own releases of public images tell, and these images."""

    releases: int
    augment: bool

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
            again = int(rows[0]) >= len(public)
            found.append(release(mirrored_and_rolled(images, draw) if again and self.augment else images))
        inputs, images = (torch.cat(parts) for parts in zip(*found, strict=True))
        return inputs, images

    def network(
        self,
        seen: Observation | FeatureObservation,
        kind: str,
        parts: Sequence[str],
        make: Callable[[], Network],
        pairs: Callable[[Network], Pairs],
    ) -> Network:
        """Return the network of this victim, defense, public images and options: from the cache, or trained and cached.

        Args:
            seen: a release, of which the model, the defense and the public images count.
            kind: the kind of network, with which the name of the file begins.
            parts: name and version of this kind of network, and what else shapes it.
            make: returns an untrained one.
            pairs: returns all that it is trained on; it may fit the untrained network to that.

        Warns:
            PrivlabWarning: for few public images, and if the stored file is damaged or foreign, or cannot be written.
        """
        assert seen.public is not None  # the capability auxiliary_images says so
        warn_of_few(seen.public)
        key = identity_of(seen.model, seen.defense, *parts, hash_of({"public": seen.public}))

        def made() -> Network:
            return seeded(self.seed, make)

        def trained() -> Network:
            network = made().to(seen.model.mean.device)
            _train(_PairTraining(network, *pairs(network)), self.plan)
            return network

        return kept_decoder(kind, key, made, trained).to(seen.model.mean.device).eval()


@dataclass(eq=False)
class _PairTraining:
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


def _train(recipe: Inversion | _PairTraining, plan: Plan) -> None:
    with full_precision():
        train(recipe, plan)
