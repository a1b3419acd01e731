"""A context manager that makes a GPU's primary context current for PyCUDA on the calling thread.

PyCUDA keeps a stack of contexts for each thread. It aborts the process if that stack is not empty when the thread ends,
or at exit. So this module counts its pushed contexts for each thread, and pops the remaining ones before PyCUDA checks
the stack: for the main thread at exit, for another thread when Python frees its thread-local values.
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


class _ThreadContexts:
    """The number of contexts that one thread has pushed, and the thread's context object of each GPU.

    Each thread needs its own objects: PyCUDA frees memory only on the thread that created the context object.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.contexts: dict[int, Any] = {}

    def pop(self) -> None:
        """Pop the context that one `with` block pushed. Raises nothing if the user has popped it already."""
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


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.open = _ThreadContexts()


_per_thread = _PerThread()
_keepalive: dict[int, Any] = {}
"""A context object of each GPU, which keeps the primary context alive, because creating one takes 0.1 s."""


class pycuda_context:  # noqa: N801 (a context manager that is entered by its name, as contextlib's are)
    """Make the primary context of GPU `device` current for PyCUDA on this thread, during a `with` block. Yields
    the PyCUDA `Context`.

        with memguard.exchange.pycuda_context():
            array = pycuda.gpuarray.zeros(1000, numpy.float32)   # in the context of torch, TensorFlow, JAX, CuPy, Numba

    `device` is CUDA's ordinal. Creates no second context, and works without a budget. The context manager is re-entrant
    and reusable, and affects only the calling thread. At exit memguard closes the main thread's open blocks, and at a
    thread's end the blocks of that thread. Join your threads: a daemon thread inside a block while the interpreter
    ends may abort the process, because PyCUDA aborts if a context is still on its stack. Raises DeviceError if PyCUDA
    or the GPU is missing.
    """

    def __init__(self, device: int = 0) -> None:
        if not is_ordinal(device):
            raise DeviceError(
                f"{device!r} is not the number of a GPU", fix="pycuda_context(0), CUDA's numbering in this process"
            )
        self.device = device

    def __enter__(self) -> Any:
        suspension.check("memguard.exchange.pycuda_context")
        here = _per_thread.open
        context = here.contexts.get(self.device)
        if context is None:
            context = here.contexts[self.device] = _retained(self.device)
            _keepalive.setdefault(self.device, context)
        _close_at_exit()
        context.push()
        here.blocks += 1
        return context

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if not _per_thread.open.blocks:
            if kind is not None:  # the block's own error propagates
                return
            raise DeviceError(
                "this block of pycuda_context was entered on another thread",
                fix="enter and leave it on the thread that works with PyCUDA",
            )
        _per_thread.open.pop()


@functools.cache
def _close_at_exit() -> None:
    """Register the exit hook once. PyCUDA's own modules also pop contexts at exit. The order does not matter, because
    every pop removes the top of the stack."""
    life.at_exit(life.HookOrder.PYCUDA, _close_here)


def _close_here() -> None:
    _per_thread.open.close()


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
