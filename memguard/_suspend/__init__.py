"""A process steps off its GPUs, every byte and its contexts, and comes back to the same addresses."""
