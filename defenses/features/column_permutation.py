"""`column-permutation`: the entries of every token are sent in a secret order, which a model keeps for its lifetime."""

from dataclasses import dataclass, replace
from typing import ClassVar

from privlab.patches import bits, draw_orders, permute_features
from privlab.threat import Draws, Effects, Sent
from privlab.victims import VictimModel

__all__ = ["ColumnPermutation"]


@dataclass(frozen=True)
class ColumnPermutation:
    """Send Z P_C instead of Z to a server whose weights are keyed by P_C; the client restores the order of the outputs.

    With the weights of Eq. 6, 12 and 13, outputs are T(Z) P_C and gradients are permuted alike (Theorems 4.4 and 4.5),
    so the utility does not change. P_C is drawn once for a model, because its weights depend on it.

    Source: Permutation Equivariance (Xu et al., CVPR 2024), Equations 5 and 6.
    """

    name: ClassVar[str] = "column-permutation"
    paper: ClassVar[str] = "Permutation Equivariance (Xu et al. 2024), Eq. 5 and 6, Theorems 4.4 and 4.5"

    acts_as: ClassVar[Effects] = Effects(columns=True)

    def secret_bits(self, model: VictimModel, together: int) -> float:
        """Return log₂ D! of an order of D columns."""
        return bits(model.vit.embed_dim)

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Return the features with their columns in the secret order."""
        d = sent.features.shape[-1]
        columns = draw_orders(d, [draws.model])[0].to(sent.source.device)
        return replace(
            sent,
            features=permute_features(sent.features, columns=columns),
            columns=columns if sent.columns is None else sent.columns[columns],
            key_bits=sent.key_bits + bits(d),
        )
