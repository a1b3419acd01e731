"""CuPy: its adapter, and what its pool holds of the driver's slabs."""
