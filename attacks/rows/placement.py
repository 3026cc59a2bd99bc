"""What the attacks on released features share: which row belongs in which slot.

Known are the released rows and the distribution of rows in each slot; sought is the slot of each row.

1. `undone` checks the features, and `known_tokens` and `patch_law` give what is public: tokens, e_s, μ and Σ.
2. `row_costs`: −2 log-likelihood of each row in each slot.
3. `place_rows`: the assignment of least cost, for each image or for the batch, as the defense moves rows.
"""

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from privlab.base import PrivlabError, linear_sum_assignment, warn
from privlab.patches import restore_features
from privlab.release import effects_of
from privlab.threat import Capability, Effects, FeatureObservation, RowOrder
from privlab.victims import VictimModel

WHITE_BOX = frozenset(
    {
        Capability.RELEASED_FEATURES,
        Capability.KNOWS_WEIGHTS,
        Capability.AUXILIARY_IMAGES,
        Capability.KNOWS_DEFENSE,
        Capability.EMBEDDED_ROWS,
    }
)
"""What an attack needs that undoes a defense on embedded rows by the public weights and images."""

MOST_IMAGES = 16  # the most images from which the law of patches is estimated; three images place rows as well

LEAST_VARIANCE = 1e-9
"""Mean variance of a feature below which public images are taken to be of one grey, and so uninformative."""

RIDGE = 1e-3  # is added to every variance, relative to their mean: public photographs may be fewer than the width


def effects(seen: FeatureObservation) -> Effects:
    """Return what the client's defenses do; their algorithms and parameters are public."""
    return effects_of(seen.model, seen.defense)


def warn_of_moves(attack: str, seen: FeatureObservation, *, rows: bool = False) -> None:
    """Warn if a defense moves what an attack takes for unmoved: columns, and rows unless it places these itself.

    Args:
        attack: name of the attack, with which the warning begins.
        seen: the observation, whose defenses are examined.
        rows: whether the attack places the rows itself, so that only moved columns matter.

    Warns:
        PrivlabWarning: with what is moved.
    """
    done = effects(seen)
    moved = [name for name, moves in (("rows", not rows and done.rows != "kept"), ("columns", done.columns)) if moves]
    if moved:
        warn(
            f"{attack} takes the {' and '.join(moved)} of what is sent for unmoved, and the defense moves them: "
            "a low score here is no evidence of privacy.",
        )


def undone(seen: FeatureObservation, columns: Int[Tensor, " d"] | None = None) -> Float[Tensor, "b t d"]:
    """Return the features in single precision or better; with `columns`, the key, also with their columns put back.

    Raises:
        PrivlabError: if they do not fit the model, or are not finite.
    """
    features, vit = seen.features.detach(), seen.model.vit
    expected = (vit.num_prefix_tokens + vit.patch_embed.num_patches, vit.embed_dim)
    if features.shape[1:] != expected:
        found = " × ".join(map(str, features.shape[1:]))
        raise PrivlabError(f"The model sends {expected[0]} × {expected[1]} features of an image. Found {found}.")
    if not features.isfinite().all():
        raise PrivlabError("Features must be finite. Found nan or inf.")
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    return features if columns is None else restore_features(features, columns=columns)


def known_tokens(model: VictimModel) -> tuple[Float[Tensor, "p d"], Float[Tensor, "n d"]]:
    """Return the class and register tokens as they are sent, and the position embeddings of the patches (or zeros)."""
    h, w = model.grid
    # The rows of any image show the prefix tokens, which do not depend on it. Patches are the last h · w rows.
    tokens = model.embed(model.mean.new_zeros(1, *model.image_shape))[0].detach().double()
    pe = model.vit.pos_embed
    prefix, patches = tokens[: -h * w], tokens[-h * w :]
    return prefix, torch.zeros_like(patches) if pe is None else pe[0, -h * w :].detach().double()


