"""The weights before and after a client's local training, in two files, as the update that a server sees."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from privlab.base import PrivlabError, first, warn
from privlab.release.capture import check_trained
from privlab.release.effects import AnyDefense
from privlab.release.gradient_file import GradientFile, check_fit
from privlab.release.local_training import rounding_deviation, trained_parameters, update_capabilities
from privlab.threat import Client, Observation
from privlab.victims import VictimModel, by_order, check_floats, from_any_layout, warn_of_integers

_HALVES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""The number formats in half precision, and what `Client.sent_as` calls them."""

_HEAD = ("head.weight", "head.bias")
_FEW = 3  # the most parameters that are listed as those which did not move


def update_between(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    images: int,
    names: tuple[str, str],
    weights: Collection[str],
) -> GradientFile:
    """Return θ_before − θ_after by timm's parameter name, the update with the sign of a gradient.

    Args:
        before: the weights from which the client began, by the names of a layout that `from_any_layout` takes.
        after: the client's weights after its local training.
        images: images of the client.
        names: what errors call the two, such as their paths.
        weights: timm's names of the weights of the client's model.

    Raises:
        PrivlabError: if the models differ, if weights are NaN, infinite or integers, or if the two are the
            same.

    Warns:
        PrivlabWarning: for other integer tensors of the second one alone, which are left aside, a difference in the
            place of the second one, and half precision.
    """
    states, integers = [by_order(from_any_layout(state), [*weights]) for state in (before, after)], list[set[str]]()
    for name, state in zip(names, states, strict=True):
        check_floats({key: state[key] for key in weights if key in state}, f"'{name}'")
        integers.append({key for key, tensor in state.items() if not tensor.is_floating_point()})
    short = [Path(name).name for name in names]
    warn_of_integers(integers[1] - integers[0], short[1])
    old, new = ({k: state[k] for k in state if k not in left} for state, left in zip(states, integers, strict=True))
    sent = new
    new = _with_difference(old, sent, short[1])
    check_trained(old, new, names)
    update = {name: (old[name].double() - new[name].double()).float() for name in old}
    halves = [_HALVES[tensor.dtype] for tensor in sent.values() if tensor.dtype in _HALVES]
    number = halves[0] if halves else "float32"
    if halves:
        warn(
            f"{short[1]} holds {len(halves)} of {len(sent)} tensors in half precision: client.sent_as={number} is "
            "taken, and the update is weighed by its rounding. A low score here is no evidence of privacy.",
        )
    sends = "weights" if new is sent else "difference"
    return GradientFile(" → ".join(short), update, images, "mean", sent_as=number, sends=sends)


