"""Labels from the gradient of the head's bias, in closed form; or of an image, from the gradients of other layers.

B images whose losses are summed release h_c = Σᵢ pᵢc − n_c for class c, with pᵢc ∈ (0, 1) the probability that the
model gives class c for image i, and n_c the number of images of that class. The mean of the losses releases h / B.
"""

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.base import PrivlabError, check_range, full_precision
from privlab.release.local_training import Update
from privlab.victims import VictimModel

_STEP = 1e-3  # the share of an update that is applied to see which logits rise: a difference quotient in float64
_ROUNDING_ERROR = 1e-3  # what the difference of stored weights, which an update is, may add to −h_c for each image

_BFLOAT16_ROUNDING = 2.0**-8
"""u, the largest relative error of rounding to bfloat16; those of float16 and float32 are smaller."""


def certain_counts(head_bias_gradient: Float[Tensor, " y"], batch_size: int) -> Int[Tensor, " y"]:
    """Return how many images of each class there are at least: the least n with n (1 + u)ⁿ⁺¹ ≥ −h_c.

    Exactly, n_c = Σᵢ pᵢc − h_c ≥ −h_c. Rounded, h_c is computed from B terms pᵢc / B, and (pᵢc − 1) / B for the n_c
    images of class c. Rounding keeps order: a larger operand never makes a smaller result, wherever rounding takes
    place. A computed pᵢc lies in [0, 1]. So h_c is at least what the same computation makes of all pᵢc = 0. That has
    n_c equal terms that are not zero, and zeros, which are added without an error. Each term is rounded once, so are
    n_c − 1 of the sums and the result, and each rounding multiplies by 1 + u at most: −h_c ≤ n_c (1 + u)^(n_c + 1).
    This grows with n_c, so that n_c is at least the n above. Which precision a client computed in cannot be read from a
    file of float32, so u is that of bfloat16.

    Args:
        head_bias_gradient: h, of the sum of the losses: B times the gradient of their mean.
        batch_size: B.

    Raises:
        PrivlabError: if the batch size is below 1, or the gradient is not finite.
    """
    check_range(batch_size >= 1, "batch_size", "a positive number", batch_size)
    if not head_bias_gradient.isfinite().all():
        raise PrivlabError("The gradient of the head's bias must be finite. Found NaN or infinity.")
    h = head_bias_gradient.double()
    n = torch.arange(batch_size + 1, dtype=h.dtype, device=h.device)
    most = n * (1 + _BFLOAT16_ROUNDING) ** (n + 1)  # the largest −h_c of n images, ascending
    return torch.searchsorted(most, -h - _ROUNDING_ERROR * batch_size)  # B + 1 where no batch of B explains it


@torch.no_grad()
def labels_that_rise(model: VictimModel, update: Update, image: Float[Tensor, "1 c h w"], most: int) -> list[int]:
    """Return the classes whose logit of an image rises most along an update, the most first.

    A step along u = Jᵀ(p − y) moves the logits by −J Jᵀ (p − y), which is largest at the label y where classes disturb
    each other less than themselves. So what is released of all layers but the head tells the label too, given the
    image.

    Args:
        model: the server's model with θ_0; it is left as it is.
        update: −(θ_T − θ_0), or a part of it, by timm's parameter name.
        image: the image, or nearly it, in [0, 1].
        most: how many classes are returned.
    """
    before = copy.deepcopy(model).double()
    after = copy.deepcopy(before)
    for name, u in update.items():
        after.vit.get_parameter(name).sub_(_STEP * u.double())
    with full_precision():
        rise = (after(image.double()) - before(image.double()))[0]
    return rise.topk(min(most, len(rise))).indices.tolist()
