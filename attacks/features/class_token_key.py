"""`class-token-key`: the key of permuted columns, from the one row that is the same for every image.

Known are the rows with their columns in an unknown order c, and the public row of each prefix token; sought is c. First
`_prefix_rows` finds the prefix tokens' rows among those released, then `_columns` matches their entries.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.rows import WHITE_BOX, effects, known_tokens, least_cost, reassemble, undone
from privlab.threat import Capability, FeatureObservation, Reconstruction


@dataclass(frozen=True)
class ClassTokenKey:
    """Match the entries of the class token's row, and of the registers', with the public ones.

    Idea: The row of the class token is the same for every image, and its values are public. A column permutation only
    changes their order, so that sorting both rows gives the key. With the key the columns are put back, and the rows
    are placed and inverted.

    Steps: sort the class token's values → read off the column key → place and invert the rows

    Algorithm: The row (cls + e_0) P_C holds the public values in another order, whatever the image is: sorting both
    gives P_C if there is no noise. If rows are permuted too, the row is found by its sorted values. Its copies in a
    batch are averaged, which reduces noise. If there are several prefix tokens, the key is the assignment of k to j
    with the least Σ_p (z_pk − c_pj)².

    The size of noise has no part in the search, so that the attack does not count as one that knows noise.

    The columns are then put back, the rows placed by their position embeddings, or by their borders if there are none,
    and inverted. Equal values are ordered by chance; `column-statistics` does not depend on them.

    Exact if: there is no noise, and the class token's values are all different: the column key is then exact.

    Fails if: there is noise: a standard deviation of 0.1 reduces the recovered key to 24 % (ViT-Ti).

    Studies: permutation

    Source: column permutation as in Permutation Equivariance (Xu et al., CVPR 2024), Eq. 5, which moves the class token
    with the others. [@xu2024permutation]
    """

    name: ClassVar[str] = "class-token-key"
    paper: ClassVar[str] = "ours, against Permutation Equivariance (Xu et al. 2024), Eq. 5"
    order: ClassVar[int] = 260
    knows: ClassVar[frozenset[str]] = frozenset({"column-permutation", "row-permutation"})
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX | {Capability.CLASS_TOKEN}
    effort: ClassVar[str] = "quick"

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Recover the columns, then the rows and the images."""
        prefix, _ = known_tokens(seen.model)
        return reassemble(seen, _columns(_prefix_rows(undone(seen).double(), prefix, seen), prefix))


def _prefix_rows(
    features: Float[Tensor, "b t d"], prefix: Float[Tensor, "p d"], seen: FeatureObservation
) -> Float[Tensor, "p d"]:
    """Return the row of each prefix token, averaged over the batch; it is found by its place or its sorted values."""
    if effects(seen).rows == "kept":
        # Rows in place: the first p rows of each image, averaged over the batch to reduce noise.
        return features[:, : len(prefix)].mean(0)
    b = len(features)
    rows = features.flatten(0, 1)
    # Sorting makes a row independent of the order of its columns. The b · t sorted rows are compared with each sorted
    # token, and the b nearest are averaged.
    ranked = rows.sort(1).values
    nearest = [ranked.sub(token.sort().values).square().sum(1).topk(b, largest=False).indices for token in prefix]
    return torch.stack([rows[chosen].mean(0) for chosen in nearest])


def _columns(found: Float[Tensor, "p d"], known: Float[Tensor, "p d"]) -> Int[Tensor, " d"]:
    """Return the key c with found[:, k] ≈ known[:, c(k)]; for one row the best assignment is that of sorted values."""
    # The entry of rank r among the found values is matched with that of rank r among the
    # known ones: `argsort` twice gives r.
    if len(found) == 1:
        return known[0].argsort()[found[0].argsort().argsort()]
    # Several tokens: cost[k, j] = Σ_p (found_pk − known_pj)², d × d.
    return least_cost(torch.cdist(found.mT, known.mT).square())[1]
