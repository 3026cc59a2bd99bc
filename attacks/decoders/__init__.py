"""Networks that turn released features back into images, and their training."""
