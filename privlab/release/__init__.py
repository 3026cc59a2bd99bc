"""What leaves the client, computed, captured in files and recorded; and what labels and effects it gives away."""
