"""The exchange's adapters: the contract of each framework's `arrays.py`, and their shared parts."""
