"""Callbacks of trainers that record the update of a fit: `lightning` for Lightning, `transformers` for Hugging Face."""
