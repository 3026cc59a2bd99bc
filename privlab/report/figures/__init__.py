"""Figures of experiments and studies."""
