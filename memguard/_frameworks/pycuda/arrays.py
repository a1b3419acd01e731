"""The exchange adapter of PyCUDA's arrays, which do not record a stream.

If PyCUDA is the producer, the consumer waits for all work of PyCUDA's context. If PyCUDA is the consumer, the stream
that the user passed waits for the producer; without a stream, the host waits. PyCUDA frees memory only on the thread
that allocated it, so memguard releases a shared array on that thread.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from typing import Any, ClassVar

from memguard._devices import contexts, copies, streams
from memguard._frameworks.arrays import array_interface
from memguard._frameworks.arrays.base import Arrays, MakeWait
from memguard._frameworks.arrays.compatibility import Layout, Traits
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer, new_offer
from memguard._frameworks.arrays.view import ITEM_SIZES, NUMPY_DTYPES, View, in_bytes
from memguard._frameworks.pycuda.contexts import may_use_non_blocking_streams


class PyCUDAArrays(Arrays):
    """Exports, imports and copies `pycuda.gpuarray.GPUArray` objects for `memguard.exchange`."""

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
        """The GPU of this thread's current context, where PyCUDA allocates. Raises if `device` is another GPU."""
        here = contexts.current()
        if device is not None and device != here:
            raise self.refusal(
                f"its arrays lie where its current context is, on {'no GPU' if here is None else f'cuda:{here}'}",
                f"with memguard.exchange.pycuda_context({device}): ...",
            )
        return super().place(view, device) if here is None else here

    def context(self, device: int | None) -> int | None:
        """The handle of this thread's current context, which PyCUDA uses; None if that is the primary context."""
        here = contexts.current_handle()
        return here if device is not None and here != contexts.primary(device) else None

    def import_view(self, view: View, lifetime: Lifetime, make_wait: MakeWait, stream: int | None) -> Any:
        make_wait(stream)
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
            self._after_former_work(made, None)
            copies.device(int(made.ptr), int(array.ptr), array.nbytes, contexts.current() or 0)
        return made

    def copy_on(self, array: Any, device: int, stream: int) -> Any:
        from pycuda import gpuarray

        made = gpuarray.empty(array.shape, array.dtype)
        if array.size:  # `stream` belongs to PyCUDA's current context
            self._after_former_work(made, stream)
            copies.queue(int(made.ptr), int(array.ptr), array.nbytes, contexts.current_handle(), stream)
        return made

    def compact(self, x: Any) -> Any:
        return self.copy(x, None)

    def upload(self, host: Any, device: int) -> Any:
        from pycuda import gpuarray

        made = gpuarray.empty(host.shape, host.dtype)
        if host.size:
            self._after_former_work(made, None)
            made.set(host)
        return made

    def _after_former_work(self, made: Any, stream: int | None) -> None:
        """Make later work on `stream` wait for earlier work on the memory of the new array `made`.

        Under a budget `gpuarray.empty` allocates from a PyCUDA pool, which may reuse a block that running kernels still
        use. A block from `cuMemAlloc` has no unfinished work, because `cuMemFree` waits for all work. Without `stream`,
        PyCUDA writes to the memory on the legacy default stream, which waits for all streams except non-blocking ones.
        """
        if isinstance(made.gpudata, sys.modules["pycuda.driver"].DeviceAllocation):
            return
        ordinal = contexts.current() or 0
        context, non_blocking = self.context(ordinal), may_use_non_blocking_streams()
        if stream is not None and stream <= streams.PER_THREAD and context is not None:
            # The handle means the default stream of `context`, but the driver would use the primary context's.
            stream = None
        if non_blocking:
            streams.follow(ordinal, None, stream, context)
        elif stream is not None:
            streams.follow_default(ordinal, stream, context)


@functools.cache
def _numpy_dtype(name: str) -> Any:
    import numpy

    return numpy.dtype(name)
