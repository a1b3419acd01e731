"""PyCUDA: its adapter, its pools, its contexts."""
