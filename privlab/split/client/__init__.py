"""The client: it keeps images, labels, embedding and head, and trains or infers through the server."""
