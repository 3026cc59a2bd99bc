"""`april`: the closed form of APRIL, from the gradients of the attention weights."""

# Known are W_QKV, W, b, E_pos and the gradients of W_QKV and of E_pos, of a first block without pre-norm and skip.
# Sought are the patches. Equation 8 gives all tokens z by a linear system, Equation 9 the patches from these.

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers import ONE_IMAGE, RTOL, ridge_inverse, warn_of_limits
from privlab.base import warn
from privlab.threat import Capability, Observation


@dataclass(frozen=True)
class April:
    """Recover the tokens z from the first attention layer, then the patches by the inverse of the projection.

    Idea: In a first block without pre-norm and skip, attention reads the tokens themselves. The gradients of its three
    matrices and of the position embeddings then give every token by a linear system. The inverse of the patch
    projection turns tokens into patches, and loses what the projection had lost.

    Steps: solve Eq. 8 for the tokens z → subtract E_pos and b → invert the projection W

    Algorithm: If attention acts on z itself, (∂ℓ/∂z)ᵀ z = W_Qᵀ ∂ℓ/∂W_Q + W_Kᵀ ∂ℓ/∂W_K + W_Vᵀ ∂ℓ/∂W_V, and ∂ℓ/∂z =
    ∂ℓ/∂E_pos. Then x = W⁺ (z − E_pos − b). For K > D, W⁺ loses K − D dimensions.

    Exact if: N + 1 ≤ D and K ≤ D, on a first block without pre-norm and skip.

    Fails if: the block is a stock one, or the client uses MJP, which it does not know. It refuses a gradient of several
    images, because its equations then mix the images.

    Cost: 4.7 ms an image given the gradient (DeiT-S, 224 pixels, two cores).

    Studies: table5, mjp

    Args:
        rtol: the ridge λ of `ridge_inverse`, relative to the norm of the matrix.

    Source: APRIL (Lu et al., CVPR 2022); MJP (CVPR 2023), appendix G, Eq. 8 and 9. [@lu2022april; @ren2023mjp]
    """

    name: ClassVar[str] = "april"
    paper: ClassVar[str] = "APRIL (Lu et al. 2022); MJP (2023), Eq. 8 and 9"
    order: ClassVar[int] = 40
    requires: ClassVar[frozenset[Capability]] = ONE_IMAGE | {
        Capability.KNOWS_WEIGHTS,
        Capability.PE_OF_EVERY_TOKEN,
        Capability.APRIL_BLOCK,
    }
    effort: ClassVar[str] = "quick"
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed", "blocks.0.attn.qkv.weight")

    rtol: float = RTOL

    def beyond(self, seen: Observation) -> str | None:
        """Return those of the conditions N + 1 ≤ D and K ≤ D that do not hold, with their numbers."""
        (n, d), k = seen.gradients["pos_embed"].shape[-2:], seen.model.vit.patch_embed.proj.weight[0].numel()
        found = (f"N + 1 = {n} > D = {d}" if n > d else "", f"K = {k} > D = {d}" if k > d else "")
        return " and ".join(filter(None, found)) or None

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed."""
        vit, proj = seen.model.vit, seen.model.vit.patch_embed.proj
        if proj.weight[0].numel() > vit.embed_dim:
            warn(
                f"april: patches of {proj.weight[0].numel()} values are projected to width {vit.embed_dim}; what the "
                "projection drops does not come back, however well the tokens do.",
            )
        # ∂ℓ/∂z = ∂ℓ/∂E_pos for each token, the class token included, because attention reads z itself.
        dz = seen.gradients["pos_embed"].squeeze(1)  # b × (N + 1) × D
        warn_of_limits(self.name, dz, most=dz.shape[2])
        W_qkv = vit.get_parameter("blocks.0.attn.qkv.weight").double()
        dW_qkv = seen.gradients["blocks.0.attn.qkv.weight"].double()
        z = ridge_inverse(dz.mT, self.rtol) @ W_qkv.mT @ dW_qkv  # Eq. 8: (∂ℓ/∂z)ᵀ z = W_QKVᵀ ∂ℓ/∂W_QKV
        # z = W x + b + E_pos: what is added is subtracted, the class token left out, and W⁺ (K × D)
        # applied. For K > D it gives the x of least norm.
        bias = 0 if proj.bias is None else proj.bias
        embedded = (z - (vit.get_parameter("pos_embed") + bias))[:, -vit.patch_embed.num_patches :]
        # The solves are in float64; the last product is in the released precision, and loses nothing more.
        X = embedded.to(dz.dtype) @ _projection_inverse(proj.weight, proj.weight._version, self.rtol).mT  # Eq. 9
        return seen.model.to_images(X)


@lru_cache(maxsize=4)
def _projection_inverse(weight: Float[Tensor, "d c p p"], _version: int, rtol: float) -> Float[Tensor, "k d"]:
    """Return W⁺; it is cached, because all batches meet the same weights. `_version` shows if they changed in place."""
    return ridge_inverse(weight.flatten(1), rtol).to(weight.dtype)
