"""The only modules that call NVML (`nvml.py`) and libcuda (`libcuda.py`), and the simulated GPUs.

`survey.py` also calls NVML, because the doctor must also describe a driver with which `nvml.py` fails.
"""
