"""`token-bins`: each patch of a large batch, from neurons that fire for one slot above one brightness or colour."""

# `Plan` (token_plan.py) lays out the channels of a token and the bins of each slot; `choose` writes them into the
# weights. Then, from the gradients of the MLPs' first layers:
# 1. `_bins` takes differences of adjacent neurons: each is the sum over the tokens of one slot in one bin.
# 2. `_separate` divides bins of one token by their bias, and takes found tokens out of the bins of other quantities.
# 3. `_images` sorts the tokens of all slots into images, by the loss gradient that the tokens of an image share.
#    Tokens of masked patches (MJP) have one place together, and borders show their slots.

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.dishonest.layout import (
    adam_inverted,
    has_class_token,
    last_reads_mean,
    more_than_a_step,
    pass_through,
)
from privlab.attacks.dishonest.token_plan import RESERVED, Bins, Plan, widths
from privlab.attacks.tokens import place_patches
from privlab.base import PrivlabError
from privlab.patches import permute, unpatchify
from privlab.threat import Capability, Client, Observation, Reconstruction
from privlab.victims import VictimModel

_KINDS = ("weight", "bias")

_NOTHING = 1e-4
"""The share of the largest Σ δ of a slot below which a bin is empty."""

_NORM = 1e-4
"""How far the mean square of a token may be off. Rounding stays below 1e-5, and mixtures of photographs above 1e-3."""

_MISFIT = 1e-3
"""How far the known channels of a token may be off."""

_INSIDE = 0.999
"""The share of a token in a bin from which on it is taken to be in no other bin of this coefficient."""

_STARTS, _FEW = 500, 8
"""The starts from which lost coefficients are sought, where no more than so many are lost; else one start."""

_START_SIZE = 10.0
"""The standard deviation of the coefficients at a start, in grey levels."""

_ROUNDS = 15
"""The rounds from each start."""

_WHOLE = 0.02
"""The root mean square distance of pixels from whole grey levels, in levels, below which they are whole."""

_EQUAL = 1e-7
"""The mean squared difference of two tokens that are one."""


def _token_gain(plan: Plan, images: int, client: Client | None) -> float:
    """Return Γ, with which gradients are far above the rounding of the weights, and of Adam as large as its ε."""
    if client is None or client.optimiser == "sgd":
        return 1 / plan.forward
    # The δ of a token is about 0.1 / (N B) of the weight of the MLPs' output, and an entry of u at most √D.
    delta = 0.1 * plan.forward / (plan.slots * images)
    return client.eps / (delta * math.sqrt(plan.model.vit.embed_dim))


def _obstacle(model: VictimModel) -> str | None:
    """Return why the weights cannot be chosen for a model, or None."""
    vit = model.vit
    if not has_class_token(model):
        return "it needs a class token that one head reads, and position embeddings"
    if vit.num_classes < 2:
        return f"it needs at least 2 classes, and the model has {vit.num_classes}"
    if (found := sum(widths(model))) < vit.patch_embed.num_patches:
        return f"it needs a neuron for each patch before the last block. Found {found}"
    return None


