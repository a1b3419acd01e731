"""RMM: the limit on RMM's memory resource for a framework that uses RMM as its allocator."""
