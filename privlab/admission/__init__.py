"""The admission test of a defense: whether its release is what it declares and nothing else."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