@dataclass(frozen=True)
class TokenBins:
    """Choose weights by which each neuron of the MLPs sees one slot and one interval of brightness, and divide.

    Idea: The server writes into each token a code of its slot, and passes it unchanged through all blocks. Each neuron
    fires for one slot, above one value of brightness or colour, so that two adjacent neurons differ by the tokens in
    between. A bin with a single token gives it back exactly, by one division, and tokens of other bins follow from it.

    Steps: differences of adjacent neurons → divide bins of one token, take it from others → sort tokens into images

    Algorithm: A token is z = (C, 0, C s_n, T y) with a point s_n of a sphere for its slot, the pixels y of its patch
    and the first D − 5 rows T of an orthonormal cosine transform. Attention and the output of the MLPs are 0 (or 1e-14)
    in all blocks but the last, so every block reads the same u = LN(z). Neuron i of slot n has the pre-activation
    α (q − τ_i − G (1 − s_n·s)) / σ, where q is one coefficient of T y. Its gradient is the sum
    of δ u over the tokens of slot n with q > τ_i, and that of its bias the sum of δ.

    1. ΔW and Δb of adjacent neurons are sums over one bin. If it holds one token, ΔW / Δb = u. Mixtures of different
       tokens are known by their norm: LayerNorm's is √D, and a mean of vectors of one norm has another one.
    2. The five known channels of u give LayerNorm's mean and deviation, and so z and y. A token that is found is taken
       from the bins of all coefficients, and others are then alone.
    3. The last block's attention takes the mean of all tokens, and the head has classes of opposite sign. So
       δ = ρ (v_0 − mean v − u_0 (u·v) / D) / σ with one ρ for each image, by which the tokens are sorted into images.

    The bound: (L − 1) 4D neurons separate at most as many tokens, B N ≤ 4 D (L − 1) for B images of N patches: 172
    images of 224 pixels for ViT-B. A patch has K pixel values, and a token D − 5 channels for them.

    4. Tokens of masked patches (MJP) share one more place, which the bias of the embedding gives, with 35 % of the
    neurons. Their ρ shows the image, and borders show the slot.

    5. For K > D − 5 the coefficients of the highest frequencies and of colour have no channel. They are those that make
    all pixels of the patch whole grey levels, where few are lost.

    6. A further factor Γ in LayerNorm, which the neurons divide by, makes the update of an SGD client exact too. For a
    client of Adam it makes gradients as small as ε, and the first step is inverted: g = ε r / (1 − |r|), r = −Δ / η.

    Exact if: K ≤ D − 5, and no two tokens of a slot share all their bins. With K > D − 5 some or all high frequencies
    are lost.

    Fails if: a client takes more than one step, or a defense changes the release. It needs a class token, position
    embeddings and two blocks.

    Cost: 7 s for 32 images of 224 pixels, given the gradient (ViT-B, a busy core).

    Studies: dishonest_server

    Example: privlab attack --model cifar_vit --attack token-bins --gradient-batch 2 --limit 2

    Source: bins of Robbing the Fed, for tokens of a transformer. [@fowl2022robbing]
    """

    name: ClassVar[str] = "token-bins"
    paper: ClassVar[str] = "bins as in Robbing the Fed (Fowl et al. 2022), for the tokens of a ViT"
    named_only: ClassVar[bool] = True
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.KNOWS_WEIGHTS, Capability.CHOOSES_WEIGHTS, Capability.PLAIN_BLOCK, Capability.LEARNABLE_PE_GRADIENT}
    )
    parameters: ClassVar[tuple[str, ...]] = ("*",)
    knows: ClassVar[frozenset[str]] = frozenset({"mjp"})
    places: ClassVar[bool] = True  # masked patches are put in order
    updates_of: ClassVar[tuple[str, ...]] = ("adam", "adamw")

    @staticmethod
    def refuses(client: Client) -> str | None:
        """Return why a client of Adam does not release a gradient."""
        return more_than_a_step(client)

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition on the width or on the number of tokens that does not hold, with its numbers."""
        vit, plan = seen.model.vit, Plan(seen.model)
        K, room, most = plan.transform.shape[1], vit.embed_dim - RESERVED, sum(map(len, plan.neurons))
        if room < K:
            return f"K = {K} > D - {RESERVED} = {room}"
        tokens = seen.images_per_release * plan.slots
        return None if tokens <= most else f"{tokens} tokens > {most} neurons"

    def choose(self, model: VictimModel, images: int, client: Client | None) -> dict[str, Tensor]:
        """Return the weights, from the architecture and the normalisation of the pixels alone.

        Args:
            model: the honest model, of which only shapes and the normalisation are read.
            images: B, the images of a release; of clients with Adam, the size of gradients follows from it.
            client: the settings of the clients, of which the optimiser and ε are read; None for gradients.

        Raises:
            PrivlabError: if the architecture has no place for the bins.
        """
        if (why := _obstacle(model)) is not None:
            raise PrivlabError(f"Attack '{self.name}' cannot choose weights for this model: {why}.")
        vit, plan = model.vit, Plan(model)
        state = pass_through(model)
        # The embedding: y = 2x − 1 for pixels x in [0, 1], from (x − mean) / std; then T y.
        mean, std = (t.double().flatten().repeat_interleave(model.patch**2).cpu() for t in (model.mean, model.std))
        rows = len(plan.transform)
        proj = state["patch_embed.proj.weight"].flatten(1)
        proj[RESERVED : RESERVED + rows] = plan.transform * (2 * std)
        state["patch_embed.proj.bias"][RESERVED : RESERVED + rows] = plan.transform @ (2 * mean - 1)
        codes = plan.known[: plan.slots]
        if model.unk_embed is not None:  # 0, and the bias has the place of all that have no position embedding
            state["unk_embed"] = torch.zeros_like(model.unk_embed)
            state["patch_embed.proj.bias"][:RESERVED] = plan.known[-1]
            codes = codes - plan.known[-1]
        state["pos_embed"][0, -plan.slots :, :RESERVED] = codes
        for name in ("cls_token", "reg_token"):
            if name in state:
                state[name][..., 0] = plan.constant
        # The neurons, slot by slot, in all blocks but the last; each block's output goes to the constant channel.
        # LayerNorm multiplies tokens by Γ and neurons divide by it: updates of small weights lose less to rounding.
        neurons, gain, done = torch.cat(plan.neurons), _token_gain(plan, images, client), 0
        for i, width in enumerate(widths(model)):
            own = neurons[done : done + width]
            state[f"blocks.{i}.norm2.weight"] *= gain
            state[f"blocks.{i}.mlp.fc1.weight"][: len(own)] = own / gain
            state[f"blocks.{i}.mlp.fc2.weight"][0] = plan.forward
            done += len(own)
        # The last attention is uniform: channel D − 1 of the class token becomes κ times the mean of v·u.
        D = vit.embed_dim
        last_reads_mean(state, len(vit.blocks), plan.readout, plan.constant / (100 * math.sqrt(D)))
        state["head.weight"][::2, D - 1] = 5.0
        state["head.weight"][1::2, D - 1] = -5.0
        return {name: weight.to(model.mean) for name, weight in state.items()}

    def __call__(self, seen: Observation) -> Reconstruction:
        """Reconstruct the images of each release, in any order."""
        return Reconstruction.join([self._release(release, Plan(seen.model)) for release in seen.each()])

    def _release(self, seen: Observation, plan: Plan) -> Reconstruction:
        names = [f"blocks.{i}.mlp.fc1.{kind}" for i in range(len(seen.model.vit.blocks) - 1) for kind in _KINDS]
        sums = _bins(adam_inverted(seen, names), plan)
        slots: list[Tensor] = []
        tokens: list[Tensor] = []
        deltas: list[Tensor] = []
        for n in range(plan.places):
            found, weights = _separate(*sums[n], plan, n)
            slots.append(torch.full((len(found),), n))
            tokens.append(found)
            deltas.append(weights)
        return _images(torch.cat(slots), torch.cat(tokens), torch.cat(deltas), plan, seen.images_per_release)


def _bins(gradients: Mapping[str, Tensor], plan: Plan) -> list[tuple[Float[Tensor, "m d"], Float[Tensor, " m"]]]:
    """Return of each bin of each place Σ δ u and Σ δ over its tokens: differences of adjacent neurons."""
    blocks, counts = range(len(plan.model.vit.blocks) - 1), [len(bins.low) for bins in plan.bins]

    def joined(name: str) -> tuple[Tensor, ...]:
        parts = [gradients[f"blocks.{i}.mlp.fc1.{name}"][0] for i in blocks]
        return torch.cat(parts)[: sum(counts)].double().cpu().split(counts)

    gain = float(plan.model.vit.get_parameter("blocks.0.norm2.weight")[0])
    both = zip(plan.bins, joined("weight"), joined("bias"), strict=True)
    return [(bins.less_next(weight.mT / gain).mT, bins.less_next(bias)) for bins, weight, bias in both]


def _separate(
    sums: Float[Tensor, "m d"], biases: Float[Tensor, " m"], plan: Plan, place: int
) -> tuple[Float[Tensor, "t d"], Float[Tensor, " t"]]:
    """Return the tokens u of one place and their δ, from the bins that hold one token; found ones leave other bins."""
    neurons, bins = plan.neurons[place], plan.bins[place]
    found, deltas = sums[:0], biases[:0]
    floor = _NOTHING * float(biases.abs().max())
    while True:
        filled = (biases.abs() > floor).nonzero().flatten()
        u = sums[filled] / biases[filled, None]
        a, _, misfit = _scale(u, plan.known[place])
        # LayerNorm divides by √(σ² + ε) = 1 / a, so that the mean of u² is σ² / (σ² + ε) = 1 − ε a².
        norm = (u.square().mean(1) - 1 + plan.eps * a[:, 0].square()).abs()
        alone = (norm < _NORM) & (misfit < _MISFIT)
        filled, u = filled[alone], u[alone]
        shares = _shares(u, neurons, bins)  # of each candidate in each bin
        # A token next to an edge is in two bins; its δ is read where nearly all of it is in the bin.
        inside = shares[torch.arange(len(u)), filled] > _INSIDE
        filled, u, shares = filled[inside], u[inside], shares[inside]
        new = _first_of_equals(u, found)
        if not len(new):
            return found, deltas
        filled, u, shares = filled[new], u[new], shares[new]
        delta = biases[filled] / shares[torch.arange(len(u)), filled]
        found, deltas = torch.cat([found, u]), torch.cat([deltas, delta])
        part = shares * delta[:, None]  # t × m
        sums, biases = sums - part.T @ u, biases - part.sum(0)


def _shares(u: Float[Tensor, "t d"], neurons: Float[Tensor, "m d"], bins: Bins) -> Float[Tensor, "t m"]:
    """Return the share of tokens in each bin: GELU'(h) of its neuron less that of the next."""
    h = u @ neurons.T
    # d/dh h Φ(h) = Φ(h) + h φ(h) with the standard normal distribution function Φ and density φ.
    return bins.less_next(torch.special.ndtr(h) + h * torch.exp(-h.square() / 2) / math.sqrt(2 * math.pi))


