"""What runs beside a budget: the session, the monitor, pressure, leaks, and retry."""
