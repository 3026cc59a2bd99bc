"""Attacks on gradients behind published defenses: one file, one attack; `stages` is the search of one of them."""
