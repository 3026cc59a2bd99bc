"""What studies and `privlab evaluate` compute, and no attack or defense does."""
