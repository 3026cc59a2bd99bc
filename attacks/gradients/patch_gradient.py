"""`patch-gradient`: the image from the gradients of the position and the patch embedding."""

# Known are A = ∂ℓ/∂E_pos (N × D, without prefix tokens) and G = ∂ℓ/∂W (D × K). Sought are the normalised patches X
# (N × K). Since z_n = W x_n + b + e_n, G = Σ_n g_n x_nᵀ = Aᵀ X with g_n = ∂ℓ/∂e_n: one linear system is solved.

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers import ONE_IMAGE, RTOL, ridge_inverse, slot_gradients, too_many, warn_of_limits
from privlab.threat import Capability, Observation


@dataclass(frozen=True)
class PatchGradient:
    """Solve Aᵀ X = ∂ℓ/∂W for the patches X, where A = ∂ℓ/∂E_pos without the class token.

    Idea: The model multiplies each patch by the same matrix W and adds a position embedding. The gradient of W is a sum
    over the patches, and the gradients of the position embeddings are the factors of that sum. So the patches are the
    solution of one linear system, and no search is needed.

    Steps: factors: A = ∂ℓ/∂E_pos → solve Aᵀ X = ∂ℓ/∂W → patches X, in place

    Algorithm: Every patch n enters by z_n = W x_n + b + e_n alone, so ∂ℓ/∂W = Σ_n g_n x_nᵀ = Aᵀ X with g_n = ∂ℓ/∂z_n =
    ∂ℓ/∂e_n, whatever follows the embedding. Pre-norm blocks ignore a constant added to a token, so A·1 = 0 and N < D is
    needed; at N ≥ D the solution of least norm is returned.

    MJP releases zeros in ∂ℓ/∂E_pos for a slot that has lost its position embedding. This attack does not know the
    defense: it takes them for equations, as the closed form of MJP's Table 5 does.

    On the update of a client it is the naive baseline: momentum, schedules and further steps of SGD on one image are
    one linear map of A and ∂ℓ/∂W, and change nothing. Weight decay and Adam do, and this attack knows of neither.

    Exact if: ∂ℓ/∂E_pos has rank N, which needs N < D; what follows the embedding does not matter.

    Fails if: a defense is in its way: it knows none, and under MJP the masked slots come back empty. It refuses a
    gradient of several images, because its equations then mix the images.

    Cost: 2.7 ms an image given the gradient (DeiT-S, 224 pixels, two cores).

    Studies: mjp, table5, gradients

    Args:
        rtol: the ridge λ of `ridge_inverse`, relative to ‖A‖_F; 0 is plain least squares.

    Source: [@lu2022april; @ren2023mjp]
    """

    name: ClassVar[str] = "patch-gradient"
    paper: ClassVar[str] = "the chain rule at z = Wx + b + e; cf. APRIL (Lu et al. 2022), MJP (2023), Eq. 8"
    order: ClassVar[int] = 10
    requires: ClassVar[frozenset[Capability]] = ONE_IMAGE
    effort: ClassVar[str] = "quick"
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed", "patch_embed.proj.weight")
    updates_of: ClassVar[tuple[str, ...]] = ("sgd", "adam", "adamw")

    rtol: float = RTOL

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition N < D with its numbers if it does not hold, or what makes an update no gradient."""
        client, found = seen.client, [too_many(seen)]
        if client is not None and client.optimiser != "sgd":
            found.append(f"{client.optimiser} scales each entry separately")
        if client is not None and client.weight_decay:
            found.append(f"weight decay {client.weight_decay:g} in the update")
        return " and ".join(filter(None, found)) or None

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed."""
        # Row n of A is g_n = ∂ℓ/∂z_n = ∂ℓ/∂e_n, and G = Σ_n g_n x_nᵀ.
        G = seen.gradients["patch_embed.proj.weight"].flatten(2)  # b × D × K
        A = slot_gradients(seen)  # b × N × D
        warn_of_limits(self.name, A, most=A.shape[2] - 1)
        # X = (Aᵀ)⁺ G in float64. The ridge damps directions of A that are weaker than float32's rounding.
        X = ridge_inverse(A.mT, self.rtol) @ G.double()
        return seen.model.to_images(X)
