"""Model keys: permuted weights, their files, and the models that they encrypt."""
