"""`patch-update`: the image from the update of a client's local training by SGD, its rounding foreseen."""

# Known are θ_0, the client's public settings, and the update u = −(θ_T − θ_0) of E_pos and W, which may have passed
# filters. Sought are the normalised patches X (N × K) of the one image that the client trained on.
# 1. `without_decay` takes the share of weight decay off u, which leaves A (N × D) of E_pos and G (D × K) of W.
# 2. `weighted_patches` solves Aᵀ X = G, each entry weighed by the rounding of the weight that it was subtracted from.
# 3. `patches_of_levels` gives a second candidate, whose pixels are whole grey levels. For N ≥ D, where the equations
# determine no patch, `PatchGradientPrior.of_update` gives the only one.
# 4. `update_on` trains the client on each candidate. The nearest update to u wins, and its
# rounding is subtracted from u for another solve.
# Behind filters that drop or clip entries, `_behind` replaces steps 3 and 4: the missing entries of A are unknowns too.

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.gradients.patch_gradient_prior import MOST_FREE, PatchGradientPrior
from privlab.attacks.solvers import (
    ONE_IMAGE,
    RTOL,
    complete_entries,
    fit_decay,
    patches_of_levels,
    photograph_gradients,
    rounding_of_embedding,
    slot_gradients,
    slot_rows,
    too_many,
    unmix,
    warn_of_limits,
    weighted_patches,
)
from privlab.base import AtLeast0, Checked, PrivlabError
from privlab.patches import patchify, unpatchify
from privlab.release import (
    EXPLAINED_RESIDUAL,
    Update,
    each_release,
    errors_of_filters,
    labels_that_rise,
    rounding_deviation,
    scale_of,
    scales,
    soft_targets,
    update_on,
    without_decay,
)
from privlab.threat import Capability, Client, Observation, Stack
from privlab.victims import VictimModel

_PE, _PROJECTION = "pos_embed", "patch_embed.proj.weight"

_MOST_MISSING = 6000
"""The most missing entries of A that are solved for: their preconditioner is a matrix of so many rows, of 288 MB."""

_MOST_OPEN = 16  # the largest N − D for which grey levels are tried: memory grows with D N²

_HARD = 0.95  # the least share of a label's largest class that counts as a label of one class

_MIXINGS = 4  # times that the shares of two mixed images and their pixels are renewed


