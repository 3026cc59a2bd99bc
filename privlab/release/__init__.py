"""What leaves the client, computed, captured in files and recorded; and what labels and effects it gives away."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
