"""`adapter-separation`: the image behind bottleneck adapters, from what the first block's MLP gives to its adapter."""

# Known are the model and one gradient of the bottleneck adapter behind the first MLP, a ↦ U GELU(V h + v), with nothing
# else trained. Sought are the patches of one image in each release.
# 1. `_outputs` finds the outputs h_n of the first MLP, which the adapter reads, one for each of the N + p tokens.
# 2. `invert_mlp` finds the inputs u_n of that MLP, and how far each may be off.
# 3. `places_of_tokens` assigns the tokens to slots, and `fit_patches` fits all patches to them at once.
# 4. `complete_image` fills in what no token determines, by an image prior.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers import photograph_gradients, token_count
from privlab.attacks.tokens import (
    Bottleneck,
    InputLaw,
    Mlp,
    PatchLaw,
    Separated,
    complete_image,
    fit_patches,
    invert_mlp,
    mirrored,
    patch_prior,
    places_of_tokens,
    projection,
    separate_inputs,
    tokens_of,
)
from privlab.base import AtLeast1, Checked, Fraction, PrivlabError, draw_for, warn
from privlab.release import as_gradients
from privlab.threat import Capability, Client, Observation, Reconstruction
from privlab.victims import PreNormBlock, first_block, why_no_plain_block

_PATH = "blocks.0.mlp.adapter"
_DOWN, _BIAS, _UP = (f"{_PATH}.{name}" for name in ("down.weight", "down.bias", "up.weight"))


