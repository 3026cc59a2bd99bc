"""Images as sets of patches, their masks, and permutations as index tensors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
