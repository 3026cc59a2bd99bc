"""The equations of tokens in the gradients of the first block, and searches for their solutions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
