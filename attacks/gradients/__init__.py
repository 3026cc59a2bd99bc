"""Attacks on released gradients: one file, one attack."""