@dataclass(frozen=True)
class AdapterSeparation(Checked):
    """Recover the image of a client that trains bottleneck adapters alone, from those of the first block.

    Idea: The gradients of an adapter behind the first MLP span what that MLP gives for each token, and only true tokens
    agree with both layers of the adapter. So the outputs are found one by one. Then the MLP is inverted, the tokens are
    put into their slots, and the image is fitted to them.

    Steps: separate the MLP's outputs → invert the MLP → put into slots, fit the patches

    Algorithm:

    1. ∂V = Σ_n δ_n h_nᵀ and ∂U = Σ_n ε_n a_nᵀ with a_n = GELU(V h_n + v) span the outputs h_n of the first MLP and the
       a_n. An h of the first span with GELU(V h + v) in the second one is an output, for r > 2 (N + p): all of them are
       found, one by one (`separate_inputs`).
    2. The MLP is inverted: its D equations have D − 2 unknowns, because u = γ ⊙ t + β with t of zero mean and unit
       variance. The search starts from the mean inputs of photographs, whose law counts less and less (`invert_mlp`).
    3. The slots of the tokens u are those in which the patches behind them are likeliest (`places_of_tokens`), and the
       patches are fitted to all tokens, with the block's own attention (`fit_patches`).
    4. For D ≤ K an embedding leaves K − D + 1 directions of a patch open. The image prior of `mjp-subspace` completes
       them, and patches without a token.

    Exact if: r > 2 (N + p) for the width r of the adapter, N patches and p prefix tokens: the outputs of the first MLP
    that are found are then exact. Their inversion has no guarantee. If D ≤ K, no token determines K − D + 1 directions
    of each patch.

    Fails if: the searches end far off: the inversion of the MLP and the fit of the patches start from photographs'
    inputs. Of one small crop 6 of 17 outputs were found. It reads one step of SGD on one image, and needs position
    embeddings.

    Cost: 44 to 270 s an image (ViT-Ti, 64 pixels, a busy core).

    Studies: partial_training

    Example: privlab attack --model cifar_vit --attack adapter-separation --img-size 16 --client sgd --set
    client.trains=adapters --set client.rank=64 --limit 1

    Args:
        starts: random starts of the search for outputs in each round.
        rounds: the most rounds of the search.
        steps: steps of the Levenberg-Marquardt method in each search.
        tolerance: the relative residual of a_n below which a solution is an output.
        seed: seed of the starts.

    Source: ours; the sums are the chain rule at the adapter of Houlsby et al. (ICML 2019). [@houlsby2019adapters]
    """

    name: ClassVar[str] = "adapter-separation"
    paper: ClassVar[str] = "ours: the chain rule at the first block's bottleneck adapter"
    order: ClassVar[int] = 110
    short: ClassVar[Mapping[str, Any]] = {"starts": 8, "rounds": 1, "steps": 3, "tolerance": 0.5}
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.KNOWS_WEIGHTS, Capability.BATCH_SIZE_ONE, Capability.CLIENT_UPDATE}
    )
    parameters: ClassVar[tuple[str, ...]] = (_DOWN, _BIAS, _UP)
    search: ClassVar[bool] = True
    updates_of: ClassVar[tuple[str, ...]] = ("sgd",)

    starts: AtLeast1 = 64
    rounds: AtLeast1 = 40
    steps: AtLeast1 = 60
    tolerance: Fraction = 1e-5
    seed: int = 0

    @staticmethod
    def refuses(client: Client) -> str | None:
        """Return why an update is not read: it has no adapters, or is not the gradient of one step."""
        if client.trains != "adapters":
            return f"reads the update of bottleneck adapters, and here client.trains={client.trains}"
        if client.gradient_factor is None:
            return f"reads the update of one step of SGD, and here there are {client.total_steps} steps"
        return None

    def beyond(self, seen: Observation) -> str | None:
        """Return 2 (N + p) ≥ r with its numbers where it holds: the outputs are not separated then."""
        count, rank = token_count(seen.model), seen.gradients[_BIAS].shape[1]
        p = seen.model.vit.num_prefix_tokens
        return None if 2 * count < rank else f"2·(N + {p}) = {2 * count} ≥ r = {rank}"

    def __call__(self, seen: Observation) -> Reconstruction:
        """Reconstruct the private images, and return how many outputs were found, and how many of them were inverted.

        Raises:
            PrivlabError: if the first block is none of attention and MLP with LayerNorm before each, or the model has
                no position embeddings, or the update is not a gradient.

        Warns:
            PrivlabWarning: if the adapter is too narrow; the images are then those of the prior.
        """
        model = seen.model
        if (why := why_no_plain_block(model)) is not None:
            raise PrivlabError(f"{self.name} inverts the MLP of a pre-norm block, and here {why}.")
        if model.vit.pos_embed is None:
            raise PrivlabError(f"{self.name} distinguishes slots by position embeddings, and this model has none.")
        # 2 (N + p) < r is needed: an h in the span of the outputs has N + p coordinates, and
        # GELU(V h + v) must lie in the span of the a_n, which is r − N − p equations.
        if (beyond := self.beyond(seen)) is not None:
            warn(
                f"{self.name}: {beyond}, so that the adapter's spans do not separate tokens. None is found: a low "
                "score here is no evidence of privacy.",
            )
        # One step of SGD without its rate and decay is the gradient. Photographs give the law of what the MLP
        # reads, and their smoothness that of patches.
        seen, block = as_gradients(seen), first_block(model)
        law = InputLaw.of(tokens_of(block, model.embed(mirrored(seen))))
        patches = PatchLaw.of(model, patch_prior(model, photograph_gradients(model, seen.photographs)))
        count, p = len(seen.gradients[_BIAS]), model.vit.num_prefix_tokens
        # Patches that are not found are zero, which is the mean colour, until the prior fills them in.
        X = patches.M.new_zeros(count, len(patches.base), patches.M.shape[1])
        known = torch.zeros(X.shape[:2], dtype=torch.bool, device=X.device)
        counts = torch.zeros(2, count, dtype=torch.long, device=X.device)  # outputs of the MLP, and inputs of it
        for i in range(count) if beyond is None else ():
            # Step 1: the outputs h_n, in no order.
            outputs = self._outputs(seen, block, law, i)
            counts[0, i] = len(outputs.u)
            if not len(outputs.u):
                continue
            # Step 2: those u_n for which the MLP gives h_n. Searches that did not end there are left out.
            inputs = invert_mlp(*_mlp(block), outputs.u, law).found()
            counts[1, i] = len(inputs.u)
            if not len(inputs.u):
                continue
            # Step 3: places count the p prefix tokens first, so that patch n has the place p + n.
            places = places_of_tokens(model, block, inputs, patches)
            X[i] = fit_patches(model, block, inputs, places, patches, draw_for(self.seed, self.name, "fit"))
            known[i, places[places >= p] - p] = True
        # Step 4: for D ≤ K the embedding does not show K − D + 1 directions of a known
        # patch. The prior completes those too.
        W, _ = projection(model)
        X = complete_image(model, X, known, seen.photographs, frozen=len(W) <= W.shape[1])
        return Reconstruction(model.to_images(X), None, None, None, *counts)

    def _outputs(self, seen: Observation, block: PreNormBlock, law: InputLaw, i: int) -> Separated:
        """Return the outputs h_n of the first MLP in release i."""
        # ∂V = Σ_n δ_n h_nᵀ and ∂U = Σ_n ε_n a_nᵀ: the row space of ∂V holds the h_n, and
        # that of ∂U the a_n = GELU(V h_n + v).
        gradients = {name.removeprefix(f"{_PATH}."): g[i] for name, g in seen.gradients.items()}
        adapter = block.mlp.get_submodule("adapter")
        mlp, b2 = _mlp(block)
        # The searches start from vectors in the span of the h_n, as long as the outputs of
        # the MLP for photographs on average.
        usual = mlp.hidden(law.mean)[0] @ mlp.W2.mT + b2
        return separate_inputs(
            Bottleneck.of(adapter, gradients),
            token_count(seen.model),
            draw_for(self.seed, self.name, "starts"),
            size=float(usual.norm(dim=1).mean()),
            starts=self.starts,
            rounds=self.rounds,
            steps=self.steps,
            tolerance=self.tolerance,
        )


def _mlp(block: PreNormBlock) -> tuple[Mlp, Float[Tensor, " d"]]:
    """Return the MLP without its adapter, and the bias of its second layer."""
    mlp, fc2 = Mlp.of(block), block.mlp.fc2
    return mlp, torch.zeros_like(mlp.β) if fc2.bias is None else fc2.bias.detach()
