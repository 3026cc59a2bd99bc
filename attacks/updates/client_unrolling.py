"""`client-unrolling`: the images of several clients from the mean of their updates; each client is run again."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.rows import known_tokens
from privlab.attacks.tokens import FC1, ImageTokens, Reads, Separated, Slots, by_image, row_space, slots_of_tokens
from privlab.attacks.updates.round_unrolling import RoundUnrolling, beyond_rank, bundled, labels_near, no_tokens
from privlab.base import PrivlabError, draw_for
from privlab.release import each_release, undecayed, update_on
from privlab.threat import Client, Observation, Reconstruction
from privlab.victims import first_block

__all__ = ["ClientUnrolling"]

_PATCH_WEIGHT, _HEAD = "patch_embed.proj.weight", "head.weight"

_PRODUCTS = (1.5, 2.0)
"""Products that the gradients of the first block are taken to sum over, in tokens of the first step."""

_MOST_OF_WIDTH = 2 / 3
"""Most of these products, relative to the width: the search finds few tokens above (docs/studies/rounds.md)."""

_FINER, _FINEST = (1.5, 2.0, 3.0, 4.0), 0.9
"""Products, in tokens of the first step, and the most, relative to the width, in whose row spaces tokens are refined
once they are found: the more products, the less of a token is cut off, and the nearer a start must be."""

_TAKEN = 0.1
"""An image is taken for a client's if it leaves less than this share of what other images cannot account for."""

_AGAIN = 3
"""The most times that each image is solved for again, from what the others leave."""


class _Found(NamedTuple):
    """An image, its label and tokens, and what its client moved, by parameter name."""

    image: Float[Tensor, "c h w"]
    label: int
    tokens: Separated
    share: Mapping[str, Float[Tensor, "..."]]


