"""Learned model inversion: a decoder is trained on what the adversary's own images become under the defense.

The adversary knows the defense's algorithm and runs the client's embedding on images of its own (queries). Keys and
draws of its releases are its own, and new in every batch: whatever the decoder learns holds for keys that it never saw.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from privlab.attacks.decoders.networks import DECODERS, Decoder, OwnRelease, Shape
from privlab.attacks.decoders.store import kept_decoder, warn_of_few
from privlab.base import check_name, draw_for, full_precision
from privlab.patches import permute
from privlab.release import send
from privlab.threat import Defense, Draws, FeatureDefense, GradientDefense, Stack
from privlab.training import Compute, Listener, Plan, train
from privlab.victims import VictimModel, hash_of

__all__ = ["DecoderSpec", "decoder_for", "decoder_key", "decoder_plan", "make_release", "train_decoder"]

FORMAT = "privlab-decoder/1"
Parts = Sequence[Defense | FeatureDefense | GradientDefense]


@dataclass(frozen=True)
class DecoderSpec:
    """Which decoder, how large, and how it is trained.

    Args:
        kind: one of `DECODERS`.
        width: width of its tokens, or number of its channels; a multiple of 32.
        depth: number of its blocks.
        augment: whether public images are mirrored and rolled at random.
        plan: how it is trained.

    Raises:
        PrivlabError: for an unknown kind.
    """

    kind: str
    width: int
    depth: int
    augment: bool
    plan: Plan

    def __post_init__(self) -> None:
        """Check the kind."""
        check_name("decoder", self.kind, DECODERS)


def decoder_plan(*, steps: int, batch_size: int, learning_rate: float, seed: int) -> Plan:
    """Return how every decoder is trained: a warm-up of a tenth of the steps or 50, then a cosine decay to zero.

    Args:
        steps: number of training steps.
        batch_size: number of examples in a step.
        learning_rate: the largest learning rate, reached after the warm-up.
        seed: seed of the training.
    """
    warmup = min(50, steps // 10)
    return Plan(steps, batch_size, learning_rate=learning_rate, weight_decay=0.01, warmup=warmup, seed=seed)


def make_release(
    model: VictimModel, defense: Parts, images: Float[Tensor, "b c h w"], draw: Generator, cut_layer: int = 0
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

    def __init__(
        self,
        model: VictimModel,
        defense: Parts,
        public: Float[Tensor, "m c h w"],
        spec: DecoderSpec,
        identity: str,
        cut_layer: int = 0,
    ) -> None:
        self.victim, self.defense, self.public, self.spec, self.identity = model, defense, public, spec, identity
        self.cut_layer = cut_layer
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(spec.plan.seed)
            self.model = DECODERS[spec.kind](Shape.of(model), spec.width, spec.depth)
        self.model.to(model.mean.device).whiten.fit(self._rows())

    def __len__(self) -> int:
        return len(self.public)

    def batch(self, rows: Tensor, draw: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a new release of some public images: features, source, images and fed images (see `OwnRelease`)."""
        images = self.public[rows.to(self.public.device)].to(self.victim.mean)
        if self.spec.augment:
            images = mirrored_and_rolled(images, draw)
        seen = make_release(self.victim, self.defense, images, draw, self.cut_layer)
        return seen.features, seen.source, seen.images, seen.fed

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor], draw: Generator) -> Tensor:
        """Return the objective of the decoder on one release (`Decoder.objective`).

        Args:
            model: the decoder, or what Fabric wraps around it; it makes the forward pass.
            batch: the parts of a `OwnRelease` in their order, as `batch` returns them.
            draw: not used, because the objective is not random.
        """
        return self.model.objective(model, OwnRelease(*batch))

    def _rows(self) -> Float[Tensor, "m d"]:
        """Return the rows of some releases under several keys; the whitening takes its statistics from them."""
        draw = draw_for(self.spec.plan.seed, "", "whitening")
        batches = torch.randperm(len(self.public), generator=draw)[:256].split(32)
        return torch.cat([self.batch(rows, draw)[0].flatten(0, 1) for rows in batches])


def train_decoder(
    model: VictimModel,
    defense: Parts,
    public: Float[Tensor, "m c h w"],
    spec: DecoderSpec,
    cut_layer: int = 0,
    *,
    out: Path | None = None,
    progress: Listener | None = None,
) -> Decoder:
    """Train a decoder on releases of public images, on the victim's device; with `out`, go on with a checkpoint there.

    Args:
        model: the victim, whose embedding and first blocks are run but not trained.
        defense: the defenses that the client uses, in their order.
        public: images of the adversary, in [0, 1].
        spec: the kind and size of the decoder, and the plan of its training.
        cut_layer: ℓ, the number of blocks that the client holds.
        out: folder of the checkpoints; without it none are written.
        progress: is called with the progress of the training.

    Raises:
        PrivlabError: whatever `privlab.training.train` raises.
    """
    recipe = Inversion(model, defense, public, spec, decoder_key(model, defense, public, spec, cut_layer), cut_layer)
    with full_precision():
        train(recipe, spec.plan, compute=Compute(device=str(model.mean.device)), out=out, progress=progress)
    return recipe.model


def decoder_for(
    model: VictimModel,
    defense: Parts,
    public: Float[Tensor, "m c h w"],
    spec: DecoderSpec,
    cut_layer: int = 0,
    *,
    progress: Listener | None = None,
) -> Decoder:
    """Return the decoder of this victim, defense, public images and spec: from the cache, or trained and cached.

    Args:
        model: the victim, on whose device the decoder is put.
        defense: the defenses that the client uses, in their order.
        public: images of the adversary, in [0, 1]; the decoder is poor with fewer than 200.
        spec: the kind and size of the decoder, and the plan of its training.
        cut_layer: ℓ, the number of blocks that the client holds.
        progress: is called with the progress of a training; never, if the decoder is in the cache.

    Warns:
        PrivlabWarning: for few public images, and if the stored file is damaged or foreign, or cannot be written.
    """
    warn_of_few(public)
    key = decoder_key(model, defense, public, spec, cut_layer)
    return kept_decoder(
        spec.kind,
        key,
        lambda: DECODERS[spec.kind](Shape.of(model), spec.width, spec.depth),
        lambda: train_decoder(model, defense, public, spec, cut_layer, progress=progress),
    ).to(model.mean.device)


def decoder_key(
    model: VictimModel, defense: Parts, public: Float[Tensor, "m c h w"], spec: DecoderSpec, cut_layer: int = 0
) -> str:
    """Return the SHA-256, in hexadecimal, of all that shapes a decoder; `decoder_for` stores it under that name.

    Args:
        model: the victim; its weights and its normalisation count.
        defense: the defenses; their options and their order count.
        public: the images that the decoder is trained on, in [0, 1].
        spec: the kind and size of the decoder, and the plan of its training.
        cut_layer: ℓ, the number of blocks that the client holds; 0 has the keys of before there was a choice.
    """
    victim = hash_of(model.state_dict() | {"mean": model.mean, "std": model.std})
    parts = (FORMAT, victim, repr(Stack(tuple(defense))), repr(spec), hash_of({"public": public}))
    parts += (f"cut layer {cut_layer}",) if cut_layer else ()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
