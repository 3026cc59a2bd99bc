"""The admission test of a defense: whether its release is what it says and nothing else."""
