"""TensorFlow's tensors. Shared through unversioned DLPack capsules, row-major ones at multiples of 64 bytes.

An operation on another address aborts the process (`Check failed: IsAligned()`, measured). TensorFlow tells no
stream: exporting waits for its device, and before importing the host waits for the lender's work.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, ClassVar

from memguard.exchange import dlpack
from memguard.exchange.adapters.base import Arrays, Before
from memguard.exchange.compatibility import Layout, Taker
from memguard.exchange.lifetimes import Loan, Offer
from memguard.exchange.view import DTYPES, NO_FLOAT8, View

_EAGER = "EagerTensor"


class TensorFlow(Arrays):
    """Eager tensors, which is also what graphs are fed with."""

    taker: ClassVar[Taker] = Taker(
        "tensorflow",
        "TensorFlow",
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
    told: ClassVar[bool] = False
    immutable: ClassVar[bool] = True

    def owns(self, x: Any) -> bool:
        if type(x).__qualname__ == _EAGER:
            return True
        tf = sys.modules["tensorflow"]
        return isinstance(x, (tf.Tensor, tf.Variable, tf.SparseTensor, tf.RaggedTensor))

    def offer(self, x: Any) -> Offer:
        import tensorflow as tf

        if type(x).__qualname__ != _EAGER:  # each name of TensorFlow's takes time to look up
            if isinstance(x, tf.SparseTensor):
                raise self.cannot("it is sparse", "tf.sparse.to_dense(x)")
            if isinstance(x, tf.RaggedTensor):
                raise self.cannot("it is ragged", "x.to_tensor()")
            if isinstance(x, tf.Variable):
                x = x.value()
        if not hasattr(x, "numpy") or not tf.executing_eagerly():
            raise self.cannot(
                "it belongs to a graph that is being built, and has no memory yet",
                "hand arrays over outside tf.function, as its arguments and results; or inside tf.py_function",
            )
        if x.dtype.name not in DTYPES:
            raise self.cannot(f"its dtype {x.dtype.name} is not one that can be handed over", "tf.cast it")
        try:
            capsule = tf.experimental.dlpack.to_dlpack(x)
            view = dlpack.read(capsule)
        except (dlpack.Unreadable, tf.errors.OpError) as error:
            raise self.cannot(str(error).splitlines()[0], "tf.cast it, or tf.identity(x) on a GPU") from error
        device = None if view.device is None else _ordinal(view.device)  # the capsule's is TensorFlow's own number
        if device != view.device:
            view = view._replace(device=device)
        return Offer(self.name, view, capsule, done=True)

    def ready(self, offer: Offer, then: int | None) -> None:
        """`to_dlpack` has waited: the values are there."""

    def take(self, view: View, loan: Loan, before: Before, stream: int | None) -> Any:
        import tensorflow as tf

        if not tf.executing_eagerly():
            raise self.cannot(
                "a graph is being built: the array would become a constant of it",
                "hand it over outside tf.function, and pass it as an argument",
            )
        number = None if view.device is None else _logical(view.device)
        before(None)
        return tf.experimental.dlpack.from_dlpack(dlpack.capsule(view, loan, device=number))

    def copy(self, array: Any, device: int | None) -> Any:
        import tensorflow as tf

        place = "/CPU:0" if device is None else f"/GPU:{_logical(device)}"
        with tf.device(place):
            moved = tf.identity(array)
            if moved.dtype == tf.bool:
                return tf.cast(tf.cast(moved, tf.uint8), tf.bool)
            if not moved.shape.num_elements():
                return moved
            # As bytes: DeepCopy brings half of the dtypes to the host (measured).
            copied = tf.raw_ops.DeepCopy(x=tf.bitcast(moved, tf.uint8))
            return tf.bitcast(copied, moved.dtype)

    def compact(self, x: Any) -> Any:
        return self.copy(x, None)  # only ever of a tensor on the host: those on a GPU are compact and aligned

    def upload(self, host: Any, device: int) -> Any:
        import tensorflow as tf

        with tf.device(f"/GPU:{_logical(device)}"):
            return tf.identity(tf.constant(host))


@functools.cache
def _ordinal(logical: int) -> int:
    """CUDA's number of a GPU that TensorFlow calls `logical`."""
    names = _visible()
    return int(names[logical].rpartition(":")[2]) if logical < len(names) else logical


@functools.cache
def _logical(ordinal: int) -> int:
    """TensorFlow's number of a GPU among those it was left (`set_visible_devices`), which stay once it has begun."""
    names = _visible()
    wanted = f"GPU:{ordinal}"
    for number, name in enumerate(names):
        if name.endswith(wanted):
            return number
    raise TensorFlow().cannot(
        f"it lies on cuda:{ordinal}, and TensorFlow was left {', '.join(names) or 'no GPU'}",
        "tf.config.set_visible_devices before TensorFlow's first operation, or copy=True with device=",
    )


def _visible() -> list[str]:
    """The GPUs that TensorFlow was left, in its order: their names end in CUDA's ordinals."""
    import tensorflow as tf

    return [device.name for device in tf.config.get_visible_devices("GPU")]
