"""Decoders on disk: each is trained once for all that shapes it."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from privlab.base import PrivlabError, warn
from privlab.release import AnyDefense
from privlab.threat import Stack
from privlab.training import keep, kept
from privlab.victims import VictimModel, cache_folder, hash_of

LEAST_IMAGES = 200  # number of public images below which a decoder is poor

Network = TypeVar("Network", bound=nn.Module)


def kept_decoder(kind: str, key: str, make: Callable[[], Network], train: Callable[[], Network]) -> Network:
    """Return a decoder: from the cache, or trained and cached.

    Args:
        kind: the kind of decoder, with which the name of the file begins.
        key: the SHA-256, in hexadecimal, of all that shapes it.
        make: returns one with weights that are replaced.
        train: returns a trained one.

    Warns:
        PrivlabWarning: if the stored file is damaged or foreign, or cannot be written.
    """
    path = cache_folder("decoders") / f"{kind}-{key[:32]}.safetensors"
    if path.exists():
        decoder = make()
        with suppress(RuntimeError):  # the tensors of another network
            if (state := kept(path, key)) is not None:
                decoder.load_state_dict(state)
                return decoder.eval()
        warn(f"The decoder in {path} is damaged or foreign. It will be trained again.", 3)
    decoder = train()
    try:
        keep(path, key, decoder.state_dict())
    except PrivlabError as error:
        warn(f"The decoder cannot be kept in {path} ({error}): it will be trained again.", 3)
    return decoder


def identity_of(model: VictimModel, defense: Sequence[AnyDefense], form: str, *parts: str) -> str:
    """Return the SHA-256, in hexadecimal, of all that shapes a decoder.

    Args:
        model: the victim; its weights and its normalisation count.
        defense: the defenses; their options and their order count.
        form: name and version of this kind of decoder.
        parts: what else shapes it, such as the plan of its training.
    """
    victim = hash_of(model.state_dict() | {"mean": model.mean, "std": model.std})
    return hashlib.sha256("\n".join((form, victim, repr(Stack(tuple(defense))), *parts)).encode()).hexdigest()


def seeded(seed: int, make: Callable[[], Network]) -> Network:
    """Return what `make` makes under this seed of torch's generator, whose state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()


def warn_of_few(public: Float[Tensor, "m c h w"]) -> None:
    """Warn of a decoder that is trained on few images.

    Warns:
        PrivlabWarning: for fewer than `LEAST_IMAGES`.
    """
    if len(public) < LEAST_IMAGES:
        warn(f"A decoder trained on {len(public)} public images is poor: its low score is no evidence of privacy.", 3)
