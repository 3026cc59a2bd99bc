"""Studies with their figures: one file, one study."""
