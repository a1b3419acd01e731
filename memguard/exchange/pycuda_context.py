"""The GPU's primary context for PyCUDA, on this thread, for a block.

PyCUDA keeps a stack of contexts for each thread. It aborts the process if a context is left there when the thread
ends, or at exit. So the contexts pushed here are counted for each thread, and those left are popped in time: at exit
for the main thread, and for another thread when Python frees its thread-local values, before PyCUDA checks.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from typing import Any

from memguard._base import life
from memguard._base.logs import log as _log
from memguard._devices import suspension
from memguard.errors import DeviceError
from memguard.exchange.arguments import is_ordinal


class _Open:
    """How many contexts this thread has pushed and not popped, and its object for each GPU's primary context.

    Each thread needs objects of its own: PyCUDA frees memory only on the thread that made the context object.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.contexts: dict[int, Any] = {}

    def pop(self) -> None:
        """One block ends. It is no error if the user has popped its context already."""
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
"""By GPU. A primary context that was used here is kept alive: making one takes a tenth of a second."""


class pycuda_context:  # noqa: N801 (a context manager that is entered by its name, as contextlib's are)
    """Makes the primary context of GPU `device` current for PyCUDA, on this thread, for a block. Yields its `Context`.

        with memguard.exchange.pycuda_context():
            array = pycuda.gpuarray.zeros(1000, numpy.float32)   # in the context of torch, TensorFlow, JAX, CuPy, Numba

    `device` is CUDA's ordinal. No second context is made, and no budget is needed. Blocks may be nested and entered
    again; each thread has its own. An open block of the main thread is closed at exit, one of another thread when that
    thread ends. Join your threads: a daemon thread that is in a block while the interpreter ends may abort the process,
    because PyCUDA aborts if a context is left. Raises DeviceError if PyCUDA or the GPU is missing.
    """

    def __init__(self, device: int = 0) -> None:
        if not is_ordinal(device):
            raise DeviceError(
                f"{device!r} is not the number of a GPU", fix="pycuda_context(0), CUDA's numbering in this process"
            )
        self.device = device

    def __enter__(self) -> Any:
        suspension.check("memguard.exchange.pycuda_context")
        here = _threads.open
        context = here.contexts.get(self.device)
        if context is None:
            context = here.contexts[self.device] = _retained(self.device)
            _kept.setdefault(self.device, context)
        _close_at_exit()
        context.push()
        here.blocks += 1
        return context

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if not _threads.open.blocks:
            if kind is not None:  # the block's own error goes on
                return
            raise DeviceError(
                "this block of pycuda_context was entered on another thread",
                fix="enter and leave it on the thread that works with PyCUDA",
            )
        _threads.open.pop()


@functools.cache
def _close_at_exit() -> None:
    """Once. PyCUDA's own modules pop at exit too. A pop takes whatever is on top, so only the number of pops counts."""
    life.at_exit(life.HookOrder.PYCUDA, _close_here)


def _close_here() -> None:
    _threads.open.close()


def _retained(device: int) -> Any:
    try:
        drv = importlib.import_module("pycuda.driver")
    except ImportError as error:
        raise DeviceError(f"PyCUDA cannot be imported: {error}", fix="pip install pycuda") from None
    try:
        drv.init()
        count = drv.Device.count()
        if device >= count:
            some = "no GPU" if not count else "one GPU, number 0" if count == 1 else f"{count} GPUs, 0 to {count - 1}"
            raise DeviceError(f"there is no GPU {device} here", fix=f"CUDA shows this process {some}")
        return drv.Device(device).retain_primary_context()
    except drv.Error as error:
        raise DeviceError(f"PyCUDA: {error}", fix="run `nvidia-smi` and check the driver") from error
