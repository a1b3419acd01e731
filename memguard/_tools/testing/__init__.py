"""What the pytest plugin does once a test asks for it: budgets for single tests, and tests that leave GPU memory."""
