"""Entries that a filter took are found from the others, exactly where those are exact."""

import torch

from privlab.attacks.solvers import complete_entries


def test_missing_entries_follow_from_the_others() -> None:
    """A tenth of A and of G is missing: A comes back, to many more digits than its interval gives."""
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(8, 60, generator=draw, dtype=torch.float64)
    A = torch.randn(8, 30, generator=draw, dtype=torch.float64)
    G = A.mT @ X
    missing_A, missing_G = A.abs() < 0.15, G.abs() < 0.3
    vA, vG = 1e-14 + missing_A.double() * 0.15**2 / 3, 1e-14 + missing_G.double() * 0.3**2 / 3
    found = complete_entries(A.masked_fill(missing_A, 0), G.masked_fill(missing_G, 0), vA, vG, missing_A)
    assert int(missing_A.sum()) > 10
    torch.testing.assert_close(found, A, rtol=0, atol=1e-4)
    torch.testing.assert_close(found[~missing_A], A[~missing_A], rtol=0, atol=0)
