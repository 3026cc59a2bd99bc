"""Compares the gradients of a caller's own model, with all of its hooks, to those that its victim releases."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from privlab.base import PrivlabError, first, full_precision, gradients_enabled, memory_ended, one_line, warn
from privlab.victims.anatomy import causes, changed_parts
from privlab.victims.closed_form import released_gradients, released_parameters
from privlab.victims.feed import Feed
from privlab.victims.layouts import timm_gradients
from privlab.victims.libraries import library_of
from privlab.victims.model import VictimModel

_SAME = 5e-4
"""Largest deviation of a gradient, relative to its norm: rounding in float32, which a deep model amplifies."""

Gradients = dict[str, Tensor]
"""A gradient for each name of a parameter."""


def check_gradients(own: nn.Module, model: VictimModel, head: nn.Module) -> None:
    """Check that a victim releases the gradients of the caller's own model, hooks and replaced methods included.

    The mean cross-entropy of two random images is differentiated in three ways: by autograd through the caller's
    model, by the closed forms of `released_gradients`, which read the inputs and outputs of layers, and, where a
    module was changed, by autograd through the victim, as local training does: a replaced `forward` may be a function
    that still runs the caller's model.

    Args:
        own: the caller's model, of timm or transformers; it is left as it is, its `grad` fields too.
        model: the victim that was made of it.
        head: what the caller's model lacks behind its outputs, a new classifier or nothing.

    Raises:
        PrivlabError: if the gradient of a parameter differs, or the caller's model cannot be differentiated.

    Warns:
        PrivlabWarning: if parameters have hooks that act on accumulated gradients, which are not run.
    """
    if model.mean.is_meta or model.classes < 1:
        return
    kind = f"{type(own).__name__} of {type(own).__module__}"
    after = [name for name, parameter in own.named_parameters() if parameter._post_accumulate_grad_hooks]
    if after:
        warn(
            f"{kind} has hooks on accumulated gradients, which privlab does not run: {first(after, 3)}.",
        )
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(2, *model.image_shape, generator=draw).to(model.mean)
    labels = torch.randint(model.classes, (2,), generator=draw).to(images.device)
    asked = images.clone().requires_grad_()  # else a backward hook warns that nothing asks for a gradient
    fed = model.with_rest(model.normalise(asked))
    devices = [images.device] if images.is_cuda else []
    try:
        with gradients_enabled(), full_precision(), torch.random.fork_rng(devices=devices):
            with _evaluation(own):
                wanted = _gradients(own, lambda made: F.cross_entropy(head(_logits(made)), labels), fed)
            wanted = timm_gradients(wanted, dict(own.named_parameters()))
            if not wanted:
                return
            names = sorted(wanted.keys() & released_parameters(model))
            feed = Feed.undefended(images, model.patch)
            ways = [{name: g[0] for name, g in released_gradients(model, feed, labels, names, 2).items()}]
            if changed_parts(model.vit):
                through = _gradients(model, lambda made: F.cross_entropy(made, labels), asked)
                ways.append({name.removeprefix("vit."): g for name, g in through.items()})
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        if memory_ended(error) is not None:
            raise
        reason = one_line(error)
        raise PrivlabError(f"The gradients of {kind} cannot be compared to its victim's: {reason}.") from error
    differences: dict[str, float] = {}
    for found in ways:
        for name, difference in _differences(wanted, found).items():
            differences[name] = max(difference, differences.get(name, 0.0))
    if not differences:
        return
    worst = max(differences, key=differences.__getitem__)
    raise PrivlabError(
        f"{kind} has other gradients than its layers alone give: that of '{worst}' differs by "
        f"{differences[worst]:.2g} of its size ({len(differences)} of {len(wanted)} parameters differ){causes(own)}. "
        "Remove the hooks that change values, and restore each module's own forward."
    )


def _gradients(module: nn.Module, loss: Callable[..., Tensor], images: Float[Tensor, "b c h w"]) -> Gradients:
    """Return the gradient of each parameter of a module; the victim's, all of them, where it holds them constant.

    The parameters themselves are differentiated where they ask for it, so that their hooks act.
    """
    frozen = isinstance(module, VictimModel)
    held = chain(module.named_parameters(), module.named_buffers())
    given = {name: tensor.detach().clone() for name, tensor in held if frozen or tensor.is_inference()}
    leaves: Gradients = {}
    for name, parameter in module.named_parameters():
        if frozen or parameter.requires_grad:
            leaves[name] = given[name].requires_grad_() if name in given else parameter
    if not leaves:
        return {}
    argument = {"pixel_values": images} if library_of(module) == "transformers" else {}
    made = functional_call(module, given, () if argument else (images,), argument)
    found = torch.autograd.grad(loss(made), list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in pairs}


def _logits(made: object) -> Tensor:
    """Return the outputs of a head: those of timm as they are, and those that models of transformers name.

    MONAI returns its hidden states behind them.
    """
    made = made[0] if isinstance(made, tuple) else made
    if isinstance(made, Tensor):
        return made
    for name in ("logits", "image_embeds", "pooler_output"):
        if isinstance(outputs := getattr(made, name, None), Tensor):
            return outputs
    raise TypeError(f"it returns {type(made).__name__} without logits")


def _differences(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ‖g − g′‖ / max(‖g‖, ‖g′‖) where this is more than rounding.

    A gradient may be zero except for rounding, as that of a bias of keys is; the rounding is that of the largest
    gradient of the same module.
    """
    norms = {name: float(g.double().norm()) for name, g in wanted.items()}
    module = {name: name.rsplit(".", 2)[0] for name in norms}
    largest: dict[str, float] = {}
    for name, norm in norms.items():
        largest[module[name]] = max(norm, largest.get(module[name], 0.0))
    differences: dict[str, float] = {}
    for name in [name for name in wanted if name in found and bool(wanted[name].isfinite().all())]:
        g, other = wanted[name].double().flatten(), found[name].double().flatten()
        rounding = torch.finfo(wanted[name].dtype).eps
        apart, size = float((g - other).norm()), max(norms[name], float(other.norm()))
        if not apart <= max(_SAME, 32 * rounding) * size + 8 * rounding * largest[module[name]]:
            differences[name] = apart / size
    return differences


@contextmanager
def _evaluation(module: nn.Module) -> Iterator[None]:
    """Run a module without dropout and compilation within the context, and leave it as it was."""
    before = [(part, part.training, part._compiled_call_impl) for part in module.modules()]
    try:
        for part, _, compiled in before:
            part.training = False
            if compiled is not None:
                part._compiled_call_impl = None
        yield
    finally:
        for part, training, compiled in before:
            part.training = training
            if compiled is not None:
                part._compiled_call_impl = compiled
