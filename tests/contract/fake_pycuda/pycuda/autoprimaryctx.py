"""`pycuda.autoprimaryctx`: the primary context of the first GPU, at import."""

from pycuda import driver

driver.init()
context = driver.Device(0).retain_primary_context()
context.push()
