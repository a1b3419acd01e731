"""CuPy: its adapter, and the count of the driver's slabs that its pool uses."""
