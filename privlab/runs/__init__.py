"""One run: an attack, or the audit of recorded features or of a gradient file."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
