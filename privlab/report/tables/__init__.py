"""Records as tables of leakage, with flags, verdict figures and comparisons."""
