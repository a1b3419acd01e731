"""PyCUDA: the adapter, its pools and its contexts."""
