"""Defenses, one per file: on images before the embedding, or on the features or gradients that are released."""

from privlab.base import attach_parts

__getattr__, __dir__ = attach_parts(__name__, __file__, "DEFENSES", "defenses")
