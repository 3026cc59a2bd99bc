"""Weights that come with privlab, each with its card."""
