"""PyTorch: the adapter, the allocator's settings, the allocation history."""
