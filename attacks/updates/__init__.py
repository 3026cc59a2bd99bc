"""Attacks on the updates of rounds: one attack, one file. Those of one image or one step are in `gradients`."""
