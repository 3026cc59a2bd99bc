"""A metric of on_a_card.py, which privlab finds as one of another package."""

from privlab.metrics import Metric

WORST_LEVEL = Metric(
    "worst_level",
    lambda x, y: 255 * (x.double() - y.double()).abs().amax((1, 2, 3)),
    "lower leaks",
    (0.0, 255.0),
    3,
    "the largest error in grey levels: below 1/2, rounding to 8 bits gives the private image",
)
