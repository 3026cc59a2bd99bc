"""Images: where they come from, how they are decoded and preprocessed, and which of them are public."""
