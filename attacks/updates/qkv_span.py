"""`qkv-span`: the image of a client with a frozen embedding, from the row space of what trains the first queries."""

# Known are the model with its frozen embedding, and one gradient of the first block's W_qkv, or of LoRA's B. Sought are
# the normalised patches x_n (N × K) of one image, and the deviation σ_n of each token, which LayerNorm divides by.
# 1. The row space T of the gradient holds A u_n for all N + p tokens u_n, with A = I, or LoRA's A.
# 2. Directions orthogonal to T give linear equations for each (x_n, σ_n).
# 3. Where these determine the patch, it is their solution.
# 4. Else the coordinates C in their null space are searched for, under an image prior and the density of row spaces.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers import Smoothness, photograph_gradients, token_count
from privlab.attacks.tokens import QKV, normalised_tokens
from privlab.base import AtLeast1, Checked, PrivlabError, gradients_enabled, warn
from privlab.release import as_gradients
from privlab.threat import Capability, Client, Observation
from privlab.victims import VictimModel, why_no_plain_block

_PATH = QKV.removesuffix(".weight")
_A, _B = (f"{_PATH}.lora_{name}.default.weight" for name in "AB")

_STAGES = ((0, 10.0), (1, 1.0), (1, 0.1))
"""Weight of the density of row spaces, and ε in standard deviations of a difference of adjacent pixels.

The smoothest image under the equations comes first: from elsewhere the density led to worse images.
"""

_RANK_TOLERANCE = 1e-6
"""The share of the largest singular value below which an equation of a patch is left out as rounding."""


