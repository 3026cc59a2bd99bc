"""Defenses on released features: one file, one defense."""
