"""Images: where they come from, how they are decoded and preprocessed, and which of them are public."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
