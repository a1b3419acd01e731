"""cuda-python: it has no cap of its own; its calls wait while the process is off its GPUs."""
