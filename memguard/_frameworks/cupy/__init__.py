"""CuPy: the adapter, and the count of driver slabs that CuPy's pool uses."""
