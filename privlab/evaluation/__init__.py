"""The pipeline: a specification becomes observations, reconstructions, scores and records."""
