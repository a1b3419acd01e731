"""The only doors to NVML (`nvml.py`) and libcuda (`libcuda.py`), and the simulated GPUs."""
