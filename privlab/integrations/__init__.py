"""Logs a run to MLflow or to Weights & Biases, which the extras `mlflow` and `wandb` bring."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
