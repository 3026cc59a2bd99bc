"""Images as bags of patches, their masks, and permutations as index tensors."""
