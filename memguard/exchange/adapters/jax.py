"""JAX's arrays. Shared through DLPack; XLA refuses addresses that are no multiple of 16 when they are used (measured).

JAX waits for its own work itself: `__dlpack__(stream=...)` makes a stream wait for the array, and `from_dlpack` names
the stream that JAX will use. The capsule stays with the loan: as long as it lives JAX refuses to donate the array.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from memguard._devices import streams
from memguard.errors import CannotShare
from memguard.exchange import dlpack
from memguard.exchange.adapters.base import Arrays, Before
from memguard.exchange.compatibility import Layout, Taker
from memguard.exchange.lifetimes import Loan, Offer
from memguard.exchange.view import DTYPES, View, dtype_name, row_major

_GPUS = ("gpu", "cuda")
_WIDE = frozenset(("int64", "uint64", "float64", "complex128"))


class JAX(Arrays):
    """`jax.Array` with one shard."""

    taker: ClassVar[Taker] = Taker(
        "jax",
        "JAX",
        frozenset(DTYPES),
        Layout.DENSE,
        alignment=16,
        host_alignment=64,
        writes=False,
        on_host=True,
        settles=True,
    )
    module: ClassVar[str] = "jax"
    call: ClassVar[str] = "jax.dlpack.from_dlpack"
    waits: ClassVar[str] = "stream"
    told: ClassVar[bool] = False
    immutable: ClassVar[bool] = True

    def owns(self, x: Any) -> bool:
        return isinstance(x, sys.modules["jax"].Array)

    def offer(self, x: Any) -> Offer:
        import jax

        if isinstance(x, jax.core.Tracer):
            raise self.cannot(
                "it is a tracer, which has no memory", "hand arrays over outside jax.jit, and pass them as arguments"
            )
        if x.is_deleted():
            raise self.cannot("it was deleted or donated", "hand it over before it is donated")
        if not x.is_fully_addressable or len(x.sharding.device_set) != 1:
            raise self.cannot(f"it lies on {len(x.sharding.device_set)} devices", "one of x.addressable_shards[i].data")
        dtype = dtype_name(x.dtype)
        if dtype not in DTYPES:
            raise self.cannot(f"its dtype {dtype} is not one that can be handed over", "cast it with x.astype")
        (device,) = x.devices()
        if device.platform != "cpu" and getattr(x.sharding, "memory_kind", None) in ("pinned_host", "unpinned_host"):
            raise self.cannot(
                "it lies in host memory of a GPU's", 'x.sharding.with_memory_kind("device") in jax.device_put'
            )
        if device.platform not in (*_GPUS, "cpu"):
            raise self.cannot(f"it lies on {device}", "jax.device_put it on a GPU")
        ordinal = None if device.platform == "cpu" else device.local_hardware_id
        shape = tuple(x.shape)
        strides = row_major(shape) if len(shape) < 2 else _strides(x, shape, ordinal)
        return Offer(self.name, View(x.unsafe_buffer_pointer(), shape, strides, dtype, ordinal), [x])

    def ready(self, offer: Offer, then: int | None) -> None:
        if then is not None and offer.view.device is not None and streams.capturing(offer.view.device, then):
            raise streams.Captured("a CUDA graph is being captured, and may not wait for JAX")
        offer.owner.append(_capsule(offer.owner[0], then))

    def take(self, view: View, loan: Loan, before: Before, stream: int | None) -> Any:
        import jax

        if view.dtype in _WIDE and not jax.config.jax_enable_x64:
            raise CannotShare(
                loan.offer.lender,
                self.name,
                f"JAX makes a narrower copy of {view.dtype} as long as its 64-bit types are off",
                'jax.config.update("jax_enable_x64", True), or cast it where it comes from',
            )
        if _tracing():
            raise self.cannot(
                "a function is being traced: the array would become a constant of it",
                "hand it over outside jax.jit, and pass it as an argument",
            )
        exporter = _Done if loan.offer.done else dlpack.Exporter
        array = jax.dlpack.from_dlpack(exporter(view, loan, view.device, before))
        if view.size and array.unsafe_buffer_pointer() != view.address:
            raise CannotShare(
                loan.offer.lender, self.name, "JAX copied it instead of sharing it", "copy=True, if that is wanted"
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
        raise self.cannot(
            f"JAX has no GPU cuda:{device} here, only {', '.join(str(found) for found in jax.local_devices())}",
            "a JAX with CUDA that sees this GPU, or leave device out",
        )


def _capsule(x: Any, stream: int | None) -> Any:
    """JAX's capsule, of which `stream` waits for the array; None: the host does."""
    return x.__dlpack__() if stream is None else x.__dlpack__(stream=stream)


def _strides(x: Any, shape: tuple[int, ...], ordinal: int | None) -> tuple[int, ...]:
    """An array that was imported transposed still lies so, which JAX tells by its layout, or in the capsule."""
    try:
        order = x.format.layout.major_to_minor
    except AttributeError:  # JAX before 0.7
        return dlpack.read(_capsule(x, None if ordinal is None else streams.LEGACY)).strides
    found, step = [0] * len(shape), 1
    for axis in reversed(order):
        found[axis], step = step, step * max(shape[axis], 1)
    return tuple(found)


def _tracing() -> bool:
    """Whether this thread traces a function now; JAX tells it in private only, and a JAX that does not is believed."""
    clean = getattr(sys.modules.get("jax._src.core"), "trace_state_clean", None)
    return clean is not None and not clean()


class _Done(dlpack.Exporter):
    """Of memory that nobody has to wait for. JAX makes no stream ready for what it knows TensorFlow's tensors by, which
    takes it half the time; under any other name this works too.
    """


_Done.__qualname__, _Done.__module__ = "EagerTensor", "tensorflow.python.framework.ops"
