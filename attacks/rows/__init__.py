"""Putting permuted rows in place, and what was shuffled back together."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
