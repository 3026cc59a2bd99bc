"""Whether an image is the private one, as the gradient or update that it gives shows: no private image is needed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from privlab.base import full_precision, gradients_enabled
from privlab.patches import patchify
from privlab.release.local_training import Update, rounding_of, undecayed, update_on, without_decay
from privlab.threat import (
    Client,
    Feed,
    GradientDefense,
    Observation,
    Stack,
    client_loss,
    defense_declarations,
    linear_loss,
)
from privlab.victims import fusing, released_gradients, released_parameters

_HEAD, _BIAS, _WEIGHT = "head.", "head.bias", "head.weight"
_PROJECTION, _PE = "patch_embed.proj.weight", "pos_embed"

_RTOL = 1e-6  # the relative error of a gradient in float32, over its largest singular value
_AUTOCAST = 2.0**-8  # that of an entry under autocast, in either format of 16 bits

_MOST_DEVIATIONS = 8.0
"""Deviations of the rounding of one step beyond which a weight was moved by gradients: rounding has at most 1.7."""

_MOST_ROUNDING = 0.02  # the rms error in normalised pixels that rounding may put into a direction that counts
_ROUNDS = 6  # times that the targets of several steps are corrected: the probabilities of later steps depend on them

FAR = 1e3
"""How far a numeric target is put from an output where the gradient shows its side alone."""

EXPLAINED_RESIDUAL = 0.05
"""The residual below which what was released is taken for that of the reconstruction.

The explained share is then above 0.9975. Where the position embeddings of one image are released, N < D, it is a PSNR
of 20 dB, and no image that was optimised against it had less (docs/how-to/updates.md). Of 1,000 wrong images, crops of
other photographs, the largest share was 0.70 (tests/release/test_explained.py).
"""


_UNDER_AUTOCAST = 0.075
"""The same under autocast: one wrong grey level changes all that is rounded, and leaves 0.04 to 0.07 of a ViT-Ti's."""


def is_explained(residual: float, client: Client | None = None) -> bool:
    """Return whether a residual is so small that what was released is taken for that of the reconstruction.

    The settings are those that it was computed with; None for a gradient.
    """
    autocast = client is not None and client.autocast != "float32"
    return residual < (_UNDER_AUTOCAST if autocast else EXPLAINED_RESIDUAL)


