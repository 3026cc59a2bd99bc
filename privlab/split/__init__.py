"""Split learning between two processes: `privlab split serve` holds T, `train` and `infer` keep the rest.

The package needs the extra `split` (grpcio, protobuf).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
