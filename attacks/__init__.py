"""Attacks: one file, one attack; each turns an observation into images, or into a key."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
