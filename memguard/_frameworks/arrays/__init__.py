"""What the exchange knows of arrays: the contract of each framework's `arrays.py`, and what they share."""
