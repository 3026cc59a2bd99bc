"""Attacks on the gradients of one published defense each: one file, one attack."""