def _scale(u: Float[Tensor, "t d"], known: Float[Tensor, "*t 5"]) -> tuple[Tensor, Tensor, Float[Tensor, " t"]]:
    """Return a, b (both t × 1) of u = a z + b by least squares over the known channels of z, and the largest misfit."""
    shown, known = u[:, :RESERVED], known.expand(len(u), -1)
    from_mean = known - known.mean(1, keepdim=True)
    a = (from_mean * shown).sum(1, keepdim=True) / from_mean.square().sum(1, keepdim=True)
    b = (shown - a * known).mean(1, keepdim=True)
    return a, b, (shown - a * known - b).abs().amax(1)


def _first_of_equals(u: Float[Tensor, "t d"], before: Float[Tensor, "s d"]) -> list[int]:
    """Return the indices of the tokens that are neither among those before nor equal to an earlier one."""
    both = torch.cat([before, u])
    same = torch.cdist(both, both).square() / both.shape[1] < _EQUAL
    earlier = same.tril(-1).any(1)[len(before) :]
    return (~earlier).nonzero().flatten().tolist()


def _images(
    slots: Tensor, tokens: Float[Tensor, "t d"], deltas: Float[Tensor, " t"], plan: Plan, count: int
) -> Reconstruction:
    """Return images of tokens that were found, sorted by the loss gradient ρ that the tokens of an image share.

    Args:
        slots: the slot of each token.
        tokens: LayerNorm's outputs u.
        deltas: the gradient δ of each token.
        plan: the layout of channels.
        count: B, the number of images.
    """
    a, b, _ = _scale(tokens, plan.known[slots])
    v, D = plan.readout, tokens.shape[1]
    # LayerNorm's Jacobian is (1 − 11ᵀ/D − uuᵀ/D) / σ with 1 / σ = a, and the output of the MLPs goes to channel 0.
    rho = deltas / (a[:, 0] * (v[0] - v.mean() - tokens[:, 0] * (tokens @ v) / D))
    values = ((tokens - b) / a)[:, RESERVED : RESERVED + len(plan.transform)] @ plan.transform
    patches = torch.full((count, plan.slots, values.shape[1]), math.nan, dtype=values.dtype)
    values = _completed(values, plan.whole[len(plan.transform) :])
    hidden = slots == plan.slots
    of_masked = rho[hidden], values[hidden]
    rho, slots, values = (each[~hidden] for each in (rho, slots, values))
    groups = _grouped(rho, slots, count)
    for image, members in enumerate(groups):
        patches[image, slots[members]] = values[members]
    if groups:
        _fill(patches, groups, rho, slots, values)
    masked = patches.isnan().any(2)
    if groups and hidden.any():
        _fill_masked(patches, [rho[members].median() for members in groups], *of_masked)
    lost = patches.isnan().any(2)
    for image, missing in zip(patches, lost, strict=True):
        image[missing] = image[~missing].mean(0) if (~missing).any() else 0.0
    pixels = unpatchify((patches + 1) / 2, plan.model.image_shape).clamp(0, 1).to(plan.model.mean)
    if plan.places == plan.slots:
        return Reconstruction(pixels)
    masked, lost = masked.to(pixels.device), lost.to(pixels.device)
    if hidden.any() and plan.model.patch >= 3:  # borders need three pixels
        orders = [place_patches(plan.model, *each) for each in zip(pixels, masked, lost, strict=True)]
        pixels = permute(pixels, torch.stack(orders), plan.model.patch)
    return Reconstruction(pixels, loose=masked)


