"""Sessions with arenas."""
