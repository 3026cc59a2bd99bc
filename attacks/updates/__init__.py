"""Attacks on the updates of rounds, or of adapters: one attack, one file. Others of one step are in `gradients`."""
