"""`rmm.allocators.torch`: a handle for torch's pluggable allocator."""

rmm_torch_allocator = object()
