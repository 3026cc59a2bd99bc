"""The names of the metrics, which cost no import of torch; `registry` holds the metrics."""

from collections.abc import Mapping

from privlab.base import with_plugins

LPIPS = "lpips"
"""What a run is asked for LPIPS by, whatever the network: `privlab.evaluation.lpips_choice` names the metric."""

METRIC_NAMES = (
    *("mse", "psnr", "ssim", "ssim_skimage", "fft2d", "fft2d_mjp", "psnr_affine", "correlation", "gms_affine"),
    *("lpips_alex", "lpips_vgg", "lpips_squeeze", "f_sim"),
)
"""The keys of `METRICS` that are privlab's own, in the same order."""

METRIC_MEANINGS: Mapping[str, str] = {
    "f_sim": "The cosine of both images' embeddings by a network that `--embedding timm:NAME@FILE` names; for faces it "
    "should be one of faces. Without a network it is n/a.\n\nSource: [@xu2024permutation]",
    "placement_accuracy": "The share of the patch slots of an image that got their own row."
    "\n\nSource: [@xu2024permutation]",
    "neighbour_accuracy": "The share of pairs of adjacent slots whose patches are adjacent in the same direction."
    "\n\nSource: [@xu2024permutation]",
    "key_recovered": "The share of the entries of the column key that were recovered.",
    "correct": "Whether the client's prediction under its defense is the label; null if labels are predictions.",
}
"""The meaning of the metrics without a function whose docstring has it: F-SIM, and those of released features."""


def metric_names() -> list[str]:
    """Return the names of all metrics, those of other packages included (`privlab.metrics`), which load nothing."""
    return [*dict.fromkeys([*METRIC_NAMES, *with_plugins({}, "privlab.metrics")])]
