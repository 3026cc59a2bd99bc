"""Least squares, descent, likelihoods and image priors that attacks share."""
