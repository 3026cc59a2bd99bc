"""Putting permuted rows in place, and what was shuffled back together."""
