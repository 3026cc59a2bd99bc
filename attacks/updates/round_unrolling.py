"""`round-unrolling`: the images of a round of several steps, one by one: each step is made again and taken off."""

# Known are θ_0, the client's settings, and the update Σ_s a_s g_s of T steps of SGD with another image in each.
# Sought are the images in the order of the steps.
# 1. `_first` finds the tokens of the next image: the server knows the weights of its step, so that they agree with both
# ∂W_fc1 and ∂W_fc2. The tokens of later images belong to weights that are not known yet.
# 2. `complete` finds missing tokens, and then all patches, with the attention of the first block.
# 3. `labels_near` proposes labels, and `replay` makes the step again. The best image and label are kept.
# 4. What the steps so far moved is subtracted from the update, and the next image follows at the weights after them.
# The image of the last step solves Aᵀ X = G (`alone`).

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.rows import known_tokens
from privlab.attacks.solvers import patches_of_levels, rounding_of_embedding, slot_rows, token_count, weighted_patches
from privlab.attacks.tokens import (
    FC1,
    FC2,
    PROJ,
    QKV,
    Embeddings,
    ImageTokens,
    Mlp,
    Reads,
    Separated,
    Spans,
    TokenSearch,
    complete_tokens,
    mirrored,
    outside,
    projection,
    row_space,
    settle,
    sharpen_coordinates,
    slots_by_law,
    tokens_of,
)
from privlab.base import AtLeast0, AtLeast1, Fraction, PrivlabError, draw_for
from privlab.release import Update, each_release, replay
from privlab.threat import Capability, Client, Observation, Reconstruction
from privlab.victims import VictimModel, first_block

_PE, _PATCH_WEIGHT, _HEAD = "pos_embed", "patch_embed.proj.weight", "head.weight"

_LABELS, _AS_NEAR = 3, 10.0
"""Classes that are tried for an image: the most, and how many times as far from the columns of the head's update as the
nearest one they may be."""

_CERTAIN = 0.25  # grey levels by which pixels may be off where their rounding is beyond doubt

_SHARPENINGS = 3
"""Runs of the Gauss-Newton method within what the spans tell, and then without ∂W_qkv's, each from where the last one
ended: it stops where a step gains little."""


