"""Reads PyCUDA's state in the running process, for `memguard doctor`, suspension and OOM retries."""

from __future__ import annotations

from memguard._frameworks.optional_modules import InProcess

IN_PROCESS = InProcess(
    modules=("pycuda", "pycuda.driver", "pycuda.autoinit", "pycuda.autoprimaryctx", "pycuda.gl.autoinit")
)