def residual(
    seen: Observation,
    images: Float[Tensor, "b c h w"],
    target: int | Float[Tensor, "z y"],
    *,
    with_bias: bool = False,
    of_logits: bool = False,
) -> float:
    """Return how far images are from giving what was released, G: the largest of three numbers, 0 for the client's own.

    1. ‖Ĝ − G‖ / ‖G‖ over all parameters but the head's. A small head scales down the gradients of all others, and its
       own, the whole norm then, says only that features are equal, which many images share.
    2. The same of the patch projection's weight alone, whose gradient Aᵀ X holds the pixels.
    3. Half the distance in pixels that this gradient still asks for (`_missing_pixels`): a model with random weights
       is nearly linear, and then A changes little from image to image, so that errors in directions where A is small
       change neither norm.

    Of an update, G is what the gradients alone moved, −(θ_T − θ_0) − (1 − c) θ_0 with the public share c that decay
    keeps, and Ĝ what they move where the client is run again on these images with its public settings, in the number
    format of its weights. Dropout is drawn again, and stays unexplained. Where the training diverges the residual
    is infinite, and so it is where nothing was released of what the images move, or little more than rounding.

    Behind filters both are compared on the entries that these leave exact, and the client's are scaled by the factor s
    that fits best where a filter scales all entries, so that G is −(θ_T − θ_0) s − s (1 − c) θ_0.

    Slots whose position embedding has no gradient are fed as MJP feeds them: with E_unk where it has a gradient.

    Args:
        seen: the observation of one release.
        images: all images of the release, such as reconstructions, in [0, 1].
        target: the class index of the private image, or the targets of each of z outputs (`soft_targets`).
        with_bias: whether the head's bias is one more number, as where a label or a rate is fitted: it shows them best.
        of_logits: whether `target` are gradients at the logits (`logit_gradients`), by which a step of any loss is run.
    """
    model, B = seen.model, len(images)
    counted = [n for n in seen.gradients if not n.startswith(_HEAD) or (with_bias and n == _BIAS)]
    held = {name: seen.gradients[name][0] for name in counted}
    kept = exact_entries(seen)
    own: Mapping[str, Tensor]
    if (client := _with(seen.client, of_logits=of_logits)) is not None:
        made = update_on(model, client, images, target)
        s = scale_of(made, held, kept) if scales(Stack(tuple(seen.defense)).on_gradients) else 1.0
        lost = s * (1 - client.kept_share) if client.is_linear else 0.0
        own = without_decay(model, {name: s * made[name].double() for name in held}, lost)
        held = without_decay(model, held, lost)
    else:
        feed = _fed(seen, images)
        names = sorted(released_parameters(model) & held.keys())
        labels = target.to(images) if isinstance(target, Tensor) else torch.full((B,), target, device=images.device)
        loss = _summed_linear if of_logits else partial(cross_entropy, reduction="sum")
        with full_precision():
            own = {n: g[0] for n, g in released_gradients(model, feed, labels, names, B, loss=loss).items()}
        held = {name: held[name] for name in names}
    own, held = ({name: u[name].double() * kept[name] for name in held} for u in (own, held))
    body = [name for name in held if name != _BIAS]
    if not body or any(_is_rounding(seen, held, names) for names in (body, [_PROJECTION]) if names[0] in held):
        return math.inf
    shares = [_relative(own, held, body)]
    shares += [_relative(own, held, [_BIAS])] if _BIAS in held else []
    if _PROJECTION in held:
        shares += [_relative(own, held, [_PROJECTION])]
        if kept[_PROJECTION].all() and (_PE not in kept or kept[_PE].all()):
            A = partial(_token_gradients, seen, images, target, of_logits=of_logits)
            shares += [_missing_pixels(seen, images, A, own, held) / 2]
    return max(shares)


def residual_of_head(seen: Observation, images: Float[Tensor, "b c h w"]) -> float | None:
    """Return `residual` with what the head shows in place of labels; None if it shows nothing that explains a release.

    That are the gradients at the logits for one step, whatever the loss is, and the targets of the stated loss for
    several steps on one image. Of several steps of a loss that is a function, contrastive or DINO's it is None.

    Args:
        seen: the observation of one release.
        images: all images of the release, such as reconstructions, in [0, 1].
    """
    of_logits = seen.client is None or seen.client.total_steps == 1
    shown = logit_gradients(seen, images) if of_logits else soft_targets(seen, images)
    return None if shown is None else residual(seen, images, shown, of_logits=of_logits)


def residual_of_clients(seen: Observation, images: Float[Tensor, "k c h w"], labels: Sequence[Sequence[int]]) -> float:
    """Return `residual` of the mean update of K clients of one image each: all K are run again.

    Of the labels of an image, that one counts whose update leaves the least of what the images before it leave. Any
    choice of labels that explains the release will do, so the adversary need not try all combinations. Which client an
    image belongs to does not matter either.

    Args:
        seen: the observation of one release without filters, with the settings of its clients.
        images: an image for each client, in any order, in [0, 1].
        labels: the classes to try for each image, one or more.
    """
    model, client = seen.model, seen.client
    held = {name: u[0] for name, u in seen.gradients.items() if not name.startswith(_HEAD)}
    assert client is not None
    moved = rest = undecayed(model, held, client)
    for image, of_image in zip(images, labels, strict=True):
        left: list[dict[str, Tensor]] = []
        for label in of_image:
            own = undecayed(model, update_on(model, client, image[None], label), client)
            left.append({name: rest[name] - own[name] / len(images) for name in held})
        rest = min(left, key=lambda each: float(_size(each)))
    given = {name: moved[name] - rest[name] for name in held}
    return max(_relative(given, moved, names) for names in (None, [_PROJECTION]) if names is None or names[0] in held)


