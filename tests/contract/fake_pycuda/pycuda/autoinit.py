"""`pycuda.autoinit`: a context of its own on the first GPU, at import."""

import atexit

from pycuda import driver

driver.init()
context = driver.Device(0).make_context()
device = context.get_device()
if driver.ENDS:
    atexit.register(context.pop)
