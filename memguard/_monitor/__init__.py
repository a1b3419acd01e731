"""What runs beside a budget: samples, pressure and leaks, and the session that composes them with the guard."""
