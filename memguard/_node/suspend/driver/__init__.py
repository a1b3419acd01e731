"""The driver's checkpoint calls and NVML's readings, through a helper process or a simulated driver."""
