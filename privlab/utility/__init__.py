"""Measures a classifier's accuracy, its consistency under shuffles, and its robustness."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