@dataclass(frozen=True)
class ClientUnrolling(RoundUnrolling):
    """Recover the images of K clients, one each, from the mean of their updates after any number of steps.

    The sum is Σ_k Σ_s a_s g(θ_k,s; x_k), with θ_k,0 = θ_0 for all: each client drifts on its own.

    1. The tokens of all images at the first step are at weights that the server knows, and lie in the row spaces of
       what ∂W_fc1 and ∂W_fc2 sum over all steps. Later steps move the tokens of the same images by little, so that
       these spaces have few more directions above rounding: 1.5 and 2 times as many as tokens are tried.
    2. Attention tells which tokens are of one image, and position embeddings their slots, as in `token-separation`.
       Missing tokens, and then all patches, are found as in `round-unrolling`. The patches lie in the row space of ∂W,
       which has K N directions however many steps there were, since an image stays the same in all of them.
    3. A client is run again on each image, with the classes that the head's update allows. The image is taken if its
       share leaves nothing of ∂W beyond the rank of the images that are left; its share is taken off.
    4. The last image solves Aᵀ X = G, as in `patch-update`. So does each other one again, once the shares of all others
       are taken off: that undoes what later steps added to its tokens.

    It needs K (N + p) < D for N patches and p prefix tokens. Images that are not found are grey, or as far as their
    tokens were found.

    Args:
        starts: random starts of the search for tokens in each round.
        rounds: the most rounds of the search.
        steps: steps of the Levenberg-Marquardt method in each search.
        tolerance: the relative residual below which a solution may be a token.
        sure: the relative residual below which a solution certainly is one.
        sharpen: the most steps of the Gauss-Newton method.
        inner: steps of conjugate gradients in each of them.
        seed: seed of the starts.
        passes: passes over the missing tokens that may find nothing.
        levels: grey levels above black of a stored image, 255 for eight bits; 0 for images without.

    Source: ours; the sums are the chain rule at the first block.
    """

    name: ClassVar[str] = "client-unrolling"
    paper: ClassVar[str] = "ours: token separation at the weights that all clients start from, each of them run again"
    stands_in_for: ClassVar[tuple[str, ...]] = ()
    reads_means: ClassVar[bool] = True
    at_full: ClassVar[Mapping[str, int]] = {"starts": 192, "rounds": 120}

    starts: int = 96
    tolerance: float = 0.01

    @staticmethod
    def refuses(client: Client) -> str | None:
        """Return why the updates are not read: that of one client, or what is private or rounded in the steps.

        Args:
            client: the public settings.
        """
        if client.clients == 1:
            return "reads the mean of several clients, and here the update of one is released"
        if client.images > 1:
            return f"reads clients of one image each, and here each has client.images={client.images}"
        return RoundUnrolling.refuses(client)

    def beyond(self, seen: Observation) -> str | None:
        """Return K (N + p) ≥ D with its numbers where it holds: the tokens of all clients are not told apart then."""
        vit, (height, width), K = seen.model.vit, seen.model.grid, seen.images_per_release
        p = vit.num_prefix_tokens
        count = K * (height * width + p)
        return None if count < vit.embed_dim else f"K·(N + {p}) = {count} ≥ D = {vit.embed_dim}"

    def __call__(self, seen: Observation) -> Reconstruction:
        """Reconstruct the images of the clients of each mean, in no order, and count the tokens that were found.

        Raises:
            PrivlabError: if the observation is no mean of updates that this attack reads, or attention depends on
                places.
        """
        client = seen.client
        if client is None or client.optimiser != "sgd" or self.refuses(client):
            found = "no client" if client is None else self.refuses(client) or f"client.optimiser={client.optimiser}"
            raise PrivlabError(f"{self.name} needs the mean of updates by SGD, of one image each. Found: {found}.")
        if first_block(seen.model).reads_places:
            raise PrivlabError(f"{self.name}: attention depends on places here, and needs to be told those of tokens.")
        usual = bundled(seen, draw_for(self.seed, self.name, "photographs"))
        found = [each for update in each_release(seen) for each in self._clients(seen, client, update, usual)]
        images = torch.stack([each.image for each in found]).to(seen.model.mean)
        return Reconstruction(images, **self.counts([each.tokens for each in found]))

    def _clients(
        self,
        seen: Observation,
        client: Client,
        update: Mapping[str, Float[Tensor, "..."]],
        usual: Float[Tensor, "i c h w"],
    ) -> list[_Found]:
        """Return the images of the clients of one mean."""
        K, rest = client.clients, undecayed(seen.model, update, client)
        rest = total = {name: K * u for name, u in rest.items()}
        found: list[_Found] = []
        while (left := K - len(found)) > 0:
            now = replace(seen, gradients={name: u[None] for name, u in rest.items()})
            if left == 1:
                of = [(self.alone(seen.model, client, rest), no_tokens(rest[FC1]))]
            else:
                of = self._candidates(now, client, left, usual)
            more: list[_Found] = []
            for guesses, tokens in of:
                best, off = self._run_again(seen, client, rest, guesses, left - len(more), tokens)
                if off < _TAKEN * _lack(rest, seen, left - len(more)):
                    more.append(best)
                    rest = _less(rest, best.share)
            found += more
            if not more:
                partly = [_Found(guesses[-1], -1, tokens, {}) for guesses, tokens in of]
                grey = _Found(torch.full(seen.model.image_shape, 0.5).to(seen.model.mean), -1, no_tokens(rest[FC1]), {})
                return self._again(seen, client, total, found) + (partly + [grey] * left)[:left]
        return self._again(seen, client, total, found)

    def _candidates(
        self, now: Observation, client: Client, left: int, usual: Float[Tensor, "i c h w"]
    ) -> list[tuple[list[Float[Tensor, "c h w"]], Separated]]:
        """Return guesses of each image that is left, those with the most tokens first, and their tokens."""
        model, block = now.model, first_block(now.model)
        prefix, pe = known_tokens(model)
        embedded = model.embed(usual).double()
        tokens = torch.cat([block.norm2(z + block.attention(z)) for z in embedded])
        each, most = len(prefix) + len(pe), int(_MOST_OF_WIDTH * model.vit.embed_dim)
        wanted = left * each
        counts = sorted({max(wanted, min(int(f * wanted), client.total_steps * wanted, most)) for f in _PRODUCTS})
        searches = [(count, near) for count in counts for near in (tokens, None)]
        own, count = no_tokens(now.gradients[FC1][0]), wanted
        for of, near in searches:
            new = self.tokens(block, now, 0, of, usual=near, most=wanted)
            if len(new.u) > len(own.u):
                own, count = new, of
            if len(own.u) == wanted:
                break
        if not len(own.u):
            return []
        Y = row_space(now.gradients[_PATCH_WEIGHT][0].flatten(1), left * len(pe))
        slots = Slots(Y.new_zeros(len(pe), Y.shape[1]), Y, pe, torch.zeros(len(pe), dtype=torch.bool, device=Y.device))
        linear = slots_of_tokens(model, block, slots, own.u, Reads.of(now, 0, block, count), left)
        parts = sorted(by_image(model, block, slots, linear, left), key=lambda part: -len(part.token))
        finest = min(client.total_steps * wanted, int(_FINEST * model.vit.embed_dim))
        finer = [*(n for f in _FINER if count < (n := int(f * wanted)) < finest), finest]
        return [
            self.complete(now, left, count, ImageTokens(own.u[part.token], part.slot), embedded, finer)
            for part in parts
        ]

    def _run_again(
        self,
        seen: Observation,
        client: Client,
        rest: Mapping[str, Float[Tensor, "..."]],
        guesses: Sequence[Float[Tensor, "c h w"]],
        left: int,
        tokens: Separated,
    ) -> tuple[_Found, float]:
        """Return the guess and its client's share, by the label that leaves the least, and how much that is."""
        tried: list[tuple[_Found, float]] = []
        for image in guesses:
            own = image[None].to(seen.model.mean)
            for label in labels_near(seen.model, client, rest[_HEAD], own[0], left * client.total_steps).tolist():
                share = undecayed(seen.model, update_on(seen.model, client, own, label), client)
                share = {name: share[name] for name in rest}
                tried.append((_Found(own[0], label, tokens, share), _lack(_less(rest, share), seen, left)))
        return min(tried, key=lambda each: each[1])

    def _again(
        self, seen: Observation, client: Client, total: Mapping[str, Float[Tensor, "..."]], found: list[_Found]
    ) -> list[_Found]:
        """Return the images, each solved for again from what the shares of all others leave, its rounding foreseen."""
        if len(found) < client.clients:
            return found
        exact, plain = copy.deepcopy(seen.model).double(), replace(client, sends="difference", sent_as="float32")
        for _ in range(_AGAIN):
            changed = False
            for i, old in enumerate(found):
                rest = total
                for other in found[:i] + found[i + 1 :]:
                    rest = _less(rest, other.share)
                unrounded = undecayed(exact, update_on(exact, plain, old.image[None].double(), old.label), client)
                foreseen = _less(rest, _less(old.share, unrounded))
                new, off = self._run_again(seen, client, rest, self.alone(seen.model, client, foreseen), 1, old.tokens)
                if off < _TAKEN * _lack(_less(rest, old.share), seen, 1):  # else it fits what is wrong of others
                    changed, found[i] = True, new
            if not changed:
                break
        return found


def _less(rest: Mapping[str, Tensor], share: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a share leaves."""
    return {name: u - share[name] for name, u in rest.items()}


def _lack(rest: Mapping[str, Tensor], seen: Observation, left: int) -> float:
    """Return what of ∂W one image fewer than are left cannot account for."""
    height, width = seen.model.grid
    return beyond_rank(rest[_PATCH_WEIGHT].flatten(1), (left - 1) * height * width)
