"""A small model of PyCUDA in plain Python, for tests without a GPU: contexts, pools with bins, default arguments."""

VERSION_TEXT = "2026.1"
