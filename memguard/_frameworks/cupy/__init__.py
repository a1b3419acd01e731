"""CuPy: its adapter, and its pool's usage of the driver's slabs."""
