"""The Python interface: objects in, a run out."""
