"""PyCUDA: the adapter that caps it, and the handling of its pools and contexts."""
