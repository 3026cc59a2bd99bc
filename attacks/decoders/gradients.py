"""A decoder of released gradients, trained on what the adversary's own images release under the defense.

The adversary knows the weights, the defense's algorithm and its options. It takes the step of a client on images of its
own, and applies the defense with draws of its own.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from privlab.attacks.decoders.networks import Shape, attention_blocks, pixel_map, slot_positions
from privlab.attacks.decoders.pairs import PairTraining, own_images
from privlab.attacks.decoders.store import kept_decoder, warn_of_few
from privlab.attacks.decoders.training import Parts
from privlab.base import draw_for, full_precision
from privlab.patches import unpatchify
from privlab.release import observe
from privlab.threat import Stack
from privlab.training import Compute, Listener, Plan, train
from privlab.victims import VictimModel, hash_of

__all__ = ["READ", "GradientDecoder", "GradientDecoderSpec", "gradient_decoder_for", "own_releases", "slots_of"]

FORMAT = "privlab-gradient-decoder/1"
READ = ("pos_embed", "patch_embed.proj.weight")
"""The parameters whose gradients the decoder reads."""

RIDGE = 0.3
"""λ of the ridge solution that the decoder reads, where the mean square of an entry of A is one."""

AT_A_TIME = 64
"""Public images that are released at a time."""


@dataclass(frozen=True)
class GradientDecoderSpec:
    """How large the decoder is, and how it is trained.

    Args:
        width: width of its tokens; a multiple of 32.
        depth: number of its blocks.
        releases: number of releases of public images that it is trained on.
        augment: whether public images are mirrored and rolled at random, from their second release on.
        plan: how it is trained.
    """

    width: int
    depth: int
    releases: int
    augment: bool
    plan: Plan


class GradientDecoder(nn.Module):
    """Transformer blocks over what `slots_of` reads of a release, and a linear map to the slots' patches.

    What a slot reads is standardised with the mean and the deviation of own releases.

    Raises:
        PrivlabError: if `width` is not a multiple of 32.
    """

    mean: Tensor
    deviation: Tensor
    positions: Tensor

    def __init__(self, shape: Shape, width: int, depth: int) -> None:
        super().__init__()
        self.shape = shape
        inputs = shape.width + 2 * 3 * shape.patch**2 + 2
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("deviation", torch.ones(inputs))
        self.register_buffer("positions", slot_positions(shape, width), persistent=False)
        self.inwards = nn.Linear(inputs, width)
        self.blocks = attention_blocks(width, depth)
        self.norm = nn.LayerNorm(width)
        self.outwards = pixel_map(shape, width)

    def fit(self, slots: Float[Tensor, "b n f"]) -> None:
        """Take the mean and the deviation from releases."""
        found = slots.flatten(0, 1)
        self.mean.copy_(found.mean(0))
        self.deviation.copy_(found.std(0).clamp_min(1e-3))

    def forward(self, slots: Float[Tensor, "b n f"]) -> Float[Tensor, "b c h w"]:
        """Return images; grey is 0.5, and pixels may leave [0, 1]."""
        tokens = self.inwards((slots - self.mean) / self.deviation) + self.positions
        return unpatchify(self.outwards(self.norm(self.blocks(tokens))), self.shape.image) + 0.5


def slots_of(model: VictimModel, gradients: Mapping[str, Tensor]) -> Float[Tensor, "b n f"]:
    """Return what each slot of the decoder reads of a release, in single precision, f = D + 2K + 2 numbers.

    A and G are the gradients of the position embeddings of the N patches and of the patch embedding's weight, each
    divided by the root of its mean square: without a defense G = Aᵀ X, but for a factor. Slot n reads row n of A, of
    F = A G / √D, of (A Aᵀ / D + λ I)⁻¹ F, and the logarithms of both roots.
    """
    A, G = (gradients[name].float() for name in READ)
    A, G = A.squeeze(1)[:, -model.vit.patch_embed.num_patches :], G.flatten(2)
    least = torch.finfo(A.dtype).tiny
    sizes = [gradient.square().mean((1, 2), keepdim=True).sqrt().clamp_min(least) for gradient in (A, G)]
    A, G = A / sizes[0], G / sizes[1]
    n, D = A.shape[1:]
    sums = A @ G / D**0.5
    gram = A @ A.mT / D + RIDGE * torch.eye(n, dtype=A.dtype, device=A.device)
    logs = torch.cat(sizes, 2).log().expand(-1, n, -1)
    return torch.cat([A, sums, torch.linalg.solve(gram, sums), logs], 2)


def own_releases(
    model: VictimModel, defense: Parts, public: Float[Tensor, "m c h w"], spec: GradientDecoderSpec
) -> tuple[Float[Tensor, "r n f"], Float[Tensor, "r c h w"]]:
    """Return what slots read of clients of the adversary's own, one image each, and the images before the defense.

    Each public image is released in turn until there are `spec.releases`, with new draws each time. Its label is the
    class that the model predicts.

    Args:
        model: the victim; it is left as it is.
        defense: the defenses that the client uses, in their order.
        public: images of the adversary, in [0, 1].
        spec: how many releases there are, and whether images are mirrored and rolled.
    """
    stack, draw = Stack(tuple(defense)), draw_for(spec.plan.seed, "", "own releases")
    found: list[tuple[Tensor, Tensor]] = []
    for own in own_images(public, spec.releases, AT_A_TIME, spec.augment, draw):
        images = own.to(model.mean)
        key, *seeds = torch.randint(2**62, (len(images) + 1,), generator=draw).tolist()
        draws = [Generator().manual_seed(seed) for seed in seeds]
        feed = stack.feed(images, model.patch, draws, 1, Generator().manual_seed(key))
        with torch.no_grad():
            labels = model(images).argmax(1)
        seen = observe(model, feed, labels, READ, defense, draws)
        found.append((slots_of(model, seen.gradients), images.float()))
    slots, images = (torch.cat(parts) for parts in zip(*found, strict=True))
    return slots, images


def gradient_training(
    model: VictimModel,
    defense: Parts,
    public: Float[Tensor, "m c h w"],
    spec: GradientDecoderSpec,
    identity: str,
) -> PairTraining[GradientDecoder]:
    """Return the training of a new decoder, from releases of public images back to these images.

    Args:
        model: the victim, on whose device the decoder is put.
        defense: the defenses that the client uses, in their order.
        public: images of the adversary, in [0, 1].
        spec: the size of the decoder, and how many releases there are.
        identity: of all that shapes the training.
    """
    slots, images = own_releases(model, defense, public, spec)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.plan.seed)
        decoder = GradientDecoder(Shape.of(model), spec.width, spec.depth)
    decoder.to(model.mean.device).fit(slots[:512])
    return PairTraining(decoder, slots, images, identity)


def gradient_decoder_for(
    model: VictimModel,
    defense: Parts,
    public: Float[Tensor, "m c h w"],
    spec: GradientDecoderSpec,
    *,
    progress: Listener | None = None,
) -> GradientDecoder:
    """Return the decoder of this victim, defense, public images and spec: from the cache, or trained and cached.

    Args:
        model: the victim, on whose device the decoder is put; it is not trained.
        defense: the defenses that the client uses, in their order.
        public: images of the adversary, in [0, 1]; the decoder is poor with fewer than 200.
        spec: the size of the decoder, and its training.
        progress: is called with the progress of a training; never, if the decoder is in the cache.

    Warns:
        PrivlabWarning: for few public images, and if the stored file is damaged or foreign, or cannot be written.
    """
    warn_of_few(public)
    victim = hash_of(model.state_dict() | {"mean": model.mean, "std": model.std})
    parts = (FORMAT, victim, repr(Stack(tuple(defense))), repr(spec), hash_of({"public": public}))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def trained() -> GradientDecoder:
        recipe = gradient_training(model, defense, public, spec, key)
        with full_precision():
            train(recipe, spec.plan, compute=Compute(device=str(model.mean.device)), progress=progress)
        return recipe.model

    made = kept_decoder("gradients", key, lambda: GradientDecoder(Shape.of(model), spec.width, spec.depth), trained)
    return made.to(model.mean.device).eval()
