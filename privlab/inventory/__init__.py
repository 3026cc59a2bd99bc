"""What is installed, and what this machine lacks."""
