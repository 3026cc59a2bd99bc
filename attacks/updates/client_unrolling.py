"""`client-unrolling`: the images of several clients from the mean of their updates; each client is run again."""

# Known are θ_0, the clients' settings, and the mean of the updates of K clients, each after several steps
# of SGD on one image. Sought are the K images.
# 1. `_candidates` finds tokens of all images at θ_0, from which all clients start, and sorts them into images.
# 2. `complete` (of `round-unrolling`) finds missing tokens and the patches of each.
# 3. `_run_again` trains a client on each image with each likely label. What it moved is subtracted from the sum.
# 4. The last image solves Aᵀ X = G, and `_again` solves for each of the others in the same
# way, from what all other shares leave.

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.rows import known_tokens
from privlab.attacks.solvers import token_count
from privlab.attacks.tokens import (
    FC1,
    ImageTokens,
    Reads,
    Separated,
    Slots,
    by_image,
    row_space,
    slots_of_tokens,
    tokens_of,
)
from privlab.attacks.updates.round_unrolling import RoundUnrolling, beyond_rank, bundled, labels_near, no_tokens
from privlab.base import AtLeast1, Fraction, draw_for
from privlab.release import Update, each_release, undecayed, update_on
from privlab.threat import Capability, Client, Observation, Reconstruction
from privlab.victims import first_block

_PE, _PATCH_WEIGHT, _HEAD = "pos_embed", "patch_embed.proj.weight", "head.weight"

_PRODUCTS = (1.5, 2.0)
"""Products that the gradients of the first block are taken to sum over, in tokens of the first step."""

_MOST_OF_WIDTH = 2 / 3
"""Most of these products, relative to the width: the search finds few tokens above (docs/studies/rounds.md)."""

_FINER, _FINEST = (1.5, 2.0, 3.0, 4.0), 0.9
"""Products, in tokens of the first step, and the most, relative to the width, in whose row spaces tokens are refined
once they are found: the more products, the less of a token is cut off, and the nearer a start must be."""

_TAKEN = 0.1
"""An image is taken for a client's if it leaves less than this share of what other images cannot account for."""

_AGAIN = 3  # the most times that each image is solved for again, from what the others leave


class _Found(NamedTuple):
    """An image, its label and tokens, and what its client moved, by parameter name."""

    image: Float[Tensor, "c h w"]
    label: int
    tokens: Separated
    share: Update


