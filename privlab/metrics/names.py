"""The names of the metrics, which cost no import of torch; `registry` holds the metrics."""

from privlab.base import with_plugins

__all__ = ["LPIPS", "METRIC_NAMES", "metric_names"]

LPIPS = "lpips"
"""What a run is asked for LPIPS by, whatever the network: `privlab.evaluation.lpips_choice` names the metric."""

METRIC_NAMES = (
    *("mse", "psnr", "ssim", "ssim_skimage", "fft2d", "fft2d_mjp", "psnr_affine", "correlation", "gms_affine"),
    *("lpips_alex", "lpips_vgg", "lpips_squeeze", "f_sim"),
)
"""The keys of `METRICS` that are privlab's own, in the same order."""


def metric_names() -> list[str]:
    """Return the names of all metrics, those of other packages included (`privlab.metrics`), which load nothing."""
    return [*dict.fromkeys([*METRIC_NAMES, *with_plugins({}, "privlab.metrics")])]
