"""Helpers for every package that know nothing of privacy: errors, options, plug-ins, draws, files, precision."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
