"""A filter of an NVFlare client that bounds its difference and adds Gaussian noise, as DP-SGD does to a gradient."""

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable


class Gaussian(DXOFilter):
    """Send d · min(1, clip/‖d‖) + N(0, (multiplier · clip)²) for a difference d; ‖d‖ is over all parameters."""

    def __init__(self, clip: float = 1.0, multiplier: float = 0.01) -> None:
        super().__init__([DataKind.WEIGHT_DIFF], [DataKind.WEIGHT_DIFF])
        self.clip, self.multiplier = clip, multiplier

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """Return the difference with noise."""
        draws = np.random.default_rng()
        norm = np.sqrt(sum(np.square(value).sum() for value in dxo.data.values()))
        scale = min(1.0, self.clip / norm)
        for name, value in dxo.data.items():
            noise = draws.normal(0, self.multiplier * self.clip, value.shape)
            dxo.data[name] = (scale * value + noise).astype(np.float32)
        return dxo
