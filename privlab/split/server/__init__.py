"""The server: it holds the backbone and serves sessions, which it may record."""