@dataclass(frozen=True)
class PatchUpdate(Checked):
    """Solve Aᵀ X = G for the patches X of a client that trained on one image, however many steps it took.

    Idea: A client that trains on one image for several steps releases the difference of its weights. All steps of SGD
    use the same patches, so the difference obeys the same linear system as one gradient. The attack undoes weight
    decay, solves the system, and trains the client again on its result to find the rounding error.

    Steps: undo decay, weigh by rounding → solve Aᵀ X = G → retrain to foresee rounding

    Algorithm: With decay undone, what SGD moved is Σ_s a_s g_s for known numbers a_s: momentum and schedules are one
    linear map for all parameters. The image stays the same in each step, so G = Σ_s a_s A_sᵀ X = Aᵀ X, where A and G
    are what moved E_pos and W. What is left is the rounding of stored weights.

    1. The entries are weighed by the rounding of the weights that they were subtracted from.
    2. Pixels have grey levels: of the solutions near that one, one of eight bits is tried too (`patches_of_levels`).
    3. Rounding is deterministic: the client is trained again on both, with the label that the head's bias reveals. The
       nearer that update is to the release, the better; if it is the release bit for bit, it is that of the image. Else
       the client is trained in float64 too, the difference is its rounding, and is subtracted from the release for
       another round. Rounding of steps that are about as large as an ulp cannot be foreseen, so that a round may make
       things worse: the best of all rounds stays.

    A filter, a defense of the release, that multiplies all entries by one factor, as clipping by the norm does, takes
    nothing: the factor is fitted to the client's own update in step 3, and decay is fitted before. Where a filter
    leaves out the head, no label is inferred. Those whose logits rise most along the update are tried
    (`labels_that_rise`), and step 3 is left out if none explains it.

    Behind other filters entries have the variance that these state. Where they leave some entries exact, those that
    they set to zero or clipped are missing, and those of A are found from the others (`complete_entries`), unless there
    are more than 6,000. Rounding is not foreseen then.

    For N ≥ D many images solve the equations, of which few have whole grey levels: the candidate of step 2 is found by
    `PatchGradientPrior.of_update` then, which finds the errors of A with it.

    Exact if: `patch-gradient` would be, and the client trains on one image by SGD, for any number of steps; the
    rounding of stored weights remains. That is undone too if the image has 256 grey levels and its gradient is not too
    small, also for a few patches more than D (measured: trained weights, D = 192, N = 196). The attack undoes momentum,
    schedules, clipping and weight decay.

    Fails if: the client uses Adam or AdamW, which divide each entry of the gradient by its own magnitude: it refuses
    them; see `adam-update`. It refuses a gradient of several images, because its equations then mix the images.

    Cost: 2 to 23 s an image (ViT-Ti, 160 pixels, 1 to 20 steps), of which the correction for rounding is nearly all;
    behind a filter that drops entries 16 to 45 s; 10 to 60 s for N ≥ D (224 pixels).

    Studies: updates

    Args:
        decay: "known" takes weight decay from the client's settings, "fitted" fits one number, without them.
        rounds: the most times that rounding is foreseen; 0 leaves out steps 2 and 3, and takes a twentieth of the time.
            What they bring is in docs/studies/updates.md. They are left out too for N > D + 16, where dropout is
            private, where the decay is not known, where no label is found, or where a defense of images made private
            draws. Of updates that are sent as int8 the result of step 3 is taken only where it is the release bit for
            bit.
        levels: grey levels above black of a stored image, 255 for eight bits; 0 leaves out step 2. Images that a client
            does not feed as they are stored, such as rescaled or jittered tensors, have none, and step 3 finds that.
    """

    name: ClassVar[str] = "patch-update"
    paper: ClassVar[str] = "ours: patch-gradient on the linear map of SGD, with the client's rounding foreseen"
    order: ClassVar[int] = 20
    short: ClassVar[Mapping[str, Any]] = {"rounds": 1}
    knows: ClassVar[frozenset[str]] = frozenset(
        {
            *("gradient-noise", "gradient-pruning", "gradient-quantisation"),
            *("percentile-privacy", "svt-privacy", "exclude-vars", "binary-weights", "adaptive-clipping"),
        }
    )
    requires: ClassVar[frozenset[Capability]] = ONE_IMAGE | {Capability.KNOWS_WEIGHTS, Capability.CLIENT_UPDATE}
    effort: ClassVar[str] = "standard"
    parameters: ClassVar[tuple[str, ...]] = (_PE, _PROJECTION)
    updates_of: ClassVar[tuple[str, ...]] = ("sgd",)
    if_released: ClassVar[tuple[str, ...]] = ("head.bias", "head.weight", "blocks.0.attn.qkv.bias")

    decay: Annotated[str, ("known", "fitted")] = "known"
    rounds: AtLeast0 = 3
    levels: AtLeast0 = 255

    def beyond(self, seen: Observation) -> str | None:
        """Return what violates N ≤ D + 4, or N < D behind filters, or how many entries these took, with the numbers."""
        errors = errors_of_filters(seen, (_PE, _PROJECTION))
        found = [too_many(seen) if _have_any(errors) else PatchGradientPrior().beyond(seen)]
        most = max(int(_missing(slot_rows(seen.model, of[_PE])).sum()) for of in errors)
        if most > _MOST_MISSING:
            found.append(f"{most} missing entries > {_MOST_MISSING}")
        return " and ".join(filter(None, found)) or None

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients trained on.

        Raises:
            PrivlabError: if the observation has no client, or one that does not train by SGD.
        """
        # Adam divides each entry of a gradient by its own magnitude, so only SGD leaves one linear map for A and G.
        client = seen.client
        if client is None or client.optimiser != "sgd":
            found = "no client" if client is None else f"client.optimiser={client.optimiser}"
            raise PrivlabError(
                f"patch-update needs the update of a client that trains by sgd. Found {found}. That this attack does "
                "not apply is no evidence of privacy."
            )
        releases = each_release(seen)
        stack, errors = Stack(tuple(seen.defense)), errors_of_filters(seen, (_PE, _PROJECTION))
        # A filter may have set all entries of E_pos or of W to zero. There is no equation then.
        nothing = [name for name in (_PE, _PROJECTION) if not all(update[name].any() for update in releases)]
        if stack.on_gradients and nothing:
            raise PrivlabError(
                f"{self.name} has nothing to solve for: the filter left no entry of {' and '.join(nothing)}. That it "
                "does not apply is no evidence of privacy."
            )
        # Filters that put errors on entries state their variances, and rounding is not foreseen then. Others
        # change these two parameters by a factor at most.
        scaled = scales(stack.on_gradients)
        filtered = _have_any(errors)
        # The system determines X for N < D only: pre-norm blocks ignore a constant added to a token, so that A has
        # rank D − 1 at most. Grey levels replace a few equations.
        most = seen.model.vit.embed_dim + (-1 if filtered or not self.levels else MOST_FREE)
        warn_of_limits(self.name, slot_gradients(seen), most=most)
        if filtered:
            found = [self._behind(seen.model, client, *of_one, scaled) for of_one in zip(releases, errors, strict=True)]
        else:  # filters that leave parameters out, or scale the others, take nothing of these
            # A defense of images makes private draws in each step, so that training the client
            # again does not repeat its rounding.
            own = replace(self, rounds=0) if stack.changes_images else self
            singles = [replace(seen, gradients={n: u[None] for n, u in update.items()}) for update in releases]
            found = [
                own._patches(single, client, update, scaled) for single, update in zip(singles, releases, strict=True)
            ]
        return seen.model.to_images(torch.stack(found))

    def unmix(self, seen: Observation) -> Float[Tensor, "b 2 c h w"]:
        """Return both photographs of each image that MixUp made, λ a + (1 − λ) b: a, and b of the smaller share.

        The label must show λ, so that the photographs have two classes. Their pixels are whole grey levels.

        Example:
            ```python
            first, second = PatchUpdate().unmix(seen)[0]  # of the first client
            ```

        Raises:
            PrivlabError: if a label does not have two classes, or for N ≥ D patches.
        """
        model, client, found = seen.model, seen.client, list[Tensor]()
        if client is None or client.optimiser != "sgd" or too_many(seen):
            raise PrivlabError(f"Unmixing needs a client that trains by sgd on N < D patches. {too_many(seen) or ''}")
        white, black = (self.levels * t.double().flatten() for t in (model.std, model.mean))
        # The covariance Γ is that of normalised pixels. It is converted to grey levels here.
        Γ = photograph_gradients(model, seen.photographs).double() * white[:, None] * white
        scale, dark = (t.repeat_interleave(model.patch**2) for t in (white, black))
        for update in each_release(seen):
            moved = without_decay(model, update, self._lost(model, client, update))
            deviations = rounding_of_embedding(model, client, update)
            A, dA = (slot_rows(model, each[_PE]).double() for each in (moved, deviations))
            G, dG = (each[_PROJECTION].flatten(1).double() for each in (moved, deviations))
            X = weighted_patches(A, G, dA, dG)
            single = replace(seen, gradients={name: u[None] for name, u in update.items()})
            label = soft_targets(single, model.to_images(X[None]))
            if label is None or float(label.max()) > _HARD or float(label.topk(2).values.sum()) < _HARD:
                raise PrivlabError("Unmixing needs a label that shows the shares of two classes.")
            # Column k of X has the precision A diag(1 / Var_k) Aᵀ, with Var_dk = Var G_dk + Σ_n Var A_nd x_nk².
            vA, vG = (d.square() + RTOL**2 * M.square().mean() for d, M in ((dA, A), (dG, G)))
            precision = torch.stack([(A / each) @ A.mT for each in (vG + vA.mT @ X.square()).mT])
            mixed = unpatchify((X * scale + dark)[None], model.image_shape)[0]
            both = unmix(mixed, precision / scale[:, None, None] ** 2, float(label.max()), Γ, self.levels)
            found.append(torch.stack([both.first, both.second]) / self.levels)
        return torch.stack(found).to(model.mean)

    def _behind(
        self, model: VictimModel, client: Client, update: Update, errors: Update, scaled: bool
    ) -> Float[Tensor, "n k"]:
        """Return the normalised patches of one client's image from what filters left of its update."""
        # With u = −(θ_T − θ_0) and the lost share l = 1 − c of θ_0, u − l θ_0 is what the gradients moved.
        moved = without_decay(model, update, self._lost(model, client, update, scaled=scaled))
        rounding = rounding_of_embedding(model, client, update)
        # A is N × D and G is D × K. d* are standard deviations of the rounding, v* the
        # variances that the filters state.
        A, dA, vA = (slot_rows(model, each[_PE]) for each in (moved, rounding, errors))
        G, dG, vG = (each[_PROJECTION].flatten(1) for each in (moved, rounding, errors))
        # The variances of filters and of rounding add up. The last term is float32's rounding of the matrix as a whole.
        missing = _missing(vA)
        vA, vG = (v + d.square() + RTOL**2 * M.square().mean() for v, d, M in ((vA, dA, A), (vG, dG, G)))
        # Missing entries of A become unknowns. Afterwards they count as exact, so that
        # only the other entries' errors weigh.
        if 0 < int(missing.sum()) <= _MOST_MISSING:
            A, vA = complete_entries(A, G, vA, vG, missing), vA.masked_fill(missing, 0)
        # Entry (d, k) of G − Aᵀ X gets the weight 1 / (Var G_dk + Σ_n Var A_nd x_nk²). A
        # missing entry of G hardly counts.
        return weighted_patches(A, G, vA.sqrt(), vG.sqrt())

    def _lost(self, model: VictimModel, client: Client, update: Update, *, scaled: bool = False) -> float:
        """Return the share of θ_0 that decay took: that of the settings, or fitted where the update is `scaled`."""
        # A filter that scales the update by an unknown factor scales the decay in it too,
        # so that its share must be fitted.
        if self.decay == "known" and not (scaled and client.weight_decay):
            return 1 - client.kept_share
        # (u_e − l E)ᵀ X = u_W − l W₀ holds at the true l alone: `fit_decay` finds the l of the least residual.
        E = slot_rows(model, model.vit.get_parameter(_PE).detach().double())
        return fit_decay(model, update, slot_rows(model, update[_PE].double()), E)

    def _patches(self, seen: Observation, client: Client, update: Update, scaled: bool) -> Float[Tensor, "n k"]:
        """Return the normalised patches of one client's image; `scaled` says whether a filter scaled its update."""
        model, Γ = seen.model, photograph_gradients(seen.model, seen.photographs)
        # Decay and the rounding of stored weights come first: both are known from the settings and θ_0, or are fitted.
        lost = self._lost(model, client, update, scaled=scaled)
        deviations = rounding_of_embedding(model, client, update)
        patches, width = slot_rows(model, update[_PE]).shape
        is_open = patches >= width  # many images solve the equations, of which few have whole grey levels
        is_beyond = patches - width > _MOST_OPEN

        def solve(of: Mapping[str, Tensor]) -> list[_Candidate]:
            A, dA = (slot_rows(model, each[_PE]) for each in (of, deviations))
            G, dG = (each[_PROJECTION].flatten(1) for each in (of, deviations))
            if is_open and not is_beyond:
                # No error counts as less than float32's of the matrix as a whole, as in `weighted_patches`.
                errors = [d.square() + RTOL**2 * M.square().mean() for d, M in ((dA, A), (dG, G))]
                open_ = PatchGradientPrior(levels=self.levels).of_update(model, A, G, (errors[0], errors[1]), Γ)
                # Settled pixels are levels up to float64's rounding: rounded they are fed as the client fed them.
                levels = self.levels or 2**24
                return [_Candidate(X, (model.to_images(X[None]) * levels).round() / levels) for X in open_]
            # Aᵀ X = G, entry by entry weighed by the inverse variance of its rounding, is the first candidate.
            X = weighted_patches(A, G, dA, dG)
            found = [_Candidate(X, model.to_images(X[None]))]
            if self.levels and not is_open:
                # The solve on grey levels has one weight for each of the D equations, so that the variances Var
                # G_dk + Σ_n Var A_nd x_nk² are averaged over the K columns.
                variance = (dG.square() + dA.square().mT @ X.square()).mean(1)
                X = patches_of_levels(model, A, G, 1 / variance, self.levels)
                found.append(_Candidate(X, (model.to_images(X[None]) * self.levels).round() / self.levels))
            return found

        # The first solve knows nothing of how the rounding fell. It is the result where training
        # cannot be repeated, or has no label.
        moved = without_decay(model, update, lost)
        found = solve(moved)
        private = client.dropout or client.drop_path
        if not self.rounds or private or is_beyond or self.decay == "fitted" or not client.has_labels:
            return found[0].X
        # ∂ℓ/∂b_c = p_c − y_c is negative for the label alone, and u has the sign of a gradient. Without the head's
        # bias, the classes are tried whose logits rise most along the update.
        has_bias = "head.bias" in moved
        labels = [int(moved["head.bias"].argmin())] if has_bias else labels_that_rise(model, moved, found[0].image)
        is_soft = has_bias and not scaled and _rises(model, client, update, moved["head.bias"]) > 1
        may_mix = has_bias and client.is_of_class and client.sent_as == "float32" and not client.label_smoothing
        may_mix &= not (is_soft or scaled or is_open)

        def targets(image: Float[Tensor, "1 c h w"]) -> list[Any]:
            """Return the labels to try for an image: the soft one that the head shows with it, where there is one."""
            soft = soft_targets(seen, image) if is_soft else None
            return labels if soft is None else [soft]

        # The same client in float64, which sends its difference in full, has no rounding: the
        # difference of both is the rounding.
        unrounded, plain = copy.deepcopy(model).double(), replace(client, sends="difference", sent_as="float32")
        first = best = found[0].X
        least = math.inf
        # Each round trains the client on all candidates, keeps the best of all rounds, and
        # foresees the rounding of the next.
        for left in reversed(range(self.rounds + 1)):
            if is_soft and self.levels and not is_open:
                # The label's shares are those of the pixels. They are as wrong as the image from which they follow, so
                # that both are renewed in turn.
                mixed = found[:1]
                for _ in range(_MIXINGS):
                    mixed = _mixture(model, found[0], targets(mixed[0].image)[0], self.levels) or mixed
                found = [*found, *mixed]
            # The distance Σ (û − u)² / Var of a candidate's update û from the release is in
            # standard deviations of rounding.
            tried = [_Tried.of(model, client, update, one, y, scaled) for one in found for y in targets(one.image)]
            offs = [_distance(each.made, update, deviations) for each in tried]
            off, now = min(zip(offs, tried, strict=True), key=lambda of: of[0])
            # In a mixture a class whose probability exceeds its share has a rising bias, so that
            # one class is left, which does not explain the head.
            if may_mix:
                may_mix = False  # the first round decides
                if _residual(now.made, update, ["head.bias"]) >= EXPLAINED_RESIDUAL:
                    soft = soft_targets(seen, now.candidate.image)
                    is_soft = soft is not None and float(soft.max()) < _HARD
                if is_soft:
                    continue
            # If the filter left out the head and no tried label explains the embedding's
            # update, the label is none of these.
            if (
                not has_bias
                and len(labels) > 1
                and _residual(now.made, update, [_PE, _PROJECTION]) >= EXPLAINED_RESIDUAL
            ):
                break
            # Rounding of steps as large as an ulp cannot be foreseen, so a later round may be
            # worse. Distance 0 is bit for bit.
            if off < least:
                best, least = now.candidate.X, off
            if not (left and off):
                break
            labels = [now.label] if isinstance(now.label, int) else labels
            # û − s û₆₄, with s the factor of a filter, is the rounding of a client with this image. Near the true image
            # it is nearly the client's rounding, and u without it gives nearly exact equations.
            exact = update_on(unrounded, plain, now.candidate.image.double(), now.label)
            foreseen = {n: update[n] - (now.made[n].double() - now.scale * exact[n]) for n in deviations}
            found = solve(without_decay(model, foreseen, now.scale * (1 - client.kept_share)))
        # Rounding as large as int8's follows from an exact image alone: others are nearer to the release by chance.
        return first if least and client.sent_as == "int8" else best


