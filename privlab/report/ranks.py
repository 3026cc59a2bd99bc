"""Identity and meaning: whose image a reconstruction is among candidates, and whether its class is still there."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from privlab.base import PrivlabError
from privlab.metrics.embedding import Embedding
from privlab.metrics.lpips_backbones import find_backbone, read_features

_SIDE = 8
"""Of the grid that `low_pass` keeps if nothing else is said."""

_LEAST_RANGE = 1 / 510
"""Half a grey level: an image that varies by less is one colour in 8 bits."""

_TIE = 1e-7
"""Similarities nearer to each other than this are equal: features of equal images differ by float32's rounding."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """How near each of b reconstructions is to its own identity, among `identities`.

    `better` counts the other identities that are nearer than the own one, and `tied` those that are as near.
    """

    better: Int[Tensor, " b"]
    tied: Int[Tensor, " b"]
    identities: int

    def rank_1(self, n: int) -> Float[Tensor, " b"]:
        """Return the probability that the own identity is the nearest among n: itself and n − 1 random others.

        With N identities and p of them nearer, it is C(N − 1 − p, n − 1) / C(N − 1, n − 1), averaged over the places p
        that ties allow. It is 1/n where all are tied, and 0 or 1 for n = N without ties.

        Raises:
            PrivlabError: if n is out of range.
        """
        return self._mean_over_ties(self._none_nearer(self.identities - 1, self._checked(n) - 1))

    def reciprocal(self, n: int) -> Float[Tensor, " b"]:
        """Return the expected reciprocal of the rank among n identities: the own one and n − 1 random others.

        With N identities and p of them nearer, it is (N/n) (1 − C(N − 1 − p, n) / C(N, n)) / (p + 1), averaged over
        the places p that ties allow: the mean of 1/(1 + X) for X nearer ones, which is hypergeometric.

        Raises:
            PrivlabError: if n is out of range.
        """
        N, places = self.identities, torch.arange(self.identities, dtype=torch.float64)
        outside = self._none_nearer(N, self._checked(n))[1:]  # C(N − (p + 1), n) / C(N, n)
        return self._mean_over_ties(N / n * (1 - outside) / (places + 1))

    def _checked(self, n: int) -> int:
        if not 2 <= n <= self.identities:
            raise PrivlabError(f"n must be from 2 to the number of identities, {self.identities}. Found {n}.")
        return n

    @staticmethod
    def _none_nearer(N: int, n: int) -> Float[Tensor, " m"]:
        """Return C(N − p, n) / C(N, n) for p = 0, …, N: that none of p are among n of N."""
        p = torch.arange(N, dtype=torch.float64)
        return torch.cat([torch.ones(1, dtype=torch.float64), ((N - p - n).clamp_min(0) / (N - p)).cumprod(0)])

    def _mean_over_ties(self, by_place: Float[Tensor, " m"]) -> Float[Tensor, " b"]:
        """Return the mean of `by_place` over the places better, …, better + tied of each reconstruction."""
        sums = torch.cat([torch.zeros(1, dtype=torch.float64), by_place.cumsum(0)])
        better, tied = self.better.cpu(), self.tied.cpu()
        return (sums[better + tied + 1] - sums[better]) / (tied + 1)


def cosines(x: Float[Tensor, "b d"], y: Float[Tensor, "m d"]) -> Float[Tensor, "b m"]:
    """Return ⟨x, y⟩ / (‖x‖ ‖y‖) for the features of b reconstructions and m candidates, 0 where a feature is zero."""
    x, y = (F.normalize(features.double(), dim=1) for features in (x, y))
    return x @ y.T


def ranks_by(
    near: Float[Tensor, "b m"],
    own: Int[Tensor, " b"],
    people: Int[Tensor, " m"] | None = None,
) -> Ranks:
    """Rank identities by given similarities with their candidates.

    Args:
        near: the similarity of each of b reconstructions or releases with each of m candidates.
        own: the place of the private image of each among the candidates.
        people: whom each candidate shows, as a number. An identity is then a person, as near as the nearest of the
            person's candidates, and the private image itself is left out. None makes each candidate an identity.

    Raises:
        PrivlabError: if there are fewer than two identities, or no other picture of a private image's person.
    """
    near, own, rows = near.clone(), own.to(near.device), torch.arange(len(near), device=near.device)
    if people is not None:
        _, persons = people.to(near.device).unique(return_inverse=True)
        near[rows, own] = -math.inf
        count = int(persons.max()) + 1
        of_person = persons.expand(len(near), -1)
        near = near.new_full((len(near), count), -math.inf).scatter_reduce(1, of_person, near, "amax")
        own = persons[own]
    if near.shape[1] < 2:
        raise PrivlabError(f"An identity is looked for among two or more. Found {near.shape[1]}.")
    to_own = near[rows, own][:, None]
    if to_own.isinf().any():
        raise PrivlabError("A person is found by other pictures of the person. Found one with a single picture.")
    better = (near > to_own + _TIE).sum(1)
    tied = ((near - to_own).abs() <= _TIE).sum(1) - 1
    return Ranks(better, tied, near.shape[1])


def low_pass(images: Float[Tensor, "b c h w"], side: int = _SIDE) -> Float[Tensor, "b d"]:
    """Return the means of `side` × `side` fields less the mean of each colour: the cosine of two is their correlation.

    An image that varies by less than half a grey level is one colour, and has the feature zero: every candidate is as
    near to it as any other.

    Args:
        images: in [0, 1], of any size.
        side: of the grid, 8 if not given.
    """
    fields = F.adaptive_avg_pool2d(images.double(), side)
    flat = (images.amax((2, 3)) - images.amin((2, 3)) < _LEAST_RANGE)[:, :, None, None]
    return (fields - fields.mean((2, 3), keepdim=True)).masked_fill(flat, 0).flatten(1)


def squeeze_embedding(device: torch.device | str = "cpu") -> Embedding:
    """Return SqueezeNet 1.1, which comes with privlab, as an embedding: its deepest layer, averaged over places."""
    from torchvision.models import squeezenet1_1

    path = find_backbone("squeeze")
    state, sha256 = read_features(path)
    with torch.random.fork_rng(devices=[]):
        features = squeezenet1_1(weights=None).features
    features.load_state_dict({name.removeprefix("features."): tensor for name, tensor in state.items()})
    module = nn.Sequential(features, nn.AdaptiveAvgPool2d(1)).eval().requires_grad_(False).to(device)
    mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    return Embedding(module, "squeezenet1_1", sha256, path.name, (224, 224), mean, std)


def class_agreement(
    classifier: Callable[[Tensor], Tensor],
    reconstructions: Float[Tensor, "b c h w"],
    images: Float[Tensor, "_ _ _ _"],
    size: tuple[int, int],
) -> Float[Tensor, " b"]:
    """Return 1 where a classifier gives a reconstruction the class that it gives the private image, and 0 elsewhere.

    Args:
        classifier: images in [0, 1] ↦ logits; it says something only if it is another network than the attacked one.
        reconstructions: in [0, 1].
        images: the private images, in the same order and of the same size.
        size: (h, w) of the classifier's input, to which both are resized by an antialiased bilinear filter.

    Raises:
        PrivlabError: if the shapes differ.
    """
    if reconstructions.shape != images.shape:
        raise PrivlabError(
            "Reconstructions and images must have one shape. "
            f"Found {tuple(reconstructions.shape)} and {tuple(images.shape)}."
        )
    with torch.no_grad():
        fed = (
            x if size == tuple(x.shape[2:]) else F.interpolate(x, size, mode="bilinear", antialias=True)
            for x in (reconstructions, images)
        )
        found, expected = (classifier(x).argmax(1) for x in fed)
    return (found == expected).double()
