"""Random draws keyed by image: the same image gets the same draw, whatever the chunk, process or machine."""

import hashlib

from torch import Generator


def draw_for(seed: int, image_sha256: str, purpose: str, draw: int = 0) -> Generator:
    """Return a CPU generator seeded by SHA-256 of (run seed, image hash, purpose, number of the draw).

    Args:
        seed: the seed of the run.
        image_sha256: the SHA-256 of the image, in hex; or another text that names what is drawn for, such as a batch.
        purpose: what is drawn, such as "release"; draws for different purposes are independent.
        draw: the number of the draw, where there are several for one image and purpose.
    """
    key = hashlib.sha256(f"{seed}/{image_sha256}/{purpose}/{draw}".encode()).digest()
    return Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
