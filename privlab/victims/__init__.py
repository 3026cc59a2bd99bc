"""Makes victims, named timm ViTs with weights of stated origin, and other classifiers to train and evaluate."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