def _with(client: Client | None, *, of_logits: bool) -> Client | None:
    """Return the client, with the linear loss where its targets are the gradients at the logits."""
    return client.with_loss(linear_loss) if client is not None and of_logits else client


def _summed_linear(o: Float[Tensor, "b y"], h: Float[Tensor, "b y"]) -> Float[Tensor, ""]:
    return len(o) * linear_loss(o, h)


def logit_gradients(seen: Observation, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "z y"] | None:
    """Return h_i = B ∂ℓ/∂z_i, with z_i the logits of image i of B, as the released head shows it; None if it does not.

    Of the loss ℓ nothing is used. The head, z_i = W f_i + b, has ∂ℓ/∂b = Σ_i h_i / B and ∂ℓ/∂W = Σ_i h_i f_iᵀ / B. So
    the bias of one image releases h; of several images, and without the bias, the features f_i solve for all h_i, where
    they are linearly independent. All other gradients follow: ∂ℓ/∂θ = Σ_i (∂z_i/∂θ)ᵀ h_i / B (`linear_loss`). A step
    along these explains a release whatever its loss, its targets and its learning rate were. Slices of a volume that
    are fused have one z, and so one h, which the bias releases.

    Several steps on one image release Σ_s a_s h_s of other h_s in each step. The mean over the steps is returned, which
    says less: the next h_s depends on the loss. Of several images in several steps nothing is returned.

    Args:
        seen: the observation of one release: a gradient, or the update of a client that trains by SGD.
        images: all images of the release, such as reconstructions, in [0, 1].
    """
    model, client, B = seen.model, seen.client, len(images)
    held = {name: u[0] for name, u in seen.gradients.items() if name in (_BIAS, _WEIGHT)}
    if not held or scales(Stack(tuple(seen.defense)).on_gradients) or not model.classes:
        return None
    one, reach = B == 1 or (client is not None and client.fuses), 1.0
    if client is not None:
        if client.fusion == "attention":  # its layer reads the order of the slices, which nothing shows
            return None
        if client.optimiser != "sgd" or (client.total_steps > 1 and (not one or client.clip is not None)):
            return None
        held, reach = undecayed(model, held, client), client.reach
    if one and _BIAS in held:
        return held[_BIAS].double()[None] / reach
    if _WEIGHT not in held or (one and B > 1):
        return None
    feed = _fed(seen, images)
    with torch.no_grad(), full_precision():
        features = model.features(images, feed.masked_pe).double()
    rows, sums = features, held[_WEIGHT].double()
    if _BIAS in held:  # the bias is the weight of one more feature, 1
        rows = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        sums = torch.cat([sums, held[_BIAS].double()[:, None]], 1)
    return torch.linalg.pinv(rows.T) @ sums.T * B / reach


def soft_targets(seen: Observation, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "z y"] | None:
    """Return the targets with which images give the released update of the head; None where it does not show them.

    The gradient h_i at the logits z_i (`logit_gradients`) is solved for the target y_i of the stated loss
    (`_targets_at`), cross-entropy for a gradient: an image of smoothed, mixed or several labels has these.

    Several steps on one image with a constant y move the bias by Σ_s a_s h_s(y): the client is run again, and y takes
    the difference. What is not a probability is cut off, and what explains nothing then stays unexplained.

    Args:
        seen: as in `logit_gradients`; of a client that does not clip.
        images: all images of the release, in [0, 1].
    """
    model, client = seen.model, seen.client
    if client is not None and (client.clip is not None or not (client.has_labels or client.is_numeric)):
        return None
    h = logit_gradients(seen, images)
    if h is None:
        return None
    feed, loss = _fed(seen, images), client or Client()
    with torch.no_grad(), full_precision():
        z = fusing(model, loss.fusion)(feed.images, feed.masked_pe, feed.replacement).double()
    y = _targets_at(loss, z, h)
    solved_again = client is not None and client.loss in ("cross-entropy", "binary", "regression", "smooth-l1")
    if client is None or client.total_steps == 1 or not solved_again or _BIAS not in seen.gradients:
        return y
    if client.is_of_class:
        y = one_hot(h.argmin(1), model.classes).to(y)  # nearer than the first step's p makes it
    held, reach = undecayed(model, {_BIAS: seen.gradients[_BIAS][0]}, client)[_BIAS], client.reach
    reach *= _slope(loss, model.classes)
    tried, steps = list[Tensor](), list[Tensor]()
    for _ in range(_ROUNDS):  # Anderson's acceleration of y ← y + (made − held) / reach: p follows y in later steps
        made = undecayed(model, {_BIAS: update_on(model, client, images, y)[_BIAS]}, client)[_BIAS]
        tried.append(y)
        steps.append((made - held)[None] / reach)
        if not steps[-1].isfinite().all():
            return tried[0]
        y = y + steps[-1]
        if len(steps) > 1:
            d_steps = torch.cat([steps[-1] - step for step in steps[:-1]])
            d_tried = torch.cat([tried[-1] - each for each in tried[:-1]])
            y = y - steps[-1] @ torch.linalg.pinv(d_steps) @ (d_tried + d_steps)
        y = _cut(client, y)
    return y


