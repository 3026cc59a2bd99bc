"""`encrypted-embedding`: the gradients of the embedding are multiplied by a secret random sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from privlab.threat import Effects, Gradients

_EMBEDDING = ("patch_embed.", "pos_embed", "cls_token", "reg_token", "dist_token", "unk_embed")
"""What the names of the embedding's parameters begin with."""


@dataclass(frozen=True)
class EncryptedEmbedding:
    """Release r ⊙ g for the parameters of the embedding, r ~ N(0, 1) in every entry, and g for all others.

    Idea: The clients multiply the gradients of the embedding by a random sequence that they share, and the server does
    not know. The closed forms of APRIL and others read these gradients. All later layers are released as they are.

    Steps: gradients of the embedding → multiply by secret numbers → all other gradients

    Algorithm: The clients share r, so that they can divide the server's mean by it; the server does not know r.

    Fails if: the adversary reads other layers: it hides the embedding alone. The gradients of the first block's MLP
    reveal its tokens, and these reveal the image, whatever the sequence is. It is a reading of an abstract.

    Cost: It changes what the server trains with, and may slow training down.

    Studies: published

    Source: Aso et al. (2023), arXiv 2308.00271, of which the abstract and the introduction could be read: the embedding
    of a federated ViT is encrypted by a random sequence. That it multiplies entries, its law, and that it is new for
    each release are assumptions; nothing that could be done to these gradients keeps more from the server than a
    fresh r does, except for their magnitudes. [@aso2023encrypted]
    """

    name: ClassVar[str] = "encrypted-embedding"
    paper: ClassVar[str] = "Aso et al. (2023), arXiv 2308.00271, by its abstract"
    order: ClassVar[int] = 200

    acts_as: ClassVar[Effects] = Effects(gradients="noisy")

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return the encrypted gradients; an image's generator draws in the order of the parameters' names."""
        released = dict(gradients)
        for name in sorted(gradients):
            if name.startswith(_EMBEDDING):
                g = gradients[name]
                released[name] = g * torch.stack([torch.randn(g.shape[1:], generator=draw) for draw in draws]).to(g)
        return released

    def variance(self, released: Gradients) -> Gradients:
        """Return 2 g̃² for the embedding and 0 for the rest: (r − 1)² g² is 2 g² on average, as 2 (r g)² is."""
        return {
            name: 2 * g.square() if name.startswith(_EMBEDDING) else torch.zeros_like(g) for name, g in released.items()
        }
