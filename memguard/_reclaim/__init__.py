"""Giving idle memory to whoever needs it: caps that move, caches that come back, memory kept for a block of work."""
