"""Model keys: permuted weights, their files, and the models that they encrypt."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
