"""The effects of defenses, whatever their names: as they declare them, or measured on the adversary's own images.

A defense's algorithm is public, so the adversary runs it under its own draws. It looks where rows, columns and
patches went, and how far two releases of one image differ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, reduce
from itertools import islice
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor

from privlab.base import PrivlabError, foreign_error, full_precision
from privlab.patches import patchify, permute
from privlab.threat import (
    Defense,
    Draws,
    Effects,
    FeatureDefense,
    Feed,
    GradientDefense,
    RowOrder,
    Sent,
    Stack,
    defense_declarations,
)
from privlab.victims import VictimModel
from privlab.victims.closed_form import released_parameters

AnyDefense = Defense | FeatureDefense | GradientDefense
"""A defense of images, of features or of gradients."""

DRAWS = 8  # releases of each image on which a defense is measured: what it does to one in ten hardly stays hidden

STD_TOLERANCE = 0.05
"""The relative distance of a noise's measured deviation from the declared `std` within which `std` is believed."""

ROUNDING_ERROR = 1e-3  # the relative error of a release, beyond its noise, above which it is more than rounding

ORDER: dict[RowOrder, int] = {"kept": 0, "shared": 1, "own": 2, "mixed": 3}

_PLACES = frozenset({"patches", "one_order", "values"})
"""The effects that say where patches and their values went."""

_TEXTURED = [0, 2]
"""The images of `_images` in which no two patches are equal, so that a patch is found wherever it went."""

_MEASURED: WeakKeyDictionary[VictimModel, dict[AnyDefense, Effects]] = WeakKeyDictionary()
"""The measured effects of each defense, for each victim in memory."""


def effects_of(model: VictimModel, defense: Sequence[AnyDefense]) -> Effects:
    """Return what stacked defenses do together to what clients of a model release.

    Raises:
        PrivlabError: if a defense that declares no effects does not run.
    """
    return reduce(_both, (_of_part(model, part) for part in defense), Effects())


def kinds_of(part: AnyDefense) -> frozenset[str]:
    """Return the kinds of effects that a defense has on the stand-in model; none if it does not run."""
    try:
        return _of_part(stand_in(), part).kinds
    except PrivlabError:
        return frozenset()


