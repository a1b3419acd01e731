"""RMM: limits RMM's memory resource where a framework uses it as its allocator."""
