"""Runs one attack, or audits recorded features or a gradient file."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
