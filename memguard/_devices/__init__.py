"""The only modules that call NVML (`nvml.py`) and libcuda (`libcuda.py`), and the simulated GPUs.

`survey.py` calls NVML too: the doctor has to describe a driver that `nvml.py` refuses.
"""
