"""Attacks on released features: one file, one attack."""
