"""Arrays between processes: one process exports them through a socket, others attach them."""
