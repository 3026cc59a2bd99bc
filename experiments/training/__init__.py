"""Trains the victims and the position predictors of the papers, and the classifiers that MJP compares with them."""
