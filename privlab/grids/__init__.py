"""Plans the cases and tasks of an experiment, and runs the tasks that a store lacks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
