"""The registry of array adapters, and the adapters of NumPy, other libraries and mapped memory."""
