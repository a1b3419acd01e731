"""Shares JAX's arrays through DLPack.

XLA rejects an address that is not a multiple of 16 when it first uses the array (measured). JAX synchronises streams
itself: `__dlpack__(stream=...)` makes a stream wait for the array, and `from_dlpack` passes the stream that JAX will
use. The exchange's `Lifetime` references the capsule, because JAX refuses to donate the array while the capsule exists.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from memguard._devices import streams
from memguard._frameworks.arrays import dlpack
from memguard._frameworks.arrays.base import Arrays, MakeWait
from memguard._frameworks.arrays.compatibility import Layout, Traits
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer, new_offer
from memguard._frameworks.arrays.view import DTYPES, View, dtype_name, new_view, row_major
from memguard.errors import CannotShare

_GPUS = ("gpu", "cuda")
_ON_THE_HOST = ("pinned_host", "unpinned_host")
_WIDE = frozenset(("int64", "uint64", "float64", "complex128"))


class JAXArrays(Arrays):
    """The exchange adapter of `jax.Array` with one shard."""

    traits: ClassVar[Traits] = Traits(
        "jax",
        frozenset(DTYPES),
        Layout.DENSE,
        alignment=16,
        host_alignment=64,
        writes=False,
        on_host=True,
        releases_when_done=True,
    )
    module: ClassVar[str] = "jax"
    call: ClassVar[str] = "jax.dlpack.from_dlpack"
    waits: ClassVar[str] = "stream"
    takes_stream: ClassVar[bool] = False
    immutable: ClassVar[bool] = True
    # False, because JAX copies between two H200s with peer access at only 57 GB/s (measured).
    direct: ClassVar[bool] = False

    def owns(self, x: Any) -> bool:
        return isinstance(x, sys.modules["jax"].Array)

    def owns_all_of(self, cls: type) -> bool:
        """True only for JAX's class of concrete arrays. For one class of tracers, `owns` may differ between objects."""
        return cls.__name__ == "ArrayImpl"

    def offer(self, x: Any) -> Offer:
        if isinstance(x, sys.modules["jax"].core.Tracer):
            raise self.refusal(
                "it is a tracer, which has no memory", "hand arrays over outside jax.jit, and pass them as arguments"
            )
        if x.is_deleted():
            raise self.refusal("it was deleted or donated", "hand it over before it is donated")
        sharding = x.sharding
        devices = sharding.device_set
        if not x.is_fully_addressable or len(devices) != 1:
            raise self.refusal(f"it lies on {len(devices)} devices", "one of x.addressable_shards[i].data")
        dtype = dtype_name(x.dtype)
        if dtype not in DTYPES:
            raise self.unknown_dtype(dtype, "cast it with x.astype")
        (device,) = devices
        platform, ordinal = device.platform, None
        if platform != "cpu" and getattr(sharding, "memory_kind", None) in _ON_THE_HOST:
            raise self.refusal(
                "it lies in host memory that JAX keeps for a GPU",
                'x.sharding.with_memory_kind("device") in jax.device_put',
            )
        if platform in _GPUS:
            ordinal = device.local_hardware_id
        elif platform != "cpu":
            raise self.refusal(f"it lies on {device}", "jax.device_put it on a GPU")
        shape = tuple(x.shape)
        strides = row_major(shape) if len(shape) < 2 else _strides(x, shape, ordinal)
        view = new_view((x.unsafe_buffer_pointer(), shape, strides, dtype, ordinal, False))
        return new_offer(("jax", view, [x], None, None, None, False))

    def ready(self, offer: Offer, stream: int | None) -> None:
        device, owner = offer.view.device, offer.owner
        if stream is not None and device is not None and streams.capturing(device, stream):
            raise streams.Captured("a CUDA graph is being captured: it cannot wait for JAX")
        owner.append(_capsule(owner[0], stream))

    def import_view(self, view: View, lifetime: Lifetime, make_wait: MakeWait, stream: int | None) -> Any:
        import jax

        if view.dtype in _WIDE and not jax.config.jax_enable_x64:
            raise CannotShare(
                lifetime.offer.producer,
                self.name,
                f"JAX would make a narrower copy of {view.dtype} while its 64-bit types are off",
                'jax.config.update("jax_enable_x64", True), or cast it in its own framework',
            )
        if _tracing():
            raise self.refusal(
                "a function is being traced: the array would become a constant of it",
                "hand it over outside jax.jit, and pass it as an argument",
            )
        exporter = _NoWaitExporter if lifetime.offer.done else dlpack.Exporter
        array = jax.dlpack.from_dlpack(exporter(view, lifetime, view.device, make_wait))
        if view.size and array.unsafe_buffer_pointer() != view.address:
            raise CannotShare(
                lifetime.offer.producer,
                self.name,
                "JAX copied it instead of sharing it",
                "copy=True, if a copy will do",
            )
        return array

    def copy(self, array: Any, device: int | None) -> Any:
        import jax
        import jax.numpy as jnp

        if device is not None and array.devices() != {self._place(device)}:
            return jax.device_put(array, self._place(device))
        return jnp.array(array, copy=True)

    def compact(self, x: Any) -> Any:
        import jax.numpy as jnp

        return jnp.array(x, copy=True)

    def upload(self, host: Any, device: int) -> Any:
        import jax

        return jax.device_put(host.copy(), self._place(device))

    def _place(self, device: int) -> Any:
        import jax

        for found in jax.local_devices():
            if found.platform in _GPUS and found.local_hardware_id == device:
                return found
        raise self.refusal(
            f"JAX has no GPU cuda:{device} here, only {', '.join(str(found) for found in jax.local_devices())}",
            "a JAX with CUDA that sees this GPU, or leave device out",
        )


def _capsule(x: Any, stream: int | None) -> Any:
    """Create JAX's DLPack capsule. `stream` waits for the array's values; with None, the host waits."""
    return x.__dlpack__() if stream is None else x.__dlpack__(stream=stream)


def _strides(x: Any, shape: tuple[int, ...], ordinal: int | None) -> tuple[int, ...]:
    """The array's strides, from JAX's layout or from the capsule. An array imported with a transposed layout keeps that
    layout."""
    try:
        order = x.format.layout.major_to_minor
    except AttributeError:  # JAX before 0.7
        return dlpack.read(_capsule(x, None if ordinal is None else streams.LEGACY)).strides
    found, step = [0] * len(shape), 1
    for axis in reversed(order):
        found[axis], step = step, step * max(shape[axis], 1)
    return tuple(found)


def _tracing() -> bool:
    """True if this thread is tracing a function. False if this JAX lacks the private function that reports tracing."""
    clean = getattr(sys.modules.get("jax._src.core"), "trace_state_clean", None)
    return clean is not None and not clean()


class _NoWaitExporter(dlpack.Exporter):
    """Exports memory whose values are already computed, so that JAX need not wait for GPU work.

    JAX recognises TensorFlow's tensors by their class name, and prepares no stream for them. This class has the same
    name, which halves the time of an array's import. With any other name the array's import works too.
    """


_NoWaitExporter.__qualname__, _NoWaitExporter.__module__ = "EagerTensor", "tensorflow.python.framework.ops"
