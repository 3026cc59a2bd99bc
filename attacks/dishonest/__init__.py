"""Attacks of a server that chooses the weights: they run if they are named, in a separate run."""
