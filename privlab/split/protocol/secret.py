"""The client's secret draws: fresh ones for each batch, one for the model's lifetime, all from one 256-bit secret.

torch's CPU generator is a Mersenne Twister of 19968 bits of state, but `manual_seed` keeps 32 bits of a seed: an
adversary who sees permuted features could try all 2³² orders. Here the whole state comes from SHAKE-256 of the secret.
"""

import hashlib
import secrets

import numpy as np
import torch
from torch import Generator

from privlab.threat import Draws

_WORDS = 624
_FIRST_WORD = 24  # after seed, count and position, eight bytes each; a word takes eight bytes too


def new_secret() -> str:
    """Return 256 bits from the operating system's CSPRNG, in hexadecimal."""
    return secrets.token_hex(32)


def generator(secret: str, *purpose: object) -> Generator:
    """Return a CPU generator whose whole state is SHAKE-256 of the secret and the purpose."""
    key = "/".join(map(str, (secret, *purpose))).encode()
    words = np.frombuffer(hashlib.shake_256(key).digest(4 * _WORDS), "<u4").astype("<u8")
    drawn = Generator().manual_seed(0)
    state = drawn.get_state()
    state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS] = torch.from_numpy(words.view(np.uint8))
    return drawn.set_state(state)


def batch_draws(secret: str, batch: object, size: int, fresh: str | None = None) -> Draws:
    """Return the draws of one batch; the generator of the model's lifetime is the same for all batches.

    Args:
        secret: the client's secret, as `new_secret` returns it.
        batch: what identifies the batch, such as the number of its step.
        size: the number of its images.
        fresh: another secret that the draws of the images and of the batch come from; None takes `secret` for them too.
    """
    own = fresh or secret
    return Draws(
        images=[generator(own, batch, "image", i) for i in range(size)],
        batch=generator(own, batch, "batch"),
        model=generator(secret, "model"),
    )
