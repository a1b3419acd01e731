"""Out-of-memory errors: classify them by type and text, explain them by figures, report each once."""
