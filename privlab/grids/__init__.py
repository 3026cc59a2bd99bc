"""Experiments as data: their grid of cases, the tasks that it lacks, the engines that run them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
