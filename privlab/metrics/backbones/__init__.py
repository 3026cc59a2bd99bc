"""Backbones of LPIPS that come with privlab, with their licence."""
