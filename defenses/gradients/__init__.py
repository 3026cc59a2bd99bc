"""Defenses on released gradients: one file, one defense."""
