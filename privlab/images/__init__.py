"""Opens image sources, decodes and preprocesses images, and separates the public ones from the private."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
