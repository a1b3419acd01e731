"""Arrays between processes: one exports them by a socket, another attaches them."""
