"""Shared helpers without privacy logic: errors, options, plug-ins, random draws, files, precision, progress."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
