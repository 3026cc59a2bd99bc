"""The vision attacks of the package breaching, as they ship."""
