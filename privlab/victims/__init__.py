"""Victims: named timm ViTs with weights of stated origin, and other classifiers that are trained and judged."""