@dataclass(frozen=True)
class QkvSpan(Checked):
    """Find the likeliest image whose tokens span the row space of ∂ℓ/∂W_qkv, or of LoRA's ∂ℓ/∂B, of the first block.

    Idea: Whoever trains queries, keys and values, or LoRA's mixtures of them, shows the space that an image's tokens
    span. Each patch must keep its token in that space: linear equations, whose number the rank decides. Where they do
    not suffice, the likeliest image is sought, with the density that a space has by its tokens.

    Steps: space that tokens span → equations of each patch → likeliest image under them

    Algorithm: ∂W_qkv = Δᵀ U and, where B = 0, ∂B = Δᵀ U Aᵀ with U of the rows u_n = γ ⊙ (z_n − mean z_n) / σ_n + β, z_n
    = W x_n + e_n, and e_n the token of a patch of zeros. The d columns (D, or LoRA's r) have a row space T of N + p
    dimensions, for N patches and p prefix tokens.

    1. With Q the d − N − p directions that complete T, Q A u_n = 0. Times σ_n this is linear in x_n and σ_n, so that
       each patch has that many equations for K + 1 numbers. Where they suffice, the patch is their solution.
    2. Where not, the image minimises Σ √(ε² + δᵀ Γ⁻¹ δ) − (d − N − p) log |det M| under these equations, with δ the
       differences of adjacent pixels and M the coordinates of the tokens σ_n A u_n in T. The determinant is the
       density of a row space: M T has the volume |det M|^(d − N − p) dM dT. Without it the likeliest image under the
       equations is one of little contrast, which is the start. Both are found by L-BFGS, the second for falling ε.

    Exact if: d − N − p ≥ K + 1 for one step of SGD on one image with N patches of K values and p prefix tokens, where d
    = r for LoRA with B = 0, and d = D if queries, keys and values are trained whole.

    Fails if: N + p ≥ d: there is no equation then, and it returns one grey. With fewer equations than values it is a
    search under a prior of photographs. It needs a frozen patch embedding and position embeddings.

    Cost: 4 to 15 s an image where it searches (ViT-Ti, 64 pixels, a busy core), 0.2 s where it is exact.

    Studies: partial_training

    Example: privlab attack --model cifar_vit --attack qkv-span --img-size 16 --client sgd --set client.trains=lora
    --set client.rank=64 --limit 8

    Args:
        steps: the most steps of L-BFGS for the start, and for each ε.

    Source: ours; LoRA of Hu et al. (ICLR 2022), Equation 3; the volume element of Muirhead, Aspects of Multivariate
    Statistical Theory (1982), Theorem 2.1.13. [@hu2022lora]
    """

    name: ClassVar[str] = "qkv-span"
    paper: ClassVar[str] = "ours: the row space of the first block's attention, with the density of row spaces"
    order: ClassVar[int] = 120
    short: ClassVar[Mapping[str, Any]] = {"steps": 1}
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.KNOWS_WEIGHTS, Capability.BATCH_SIZE_ONE, Capability.CLIENT_UPDATE}
    )
    parameters: ClassVar[tuple[str, ...]] = ()
    if_released: ClassVar[tuple[str, ...]] = (QKV, _B)
    search: ClassVar[bool] = True
    updates_of: ClassVar[tuple[str, ...]] = ("sgd",)

    steps: AtLeast1 = 300

    @staticmethod
    def refuses(client: Client) -> str | None:
        """Return why an update is not read: the embedding is trained too, or no attention, or it is not a gradient."""
        embedding = any(client.chooses(name) for name in ("pos_embed", "patch_embed.proj.weight"))
        if client.trains != "lora" and (embedding or not client.chooses(QKV)):
            return f"reads the update of attention behind a frozen embedding, and here client.trains={client.trains}"
        if client.gradient_factor is None:
            return f"reads the update of one step of SGD, and here there are {client.total_steps} steps"
        return None

    def beyond(self, seen: Observation) -> str | None:
        """Return N + p ≥ d, or a rank below N + p, with the numbers: the row space then says nothing of a patch.

        LoRA adapters that were merged into the weights move these by a matrix of their rank.
        """
        G, count, p = seen.gradients[_read(seen)], token_count(seen.model), seen.model.vit.num_prefix_tokens
        if count >= (width := G.shape[2]):
            return f"N + {p} = {count} ≥ {'r' if _read(seen) == _B else 'D'} = {width}"
        singular = torch.linalg.svdvals(G.double())
        rank = int((singular > _RANK_TOLERANCE * singular[:, :1]).sum(1).min())
        return None if rank >= count else f"rank {rank} < N + {p} = {count}"

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the private images.

        Raises:
            PrivlabError: if the first block is none of attention and MLP with LayerNorm before each, or the model has
                no position embeddings, or the update is not a gradient.

        Warns:
            PrivlabWarning: if the row space says nothing of a patch; the images are then of one grey.
        """
        model = seen.model
        if (why := why_no_plain_block(model)) is not None:
            raise PrivlabError(f"{self.name} reads the attention of a pre-norm block, and here {why}.")
        if model.vit.pos_embed is None:
            raise PrivlabError(f"{self.name} distinguishes slots by position embeddings, and this model has none.")
        # No direction is orthogonal to T if N + p ≥ d; and if the rank is less than
        # N + p, T is not what the tokens span.
        if (beyond := self.beyond(seen)) is not None:
            warn(
                f"{self.name}: {beyond}, so that the row space says nothing of a patch. That no image is found is no "
                "evidence of privacy.",
            )
            return model.mean.expand(len(seen.gradients[_read(seen)]), *model.image_shape).clone()
        # One step of SGD without its rate and decay is the gradient. Its right singular
        # vectors are T, and then the rest.
        name, seen = _read(seen), as_gradients(seen)
        prior = Smoothness(model.image_shape, photograph_gradients(model, seen.photographs))
        A = torch.eye(model.vit.embed_dim, dtype=torch.float64, device=model.mean.device)
        # With B = 0, ∂B = Δᵀ U Aᵀ: rows of the gradient hold A u_n (r numbers), where
        # those of ∂W_qkv hold u_n (D numbers).
        if name == _B:  # LoRA mixes what tokens hold
            A = model.vit.get_parameter(_A).detach().double()
        X = [self._patches(model, prior, A, torch.linalg.svd(G.double()).Vh) for G in seen.gradients[name]]
        return model.to_images(torch.stack(X))

    def _patches(
        self, model: VictimModel, prior: Smoothness, A: Float[Tensor, "r d"], basis: Float[Tensor, "r r"]
    ) -> Float[Tensor, "n k"]:
        """Return the normalised patches of one image, from right singular vectors, those of the row space first."""
        # σ_n u_n = F (x_n, σ_n) + g_n, with F of D × (K + 1). The first N + p singular vectors span the
        # tokens; the other d − N − p vanish on them.
        F, g, prefix = normalised_tokens(model)
        T, free = basis[: len(prefix) + len(g)], basis[len(prefix) + len(g) :]
        # Q A u_n = 0 for Q = `free`, times σ_n: E (x_n, σ_n) = −Q A g_n, d − N − p
        # equations with one matrix for all slots.
        E, sides = free @ A @ F, -(free @ A @ g.mT)
        # V (N × (K + 1)) is the solution of least norm. The rows of Y span the null
        # space, which the equations leave open.
        left, σ, right = torch.linalg.svd(E)
        rank = int((σ > _RANK_TOLERANCE * σ[0]).sum())
        V = (right[:rank].mT / σ[:rank] @ (left[:, :rank].mT @ sides)).mT
        Y = right[rank:]
        # Nothing is open: V is the solution, and its last column, σ_n, is not a pixel.
        if not len(Y):
            return V[:, :-1]
        # M (N + p square) holds the coordinates in T of A u_n for prefix tokens, and of σ_n A u_n = A (F (v_n + Yᵀ
        # c_n) + g_n) for patches: it is linear in C.
        reads = T @ A
        base, slopes, rows = (V @ F.mT + g) @ reads.mT, Y @ F.mT @ reads.mT, prefix @ reads.mT
        # The search begins at the solution of least norm, and first finds the smoothest image, without the density.
        C = torch.zeros(len(V), len(Y), dtype=V.dtype, device=V.device, requires_grad=True)
        for weight, ε in _STAGES:
            search = torch.optim.LBFGS([C], max_iter=self.steps, history_size=30, line_search_fn="strong_wolfe")

            def closure(search: torch.optim.LBFGS = search, weight: int = weight, ε: float = ε) -> Tensor:
                search.zero_grad()
                M = torch.cat([rows, base + C @ slopes])
                # For large ε, Σ √(ε² + q) is a constant plus Σ q / 2ε. The factor max(ε, 1) keeps
                # the scale of the quadratic part.
                energy = max(ε, 1) * prior.sparse_energy((V + C @ Y)[None, :, :-1], ε)[0]
                # The density of a row space has the factor |det M|^(d − N − p). log |det M| is the
                # sum of the logs of singular values.
                value = energy - weight * len(free) * torch.linalg.svdvals(M).log().sum()
                value.backward()
                return value

            with gradients_enabled():
                search.step(closure)
        return (V + C.detach() @ Y)[:, :-1]


def _read(seen: Observation) -> str:
    """Return the name of the parameter whose gradient is read."""
    return _B if _B in seen.gradients else QKV
