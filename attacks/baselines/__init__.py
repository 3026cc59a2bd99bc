"""Attacks on gradients and updates from papers that end in a search: they run if they are named."""
