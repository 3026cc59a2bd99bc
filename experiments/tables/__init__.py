"""Experiments as TOML files, and the printed figures that stand beside them."""
