"""One run: an attack, or the audit of recorded features or of a gradient file."""
