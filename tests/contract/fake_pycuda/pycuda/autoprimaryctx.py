"""`pycuda.autoprimaryctx`: the primary context of the first GPU, at import."""

import atexit

from pycuda import driver

driver.init()
context = driver.Device(0).retain_primary_context()
context.push()
device = context.get_device()
if driver.ENDS:
    atexit.register(context.pop)
