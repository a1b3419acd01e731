"""The only modules that call NVML (`nvml.py`) and libcuda (`libcuda.py`), and the simulated GPUs."""
