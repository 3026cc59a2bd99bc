"""Defenses on images, before the embedding: one file, one defense."""
