"""Your own images and labels, checked before a client trains on them: converted where one reading is possible."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.base import PrivlabError, one_line
from privlab.victims import Victim, VictimModel

Images = Tensor | np.ndarray | Sequence[Tensor] | Sequence[np.ndarray]  # b images as `images_for` takes them
Labels = Tensor | np.ndarray | Sequence[int]  # b class indices or soft labels, as `labels_for` takes them
_ROUNDING = 1e-3  # how far the shares of a soft label may be from 1 in all


def model_of(model: object) -> VictimModel:
    """Return the model of a victim; a model is returned as it is.

    Raises:
        PrivlabError: if it is neither.
    """
    if isinstance(model, Victim):
        return model.model
    if not isinstance(model, VictimModel):
        raise PrivlabError(f"The model must be a victim. Found {type(model).__name__}: give privlab.victim(model).")
    return model


def images_for(model: VictimModel, given: Images, what: str = "images") -> Float[Tensor, "b c h w"]:
    """Return images in [0, 1] as the model takes them, in its precision and on its device.

    Bytes are divided by 255. NumPy arrays and sequences of images become one tensor. Nothing is resized, moved or
    normalised: each of these could be meant in several ways.

    Args:
        model: the model; its input is c × h × w.
        given: b × c × h × w, in [0, 1], or of type uint8, in 0 … 255.
        what: what the images are, for the errors.

    Raises:
        PrivlabError: if they have another shape or type, are not finite, or are outside [0, 1].
    """
    images = _tensor(given, what)
    shape = model.image_shape
    wanted = f"b × {' × '.join(map(str, shape))}"
    if images.ndim != 4 or images.shape[1:] != shape:
        found, right = "×".join(map(str, images.shape)) or "a number", f"Give {wanted}"
        channels_last = (*shape[1:], shape[0])
        if images.shape[-3:] == channels_last and shape[0] != shape[2]:
            right = "The channels come last: move them to the front, as in images.permute(0, 3, 1, 2)"
        elif images.shape == shape:
            right = "Add a dimension for the batch, as in images[None]"
        elif images.ndim == 4 and images.shape[1] == shape[0]:
            right = "Resize them to the size of the model's input, or make the model with their size (img_size)"
        raise PrivlabError(f"The {what} must be {wanted}, as the model's input is. Found {found}. {right}.")
    if images.dtype == torch.uint8:
        return images.to(model.mean) / 255
    if not images.is_floating_point():
        kind = str(images.dtype).removeprefix("torch.")
        raise PrivlabError(f"The {what} must be of type uint8 (0 to 255) or floating point (0 to 1). Found {kind}.")
    values = images.detach()
    if not bool(values.isfinite().all()):
        broken = int((~values.isfinite()).flatten(1).any(1).sum())
        raise PrivlabError(f"The {what} must be finite. Found NaN or infinity in {broken} of {len(values)} {what}.")
    outside = (values < 0) | (values > 1)
    if bool(outside.any()):
        low, high = float(values.min()), float(values.max())
        right = "divide them by 255" if low >= 0 and high > 2 else "the model normalises them itself"
        raise PrivlabError(f"The {what} must be in [0, 1]. Found values from {low:.4g} to {high:.4g}: {right}.")
    return images.to(model.mean)


def labels_for(model: VictimModel, given: Labels, count: int) -> Int[Tensor, " b"] | Float[Tensor, "b y"]:
    """Return class indices on the model's device, in 64 bits, or soft labels in the model's precision.

    Args:
        model: the model, whose classes are 0 … classes − 1.
        given: the class index of each image, or its probability of each class.
        count: b, the number of images.

    Raises:
        PrivlabError: if there is no image, or the labels are neither integers nor probabilities, not as many as the
            images, or out of range.
    """
    if not count:
        raise PrivlabError("A client needs at least one image. Found none.")
    labels = _tensor(given, "labels")
    if labels.ndim == 2 and labels.shape == (count, model.classes) and labels.is_floating_point():
        if bool((labels < 0).any()) or not bool(((labels.sum(1) - 1).abs() < _ROUNDING).all()):
            raise PrivlabError("Each soft label must be probabilities that add up to 1.")
        return labels.to(model.mean)
    if labels.shape != (count,):
        found = f"{len(labels)} labels" if labels.ndim == 1 else f"the shape {tuple(labels.shape)}"
        raise PrivlabError(f"There must be one label for each of the {count} images. Found {found}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        kind = str(labels.dtype).removeprefix("torch.")
        raise PrivlabError(f"The labels must be class indices, which are integers. Found type {kind}.")
    labels = labels.long()
    wrong = labels[(labels < 0) | (labels >= model.classes)]
    if model.classes and len(wrong):
        raise PrivlabError(
            f"Each label must be in 0 … {model.classes - 1}, for the model has {model.classes} classes. "
            f"Found {int(wrong[0])}."
        )
    return labels.to(model.mean.device)


def _tensor(given: Any, what: str) -> Tensor:  # noqa: ANN401
    """Return a tensor of what can only mean one."""
    if isinstance(given, Tensor):
        return given.clone() if given.is_inference() else given  # autograd cannot save tensors of inference_mode
    try:
        if isinstance(given, Sequence) and given and isinstance(given[0], Tensor):
            return torch.stack(list(given))
        if isinstance(given, np.ndarray | Sequence) and not isinstance(given, str | bytes):
            return torch.from_numpy(np.ascontiguousarray(given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise PrivlabError(f"The {what} cannot be made one tensor: {one_line(error)}.") from error
    raise PrivlabError(f"The {what} must be a tensor or a NumPy array. Found {type(given).__name__}.")
