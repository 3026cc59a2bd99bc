"""Defaults of split learning that the command line shows, which must not load torch for that."""

RETRY_SECONDS = 60.0
"""Seconds for which a client tries again, before it gives up on a server that does not answer."""

SESSIONS, BATCH, MESSAGE_MIB, IDLE_SECONDS = 8, 256, 256, 300
"""The most that a server allows: clients at once, images in a batch, MiB in a message, and seconds of silence."""
