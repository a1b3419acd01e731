"""PyCUDA's arrays. They name no stream: as producer all work of the context is waited for. As consumer, the stream that
the user names waits; without one, the host.

PyCUDA frees memory only on the thread that allocated it, so an array that was handed over is released on that thread.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from typing import Any, ClassVar

from memguard._devices import contexts, copies
from memguard.exchange.adapters import array_interface
from memguard.exchange.adapters.base import Arrays, Before
from memguard.exchange.compatibility import Layout, Traits
from memguard.exchange.lifetimes import Lifetime, Offer, new_offer
from memguard.exchange.view import ITEM_SIZES, NUMPY_DTYPES, View, in_bytes


class PyCUDAArrays(Arrays):
    """`pycuda.gpuarray.GPUArray`."""

    traits: ClassVar[Traits] = Traits("pycuda", NUMPY_DTYPES, Layout.FORWARD, strided=False)
    module: ClassVar[str] = "pycuda"
    call: ClassVar[str] = "pycuda.gpuarray.GPUArray(gpudata=address)"
    waits: ClassVar[str] = "host"
    own_contexts: ClassVar[bool] = True
    copies_on: ClassVar[bool] = True
    compacts: ClassVar[Layout | None] = Layout.COMPACT

    def owns(self, x: Any) -> bool:
        gpuarray = sys.modules.get("pycuda.gpuarray")
        return gpuarray is not None and isinstance(x, gpuarray.GPUArray)

    def offer(self, x: Any) -> Offer:
        view, _, context = self._interface(x)
        return new_offer(("pycuda", view, x, None, context, threading.get_ident(), False))

    def place(self, view: View, device: int | None) -> int | None:
        """On the GPU whose context is current on this thread: PyCUDA allocates only there."""
        here = contexts.current()
        if device is not None and device != here:
            raise self.refusal(
                f"its arrays lie where its current context is, on {'no GPU' if here is None else f'cuda:{here}'}",
                f"with memguard.exchange.pycuda_context({device}): ...",
            )
        return super().place(view, device) if here is None else here

    def context(self, device: int | None) -> int | None:
        """PyCUDA works in the thread's current context, which may be one of its own."""
        here = contexts.current_handle()
        return here if device is not None and here != contexts.primary(device) else None

    def import_view(self, view: View, lifetime: Lifetime, before: Before, stream: int | None) -> Any:
        before(stream)
        gpuarray = sys.modules.get("pycuda.gpuarray") or importlib.import_module("pycuda.gpuarray")
        address, shape, strides, dtype, _, _ = view
        return gpuarray.GPUArray(
            shape,
            _numpy_dtype(dtype),
            gpudata=address,
            base=array_interface.WithInterface(view, lifetime),
            strides=in_bytes(strides, ITEM_SIZES[dtype]),
        )

    def copy(self, array: Any, device: int | None) -> Any:
        from pycuda import gpuarray

        made = gpuarray.empty(array.shape, array.dtype)
        if array.size:
            copies.device(int(made.ptr), int(array.ptr), array.nbytes, contexts.current() or 0)
        return made

    def copy_on(self, array: Any, device: int, stream: int) -> Any:
        from pycuda import gpuarray

        made = gpuarray.empty(array.shape, array.dtype)
        if array.size:  # the stream is of the context in which PyCUDA works now
            copies.queue(int(made.ptr), int(array.ptr), array.nbytes, contexts.current_handle(), stream)
        return made

    def compact(self, x: Any) -> Any:
        return self.copy(x, None)

    def upload(self, host: Any, device: int) -> Any:
        from pycuda import gpuarray

        return gpuarray.to_gpu(host)


@functools.cache
def _numpy_dtype(name: str) -> Any:
    import numpy

    return numpy.dtype(name)
