"""Collects the facts: the machine, the installed packages, and how each framework works in a separate process."""
