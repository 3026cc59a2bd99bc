"""How near a reconstruction comes to its reference, and how well rows and keys were recovered."""
