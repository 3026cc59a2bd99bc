"""Defenses on released features, one per file."""
