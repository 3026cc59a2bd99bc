"""`imprint-bins`: the patches of one image, from differences of adjacent neurons of the first MLP."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.attacks.dishonest.layout import STEEP, OneLayerAttack, mlp_inputs
from privlab.victims import VictimModel


@torch.no_grad()
def bins(
    model: VictimModel, images: Float[Tensor, "b c h w"], steep: float = STEEP, neurons: int | None = None
) -> None:
    """Let neurons of the first MLP count into bins by one projection of a token (Fowl et al. 2022).

    Args:
        model: the model, which is changed.
        images: public images, by whose quantiles the bins are made.
        steep: the factor of weights and bias, > 0.
        neurons: how many neurons are changed, the first ones; None for all.
    """
    mlp: Any = model.vit.blocks[0].mlp
    m = len(mlp.fc1.bias) if neurons is None else neurons
    # Every row is the measurement h of the paper, and the biases are −ψ⁻¹(i / m): quantiles of h·u.
    direction = torch.randn(mlp.fc1.weight.shape[1], generator=Generator().manual_seed(1)).to(mlp.fc1.weight)
    levels = (mlp_inputs(model, images)[:, 1:] @ direction).flatten()
    mlp.fc1.weight[:m] = steep * direction
    mlp.fc1.bias[:m] = -steep * levels.quantile(torch.linspace(0, 1, m).to(levels))
    # Equal columns give all neurons the same gradient from above, so that differences cancel.
    mlp.fc2.weight[:, :m] = mlp.fc2.weight[:, :1] / steep


@dataclass(frozen=True)
class ImprintBins(OneLayerAttack):
    """Divide the differences of adjacent rows of ∂ℓ/∂W₁ by those of ∂ℓ/∂b₁, where each neuron counts into a bin.

    Idea: The server gives all neurons of the first MLP one direction and rising thresholds. Two adjacent neurons then
    differ by the tokens in between, and a bin with a single token gives it back. Each token is put into the slot whose
    position embedding it has.

    Steps: differences of adjacent neurons → divide by those of biases → find the slot, solve for the patch

    Algorithm: Neuron i computes GELU(s (h·u − q_i)) for the quantiles q_i of h·u over images of noise that have the
    spectrum of photographs; a large s makes it a step. With one token u between q_i and q_{i+1},
    u = (∂W_i − ∂W_{i+1}) / (∂b_i − ∂b_{i+1}). The projection of the first attention is 0, so that u = LN(W x_n + e_n).
    Outside the space of all W x, the direction of e_n identifies n; then x_n and LayerNorm's deviation follow linearly.

    Exact if: each token has a bin without others, and D > K + 1, so that the slot shows.

    Fails if: D ≤ K, a bin holds several tokens, or the client trains: the update of a steep weight is rounded.

    Studies: dishonest_server

    Example: privlab attack --model cifar_vit --attack imprint-bins --limit 2

    Source: Robbing the Fed, in the first MLP of a ViT. [@fowl2022robbing]
    """

    name: ClassVar[str] = "imprint-bins"
    paper: ClassVar[str] = "Robbing the Fed (Fowl et al. 2022), in the first MLP of a ViT"
    manipulate = staticmethod(bins)

    @staticmethod
    def sums(W: Float[Tensor, "m d"], b: Float[Tensor, " m"]) -> tuple[Float[Tensor, "m d"], Float[Tensor, " m"]]:
        """Return the sums over the tokens of each bin, the differences of adjacent neurons."""
        # Thresholds rise with i: neuron i holds all tokens above its own. The last one has no next.
        return W - torch.cat([W[1:], W[:1] * 0]), b - torch.cat([b[1:], b[:1] * 0])
