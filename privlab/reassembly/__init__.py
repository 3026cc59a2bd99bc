"""Where an adversary puts patches that a defense shuffled, from what it holds alone."""
