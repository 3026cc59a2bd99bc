"""`trap-weights`: the patches of one image, from neurons of the first MLP that are active for few tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.attacks.dishonest.layout import STEEP, OneLayerAttack, mlp_inputs
from privlab.victims import VictimModel


@torch.no_grad()
def traps(model: VictimModel, images: Float[Tensor, "b c h w"]) -> None:
    """Let each neuron of the first MLP be active for one token in a hundred (Boenisch et al. 2023).

    The model is changed; the images are public ones.
    """
    mlp: Any = model.vit.blocks[0].mlp
    rows = STEEP * torch.randn(mlp.fc1.weight.shape, generator=Generator().manual_seed(1)).to(mlp.fc1.weight)
    mlp.fc1.weight.copy_(rows)
    mlp.fc1.bias.copy_(-(mlp_inputs(model, images).flatten(0, 1) @ rows.mT).quantile(0.99, dim=0))
    mlp.fc2.weight.div_(STEEP)


@dataclass(frozen=True)
class TrapWeights(OneLayerAttack):
    """Divide the rows of ∂ℓ/∂W₁ by ∂ℓ/∂b₁, where each neuron is active for about one token in a hundred.

    Idea: The server gives the neurons of the first MLP random directions, and thresholds that few tokens exceed. A
    neuron that is active for a single token holds that token in its gradient. Each token is put into the slot whose
    position embedding it has.

    Steps: rows of active neurons → divide by the gradient of the bias → find the slot, solve for the patch

    Algorithm: Neuron i computes GELU(s (r_i·u − q_i)) with q_i the quantile 0.99 of r_i·u over images of noise. With
    one active token u, ∂W_i = δ uᵀ and ∂b_i = δ, so that u is their quotient. The paper makes a neuron rarely active by
    larger negative weights, scaled by a factor below 1 for the positive ones; inputs behind LayerNorm have both signs,
    so that a bias does it here. Slot and patch follow as in `imprint-bins`.

    Exact if: each token is alone in one neuron at least, and D > K + 1.

    Fails if: D ≤ K, tokens share all their neurons, or the client trains: the update of a steep weight is rounded.

    Studies: dishonest_server

    Example: privlab attack --model cifar_vit --attack trap-weights --limit 2

    Source: trap weights, by biases in the first MLP of a ViT. [@boenisch2023curious]
    """

    name: ClassVar[str] = "trap-weights"
    paper: ClassVar[str] = "trap weights (Boenisch et al. 2023), in the first MLP of a ViT"
    manipulate = staticmethod(traps)
