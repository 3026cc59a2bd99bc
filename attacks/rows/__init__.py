"""The placement of permuted rows, and the reassembly of what was shuffled."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
