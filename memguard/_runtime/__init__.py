"""What runs beside a budget: the session, the monitor, pressure and leaks, retry, and activation at Python's start."""
