"""The assignment problem. SciPy solves it, and is imported where one is solved: it takes a third of a second."""

from typing import Any

import numpy as np


def linear_sum_assignment(cost: Any, maximize: bool = False) -> tuple[np.ndarray, np.ndarray]:  # noqa: ANN401
    """Return the rows and the columns of an assignment with the least sum of costs, min_π Σ_i C_{i, π(i)}.

    Args:
        cost: C, a matrix, as an array or as a tensor of the CPU.
        maximize: whether the sum is the greatest instead.

    Source: `scipy.optimize.linear_sum_assignment`, a modified Jonker-Volgenant algorithm (Crouse 2016).
    """
    from scipy.optimize import linear_sum_assignment as solve

    return solve(cost, maximize=maximize)