class _Candidate(NamedTuple):
    """Normalised patches that may be the client's, and the image that they make."""

    X: Float[Tensor, "n k"]
    image: Float[Tensor, "1 c h w"]


class _Tried(NamedTuple):
    """A candidate with a label, and the update that a client of both would send, times the factor of a filter."""

    candidate: _Candidate
    label: int | Float[Tensor, "1 y"]
    scale: float
    made: Update

    @classmethod
    def of(
        cls,
        model: VictimModel,
        client: Client,
        update: Mapping[str, Tensor],
        one: _Candidate,
        label: int | Float[Tensor, "1 y"],
        scaled: bool,
    ) -> "_Tried":
        """Train the client again; the factor is fitted if the update is `scaled`, and rounded as filters round it."""
        made = update_on(model, client, one.image, label)
        # Without such a filter the factor s is 1.
        if not scaled:
            return cls(one, label, 1.0, made)
        # Else s minimises ‖s û − u‖. It is rounded to the number format of the update, as the filter rounds it.
        kept = {name: torch.ones_like(u, dtype=torch.bool) for name, u in update.items()}
        s = torch.tensor(scale_of(made, update, kept)).to(update[_PE])
        return cls(one, label, float(s), {name: s * u for name, u in made.items()})


def _have_any(errors: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether a filter put an error on any entry of a release, by the variances of each."""
    return any(bool(variance.any()) for of_one in errors for variance in of_one.values())


def _mixture(model: VictimModel, one: _Candidate, label: int | Float[Tensor, "1 y"], levels: int) -> list[_Candidate]:
    """Return the nearest image that mixes two of whole grey levels in the shares of a label of two classes, if any.

    MixUp takes λ a + (1 − λ) b for pixels and labels, so that a pixel has one of (L + 1)² values at most.
    """
    if isinstance(label, int):
        return []
    λ = float(label.max())
    whole = torch.arange(levels + 1, dtype=torch.float64, device=model.mean.device)
    values = (λ * whole[:, None] + (1 - λ) * whole).flatten().sort().values / levels
    # The nearest of the sorted values is one of the two between which a pixel lies.
    pixels = one.image.double()
    above = torch.searchsorted(values, pixels.contiguous()).clamp(1, len(values) - 1)
    lower, upper = values[above - 1], values[above]
    image = torch.where(pixels - lower < upper - pixels, lower, upper)
    return [_Candidate(patchify(model.normalise(image), model.patch)[0], image.to(one.image))]


def _rises(model: VictimModel, client: Client, update: Update, bias: Float[Tensor, " y"]) -> int:
    """Return how many classes a soft label has: the biases that rise by more than rounding; 1 where all are smoothed.

    Softmax gives ∂ℓ/∂b_c = p_c − y_c, which is negative only for classes with a share y_c of the label.
    """
    if client.label_smoothing:
        return 1
    deviation = rounding_deviation(model.vit.get_parameter("head.bias").detach(), update["head.bias"], client)
    # T steps may all round by ulp / 2 to the same side, which is √(3 T) of these deviations: twice that is certain.
    sure = math.sqrt(12 * client.total_steps)
    return int(((bias < -sure * deviation) & (bias < bias.min() / 100)).sum())


def _distance(made: Mapping[str, Tensor], update: Mapping[str, Tensor], deviations: Mapping[str, Tensor]) -> float:
    """Return the squared distance of two updates, in standard deviations of rounding; 0 if they are equal."""
    # The second term of the variance is float32's rounding of the entry itself. 0 / 0, of equal entries, counts as 0.
    parts = [
        (made[name].double() - update[name]).square() / (dev.square() + (RTOL * update[name]).square())
        for name, dev in deviations.items()
    ]
    return sum(float(part.nan_to_num().sum()) for part in parts)


def _residual(made: Mapping[str, Tensor], update: Mapping[str, Tensor], names: Sequence[str]) -> float:
    """Return the relative distance of two updates of the named parameters."""
    off = sum(float((made[name] - update[name]).double().square().sum()) for name in names)
    size = sum(float(update[name].double().square().sum()) for name in names)
    return math.sqrt(off / size) if size else math.inf


def _missing(variance: Float[Tensor, "n d"]) -> Bool[Tensor, "n d"]:
    """Return the entries that filters did not leave exact; none where all have an error, as under noise."""
    return (variance > 0) & (variance == 0).any()
