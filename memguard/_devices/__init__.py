"""The only doors to NVML and libcuda, and the simulated devices."""
