"""The equations of tokens in the gradients of the first block, and searches for their solutions."""
