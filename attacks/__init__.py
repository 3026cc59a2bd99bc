"""Attacks: one file, one attack; each turns an observation into images, or into a key."""

from privlab.base import attach_parts

__getattr__, __dir__ = attach_parts(__name__, __file__, "ATTACKS", "attacks")
