"""Defaults of split learning that the command line shows, which must not load torch for that."""

RETRY_SECONDS = 60.0
"""Seconds for which a client tries again, before it gives up on a server that does not answer."""

SESSIONS, BATCH, MESSAGE_MIB, IDLE_SECONDS, DISK_MIB = 8, 256, 256, 300, 2**16
"""The most that a server allows: clients at once, images in a batch, MiB in a message, seconds of silence, and MiB on
disk for the checkpoints of a session, and for its recording."""