@dataclass(frozen=True)
class RoundUnrolling(TokenSearch):
    """Recover the images of a round of SGD with batches of one, step by step.

    Idea: A client takes several steps with another image in each, and releases the sum of what they moved. The first
    step was made at weights that the server knows, so only the first image's tokens agree with both matrices of the
    MLP. The attack finds that image, makes the step again, takes it off, and goes on at the next weights.

    Steps: tokens of the first step → its image, by attention → make the step again, take it off

    Algorithm: The update is Σ_s a_s g_s over the steps s, each at its own weights; the server knows the first.

    1. The tokens u_n of the first image lie in the row space of what ∂W_fc1 sums over all steps, and their h_n, at θ_0,
       in that of ∂W_fc2: they are separated as in `token-separation`. Those of later images are not found.
    2. Position embeddings give the slots of the tokens (`slots_by_law`). Attention, evaluated on what is found, gives
       embedded patches z from tokens; a missing token is searched for as a function of its z, which has few
       unknowns: x lies in the row space of ∂W, and γ₁ ⊙ z in that of ∂W_qkv (`complete_tokens`).
    3. All patches of the image are solved by the Gauss-Newton method, and rounded to grey levels.
    4. The label is that of the classes whose ∂ℓ/∂logits lies nearest the columns of the head's update with which the
       step, made again (`replay`), leaves the least of ∂W_fc1 beyond the rank that later tokens need.
    5. That share is taken off, and the search goes on at the weights after the step. The image of a step that is left
       alone solves Aᵀ X = G, as in `patch-update`.

    In later passes the images are known already. All images after one whose tokens are not found are grey.

    Exact if: T (N + p) < D for rounds of T steps of SGD with one image in each, N patches and p prefix tokens, the
    images have 256 grey levels, and every token of an image is found.

    Fails if: a token of an image is missed: it ends there. The images must be like photographs, because their
    statistics decide to which slot a token belongs.

    Cost: 6 to 21 s an image for 68 to 74 tokens of 192, 69 s for 148 (ViT-Ti, 64 and 96 pixels, a busy core).

    Studies: rounds

    Args:
        passes: passes over the missing tokens that may find nothing.
        levels: grey levels above black of a stored image, 255 for eight bits; 0 for images without.

    Source: ours; the sums are the chain rule at the first block.
    """

    name: ClassVar[str] = "round-unrolling"
    paper: ClassVar[str] = "ours: token separation at the first step's weights, which is then made again"
    order: ClassVar[int] = 130
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {
            *(Capability.KNOWS_WEIGHTS, Capability.PLAIN_BLOCK, Capability.LEARNABLE_PE_GRADIENT),
            *(Capability.CLIENT_UPDATE, Capability.CLASS_LABELS),
        }
    )
    parameters: ClassVar[tuple[str, ...]] = (FC1, FC2, QKV, PROJ, _PATCH_WEIGHT, _PE, _HEAD)
    updates_of: ClassVar[tuple[str, ...]] = ("sgd",)
    stands_in_for: ClassVar[tuple[str, ...]] = ("patch-update", "token-separation")

    tolerance: Fraction = 0.001
    sharpen: AtLeast0 = 12
    inner: AtLeast1 = 40
    passes: AtLeast0 = 3
    levels: AtLeast0 = 255

    @staticmethod
    def refuses(client: Client) -> str | None:
        """Return why a round is not read: its batches, or what is private or rounded in its steps."""
        if (client.batch_size > 1 and client.images > 1) or client.accumulation > 1:
            each = min(client.batch_size, client.images) * client.accumulation
            return f"reads rounds with one image in each step, and here a step has up to {each}"
        if client.dropout or client.drop_path:
            return "makes the steps of a round again, and here their dropout is private"
        if client.autocast != "float32":
            return f"needs tokens in float32, and here they are in {client.autocast}"
        return None

    def beyond(self, seen: Observation) -> str | None:
        """Return T (N + p) ≥ D with its numbers where it holds: the tokens of all steps are not separated then."""
        vit, steps = seen.model.vit, 1 if seen.client is None else seen.client.total_steps
        p, count = vit.num_prefix_tokens, steps * token_count(seen.model)
        return None if count < vit.embed_dim else f"T·(N + {p}) = {count} ≥ D = {vit.embed_dim}"

    def __call__(self, seen: Observation) -> Reconstruction:
        """Reconstruct the images of each client, in the order of its steps, and count the tokens that were found.

        Raises:
            PrivlabError: if this attack does not read such updates, or attention depends on places.
        """
        client = self.client_of(seen, "the update of a round of SGD with batches of one")
        # The tokens of photographs decide which slot a token belongs to. Their order is drawn once, for all clients.
        usual = bundled(seen, draw_for(self.seed, self.name, "photographs"))
        found = [each for update in each_release(seen) for each in self._round(seen, client, update, usual)]
        images, tokens = zip(*found, strict=True)
        return Reconstruction(torch.stack(images).to(seen.model.mean), **self.counts(tokens))

    def client_of(self, seen: Observation, needed: str) -> Client:
        """Return the client of an observation that this attack can read; `needed` says what it reads."""
        client = seen.client
        if client is None or client.optimiser != "sgd" or self.refuses(client):
            found = "no client" if client is None else self.refuses(client) or f"client.optimiser={client.optimiser}"
            raise PrivlabError(f"{self.name} needs {needed}. Found: {found}.")
        if first_block(seen.model).reads_places:
            raise PrivlabError(f"{self.name}: attention depends on places here, and needs those of tokens.")
        return client

    def _round(
        self, seen: Observation, client: Client, update: Update, usual: Float[Tensor, "i c h w"]
    ) -> list[tuple[Float[Tensor, "c h w"], Separated]]:
        """Return the images of one client, grey where they are not found, each with its tokens."""
        found: list[tuple[Tensor, Separated]] = []
        images, labels = seen.model.mean.new_zeros(0, *seen.model.image_shape), torch.zeros(0, dtype=torch.long)
        # Without any image this is θ_0, and the update is that of weight decay alone.
        done = replay(seen.model, client, images, labels)
        for step in range(min(client.images, client.total_steps)):
            # `rest` is what the gradients of the steps that are left moved. It is read at
            # the weights after the steps so far.
            left = client.total_steps - step
            rest = {name: u.double() - done.update[name].double() for name, u in update.items()}
            now = replace(seen, model=done.model, gradients={name: u[None] for name, u in rest.items()})
            # Of a single step, rest = a g has one image, so that the system of `patch-update`
            # gives it without a search for tokens.
            if left == 1:
                guesses, own = self.alone(done.model, client, rest, update), no_tokens(rest[FC1])
            else:
                guesses, own = self._first(now, left, usual)
            # All N + p tokens are needed: a wrong image would put wrong weights under all later steps. What was found
            # of this one is returned, and the search ends.
            whole = left == 1 or len(own.u) == own.wanted
            if not whole or not guesses:
                found += [(each, own) for each in guesses[-1:]]
                break
            # Every guess is tried with every label that the head allows: the steps so far and
            # this one are made again from θ_0.
            best = torch.inf
            chosen = (images, labels, done)
            for image in guesses:
                for label in labels_near(done.model, client, rest[_HEAD], image, left):
                    tried = torch.cat([images, image[None].to(images)]), torch.cat([labels, label[None]])
                    after = replay(seen.model, client, *tried)
                    # The true image and label leave a sum of (left − 1) (N + p) products in ∂W_fc1, and so
                    # nothing beyond that rank.
                    off = beyond_rank(update[FC1].double() - after.update[FC1].double(), (left - 1) * own.wanted)
                    if off < best:
                        best, chosen = off, (*tried, after)
            images, labels, done = chosen
            found.append((images[-1], own))
        # Images after the last one that was found are grey.
        grey = torch.full(seen.model.image_shape, 0.5).to(seen.model.mean)
        return found + [(grey, no_tokens(update[FC1])._replace(wanted=1))] * (client.images - len(found))

    def alone(
        self, model: VictimModel, client: Client, rest: Update, sent: Update | None = None
    ) -> list[Float[Tensor, "c h w"]]:
        """Return guesses of the image of a step that is left alone, from what it moved.

        Args:
            model: the model with the weights of that step.
            client: the public settings.
            rest: what the step moved of the embedding.
            sent: the update that was released, of this step and others; None where it contains this step alone.
        """
        # As in `patch-update`: Aᵀ X = G with A (N × D) and G (D × K), weighed by the rounding of one step. Rounding of
        # more steps, as `client-unrolling` leaves, multiplies nearly all deviations by one number, which cancels: it
        # moved images by less than 0.002 dB after five steps, in float32, bf16 and int8.
        deviations = rounding_of_embedding(model, replace(client, steps=1, epochs=None), rest, sent)
        A, dA = (slot_rows(model, of[_PE].double()) for of in (rest, deviations))
        G, dG = (of[_PATCH_WEIGHT].flatten(1).double() for of in (rest, deviations))
        X = weighted_patches(A, G, dA, dG)
        # Grey levels need N < D, where the equations determine each patch.
        if not self.levels or A.shape[0] >= A.shape[1]:
            return [model.to_images(X[None])[0]]
        # The second solve rounds patch after patch to grey levels. It has one weight for each of the D equations: the
        # inverse of the mean over K of Var G_dk + Σ_n Var A_nd x_nk².
        variance = (dG.square() + dA.square().mT @ X.square()).mean(1)
        levels = patches_of_levels(model, A, G, 1 / variance, self.levels)
        return self._guesses(*model.to_images(torch.stack([X, levels])))

    def _guesses(self, image: Float[Tensor, "c h w"], near: Float[Tensor, "c h w"]) -> list[Float[Tensor, "c h w"]]:
        """Return the grey levels of `near`, and the image itself where it is not that near to them."""
        if not self.levels:
            return [image]
        rounded = (near * self.levels).round() / self.levels
        # Where all pixels are within a quarter of a level, rounding is beyond doubt. Else
        # the unrounded image is a guess too.
        certain = bool(((image - rounded).abs() < _CERTAIN / self.levels).all())
        return [rounded] if certain else [rounded, image]

    def _first(
        self, seen: Observation, left: int, usual: Float[Tensor, "i c h w"]
    ) -> tuple[list[Float[Tensor, "c h w"]], Separated]:
        """Return guesses of the image of the first of the steps that are left, and its tokens."""
        model, block = seen.model, first_block(seen.model)
        prefix, pe = known_tokens(model)
        each = len(prefix) + len(pe)
        # The spans hold the products of all steps that are left, left · (N + p), but only the tokens of this step
        # satisfy both matrices at these weights. So at most N + p are sought.
        own = self.tokens(block, seen, [0], left * each, most=each)[0]
        if not len(own.u):
            return [], own._replace(wanted=each)
        # Position embeddings and the statistics of photographs assign the tokens to slots.
        z = model.embed(usual).double()
        return self.complete(seen, left, left * each, slots_by_law(Mlp.of(block), own.u, tokens_of(block, z)), z)

    def complete(
        self,
        seen: Observation,
        images: int,
        count: int,
        tokens: ImageTokens,
        embedded: Float[Tensor, "i t d"],
        finer: Sequence[int] = (),
    ) -> tuple[list[Float[Tensor, "c h w"]], Separated]:
        """Return guesses of an image of a release from some of its tokens, and all its tokens that were found.

        Args:
            seen: what is left of one release, at the weights of these tokens.
            images: images that the release sums over.
            count: products that the gradients of the first block are taken to sum over.
            tokens: tokens of the image, and their places.
            embedded: embedded tokens of photographs.
            finer: larger counts, from the least on, with which the tokens are refined once they are found.
        """
        model, block = seen.model, first_block(seen.model)
        # Every patch lies in the row space Y (m × K) of ∂W = Σ_n g_n x_nᵀ, and γ₁ ⊙ z in what ∂W_qkv, γ₁ and β₁ span:
        # both together leave each embedded patch few unknowns c, z_n = base_n + Q c_n.
        (prefix, pe), W = known_tokens(model), projection(model)
        Y = row_space(seen.gradients[_PATCH_WEIGHT][0].flatten(1), images * len(pe))
        of = Embeddings.of(Reads.of(seen, 0, block, max(count, *finer, 0)), Y, pe)
        G1, G2 = seen.gradients[FC1][0], seen.gradients[FC2][0]
        # Missing tokens are searched for as functions of their c: u must lie in the row space
        # of ∂W_fc1, and h in that of ∂W_fc2.
        mlp, whole = Mlp.of(block), Spans.of(G1, G2, count)
        tokens, z = complete_tokens(
            model,
            block,
            of,
            whole,
            (G1, G2),
            tokens,
            embedded[:, len(prefix) :],
            steps=self.steps,
            tolerance=self.tolerance,
            passes=self.passes,
        )
        # A span of few directions cuts something off a token. From the token found, the search goes on in larger spans,
        # and the result is kept where it leaves less outside of them.
        for more in finer:
            whole = Spans.of(G1, G2, more)
            α = settle(mlp, whole, tokens.u @ whole.u.mT, self.steps)
            better = outside(mlp, whole, α) < outside(mlp, whole, tokens.u @ whole.u.mT)
            tokens = tokens._replace(u=torch.where(better[:, None], α @ whole.u, tokens.u))
        # The rounding of ∂W_qkv limits the precision of Q. So the last runs are without it:
        # z = W x + b + e with x in Y alone.
        free = Embeddings(W[1] + pe, torch.linalg.qr((Y @ W[0].mT).mT).Q)
        # Gauss-Newton steps on all c at once, so that the tokens which attention makes of all
        # patches are those that were found.
        for space in [of] * _SHARPENINGS + [free] * _SHARPENINGS:
            args = (prefix, block, space.base, space.Q.mT, tokens.u, tokens.place, [(z - space.base) @ space.Q])
            z = space.base + sharpen_coordinates(*args, self.sharpen, self.inner) @ space.Q.mT
        # Last, W Yᵀ c_n = z_n − b − e_n is solved for c_n by least squares, and x_n = Yᵀ c_n (N × K in all).
        X = torch.linalg.lstsq(W[0] @ Y.mT, (z - W[1] - pe).mT).solution.mT @ Y
        image = model.to_images(X[None])[0]
        wanted = len(prefix) + len(pe)
        return self._guesses(image, image), Separated(tokens.u, outside(mlp, whole, tokens.u @ whole.u.mT), wanted)


