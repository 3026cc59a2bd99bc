"""Attacks on encrypted weights: one file, one attack."""
