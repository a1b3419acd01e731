"""Shares TensorFlow's tensors through unversioned DLPack.

TensorFlow requires row-major tensors at addresses that are multiples of 64. An operation on a tensor at any other
address aborts the process (`Check failed: IsAligned()`, measured). TensorFlow exposes no stream, so `to_dlpack` waits
for the device, and before TensorFlow imports an array, the host waits for the producer's GPU work.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, ClassVar, NamedTuple

from memguard._frameworks.arrays import dlpack
from memguard._frameworks.arrays.base import Arrays, MakeWait
from memguard._frameworks.arrays.compatibility import Layout, Traits
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer, new_offer
from memguard._frameworks.arrays.view import DTYPES, NO_FLOAT8, View

_EAGER = "EagerTensor"


class _Calls(NamedTuple):
    tf: Any
    executing_eagerly: Any
    to_dlpack: Any
    from_dlpack: Any


class TensorFlowArrays(Arrays):
    """The exchange adapter of eager tensors. Refuses the exchange while TensorFlow builds a graph (`tf.function`)."""

    traits: ClassVar[Traits] = Traits(
        "tensorflow",
        NO_FLOAT8,
        Layout.COMPACT,
        alignment=64,
        host_alignment=64,
        writes=False,
        on_host=True,
    )
    module: ClassVar[str] = "tensorflow"
    call: ClassVar[str] = "tf.experimental.dlpack.from_dlpack"
    waits: ClassVar[str] = "host"
    takes_stream: ClassVar[bool] = False
    immutable: ClassVar[bool] = True

    def owns(self, x: Any) -> bool:
        if type(x).__qualname__ == _EAGER:
            return True
        tf = sys.modules["tensorflow"]
        return isinstance(x, (tf.Tensor, tf.Variable, tf.SparseTensor, tf.RaggedTensor))

    _known: _Calls | None = None

    def _calls(self) -> _Calls:
        """TensorFlow's functions, cached because a lookup in TensorFlow's package takes as long as a driver call."""
        tf, known = sys.modules["tensorflow"], self._known
        if known is None or known.tf is not tf:
            functions = tf.experimental.dlpack
            known = self._known = _Calls(tf, tf.executing_eagerly, functions.to_dlpack, functions.from_dlpack)
        return known

    def offer(self, x: Any) -> Offer:
        tf, eager, to_dlpack, _ = self._calls()
        if type(x).__qualname__ != _EAGER:
            if isinstance(x, tf.SparseTensor):
                raise self.refusal("it is sparse", "tf.sparse.to_dense(x)")
            if isinstance(x, tf.RaggedTensor):
                raise self.refusal("it is ragged", "x.to_tensor()")
            if isinstance(x, tf.Variable):
                x = x.value()
        if not hasattr(x, "numpy") or not eager():
            raise self.refusal(
                "it belongs to a graph that is being built, and has no memory yet",
                "hand arrays over outside tf.function, as its arguments and results; or inside tf.py_function",
            )
        dtype = x.dtype.name
        if dtype not in DTYPES:
            raise self.unknown_dtype(dtype, "tf.cast it")
        try:
            capsule = to_dlpack(x)
            view = dlpack.read(capsule)
        except (dlpack.BadCapsule, tf.errors.OpError) as error:
            raise self.refusal(str(error).splitlines()[0], "tf.cast it, or tf.identity(x) on a GPU") from error
        device = None if view.device is None else _ordinal(view.device)  # `view` has TensorFlow's device index
        if device != view.device:
            view = view._replace(device=device)
        return new_offer(("tensorflow", view, capsule, None, None, None, True))

    def ready(self, offer: Offer, stream: int | None) -> None:
        """Does nothing, because `to_dlpack` has already waited for the tensor's values."""

    def import_view(self, view: View, lifetime: Lifetime, make_wait: MakeWait, stream: int | None) -> Any:
        if "tensorflow" not in sys.modules:
            importlib.import_module("tensorflow")
        _, eager, _, from_dlpack = self._calls()
        if not eager():
            raise self.refusal(
                "a graph is being built: the array would become a constant of it",
                "hand it over outside tf.function, and pass it as an argument",
            )
        number = None if view.device is None else _logical(view.device)
        make_wait(None)
        return from_dlpack(dlpack.capsule(view, lifetime, device=number))

    def copy(self, array: Any, device: int | None) -> Any:
        import tensorflow as tf

        place = "/CPU:0" if device is None else f"/GPU:{_logical(device)}"
        with tf.device(place):
            moved = tf.identity(array)
            if moved.dtype == tf.bool:
                return tf.cast(tf.cast(moved, tf.uint8), tf.bool)
            if not moved.shape.num_elements():
                return moved
            # Copy the tensor as uint8, because for half of the dtypes DeepCopy returns a tensor on the host (measured).
            copied = tf.raw_ops.DeepCopy(x=tf.bitcast(moved, tf.uint8))
            return tf.bitcast(copied, moved.dtype)

    def compact(self, x: Any) -> Any:
        return self.copy(x, None)  # called for host tensors only, as tensors on a GPU are compact and aligned

    def upload(self, host: Any, device: int) -> Any:
        import tensorflow as tf

        with tf.device(f"/GPU:{_logical(device)}"):
            return tf.identity(tf.constant(host))


@functools.cache
def _ordinal(logical: int) -> int:
    """CUDA's ordinal of the TensorFlow GPU with the index `logical`."""
    names = _visible()
    return int(names[logical].rpartition(":")[2]) if logical < len(names) else logical


@functools.cache
def _logical(ordinal: int) -> int:
    """TensorFlow's index of the GPU with this CUDA ordinal among its visible GPUs (`set_visible_devices`), which are
    fixed at TensorFlow's start."""
    names = _visible()
    wanted = f"GPU:{ordinal}"
    for number, name in enumerate(names):
        if name.endswith(wanted):
            return number
    raise TensorFlowArrays().refusal(
        f"it lies on cuda:{ordinal}, and TensorFlow may use {', '.join(names) or 'no GPU'}",
        "tf.config.set_visible_devices before TensorFlow's first operation, or copy=True with device=",
    )


def _visible() -> list[str]:
    """The names of TensorFlow's visible GPUs, in TensorFlow's order. Each name ends in CUDA's ordinal."""
    import tensorflow as tf

    return [device.name for device in tf.config.get_visible_devices("GPU")]