def no_tokens(G: Tensor) -> Separated:
    """Return that no token was sought."""
    return Separated(G.new_zeros(0, G.shape[1]), G.new_zeros(0), 0)


def bundled(seen: Observation, draw: torch.Generator) -> Float[Tensor, "i c h w"]:
    """Return the bundled photographs and their mirror images, shuffled."""
    images = mirrored(seen)
    return images[torch.randperm(len(images), generator=draw).to(images.device)]


def labels_near(
    model: VictimModel, client: Client, H: Float[Tensor, "y d"], image: Float[Tensor, "c h w"], left: int
) -> Int[Tensor, " l"]:
    """Return the classes whose r = ∂ℓ/∂logits lies nearest the columns of H = Σ_s r_s f_sᵀ; all, if these span all.

    Args:
        model: the model with the weights of the image's step.
        client: the public settings.
        H: the update of the head's weight.
        image: the image, in [0, 1].
        left: the number of products that H is a sum of.
    """
    classes = len(H)
    # r_s sums to zero over the C classes, so that C − 1 products span all that any r can be.
    if left >= classes - 1:
        return torch.arange(classes)
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(image[None].double())
    # Row y of r (C × C) is ∂ℓ/∂logits = softmax − (1 − s) 1_y − s / C for the label y, with label smoothing s.
    smooth = client.label_smoothing
    r = logits.softmax(1) - (1 - smooth) * torch.eye(classes).to(logits) - smooth / classes
    # The columns of H lie in the span of the r_s. The distance of each r from that span is relative to its length,
    # because small r, of labels that the model predicts, would be near to any span.
    U = torch.linalg.svd(H.double(), full_matrices=False).U[:, :left]
    off = ((r - r @ U @ U.mT).norm(dim=1) / r.norm(dim=1)).cpu()
    near = off.argsort()[:_LABELS]
    return near[off[near] <= _AS_NEAR * off[near[0]]]


def beyond_rank(G: Float[Tensor, "m d"], rank: int) -> float:
    """Return what G has beyond its largest `rank` singular values: zero for a sum of as many products."""
    return float(torch.linalg.svdvals(G)[rank:].norm())
