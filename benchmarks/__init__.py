"""Benches of a clone: speeds as ratios, measured in one run on the same inputs and threads; one bench, one file."""