def _slope(client: Client, classes: int) -> float:
    """Return −∂h/∂y of a loss whose gradient at the logits is linear in the target, as a mean over outputs makes it."""
    return {"binary": 1.0, "regression": 2.0, "l1": 1.0, "smooth-l1": 1.0}.get(str(client.loss), classes) / classes


def _targets_at(client: Client, z: Float[Tensor, "b y"], h: Float[Tensor, "b y"]) -> Float[Tensor, "b y"]:
    """Return the targets y with which the loss of one image has the gradient h at logits z, h = ∂ℓ/∂z.

    With e = h / slope, of C outputs:

    - "cross-entropy": h = p − y;
    - "binary": e = σ − y (w − (w − 1) σ), with the weight w of positive entries;
    - "regression": e = z − y;
    - "l1" and "smooth-l1": e = z − y cut to [−1, 1], so that beyond it the side of y is all that is known;
    - "focal": the loss falls with p_y alone, so that h is negative at the label alone; "binary-focal" the same of each
      entry. Whatever γ, α and the weights are, these signs show the labels.
    """
    e = h / _slope(client, z.shape[1])
    match client.loss:
        case "focal":
            return one_hot(h.argmin(1), z.shape[1]).to(z)
        case "binary-focal":
            return (h < 0).to(z)
        case "regression":
            return z - e
        case "l1" | "smooth-l1":
            inside = (e.abs() < 1 - 1e-3) & (client.loss != "l1")
            return (z - e).where(inside | (e == 0), z - FAR * e.sign())
        case "binary":
            w = 1.0 if client.pos_weight is None else z.new_tensor(client.pos_weight)
            return _cut(client, (z.sigmoid() - e) / (w - (w - 1) * z.sigmoid()))
        case _:
            return _cut(client, z.softmax(1) - h)


def _fed(seen: Observation, images: Float[Tensor, "b c h w"]) -> Feed:
    """Return images as the client of a gradient feeds them: slots without a gradient as MJP does."""
    feed, masked = Feed.undefended(images, seen.model.patch), slots_without_gradient(seen)
    if seen.client is not None or not masked.any():
        return feed
    unknown = "unk_embed" in seen.gradients and bool(seen.gradients["unk_embed"].any())
    return replace(feed, masked_pe=masked.expand(len(images), -1), replacement="unknown" if unknown else "zero")


def _cut(client: Client, y: Float[Tensor, "b y"]) -> Float[Tensor, "b y"]:
    """Return targets cut to [0, 1] where they are probabilities; those of a softmax add up to 1."""
    if client.is_numeric:
        return y
    y = y.clamp(0, 1)
    return y if client.is_for_each_class else y / y.sum(1, keepdim=True)


