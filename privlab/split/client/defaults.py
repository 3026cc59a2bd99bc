"""Defaults of a client that the command line shows, which must not load torch for that."""

RETRY_SECONDS = 60.0
"""How long a client tries again, unless it is told otherwise, before it gives up a server that does not answer."""