@dataclass(frozen=True)
class ClientUnrolling(RoundUnrolling):
    """Recover the images of K clients, one each, from the mean of their updates after any number of steps.

    Idea: Several clients take several steps each on one image, and the server sees the mean alone. All of
    them start at weights that the server knows, so the tokens of all first steps agree with both matrices of the MLP.
    The attack sorts them into images, runs the client of each again, and takes it off.

    Steps: tokens of all first steps → sort into images, by attention → run each client again, take it off

    Algorithm: One client is read too where its position embeddings are frozen, so that `patch-update` has no equations.

    The sum is Σ_k Σ_s a_s g(θ_k,s; x_k), with θ_k,0 = θ_0 for all: each client drifts on its own.

    1. The tokens of all first steps are at known weights, and lie in the row spaces of the sums ∂W_fc1 and ∂W_fc2 over
       all steps. Later steps add few directions above rounding: 1.5 and 2 times as many as tokens are tried.
    2. Attention shows which tokens belong to one image, and position embeddings their slots, as in `token-separation`.
       Missing tokens, and then all patches, are found as in `round-unrolling`. The patches lie in the row space of ∂W,
       which has K N directions however many steps there were, since an image stays the same in all of them.
    3. A client is run again on each image, with the classes that the head's update allows. The image is taken if its
       share leaves nothing of ∂W beyond the rank of the images that are left; its share is taken off.
    4. The last image solves Aᵀ X = G, as in `patch-update`. So does each other one again, once the shares of all others
       are taken off: that undoes what later steps added to its tokens. Where position embeddings are frozen A is not
       released, and the images are those of steps 1 to 3. What is not found of an image stays grey.

    Exact if: K (N + p) < D for K clients of one image each after several steps of SGD, N patches and p prefix tokens,
    the images have 256 grey levels, and every token of one image, then of the next, is found.

    Fails if: drift costs tokens: at a rate of 0.001 two images of 96 pixels were not found after two steps, where 0.01
    and 0.1 gave both. It ends when it finds none of the images that are left.

    Cost: 10 to 60 s for two images (ViT-Ti, 64 and 96 pixels, a busy core).

    Example: privlab attack --model cifar_vit --attack client-unrolling --img-size 16 --client sgd --set
    client.clients=2

    Studies: clients, rounds

    Source: ours; the sums are the chain rule at the first block.
    """

    name: ClassVar[str] = "client-unrolling"
    paper: ClassVar[str] = "ours: token separation at the weights that all clients start from, each of them run again"
    order: ClassVar[int] = 140
    short: ClassVar[Mapping[str, Any]] = {"starts": 4, "rounds": 2, "passes": 0}
    requires: ClassVar[frozenset[Capability]] = RoundUnrolling.requires - {Capability.LEARNABLE_PE_GRADIENT}
    parameters: ClassVar[tuple[str, ...]] = tuple(name for name in RoundUnrolling.parameters if name != _PE)
    if_released: ClassVar[tuple[str, ...]] = (_PE,)
    stands_in_for: ClassVar[tuple[str, ...]] = ()
    reads_means: ClassVar[bool] = True
    at_full: ClassVar[Mapping[str, int]] = {"starts": 192, "rounds": 120}

    starts: AtLeast1 = 96
    tolerance: Fraction = 0.01

    @staticmethod
    def refuses(client: Client) -> str | None:
        """Return why the updates are not read: one client is read better, or steps hold what is private or rounded."""
        if client.clients == 1 and client.chooses(_PE):
            return "reads the mean of several clients, and here the update of one is released"
        if client.clients == 1 and client.total_steps == 1:
            return "reads several steps of one client, and here it took one, which is a gradient"
        if client.images > 1:
            return f"reads clients of one image each, and here each has client.images={client.images}"
        return RoundUnrolling.refuses(client)

    def beyond(self, seen: Observation) -> str | None:
        """Return K (N + p) ≥ D with its numbers where it holds: the tokens of all clients are not separated then."""
        vit, count = seen.model.vit, seen.images_per_release * token_count(seen.model)
        p = vit.num_prefix_tokens
        return None if count < vit.embed_dim else f"K·(N + {p}) = {count} ≥ D = {vit.embed_dim}"

    def __call__(self, seen: Observation) -> Reconstruction:
        """Reconstruct the images of the clients of each mean, in no order, and count the tokens that were found.

        Raises:
            PrivlabError: if the observation is not a mean of updates that this attack reads, or attention reads places.
        """
        client = self.client_of(seen, "the mean of updates by SGD, of one image each")
        # Photographs, their tokens and their statistics serve all releases.
        usual = bundled(seen, draw_for(self.seed, self.name, "photographs"))
        found = [each for update in each_release(seen) for each in self._clients(seen, client, update, usual)]
        images = torch.stack([each.image for each in found]).to(seen.model.mean)
        return Reconstruction(images, **self.counts([each.tokens for each in found]))

    def _clients(
        self, seen: Observation, client: Client, update: Update, usual: Float[Tensor, "i c h w"]
    ) -> list[_Found]:
        """Return the images of the clients of one mean."""
        # K times the mean is the sum Σ_k Σ_s a_s g(θ_k,s; x_k), with decay undone.
        K, rest = client.clients, undecayed(seen.model, update, client)
        rest = total = {name: K * u for name, u in rest.items()}
        found: list[_Found] = []
        while (left := K - len(found)) > 0:
            now = replace(seen, gradients={name: u[None] for name, u in rest.items()})
            # One image alone gives A and G of the same image, whatever number of steps there were, and needs no tokens.
            if left == 1 and _PE in rest:
                of = [(self.alone(seen.model, client, rest), no_tokens(rest[FC1]))]
            else:
                of = self._candidates(now, client, left, usual)
            more: list[_Found] = []
            # A true image's share takes N of the ranks of ∂W. What is left beyond (left − 1) N then almost vanishes.
            for guesses, tokens in of:
                best, off = self._run_again(seen, client, rest, guesses, left - len(more), tokens)
                if off < _TAKEN * _lack(rest, seen, left - len(more)):
                    more.append(best)
                    rest = _less(rest, best.share)
            found += more
            # If no image of this pass is taken, the search ends: partly found images are
            # returned, and grey for the rest.
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
        # What photographs feed to the MLP is where half of the searches for tokens start.
        embedded = model.embed(usual).double()
        tokens = tokens_of(block, embedded).flatten(0, 1)
        # There are left · (N + p) tokens. Later steps add products with nearly the same tokens, so that the row spaces
        # have a few more directions: 1.5 and 2 times as many are tried, but no more than there are products.
        each, most = len(prefix) + len(pe), int(_MOST_OF_WIDTH * model.vit.embed_dim)
        wanted = left * each
        counts = sorted({max(wanted, min(int(f * wanted), client.total_steps * wanted, most)) for f in _PRODUCTS})
        searches = [(count, near) for count in counts for near in (tokens, None)]
        own, count = no_tokens(now.gradients[FC1][0]), wanted
        # Each number of directions is tried with photographs' tokens and without. The
        # search with the most tokens counts.
        for of, near in searches:
            new = self.tokens(block, now, [0], of, usual=near, most=wanted)[0]
            if len(new.u) > len(own.u):
                own, count = new, of
            if len(own.u) == wanted:
                break
        if not len(own.u):
            return []
        # An image stays the same in all steps, so that ∂W has the rank left · N: every
        # patch is x = Yᵀ c, with nothing known.
        Y = row_space(now.gradients[_PATCH_WEIGHT][0].flatten(1), left * len(pe))
        slots = Slots(Y.new_zeros(len(pe), Y.shape[1]), Y, pe, torch.zeros(len(pe), dtype=torch.bool, device=Y.device))
        # Position embeddings show the slot of each token, and attention which tokens belong to one image. An image with
        # many tokens comes first, because it is the most likely to be completed.
        linear = slots_of_tokens(slots, own.u, Reads.of(now, 0, block, count), left)
        parts = sorted(by_image(model, block, slots, linear, left), key=lambda part: -len(part.token))
        # `complete` refines the tokens found in larger and larger row spaces: rounding cuts less of them off there.
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
        rest: Update,
        guesses: Sequence[Float[Tensor, "c h w"]],
        left: int,
        tokens: Separated,
    ) -> tuple[_Found, float]:
        """Return the guess and its client's share, by the label that leaves the least, and how much that is."""
        tried: list[tuple[_Found, float]] = []
        # The client is trained on each guess with each label that the head's update allows. Its update is
        # the share, without decay as the sum is.
        for image in guesses:
            own = image[None].to(seen.model.mean)
            for label in labels_near(seen.model, client, rest[_HEAD], own[0], left * client.total_steps).tolist():
                share = undecayed(seen.model, update_on(seen.model, client, own, label), client)
                share = {name: share[name] for name in rest}
                # The true one leaves ∂W of the least norm beyond the rank of the images that are left.
                tried.append((_Found(own[0], label, tokens, share), _lack(_less(rest, share), seen, left)))
        return min(tried, key=lambda each: each[1])

    def _again(self, seen: Observation, client: Client, total: Update, found: list[_Found]) -> list[_Found]:
        """Return the images, each solved for again from what the shares of all others leave, its rounding foreseen."""
        # If an image is missing, no rest is the update of one client alone.
        if len(found) < client.clients or _PE not in total:
            return found
        # A client in float64 whose difference is sent in full has no rounding: the difference of both is the rounding.
        exact, plain = copy.deepcopy(seen.model).double(), replace(client, sends="difference", sent_as="float32")
        for _ in range(_AGAIN):
            changed = False
            for i, old in enumerate(found):
                # What the shares of all others leave is the update of this client, up to the errors of the others.
                rest = total
                for other in found[:i] + found[i + 1 :]:
                    rest = _less(rest, other.share)
                # The rounding of this client, as training on the old image has it, is
                # subtracted before Aᵀ X = G is solved.
                unrounded = undecayed(exact, update_on(exact, plain, old.image[None].double(), old.label), client)
                foreseen = _less(rest, _less(old.share, unrounded))
                new, off = self._run_again(seen, client, rest, self.alone(seen.model, client, foreseen), 1, old.tokens)
                # The new image replaces the old one only if it explains far more. The others
                # are then solved for again too.
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
    return beyond_rank(rest[_PATCH_WEIGHT].flatten(1), (left - 1) * seen.model.vit.patch_embed.num_patches)
