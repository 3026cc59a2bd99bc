"""The threat model in types: capabilities, observations, and what attacks and defenses declare."""
