"""`column-permutation`: the entries of every token are sent in a secret order, which a model keeps for its lifetime."""

from dataclasses import dataclass, replace
from typing import ClassVar

from privlab.patches import bits, draw_orders, permute_features
from privlab.threat import Draws, Effects, Sent
from privlab.victims import VictimModel


@dataclass(frozen=True)
class ColumnPermutation:
    """Send Z P_C instead of Z to a server whose weights are keyed by P_C; the client restores the order of the outputs.

    Idea: The client sends its features with their columns in a secret order, to a server whose weights are stored in
    that order. The server computes as before, and the client puts the outputs back. The order is the key of a model.

    Steps: features Z → permute the columns: Z P_C

    Algorithm: With the weights of Eq. 6, 12 and 13, outputs are T(Z) P_C and gradients are permuted in the same way
    (Theorems 4.4 and 4.5), so the utility does not change. P_C is drawn once for a model: its weights depend on it.

    Fails if: there is a class token, whose row is public: sorting it gives the key. Without it the statistics of the
    columns do, if the base model is public.

    Cost: It costs no accuracy: the client puts the outputs back in order.

    Studies: permutation

    Source: Permutation Equivariance (Xu et al., CVPR 2024), Equations 5 and 6. [@xu2024permutation]
    """

    name: ClassVar[str] = "column-permutation"
    paper: ClassVar[str] = "Permutation Equivariance (Xu et al. 2024), Eq. 5 and 6, Theorems 4.4 and 4.5"
    order: ClassVar[int] = 100

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
