"""CuPy: the adapter that caps its memory pool, and the accounting of the driver memory behind that pool."""
