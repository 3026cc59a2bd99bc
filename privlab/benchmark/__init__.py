"""The benchmark: frozen tracks, entries that are checked and signed, and the table that ranks them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