def tells_images(seen: Observation) -> bool:
    """Return whether a small `residual` says that an image is the private one.

    What determines the pixels must be among what is compared. That is the gradient of the patch projection W, or, where
    it is not trained, that of other layers if W loses nothing of a patch (K ≤ D and full rank): else two images that W
    maps to the same tokens have the same gradients. At least as many numbers must be compared as the image has. The
    head's gradient alone says only that features are nearly equal, a parameter that did not move says nothing, and
    filters that leave no entry exact, such as noise, leave nothing to compare.
    """
    kept = exact_entries(seen)
    moved = [n for n, u in seen.gradients.items() if not n.startswith(_HEAD) and bool(u[0][kept[n]].any())]
    if sum(int(kept[name].sum()) for name in moved) < seen.images_per_release * math.prod(seen.model.image_shape):
        return False
    if _PROJECTION in moved:
        return True
    W = seen.model.vit.get_parameter(_PROJECTION).detach().flatten(1).double()
    singular = torch.linalg.svdvals(W)
    smallest = singular[0] * max(W.shape) * torch.finfo(W.dtype).eps  # what `torch.linalg.matrix_rank` calls zero
    return int((singular > smallest).sum()) == W.shape[1]


def explained_share(residual: float) -> float:
    """Return the share of a release that an image explains: max(0, 1 − residual²), in [0, 1]; 1 is the private image's.

    With G what was released (of an update, what the gradients in it moved) and Ĝ what the image gives, it is
    1 − ‖Ĝ − G‖² / ‖G‖²: the coefficient of determination about zero, over all parameters that are looked at.
    """
    return max(0.0, 1 - residual**2)


def errors_of_filters(seen: Observation, names: Sequence[str]) -> list[dict[str, Float[Tensor, "..."]]]:
    """Return the variances that filters state of the entries of a release, by release; those of several add up.

    Each states them of these parameters' part of the release alone.
    """
    released = {name: seen.gradients[name].double() for name in names}
    total = Stack(tuple(seen.defense)).variance(released)
    return [{name: total[name][i] for name in names} for i in range(len(released[names[0]]))]


def exact_entries(seen: Observation) -> dict[str, Bool[Tensor, "..."]]:
    """Return which entries of the first release filters leave as they were, except for one factor on all (`scales`)."""
    if not Stack(tuple(seen.defense)).on_gradients:
        return {name: torch.ones_like(g[0], dtype=torch.bool) for name, g in seen.gradients.items()}
    return {name: variance == 0 for name, variance in errors_of_filters(seen, list(seen.gradients))[0].items()}


def scales(filters: Sequence[GradientDefense]) -> bool:
    """Return whether a filter multiplies all entries by a factor that depends on them, as clipping by the norm does."""
    return any(defense_declarations(part).expected is not None for part in filters)


def scale_of(made: Update, released: Update, kept: Mapping[str, Bool[Tensor, "..."]]) -> float:
    """Return s ≥ 0 of the least ‖s u − r‖ over the kept entries: the factor by which a filter scaled u to r.

    Args:
        made: u, by parameter name.
        released: r, of the parameters that are looked at.
        kept: which of their entries are looked at.
    """
    product = sum(float((made[n].double() * r.double())[kept[n]].sum()) for n, r in released.items())
    size = sum(float(made[n].double().square()[kept[n]].sum()) for n in released)
    return max(product / size, 0.0) if size else 0.0


def _missing_pixels(
    seen: Observation,
    images: Float[Tensor, "b c h w"],
    token_gradients: Callable[[], Float[Tensor, "n d"]],
    own: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
) -> float:
    """Return the rms distance in pixels, in [0, 1], that the projection's gradient G = Aᵀ X puts between images and X.

    It is that of (Aᵀ)⁺ (G − Aᵀ X̂). A singular vector of A counts where rounding cannot put as much there. Of one image
    A is what was released of the position embeddings. Of several images, and where these embeddings are not trained or
    not fed, A is that of X̂ at the first step (`token_gradients`), and G − Ĝ replaces G − Aᵀ X̂. Of other
    optimisers than SGD and under clipping A is not known, and 0 is returned.
    """
    model, client = seen.model, seen.client
    if client is not None and (client.optimiser != "sgd" or client.clip is not None):
        return 0.0
    X = patchify(model.normalise(images), model.patch).flatten(0, 1).double()
    G, of_A = held[_PROJECTION].flatten(1), 0.0
    if len(images) == 1 and _PE in held and not slots_without_gradient(seen).any():
        A = held[_PE][0, -len(X) :]
        left, of_A = G - A.mT @ X, _rounding(seen, _PE)
    else:
        A, left = token_gradients(), G - own[_PROJECTION].flatten(1)
    U, sizes, V = torch.linalg.svd(A.mT, full_matrices=False)
    noise = _RTOL * sizes[0] + _rounding(seen, _PROJECTION) + math.sqrt(len(X)) * of_A
    sure = sizes * _MOST_ROUNDING > noise
    missing = V.mT[:, sure] @ ((U.mT @ left)[sure] / sizes[sure, None])
    std = model.std.double().expand(model.image_shape[0], 1, 1).flatten()
    return float((missing.view(len(X), len(std), -1) * std[:, None]).square().mean().sqrt().nan_to_num(math.inf))