@cache
def stand_in() -> VictimModel:
    """Return a small model with 224 pixels and E_unk, for effects that do not depend on the victim."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        vit = VisionTransformer(img_size=224, patch_size=16, embed_dim=64, depth=1, num_heads=1, num_classes=2)
        return VictimModel(vit.eval(), (0.5,) * 3, (0.5,) * 3, torch.zeros(1, 1, 64)).requires_grad_(False)


def _of_part(model: VictimModel, part: AnyDefense) -> Effects:
    declared = defense_declarations(part).acts_as
    if isinstance(declared, Effects):
        return declared
    if declared is not None:
        kind = type(declared).__name__
        raise PrivlabError(f"acts_as of defense '{part.name}' must be privlab.threat.effects.Effects. Found {kind}.")
    return _measured(model, part)


def _measured(model: VictimModel, part: AnyDefense) -> Effects:
    """Return the measured effects of a defense, which are measured once for each victim in memory."""
    kept = _MEASURED.setdefault(model, {})
    try:
        if part not in kept:
            kept[part] = measure_effects(model, part)
    except TypeError:  # it has an option that cannot be hashed
        return measure_effects(model, part)
    return kept[part]


def _both(first: Effects, then: Effects) -> Effects:
    """Return what two defenses do, one after the other.

    The later mask is the one that is fed, so the patches that another part moved are no longer those under it.
    """
    moving = [each for each in (first, then) if each.patches != "kept"]
    masking = [each for each in (first, then) if each.pe != "slot"]
    patches = (
        "kept" if not moving else moving[0].patches if len(moving) == 1 and masking in ([], moving) else "shuffled"
    )
    return Effects(
        rows=_furthest(first.rows, then.rows),
        columns=first.columns or then.columns,
        noise_std=(first.noise_std**2 + then.noise_std**2) ** 0.5,
        patches=patches,
        pe=masking[-1].pe if masking else "slot",
        one_order=bool(moving or masking) and all(each.one_order for each in (*moving, *masking)),
        values=first.values or then.values,
        gradients=first.gradients if then.gradients == "kept" else then.gradients,
        other=first.other or then.other,
    )


def measure_effects(model: VictimModel, part: AnyDefense, given: Mapping[str, Tensor] | None = None) -> Effects:
    """Return the effects of one defense, measured on its releases of a few images; what it declares is not looked at.

    Args:
        model: the victim on which the defense is measured.
        part: the defense, with its options.
        given: what the defense gets of clients: the images or the tokens under any name, or the gradients by theirs;
            None for those of images of the adversary's own.

    Raises:
        PrivlabError: if it does not run.
    """
    measure: Callable[..., Effects] = _on_images
    method = "__call__(images, patch, draws) must return a Feed"
    if isinstance(part, GradientDefense):
        measure, method = _on_gradients, "release(gradients, draws) must return gradients by name"
    elif isinstance(part, FeatureDefense):
        measure, method = _on_features, "send(sent, draws) must return Sent"
    try:
        with torch.no_grad(), full_precision(), torch.random.fork_rng(devices=[]):
            return measure(model, part, given)
    except PrivlabError:
        raise
    except Exception as error:
        raise PrivlabError(
            f"Defense '{part.name}' does not run: {foreign_error(error, type(part).__module__)}. {method}."
        ) from error


def contradictions(
    model: VictimModel, part: AnyDefense, chance: float = 1.1, given: Mapping[str, Tensor] | None = None
) -> list[str]:
    """Return where the measured effects of a defense differ from those that it declares in `acts_as`, one line each.

    A defense that does nothing here, with these options, contradicts nothing.

    Args:
        model: the victim on which the defense is measured.
        part: the defense, with its options.
        chance: the factor, at least 1, that declared and measured variance of a noise may differ by chance.
        given: as `measure_effects` takes it.

    Raises:
        PrivlabError: if the defense does not run.
    """
    declared = defense_declarations(part).acts_as
    if type(declared) is not Effects:
        return [f"{type(declared).__name__} declared instead of Effects"]
    found = _measured(model, part) if given is None else measure_effects(model, part, given)
    if found == Effects():
        return []
    wrong = []
    # In clients' images whose pixels are changed, patches may be equal, and it is not seen where they went.
    unseen = _PLACES if given is not None and declared.other and found.other else frozenset()
    for name in (field.name for field in fields(Effects) if field.name not in unseen):
        said, seen = getattr(declared, name), getattr(found, name)
        near = name == "noise_std" and said > 0 and 1 / chance <= (seen / said) ** 2 <= chance
        if said != seen and not near:
            wrong.append(f"{name}: {said} declared, {seen} measured")
    return wrong


def _on_images(model: VictimModel, part: Defense, given: Mapping[str, Tensor] | None) -> Effects:
    """Measure the order, the masks and the pixels of what is fed."""
    images = _images(model) if given is None else _only(given)
    textured = _TEXTURED if given is None else []
    moved = beyond = masked = values = other = False
    one_order, kind = True, "unknown"
    for draws in _draws(len(images)):
        feed = Stack((part,)).feed(images, model.patch, draws.images, len(images), draws.model)
        order, seen = _order(images, feed, model.patch, textured)
        away = order != torch.arange(order.shape[1], device=order.device)
        hidden = torch.zeros_like(away) if feed.masked_pe is None else feed.masked_pe
        moved, beyond = moved or bool(away.any()), beyond or bool((away & ~hidden).any())
        if hidden.any():
            masked, kind = True, feed.replacement
        one_order = one_order and bool((order[seen] == order[0]).all() and (hidden == hidden[0]).all())
        fed, own = (patchify(each[seen], model.patch) for each in (feed.images, permute(images, order, model.patch)))
        same = torch.equal(fed.sort(2).values, own.sort(2).values)
        values, other = values or (same and not torch.equal(fed, own)), other or not same
    patches = "kept" if not moved else "shuffled" if beyond else "masked"
    pe = "slot" if not masked else "zero" if kind == "zero" else "unknown"
    return Effects(patches=patches, pe=pe, one_order=one_order and (moved or masked), values=values, other=other)


def _only(given: Mapping[str, Tensor]) -> Tensor:
    """Return the one tensor that there is."""
    (tensor,) = given.values()
    return tensor


def _order(
    images: Float[Tensor, "b c h w"], feed: Feed, patch: int, textured: Sequence[int]
) -> tuple[Int[Tensor, "b n"], Sequence[int]]:
    """Return the order in which patches are fed, and the images in which it is seen.

    It is the order that the feed states if the pixels stand so. Otherwise each patch of a textured image is taken for
    the nearest private one, if that is a permutation: of what explains nothing it hardly is one.

    Args:
        images: the private images.
        feed: what a defense makes of them.
        patch: the side of a patch in pixels.
        textured: the images in which no two patches are equal; where there are none, the feed's order is believed.
    """
    everywhere = range(len(images))
    if torch.equal(feed.images, permute(images, feed.order, patch)):
        return feed.order, everywhere
    order, away = feed.order.clone(), False
    for i in textured:
        fed, own = (patchify(each[i : i + 1], patch)[0] for each in (feed.images, images))
        nearest = torch.cdist(fed, own).argmin(1)
        if len(nearest.unique()) == len(nearest):
            away = away or not torch.equal(nearest, order[i])
            order[i] = nearest
    return order, textured if away else everywhere


def _on_features(model: VictimModel, part: FeatureDefense, given: Mapping[str, Tensor] | None) -> Effects:
    """Measure where rows and columns come from, and what is left: what differs from draw to draw is noise."""
    tokens = model.embed(_images(model)) if given is None else _only(given)
    b = len(tokens)
    sent = [part.send(Sent.plain(tokens.clone(), model.vit.num_prefix_tokens), draws) for draws in _draws(b)]
    places: list[RowOrder] = [_rows(each) for each in sent]
    plain = torch.stack([each.restore(each.features) for each in sent])
    variance = float(plain.diff(dim=0).double().square().mean() / 2)
    off = float((plain - tokens).double().square().mean()) - variance
    size = float(tokens.double().square().mean())
    std, said = variance**0.5, defense_declarations(part).std
    if isinstance(said, int | float) and abs(std - said) <= STD_TOLERANCE * said:
        std = said
    return Effects(
        rows=_furthest(*places),
        columns=any(each.columns is not None and bool((each.columns.diff() != 1).any()) for each in sent),
        noise_std=std,
        other=off > ROUNDING_ERROR**2 * size + STD_TOLERANCE * variance,
    )


def _furthest(*rows: RowOrder) -> RowOrder:
    """Return where rows have gone farthest."""
    return max(rows, key=lambda each: ORDER[each])


def _rows(sent: Sent) -> RowOrder:
    b, t = sent.source.shape
    images = torch.arange(b, device=sent.source.device)[:, None]
    order, slots = sent.source - t * images, torch.arange(t, device=sent.source.device)
    if bool((sent.source // t != images).any()):
        return "mixed"
    if bool((order != order[0]).any()):
        return "own"
    return "kept" if torch.equal(order[0], slots) else "shared"


def _on_gradients(model: VictimModel, part: GradientDefense, given: Mapping[str, Tensor] | None) -> Effects:
    """Compare two releases of the same gradients with each other, and with them."""
    true = _gradients(model) if given is None else given
    first, second = islice(_draws(len(next(iter(true.values())))), 2)
    one = part.release({name: g.clone() for name, g in true.items()}, first.images)
    two = part.release({name: g.clone() for name, g in true.items()}, second.images)
    true = {name: g for name, g in true.items() if name in one}
    if all(torch.equal(each[name], g) for each in (one, two) for name, g in true.items()):
        return Effects()
    if all(bool(((each[name] == 0) | (each[name] == g)).all()) for each in (one, two) for name, g in true.items()):
        return Effects(gradients="pruned")
    drawn = any(not torch.equal(one[name], two[name]) for name in true)
    return Effects(gradients="noisy" if drawn else "rounded")


def _gradients(model: VictimModel) -> dict[str, Tensor]:
    """Return random gradients of every parameter that clients release: a defense may look for any of them by name."""
    parameters = dict(model.vit.named_parameters())
    shapes = {name: parameters[name].shape for name in sorted(released_parameters(model) & parameters.keys())}
    # All of them share one table of random numbers, as long as the largest, which is drawn and held once.
    longest = max(shape.numel() for shape in shapes.values())
    table = torch.randn(2, longest, generator=Generator().manual_seed(0)).to(model.mean)
    return {name: table[:, : shape.numel()].unflatten(1, shape) for name, shape in shapes.items()}


def _images(model: VictimModel) -> Float[Tensor, "4 c h w"]:
    """Return images of the adversary's own: noise, a gradient, patches of one colour each, and grey.

    No two are equal, for what a defense does may depend on what it is given.
    """
    c, h, w = model.image_shape
    seed = Generator().manual_seed(0)
    slope = torch.linspace(0, 1, h)[:, None] * torch.linspace(0.2, 1, w)
    colours = torch.rand(c, *model.grid, generator=seed)
    colours = colours.repeat_interleave(model.patch, 1).repeat_interleave(model.patch, 2)
    made = (torch.rand(c, h, w, generator=seed), slope.expand(c, h, w), colours, torch.full((c, h, w), 0.5))
    return torch.stack(made).to(model.mean)


def _draws(b: int) -> Iterator[Draws]:
    """Yield draws of the adversary's own for b images."""
    for number in range(DRAWS):
        seeds = [torch.Generator().manual_seed(1000 * number + i) for i in range(b + 2)]
        yield Draws(seeds[2:], seeds[0], seeds[1])
