"""`learning-to-invert`: a decoder that is trained on what public images release under the defense."""

# Known are the model, the defense, public images, and the defended gradients A of E_pos and G of W. Sought are images.
# 1. `_own_releases` releases public images under the defense, with draws that the adversary makes.
# 2. `_slots_of` turns each release into f = D + 2 K + 2 numbers for each slot.
# 3. A `GradientDecoder` is trained to map these to the image, and is kept for later calls.
# 4. It is applied to the release under attack.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from privlab.attacks.decoders import PairTrained, PairTraining
from privlab.attacks.decoders.networks import Shape, attention_blocks, pixel_map, slot_positions
from privlab.attacks.decoders.training import Pairs
from privlab.base import PrivlabError, check_range, draw_for
from privlab.patches import unpatchify
from privlab.release import observe
from privlab.threat import Capability, Observation, Stack
from privlab.victims import VictimModel


@dataclass(frozen=True)
class LearningToInvert(PairTrained["GradientDecoder"]):
    """Train a decoder on pairs of a public image and what it releases under the defense; apply it to the release.

    Idea: The adversary takes the step of a client on public images, and applies the defense to the gradients with
    its own draws. On these pairs it trains a decoder from a release back to its image. The decoder learns what the
    defense leaves, whatever the defense is.

    Steps: own releases of public images → train a decoder → apply it to the release

    Algorithm: min_φ E ‖f_φ(d(∇ℓ(x))) − x‖², over public images x and draws of the defense d. The paper trains one
    decoder for all parameters. Here A = ∂ℓ/∂E_pos and G = ∂ℓ/∂W are read, slot by slot, by a Transformer: without a
    defense they determine the image, since G = Aᵀ X, and the decoder learns to use what a defense leaves of both. It is
    trained once for each victim, defense and set of public images, and cached.

    The public images have the classes that the model predicts.

    Exact if: no condition is known: it is a trained decoder without a guarantee. Under noise as strong as the gradient
    it can learn no more than the mean of its images.

    Fails if: it has too few images to learn from, as with the bundled photographs alone: it needs `--public` with
    hundreds of images.

    Cost: 11 to 24 minutes of training on one busy core, for 8,000 releases and 800 steps (`cifar_vit`).

    Studies: gradients

    Args:
        width: width of the decoder's tokens; a multiple of 32.
        depth: number of its blocks.
        releases: number of releases of public images that it is trained on.
        augment: whether public images are mirrored and rolled at random, from their second release on.

    Source: [@wu2023lti]
    """

    name: ClassVar[str] = "learning-to-invert"
    kind: ClassVar[str] = "gradients"
    paper: ClassVar[str] = "Learning To Invert (Wu et al., UAI 2023), on two gradients of a ViT"
    order: ClassVar[int] = 190
    short: ClassVar[Mapping[str, Any]] = {"steps": 1, "releases": 8, "batch_size": 8}
    knows: ClassVar[frozenset[str]] = frozenset(
        {
            *("gradient-noise", "gradient-pruning", "gradient-sign"),
            *("svt-privacy", "binary-weights", "censor"),
        }
    )
    undefended: ClassVar[str] = "patch-gradient"
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {
            *(Capability.KNOWS_WEIGHTS, Capability.BATCH_SIZE_ONE, Capability.LEARNABLE_PE_GRADIENT),
            *(Capability.KNOWS_DEFENSE, Capability.GRADIENT_DEFENSE, Capability.AUXILIARY_IMAGES),
            Capability.CLASS_LABELS,
        }
    )
    effort: ClassVar[str] = "full"
    named_only: ClassVar[bool] = True
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed", "patch_embed.proj.weight")

    width: int = 192
    depth: int = 4
    releases: int = 8000
    steps: int = 800
    batch_size: int = 64
    learning_rate: float = 2e-3
    augment: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError if there is nothing to train on."""
        right = f"at least batch_size={self.batch_size}"
        check_range(self.releases >= self.batch_size, f"releases of {self.name}", right, self.releases)

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed.

        Raises:
            PrivlabError: if they are not RGB.
        """
        if (channels := seen.model.image_shape[0]) != 3:
            raise PrivlabError(f"The decoder paints RGB images. Found a victim of {channels} channels.")
        # The decoder is loaded from the cache, or trained on own releases first.
        decoder = self.network(seen)
        with torch.no_grad():
            images = decoder(_slots_of(seen.model, seen.gradients)).clamp(0, 1)
        return images.to(seen.model.mean.dtype)

    def form(self, seen: Observation) -> tuple[str, ...]:
        """Return the version of the decoders."""
        return (FORMAT,)

    def made(self, seen: Observation) -> "GradientDecoder":
        """Return an untrained decoder."""
        return GradientDecoder(Shape.of(seen.model), self.width, self.depth)

    def recipe(self, seen: Observation, network: "GradientDecoder") -> PairTraining:
        """Return the training on own releases, by which what slots read is standardised."""
        # What slots read is standardised before the training, by statistics of own releases
        # that are stored with the decoder.
        slots, images = _own_releases(seen, self)
        network.fit(slots)
        return PairTraining(network, slots, images)


