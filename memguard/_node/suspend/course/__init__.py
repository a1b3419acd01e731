"""Taking a process off its GPUs and bringing it back, step by step: decisions, calls, waits and messages."""
