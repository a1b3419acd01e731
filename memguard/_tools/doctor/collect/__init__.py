"""Reads the facts: the machine, what is installed, and each framework at work in a process of its own."""
