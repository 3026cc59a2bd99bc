"""The weights before and after a client's local training, in two files, as the update that a server sees."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError, PrivlabWarning, first
from privlab.release.gradient_file import GradientFile, check_fit
from privlab.release.local_training import trained_parameters, undecayed, update_capabilities
from privlab.threat import Client, Defense, FeatureDefense, GradientDefense, Observation
from privlab.victims import VictimModel, from_any_layout, read_state

__all__ = ["check_order", "label_of_update", "read_update", "update_between", "update_observation"]


def read_update(before: Path, after: Path, images: int, weights: Collection[str]) -> GradientFile:
    """Return θ_before − θ_after by timm's parameter name, the update with the sign of a gradient.

    Args:
        before: the server's weights, from which the client began: safetensors, or what torch saves.
        after: the client's weights after its local training.
        images: images of the client.
        weights: timm's names of the weights of the client's model.

    Raises:
        PrivlabError: if a file cannot be read, the two are of different models, hold NaN, infinity or integers instead
            of weights, or are the same.

    Warns:
        PrivlabWarning: for other integer tensors of the second file alone, which are left aside. Of the first one the
            model says it that takes its weights.
    """
    old, new = (read_state(path) for path in (before, after))
    return update_between(old, new, images, (str(before), str(after)), weights)


def update_between(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    images: int,
    names: tuple[str, str],
    weights: Collection[str],
) -> GradientFile:
    """Return θ_before − θ_after of two state dicts, as `read_update` does of two files.

    Args:
        before: the server's weights, by the names of a layout that `from_any_layout` takes.
        after: the client's weights after its local training.
        images: images of the client.
        names: what errors call the two, such as their paths.
        weights: timm's names of the weights of the client's model.

    Raises:
        PrivlabError: if the two are of different models, hold NaN, infinity or integers instead of weights, or are the
            same.

    Warns:
        PrivlabWarning: for other integer tensors of the second one alone, which are left aside.
    """
    old, new = (_timm_names(state) for state in (before, after))
    short = [Path(name).name for name in names]
    for name, state in zip(names, (old, new), strict=True):
        if whole := [f"{k} of {state[k].dtype}" for k in weights if k in state and not state[k].is_floating_point()]:
            raise PrivlabError(
                f"The weights of '{name}' must be floating-point numbers. Found {first(whole, 3)}: save them as the "
                "model trains them, in float32."
            )
    counters = [set(state) - set(_floats(state)) for state in (old, new)]
    if aside := sorted(counters[1] - counters[0]):
        warnings.warn(
            f"{short[1]}: {first(aside, 3)} {'is' if len(aside) == 1 else 'are'} left aside: integers, such as the "
            "counters of BatchNorm, are no weights.",
            PrivlabWarning,
            stacklevel=4,
        )
    old, new = _floats(old), _floats(new)
    problems = {
        f"missing in {short[1]}": [name for name in old if name not in new],
        f"missing in {short[0]}": [name for name in new if name not in old],
        "of other shapes": [
            f"{name} {tuple(old[name].shape)} and {tuple(new[name].shape)}"
            for name in old
            if name in new and old[name].shape != new[name].shape
        ],
    }
    if told := "; ".join(f"{kind}: {first(found, 3)}" for kind, found in problems.items() if found):
        raise PrivlabError(f"'{names[0]}' and '{names[1]}' must be weights of one model. Found {told}.")
    for name, state in zip(names, (old, new), strict=True):
        if broken := [key for key, tensor in state.items() if not tensor.isfinite().all()]:
            why = "the client diverged, and such an update shows nothing" if state is new else "take others"
            raise PrivlabError(f"The weights '{name}' must be finite. Found NaN or infinity in {first(broken)}: {why}.")
    update = {name: (old[name].double() - new[name].double()).float() for name in old}
    if not any(bool(difference.any()) for difference in update.values()):
        raise PrivlabError(
            f"Nothing was trained: '{names[0]}' and '{names[1]}' hold the same weights. In Python, "
            "model.state_dict() is no copy: take copy.deepcopy(model.state_dict()) before the training."
        )
    return GradientFile(" → ".join(short), update, images, "mean")


def update_observation(
    released: GradientFile,
    model: VictimModel,
    client: Client,
    defense: Sequence[Defense | FeatureDefense | GradientDefense] = (),
) -> tuple[GradientFile, Observation]:
    """Return the update of the trained parameters, and what the adversary sees of it.

    Args:
        released: what `read_update` returns.
        model: the client's model with the weights before.
        client: its public settings.
        defense: the filters that the client is known to use: the file holds what they released.

    Raises:
        PrivlabError: if the update is of another model, or of parameters that the client does not train, or the client
            trains adapters or prompts.
    """
    if client.trains in ("lora", "adapters", "prompts"):
        raise PrivlabError(
            f"{released.source}: files of adapters and prompts are not read. Found client.trains={client.trains}: "
            "privlab trains such a client itself, without --update."
        )
    parameters = dict(model.vit.named_parameters())
    held = {name: u for name, u in released.gradients.items() if name in parameters}
    names = trained_parameters(model, client)
    if moved := [name for name, u in held.items() if name not in names and bool(u.any())]:
        raise PrivlabError(
            f"{released.source}: client.trains={client.trains} leaves {first(moved, 3)} as they were. Found that they "
            "moved: name what the client trains."
        )
    left = frozenset(held.keys() - set(names))
    released = GradientFile(
        released.source, {n: u for n, u in held.items() if n not in left}, released.batch_size, "mean", left
    )
    check_fit(released, model)
    gradients = {name: u.to(model.mean)[None] for name, u in released.gradients.items()}
    grants = update_capabilities(model, client, defense)
    return released, Observation(model, gradients, grants, tuple(defense), client.released_images, client=client)


def label_of_update(seen: Observation) -> int | None:
    """Return the class that the update of a client of one image tells; None where that of the head's bias is not sent.

    None too where a filter left nothing of it.

    In each step ∂ℓ/∂b = p − y is negative at the image's label alone, under label smoothing most negative there; of a
    binary loss per class, p_c is a sigmoid. Losses without labels tell none. So is
    what SGD, Adam and AdamW make of it, once their decay is undone.
    """
    if "head.bias" not in seen.gradients or seen.client is None or not seen.client.has_labels:
        return None
    return int(_head(seen, seen.client).argmin()) if seen.gradients["head.bias"].any() else None


def check_order(seen: Observation, source: str) -> None:
    """Refuse an update that goes the other way: its label's bias falls and the others rise, so the files are swapped.

    Softmax cross-entropy moves the biases of B labels at most against all others. Smoothing and other losses may move
    them otherwise, and then nothing is said.

    Raises:
        PrivlabError: if at most B biases were moved down, and more than 2 B up by what the gradients alone moved.
    """
    if "head.bias" not in seen.gradients or seen.client is None or seen.client.loss != "cross-entropy":
        return
    bias, B = _head(seen, seen.client), seen.images_per_release
    raised, lowered = int((bias < 0).sum()), int((bias > 0).sum())
    if lowered <= B and raised > 2 * B:
        raise PrivlabError(
            f"{source} goes up the loss: {raised} of {len(bias)} biases of the head rise, where those of at most {B} "
            "labels can. BEFORE and AFTER are swapped: give the weights before training first."
        )


def _head(seen: Observation, client: Client) -> Float[Tensor, " y"]:
    """Return what the gradients alone moved of the head's bias."""
    return undecayed(seen.model, {"head.bias": seen.gradients["head.bias"][0]}, client)["head.bias"]


def _floats(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def _timm_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state, unknown = from_any_layout(dict(state))
    return dict(state) | ({} if unknown is None else {"unk_embed": unknown.reshape(1, 1, -1)})
