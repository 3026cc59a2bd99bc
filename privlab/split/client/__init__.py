"""The client: it keeps images, labels, embedding and head, and trains or infers through the server."""

RETRY_SECONDS = 60
"""How long a client tries again, unless it is told otherwise, before it gives up a server that does not answer."""
