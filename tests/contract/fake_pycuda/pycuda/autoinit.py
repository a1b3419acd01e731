"""`pycuda.autoinit`: a context of its own on the first GPU, at import."""

from pycuda import driver

driver.init()
context = driver.Device(0).make_context()
