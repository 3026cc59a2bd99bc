"""Defines the types of the threat model: capabilities, observations, what attacks and defenses declare."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
