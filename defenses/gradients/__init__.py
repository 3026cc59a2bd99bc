"""Defenses on released gradients, one per file."""
