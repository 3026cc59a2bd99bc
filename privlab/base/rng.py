"""Random draws keyed by image: the same image gets the same draw in whichever chunk, process or machine."""

import hashlib

from torch import Generator

__all__ = ["draw_for"]


def draw_for(seed: int, image_sha256: str, purpose: str, draw: int = 0) -> Generator:
    """Return a CPU generator seeded by SHA-256 of (run seed, image hash, purpose, number of the draw)."""
    key = hashlib.sha256(f"{seed}/{image_sha256}/{purpose}/{draw}".encode()).digest()
    return Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
