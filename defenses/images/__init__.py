"""Defenses on images before the embedding, one per file."""
