"""Defenses, one per file: on images before the embedding, or on the features or gradients that are released."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
