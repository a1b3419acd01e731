"""The GPU's primary context as PyCUDA's, on this thread, for a block.

PyCUDA keeps a stack of contexts for each thread, and ends the process where one is left on it when its thread ends,
or at exit. So what is pushed here is counted for each thread, and popped at the latest then: of the main thread at
exit, of another where Python lets go of its thread-local values, which comes before PyCUDA looks.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import sys
import threading
from typing import Any

from memguard.errors import DeviceError

_log = logging.getLogger("memguard")


class _Open:
    """What this thread has pushed and not popped, and its object of each GPU's primary context.

    Each thread has an object of its own: PyCUDA frees what was made under one only on the thread that made the object.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.contexts: dict[int, Any] = {}

    def pop(self) -> None:
        """One block ends. What its user has popped already is not popped again."""
        self.blocks -= 1
        drv = sys.modules.get("pycuda.driver")
        if drv is None:
            return
        try:
            drv.Context.pop()
        except drv.Error as error:
            _log.debug("pycuda_context: %s", error)

    def close(self) -> None:
        while self.blocks > 0:
            self.pop()

    def __del__(self) -> None:
        self.close()


class _Threads(threading.local):
    def __init__(self) -> None:
        self.open = _Open()


_threads = _Threads()
_kept: dict[int, Any] = {}
"""By GPU: a primary context that was used here stays, whoever lets go of it; making one takes a tenth of a second."""


class pycuda_context:  # noqa: N801 (a context manager that is entered by its name, as contextlib's are)
    """GPU `device`'s primary context as PyCUDA's on this thread, for a block; yields PyCUDA's `Context`.

        with memguard.exchange.pycuda_context():
            array = pycuda.gpuarray.zeros(1000, numpy.float32)   # in the context of torch, TensorFlow, JAX, CuPy, Numba

    `device` is CUDA's ordinal. No second context is made, and no budget is needed. Blocks may be nested and entered
    again; each thread has its own. A block that the main thread leaves open is closed at exit, one of another thread
    when that ends. Join your threads: a daemon thread that is in a block while the interpreter ends may abort the
    process, as PyCUDA does where a context is left. DeviceError where PyCUDA or the GPU is not there.
    """

    def __init__(self, device: int = 0) -> None:
        if isinstance(device, bool) or not isinstance(device, int) or device < 0:
            raise DeviceError(
                f"{device!r} is no number of a GPU\n    fix: pycuda_context(0), by CUDA's numbering in this process"
            )
        self.device = device

    def __enter__(self) -> Any:
        here = _threads.open
        context = here.contexts.get(self.device)
        if context is None:
            context = here.contexts[self.device] = _retained(self.device)
            _kept.setdefault(self.device, context)
        _close_at_exit()
        context.push()
        here.blocks += 1
        return context

    def __exit__(self, *_: object) -> None:
        if not _threads.open.blocks:
            raise DeviceError(
                "this block of pycuda_context was entered on another thread\n"
                "    fix: enter and leave it on the thread that works with PyCUDA"
            )
        _threads.open.pop()


@functools.cache
def _close_at_exit() -> None:
    """Once. PyCUDA's own modules pop at exit too: a pop takes whatever is on top, so that only their number counts."""
    atexit.register(_close_here)


def _close_here() -> None:
    _threads.open.close()


def _retained(device: int) -> Any:
    try:
        drv = importlib.import_module("pycuda.driver")
    except ImportError as error:
        raise DeviceError(f"PyCUDA cannot be imported: {error}\n    fix: pip install pycuda") from None
    try:
        drv.init()
        count = drv.Device.count()
        if device >= count:
            some = "no GPU" if not count else "one GPU, number 0" if count == 1 else f"{count} GPUs, 0 to {count - 1}"
            raise DeviceError(f"there is no GPU {device} here\n    fix: CUDA shows this process {some}")
        return drv.Device(device).retain_primary_context()
    except drv.Error as error:
        raise DeviceError(f"PyCUDA: {error}\n    fix: run `nvidia-smi` and check the driver") from error