def _completed(values: Float[Tensor, "t k"], lost: Float[Tensor, "l k"]) -> Float[Tensor, "t k"]:
    """Return patches with the coefficients that had no channel, where these make all pixels whole grey levels.

    Each round rounds the pixels to levels, and then restores the coefficients that are known. Where few are lost, many
    random starts are tried. A patch for which no start ends in whole levels stays without these coefficients.
    """
    if not len(lost):
        return values
    known = (values + 1) * 127.5
    made, left = known.clone(), torch.arange(len(known))
    draw = torch.Generator().manual_seed(0)
    for start in range(_STARTS if len(lost) <= _FEW else 1):
        size = 0.0 if start == 0 else _START_SIZE
        x = known[left] + size * torch.randn(len(left), len(lost), dtype=known.dtype, generator=draw) @ lost
        for _ in range(_ROUNDS):
            x = known[left] + ((x.round().clamp(0, 255) - known[left]) @ lost.T) @ lost
        whole = (x - x.round()).square().mean(1).sqrt() < _WHOLE
        made[left[whole]] = x[whole]
        left = left[~whole]
    return made / 127.5 - 1


def _grouped(rho: Float[Tensor, " t"], slots: Tensor, count: int) -> list[Tensor]:
    """Return the tokens of each image: those of nearly equal ρ, at most one in a slot."""
    order = rho.argsort()
    gaps = rho[order].diff().abs() / rho[order][1:].abs()
    best: list[Tensor] = []
    for tolerance in (1e-2, 1e-3, 1e-4, 1e-5):
        starts = (gaps > tolerance).nonzero().flatten() + 1
        parts = order.tensor_split(starts.tolist())
        best = sorted(parts, key=len, reverse=True)[:count]
        if all(len(slots[part].unique()) == len(part) for part in best):
            break
    return [part for part in best if len(part)]


