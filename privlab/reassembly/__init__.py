"""Re-assembly: an adversary orders the patches that a defense shuffled, from what it holds alone."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
