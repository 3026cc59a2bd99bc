"""Computes, saves and reads what a client releases, and infers labels and the effects of defenses from it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
