"""Tests that defenses, attacks and metrics are what they declare, and nothing more."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
