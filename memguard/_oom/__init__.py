"""Out-of-memory errors: recognised by their text, explained by the figures, reported once."""