def patch_law(
    model: VictimModel, public: Float[Tensor, "m c h w"], noise: float = 0.0
) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Return mean and covariance of W x + β + ε over the patches of the first public images, with noise ε.

    Args:
        model: the victim, whose W and β embed the patches.
        public: images in [0, 1], of which the first `MOST_IMAGES` are used.
        noise: standard deviation of ε, white, in the units of the rows, ≥ 0.

    Raises:
        PrivlabError: if there are no public images.
    """
    if not len(public):
        raise PrivlabError("The law of patches is taken from public images. Found none: give one or more.")
    # The projection alone, without position embeddings: W x + β of all patches, (images · N) × D.
    proj = model.vit.patch_embed.proj(model.normalise(public[:MOST_IMAGES].to(model.mean)))
    rows = proj.flatten(2).mT.flatten(0, 1).detach().double()
    covariance = rows.mT.cov(correction=0)
    ridge = RIDGE * covariance.diagonal().mean().clamp_min(LEAST_VARIANCE) + noise**2
    return rows.mean(0), covariance + ridge * torch.eye(len(covariance), dtype=rows.dtype, device=rows.device)


def row_costs(
    features: Float[Tensor, "b t d"],
    prefix: Float[Tensor, "p d"],
    pe: Float[Tensor, "n d"],
    law: tuple[Float[Tensor, " d"], Float[Tensor, "d d"]],
    noise: float = 0.0,
) -> Float[Tensor, "b t t"]:
    """Return −2 log-likelihood of row r in slot s, class and register tokens first: ‖z_r − μ_s‖² in Σ_s⁻¹, + log |Σ_s|.

    A patch's row is N(μ + e_s, Σ); the row of a class or register token is its public value with nothing but noise.
    Among the patch slots, terms that depend on r or on s alone do not affect an assignment, leaving −2 z_rᵀ Σ⁻¹ e_s.

    Args:
        features: the rows of each image, with their columns in the model's order.
        prefix: class and register tokens as they are sent without a defense, one slot each.
        pe: position embeddings e_s of the patch slots; zeros for a victim without any.
        law: (μ, Σ), mean and covariance of the rows of patches without e_s, with the noise (`patch_law`).
        noise: standard deviation of the noise on an entry of the rows, ≥ 0.
    """
    mean, covariance, prefix, pe = (x.to(features.dtype) for x in (*law, prefix, pe))
    # With Σ = L Lᵀ, rows and embeddings are multiplied by L⁻¹: the Mahalanobis distance
    # (z − μ − e_s)ᵀ Σ⁻¹ (z − μ − e_s) becomes a squared length.
    L = torch.linalg.cholesky(covariance)
    rows = torch.linalg.solve_triangular(L, (features - mean).mT, upper=False).mT
    slots = torch.linalg.solve_triangular(L, pe.mT, upper=False).mT
    # The logarithm of the covariance's determinant is twice the sum of log L_ii.
    patch = _squares(rows, slots) + 2 * L.diagonal().log().sum()
    known = noise**2 + RIDGE**2 * covariance.diagonal().mean()  # above rounding, even without noise
    # A prefix row is its public value with white noise: ‖z − c‖² / variance + D log variance. b × t × (p + N).
    return torch.cat([_squares(features, prefix) / known + len(L) * known.log(), patch], 2)


def _squares(rows: Float[Tensor, "b t d"], slots: Float[Tensor, "s d"]) -> Float[Tensor, "b t s"]:
    # ‖z‖² − 2 zᵀ e + ‖e‖², which needs no b × t × s × d tensor.
    return rows.square().sum(2, keepdim=True) - 2 * rows @ slots.mT + slots.square().sum(1)


def place_rows(costs: Float[Tensor, "b t s"], kind: RowOrder) -> Int[Tensor, "b s"]:
    """Return, for every slot of every image, the row of the batch that an assignment of least cost puts there.

    If rows are mixed among images, each slot takes b rows, and which of them belongs to which image is left open.
    """
    b, t, s = costs.shape
    if kind == "mixed":
        # All b · t rows compete for b copies of each slot: one assignment of bt × bs costs.
        rows = _assign(costs.flatten(0, 1).repeat(1, b)[None])[0]
        return rows.view(b, s).to(costs.device)
    if kind == "kept":
        rows = torch.arange(s).expand(b, s)
    else:
        # One order for the batch: likelihoods of all images add up. Otherwise each image has a separate assignment.
        rows = _assign(costs.sum(0, keepdim=True) if kind == "shared" else costs).expand(b, s)
    # Rows are numbered over the whole batch: image · t + row.
    return (rows + t * torch.arange(b)[:, None]).to(costs.device)


def _assign(costs: Float[Tensor, "g r s"]) -> Int[Tensor, "g s"]:
    """Return the row of each slot. If all slots have different cheapest rows, these are the best assignment."""
    rows = costs.argmin(1).cpu()
    for i in (rows.sort(1).values.diff(dim=1) == 0).any(1).nonzero().flatten().tolist():
        rows[i] = least_cost(costs[i].T)[1]
    return rows


def least_cost(costs: Real[Tensor, "m n"]) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return the rows and the columns of the assignment of least cost, on the device of the costs."""
    rows, columns = (torch.from_numpy(each).to(costs.device) for each in linear_sum_assignment(costs.cpu().numpy()))
    return rows, columns
