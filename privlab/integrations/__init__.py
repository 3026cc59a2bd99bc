"""Logs a run to MLflow or to Weights & Biases, or writes it as records of Every Eval Ever."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