def _with_difference(old: Mapping[str, Tensor], new: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the weights after training; where a difference to those before was sent, it is added, and said.

    Trained weights are nearer to those before than to zero, ‖θ′ − θ‖ < ‖θ′‖, and a difference of them is not.
    """
    if old.keys() != new.keys() or any(old[key].shape != new[key].shape for key in old):
        return new  # refused below
    sizes = torch.tensor([float(new[key].double().norm()) for key in new])
    moved = torch.tensor([float((new[key].double() - old[key].double()).norm()) for key in new])
    if not moved.norm() > sizes.norm() > 0:
        return new
    warn(f"{name} was read as the difference of the weights after and before, as it is nearer to zero than to those.")
    return {key: (old[key].double() + new[key].double()) for key in new}


def update_observation(
    released: GradientFile, model: VictimModel, client: Client, defense: Sequence[AnyDefense] = ()
) -> tuple[GradientFile, Observation]:
    """Return the update of the parameters that moved, and what the adversary sees of it.

    The client of the observation trains what moved, whatever was stated. Behind filters, which may leave nothing of a
    parameter, it trains what was stated and what moved.

    Args:
        released: what `update_between` returns.
        model: the client's model with the weights before.
        client: its public settings.
        defense: the filters that the client is known to use: the file holds what they released.

    Raises:
        PrivlabError: if the update belongs to another model, or of parameters that this model does not train.

    Warns:
        PrivlabWarning: if not all parameters moved, or others than stated.
    """
    held = {name: u for name, u in released.gradients.items() if name in dict(model.vit.named_parameters())}
    moved = {name for name, u in held.items() if bool(u.any())}
    if fixed := sorted(moved & model.frozen):
        raise PrivlabError(
            f"{released.source}: this model fixes {first(fixed, 3)}. Found that they moved: name the client's model."
        )
    if not moved:
        raise PrivlabError(f"{released.source}: nothing that this model trains moved. Name the client's model.")
    if released.sent_as != "float32":
        client = replace(client, sent_as=released.sent_as, sends=released.sends)
    client = _that_moved(released.source, model, client, held, moved, filtered=bool(defense))
    left = frozenset(held.keys() - set(trained_parameters(model, client)))
    released = replace(released, gradients={n: u for n, u in held.items() if n not in left}, without=left)
    check_fit(released, model)
    gradients = {name: u.to(model.mean)[None] for name, u in released.gradients.items()}
    grants = update_capabilities(model, client, defense)
    return released, Observation(model, gradients, grants, tuple(defense), client.released_images, client=client)


def _that_moved(
    source: str, model: VictimModel, client: Client, update: Mapping[str, Tensor], moved: set[str], *, filtered: bool
) -> Client:
    """Return the client with the parameters that it trains as what moved shows them."""
    own = client.trains in ("lora", "adapters", "prompts")  # what a server adds is in no file of this model's weights
    stated: set[str] = set() if own else set(trained_parameters(model, client))
    if moved == stated or (filtered and moved < stated):
        return client
    trained = moved | stated if filtered else moved
    every = [name for name, _ in model.vit.named_parameters() if name not in model.frozen]
    found = replace(client, trains=_set_of(trained, every), rank=Client.rank, prompts=Client.prompts)
    rest = [name for name in every if name not in moved]
    what = f"all but {', '.join(rest)}" if len(rest) <= _FEW else _listed(_set_of(moved, every))
    said = f"{source}: {len(moved)} of {len(every)} parameters moved ({what})"
    if client.trains != "all":
        said += f", which contradicts client.trains={client.trains}. The audit goes on with what moved."
    elif client.total_steps == 1 and moved <= {*_HEAD} and not model.vit.get_parameter(_HEAD[0]).any():
        said += ": the head's weights were zero before, and one step gives nothing else a gradient then."
    else:
        said += ", and the client is taken to have trained these alone."
    warn(said + _low_rank(model, client, update, moved))
    return found


def _listed(trains: str) -> str:
    return first(trains.split(","), 8)


def _set_of(chosen: Collection[str], every: Sequence[str]) -> str:
    """Return what `Client.trains` calls these of a model's parameters: a named set, or else patterns of their names.

    Of the patterns that match no other parameter, the one that matches the most that are left is taken in turn.
    """
    for name in ("all", "no-embedding", "attention", "norms", "head"):
        of = Client(trains=name)
        if {each for each in every if of.chooses(each)} == {*chosen}:
            return name
    sound: dict[str, set[str]] = {}
    for pattern in sorted({pattern for name in chosen for pattern in _patterns(name)}):
        matched = {name for name in every if fnmatchcase(name, pattern)}
        if matched <= {*chosen}:
            sound[pattern] = matched
    parts = _cover({*chosen}, {pattern: of for pattern, of in sound.items() if not pattern.startswith("*")})
    kinds = _cover({*chosen}, sound)
    return ",".join(kinds if 2 * len(kinds) <= len(parts) else parts)


def _cover(chosen: set[str], patterns: Mapping[str, set[str]]) -> list[str]:
    """Return patterns that match all names, in turn the one that matches the most that are left, the shortest first."""
    left, taken = {*chosen}, []
    while left:
        pattern = min(patterns, key=lambda each: (-len(patterns[each] & left), len(each), each))
        taken.append(pattern)
        left -= patterns[pattern]
    return taken


def _patterns(name: str) -> Iterator[str]:
    """Yield the patterns of a parameter's name that say what a client may train: a part of the model, or a kind."""
    parts = name.split(".")
    general = ["*" if part.isdigit() else part for part in parts]
    for of in (parts, general):
        yield ".".join(of)
        for i in range(1, len(of)):
            yield ".".join(of[:i]) + ".*"
            yield "*." + ".".join(of[i:])
            yield ".".join(of[:i]) + ".*." + parts[-1]


def _low_rank(model: VictimModel, client: Client, update: Mapping[str, Tensor], moved: set[str]) -> str:
    """Return what is said where weights moved by matrices of a low rank, and their biases not, as merged LoRA does.

    A step on B images of N tokens moves whole weights by a sum of B N products, and their biases too.
    """
    parameters, most = dict(model.vit.named_parameters()), 0
    adapted = [
        name
        for name in sorted(moved)
        if name.startswith("blocks.") and update[name].ndim == 2
        if name.removesuffix("weight") + "bias" in parameters.keys() - moved
    ]
    for name in adapted:
        before, u = parameters[name].detach().cpu(), update[name].cpu()
        noise = rounding_deviation(before, u, client).square().mean().sqrt()
        # A random matrix of m × n entries of deviation σ has no singular value above σ (√m + √n), but by chance.
        floor = 2 * float(noise) * (u.shape[0] ** 0.5 + u.shape[1] ** 0.5)
        sizes = torch.linalg.svdvals(u.double())
        most = max(most, int((sizes > max(floor, 1e-6 * float(sizes[0]))).sum()))
    tokens = client.released_images * (model.vit.patch_embed.num_patches + model.vit.num_prefix_tokens)
    if not adapted or most >= min(tokens, model.vit.embed_dim):
        return ""
    return (
        f" {_listed(_set_of(adapted, [*parameters]))} changed by matrices of rank {most} at most, and the biases of "
        "these layers did not, which looks like LoRA adapters that were merged. No attack here reads these."
    )