FORMAT = "privlab-gradient-decoder/1"
READ = ("pos_embed", "patch_embed.proj.weight")  # the parameters whose gradients the decoder reads
RIDGE = 0.3  # λ of the ridge solution that the decoder reads, where the mean square of an entry of A is one
AT_A_TIME = 64  # public images that are released at a time


class GradientDecoder(nn.Module):
    """Transformer blocks over what `_slots_of` reads of a release, and a linear map to the slots' patches.

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
        # A slot reads D numbers of A, K = 3 p² of A G, K of the ridge solution, and two logarithms.
        inputs = shape.width + 2 * 3 * shape.patch**2 + 2
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("deviation", torch.ones(inputs))
        self.register_buffer("positions", slot_positions(shape, width), persistent=False)
        self.inwards = nn.Linear(inputs, width)
        self.blocks = attention_blocks(width, depth)
        self.norm = nn.LayerNorm(width)
        self.outwards = pixel_map(shape, width)

    def fit(self, slots: Float[Tensor, "r n f"]) -> None:
        """Take the mean and the deviation from what slots read of the first releases."""
        found = slots[:512].flatten(0, 1)
        self.mean.copy_(found.mean(0))
        self.deviation.copy_(found.std(0).clamp_min(1e-3))

    def forward(self, slots: Float[Tensor, "b n f"]) -> Float[Tensor, "b c h w"]:
        """Return images; grey is 0.5, and pixels may leave [0, 1]."""
        # Each slot is a token with a fixed code of its position. The blocks exchange information between slots,
        # and a linear map paints a patch for each.
        tokens = self.inwards((slots - self.mean) / self.deviation) + self.positions
        return unpatchify(self.outwards(self.norm(self.blocks(tokens))), self.shape.image) + 0.5


def _slots_of(model: VictimModel, gradients: Mapping[str, Tensor]) -> Float[Tensor, "b n f"]:
    """Return what each slot of the decoder reads of a release, in single precision, f = D + 2K + 2 numbers.

    A and G are the gradients of the position embeddings of the N patches and of the patch embedding's weight, each
    divided by the root of its mean square: without a defense G = Aᵀ X, except for a factor. Slot n reads row n of A, of
    F = A G / √D, of (A Aᵀ / D + λ I)⁻¹ F, and the logarithms of both roots.
    """
    # A is b × N × D without the rows of prefix tokens, and G is b × D × K.
    A, G = (gradients[name].float() for name in READ)
    A, G = A.squeeze(1)[:, -model.vit.patch_embed.num_patches :], G.flatten(2)
    least = torch.finfo(A.dtype).tiny
    # The decoder sees both at one scale, whatever the size of the loss, and their scales as logarithms.
    sizes = [gradient.square().mean((1, 2), keepdim=True).sqrt().clamp_min(least) for gradient in (A, G)]
    A, G = A / sizes[0], G / sizes[1]
    n, D = A.shape[1:]
    # G = Aᵀ X gives A G = A Aᵀ X, so that (A Aᵀ + λ' I)⁻¹ A G is the ridge solution X, except for a factor. Without a
    # defense the decoder has the image in its input.
    sums = A @ G / D**0.5
    gram = A @ A.mT / D + RIDGE * torch.eye(n, dtype=A.dtype, device=A.device)
    logs = torch.cat(sizes, 2).log().expand(-1, n, -1)
    return torch.cat([A, sums, torch.linalg.solve(gram, sums), logs], 2)


def _own_releases(seen: Observation, attack: LearningToInvert) -> Pairs:
    """Return what slots read of clients of the adversary's own, one image each, and the images before the defense.

    Each public image is released in turn until there are `releases`, with new draws each time. Its label is the class
    that the model predicts.
    """
    model, public = seen.model, seen.public
    assert public is not None  # the capability auxiliary_images says so
    stack, draw = Stack(tuple(seen.defense)), draw_for(attack.seed, "", "own releases")

    def release(own: Tensor) -> Pairs:
        images = own.to(model.mean)
        # Every draw of feeding and of the defense has its seed from one generator: a training can be repeated exactly.
        key, *seeds = torch.randint(2**62, (len(images) + 1,), generator=draw).tolist()
        draws = [Generator().manual_seed(seed) for seed in seeds]
        feed = stack.feed(images, model.patch, draws, 1, Generator().manual_seed(key))
        # The adversary has no labels of public images, and takes the class that the model predicts.
        with torch.no_grad():
            labels = model(images).argmax(1)
        released = observe(model, feed, labels, READ, seen.defense, draws).gradients
        return _slots_of(model, released), images.float()

    return attack.own_pairs(public, AT_A_TIME, draw, release)
