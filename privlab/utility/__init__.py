"""The utility of a classifier: accuracy, consistency under shuffles, robustness."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
