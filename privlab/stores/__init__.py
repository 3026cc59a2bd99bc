"""Writes, reads and merges run directories: records as Parquet parts, strips."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
