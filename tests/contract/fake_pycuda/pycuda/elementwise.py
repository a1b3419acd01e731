"""`pycuda.elementwise`: its imports."""

from pycuda.tools import DeviceMemoryPool  # noqa: F401
