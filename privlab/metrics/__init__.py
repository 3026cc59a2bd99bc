"""Metrics: similarity of reconstructions to their references, and recovery of rows and keys."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
