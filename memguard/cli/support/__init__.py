"""What several commands share: their options, their output, and the files that they read."""
