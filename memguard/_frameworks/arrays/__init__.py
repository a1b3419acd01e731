"""The contract of each framework's array adapter (`arrays.py`), and the code that the adapters share."""
