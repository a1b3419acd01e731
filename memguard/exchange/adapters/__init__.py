"""The registry of every array, and those of no framework of the budget: NumPy, other libraries, mapped memory."""
