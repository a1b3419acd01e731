"""Budgets from what was recorded, and first ones from what is installed."""
