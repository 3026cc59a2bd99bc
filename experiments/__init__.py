"""Experiments as data: the papers' tables and our studies."""