def _token_gradients(
    seen: Observation, images: Float[Tensor, "b c h w"], target: int | Float[Tensor, "z y"], *, of_logits: bool
) -> Float[Tensor, "n d"]:
    """Return A of all patches of all images in the first step, times what a gradient moves in all steps."""
    feed = _fed(seen, images)
    client = _with(seen.client or Client(), of_logits=of_logits) or Client()
    model = fusing(seen.model, client.fusion)
    if isinstance(target, Tensor):
        client, labels = replace(client, label_smoothing=0.0, class_weights=None), target.to(images)
    else:
        labels = torch.full((len(images),), target, device=images.device)
    with full_precision(), gradients_enabled():
        z = model.embed(feed.images, feed.masked_pe, feed.replacement).detach().requires_grad_()
        outputs = model.classify(z)
        if client.is_for_each_class and labels.ndim == 1:
            labels = one_hot(labels, outputs.shape[1])
        (g,) = torch.autograd.grad(client_loss(client, outputs, labels), z)
    return g[:, -model.vit.patch_embed.num_patches :].flatten(0, 1).double() * (
        1.0 if seen.client is None else client.reach
    )


def _is_rounding(seen: Observation, held: Mapping[str, Tensor], names: Sequence[str]) -> bool:
    """Return whether no weight moved beyond what rounding does: under decay every image gives the same then."""
    if seen.client is None:
        return False
    most = _MOST_DEVIATIONS * math.sqrt(seen.client.total_steps)
    for name in names:
        if name == "unk_embed":
            continue
        decayed = (seen.gradients[name][0].double() - held[name]).abs()  # known to a float32's digits
        if bool((held[name].abs() > most * rounding_of(seen, name) + _RTOL * decayed).any()):
            return False
    return True


def _rounding(seen: Observation, name: str) -> float:
    """Return the rms of what rounding gives each entry of an update of a parameter; 0 of a gradient."""
    if seen.client is None:
        return 0.0
    mixed = 0.0 if seen.client.autocast == "float32" else _AUTOCAST
    return float(
        rounding_of(seen, name).square().mean().sqrt() + mixed * seen.gradients[name].double().square().mean().sqrt()
    )


def _relative(own: Mapping[str, Tensor], held: Mapping[str, Tensor], names: Sequence[str] | None = None) -> float:
    """Return ‖own − held‖ / ‖held‖ over these parameters, or all that are held."""
    names = list(held) if names is None else names
    off, size = _size({name: own[name] - held[name] for name in names}), _size({name: held[name] for name in names})
    return float((off / size).nan_to_num(math.inf, math.inf))


def _size(u: Mapping[str, Tensor]) -> Float[Tensor, ""]:
    """Return the norm of all entries."""
    return torch.stack([each.double().square().sum() for each in u.values()]).sum().sqrt()


def slots_without_gradient(seen: Observation) -> Bool[Tensor, " n"]:
    """Return the patch slots whose position embedding has no gradient."""
    count = seen.model.vit.patch_embed.num_patches
    if "pos_embed" not in seen.gradients:
        return torch.zeros(count, dtype=torch.bool, device=seen.model.mean.device)
    return (seen.gradients["pos_embed"][0, 0, -count:] == 0).all(1)
