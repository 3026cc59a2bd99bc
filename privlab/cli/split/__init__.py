"""`privlab split`: commands and what they print."""