def _fill(
    patches: Float[Tensor, "b n k"],
    groups: list[Tensor],
    rho: Float[Tensor, " t"],
    slots: Tensor,
    values: Float[Tensor, "t k"],
) -> None:
    """Put the tokens of no image into images that lack one there.

    The ρ of two images with equal patches is the sum of theirs. A token next to an edge may have a ρ that is a little
    off; it goes to the image of the nearest ρ.
    """
    means = torch.stack([rho[members].median() for members in groups])
    used = torch.zeros(len(rho), dtype=torch.bool)
    used[torch.cat(groups)] = True
    loose: list[tuple[int, int]] = []
    for token in (~used).nonzero().flatten().tolist():
        slot = int(slots[token])
        for pair in combinations(_missing(patches, slot, len(groups)), 2):
            whole = means[list(pair)].sum()
            if (whole - rho[token]).abs() < 1e-3 * means[list(pair)].abs().max():
                patches[list(pair), slot] = values[token]
                break
        else:
            loose.append((token, slot))
    for token, slot in loose:
        if missing := _missing(patches, slot, len(groups)):
            nearest = int((means[missing] - rho[token]).abs().argmin())
            patches[missing[nearest], slot] = values[token]


def _fill_masked(
    patches: Float[Tensor, "b n k"], means: list[Tensor], rho: Float[Tensor, " t"], values: Float[Tensor, "t k"]
) -> None:
    """Put the tokens of masked patches into images that lack patches, into any slots there.

    Equal patches of an image, or of two, are one token with the sum of their ρ.

    Args:
        patches: the patches of each image, nan where one is missing.
        means: the ρ of each of the first images.
        rho: the ρ of each token.
        values: the patch of each token.
    """
    lacks = [image.isnan().any(1).nonzero().flatten().tolist() for image in patches]
    images = [i for i in range(len(means)) if lacks[i]]
    owners = [(i,) * n for i in images for n in range(1, len(lacks[i]) + 1)] + [*combinations(images, 2)]
    if not owners:
        return
    sums = torch.stack([torch.stack([means[i] for i in each]).sum() for each in owners])
    off, best = (rho[:, None] / sums - 1).abs().min(1)
    for token in off.argsort().tolist():
        for i in owners[best[token]]:
            if lacks[i]:
                patches[i, lacks[i].pop()] = values[token]


def _missing(patches: Float[Tensor, "b n k"], slot: int, count: int) -> list[int]:
    """Return the images among the first ones that have no patch in a slot."""
    return patches[:count, slot].isnan().any(1).nonzero().flatten().tolist()
