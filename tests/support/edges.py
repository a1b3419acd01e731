"""Unusual arrays that each framework can create, and the outcome that docs/exchange.md documents for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from support.arrays import ON_CPU, Facts, ReadOnly, make, on_gpu

NEVER = ("conjugated", "sparse", "quantised", "ragged", "string", "deleted", "tracer")
"""Arrays that cannot even be copied."""
FORWARD = ("torch", "cupy", "pycuda", "numba")  # Frameworks that accept any non-negative strides.
WRITE = FORWARD  # Frameworks whose arrays are writable.


def expected(case: str, x: Facts | None, target: str) -> tuple[str, str]:
    """The expected outcome of the exchange, without `copy` and with `copy=True`, from the array's address and
    strides."""
    if x is None or case in NEVER:
        return "refused", "refused"
    if case == "64-bit" and target == "jax":  # its 64-bit types are disabled
        return "refused", "refused"
    if case == "requires a gradient":
        return "refused", "equal"
    if not math.prod(x.shape):
        return "shared", "equal"
    negative, compact, dense = _layout(x)
    refused = negative
    if target == "tensorflow":
        refused = refused or not compact or x.address % 64 != 0
    if target == "jax":
        refused = refused or not dense or x.address % (64 if ON_CPU else 16) != 0
    if x.readonly and target in WRITE:
        refused = True
    if target == "numba" and x.strides is not None:  # it copies repeated elements to the host incorrectly (measured)
        refused = refused or any(not stride and extent != 1 for stride, extent in zip(x.strides, x.shape, strict=False))
    return ("refused" if refused else "shared"), "equal"


def _layout(x: Facts) -> tuple[bool, bool, bool]:
    """Whether any stride is negative; whether the layout is row-major without gaps; whether it has no gaps in some
    order."""
    if x.strides is None:
        return False, True, True
    size = {"float32": 4, "uint8": 1, "float64": 8}[x.dtype]
    matter = [(stride // size, extent) for stride, extent in zip(x.strides, x.shape, strict=False) if extent != 1]
    negative = any(stride < 0 for stride, _ in matter)

    def without_gaps(order: list[tuple[int, int]]) -> bool:
        step = 1
        for stride, extent in order:
            if stride != step:
                return False
            step *= extent
        return True

    return negative, without_gaps(matter[::-1]), without_gaps(sorted(matter))


def cases(source: str, not_made: Callable[[str, Exception], None]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Name, array, and its values; None for the values of anything but a plain array."""
    import numpy as np

    square = np.arange(4096, dtype=np.float32).reshape(64, 64) % 97
    if source in ("rmm", "cuda.core"):
        whole = square.view(np.uint8 if source == "rmm" else np.int8).reshape(-1)  # as each framework names its bytes
        makers: dict[str, Callable[[], tuple[Any, Any]]] = {
            "a whole buffer": lambda: (make(source, whole), whole),
            "zero-size": lambda: (make(source, whole[:0]), whole[:0]),
        }
    else:
        makers = {
            "zero-size": lambda: (make(source, square[:0]), square[:0]),
            "0-d": lambda: (make(source, np.array(5, np.float32)), np.array(5, np.float32)),
            "plain": lambda: (make(source, square), square),
            "64-bit": lambda: _both(source, square.astype(np.float64)),
            **_SPECIAL[source](source, square),
        }
    for name, maker in makers.items():
        try:
            made = maker()
        except Exception as error:
            not_made(name, error)
            continue
        x, values = made
        if values is not None and tuple(getattr(x, "shape", values.shape)) != values.shape:
            not_made(name, ValueError(f"its shape is {tuple(x.shape)}, not {values.shape}"))
            continue
        yield name, made


def _both(source: str, values: Any) -> tuple[Any, Any]:
    return make(source, values), values


def _slices(source: str, square: Any) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Slices, which keep the whole array's memory alive."""
    flat = square.reshape(-1)
    parts: dict[str, Any] = {
        "sliced": slice(16, 48), "stepped": slice(0, 64, 2), "reversed": slice(None, None, -1),
        "misaligned by 4": slice(1, 33), "misaligned by 16": slice(4, 36), "misaligned by 32": slice(8, 40),
        "misaligned by 64": slice(16, 48),
    }  # fmt: skip
    makers: dict[str, Callable[[], tuple[Any, Any]]] = {
        name: (lambda part=part: (make(source, flat)[part], flat[part])) for name, part in parts.items()
    }
    makers["rows"] = lambda: (make(source, square)[8:24], square[8:24])
    makers["columns"] = lambda: (make(source, square)[:, 8:24], square[:, 8:24])
    return makers


def _read_only(source: str, square: Any) -> Callable[[], tuple[Any, Any]]:
    return lambda: (ReadOnly(make(source, square)), square)


def _torch(source: str, square: Any) -> dict[str, Callable[[], tuple[Any, Any]]]:
    import torch

    whole = make(source, square)
    slices = _slices(source, square)
    del slices["reversed"]  # it has none
    if not ON_CPU:
        slices["read-only"] = _read_only(source, square)
    return {
        **slices, "transposed": lambda: (whole.t(), square.T),
        "broadcast": lambda: (whole[:1].expand(8, 64), square[:1].repeat(8, 0)),
        "requires a gradient": lambda: (whole.clone().requires_grad_(), square),
        "conjugated": lambda: (torch.complex(whole, whole).conj(), None), "sparse": lambda: (whole.to_sparse(), None),
        "quantised": lambda: (torch.quantize_per_tensor(whole, 1.0, 0, torch.qint8), None),
    }  # fmt: skip


def _tensorflow(source: str, square: Any) -> dict[str, Callable[[], tuple[Any, Any]]]:
    import tensorflow as tf

    whole = make(source, square)

    def within(call: Callable[[], Any]) -> Any:
        with on_gpu():
            return call()

    return {
        "rows": lambda: (within(lambda: whole[8:24]), square[8:24]),
        "transposed": lambda: (within(lambda: tf.transpose(whole)), square.T),
        "variable": lambda: (within(lambda: tf.Variable(whole)), square),
        "sparse": lambda: (tf.sparse.from_dense([[1.0, 0.0]]), None),
        "ragged": lambda: (tf.ragged.constant([[1.0], [2.0, 3.0]]), None),
        "string": lambda: (tf.constant("text"), None),
    }


def _cupy(source: str, square: Any) -> dict[str, Callable[[], tuple[Any, Any]]]:
    import cupy

    def sparse() -> tuple[Any, Any]:
        from cupyx.scipy.sparse import csr_matrix

        return csr_matrix(make(source, square)), None

    return {
        **_slices(source, square), "transposed": lambda: (make(source, square).T, square.T),
        "upside down": lambda: (make(source, square)[::-1], square[::-1]),
        "broadcast": lambda: (cupy.broadcast_to(make(source, square)[:1], (8, 64)), square[:1].repeat(8, 0)),
        "read-only": _read_only(source, square), "sparse": sparse,
    }  # fmt: skip


def _jax(source: str, square: Any) -> dict[str, Callable[[], tuple[Any, Any]]]:
    whole = make(source, square)

    def deleted() -> tuple[Any, Any]:
        gone = make(source, square)
        gone.delete()
        return gone, None

    return {"rows": lambda: (whole[8:24], square[8:24]), "transposed": lambda: (whole.T, square.T), "deleted": deleted}


def _pycuda(source: str, square: Any) -> dict[str, Callable[[], tuple[Any, Any]]]:
    import numpy as np

    return {
        **_slices(source, square),
        "transposed": lambda: (make_as_it_is(source, np.asfortranarray(square)), square),
        "read-only": _read_only(source, square),
    }


def make_as_it_is(source: str, values: Any) -> Any:
    """In the order of its values, including column-major."""
    if source == "pycuda":
        from pycuda import gpuarray

        return gpuarray.to_gpu(values)
    from numba import cuda

    return cuda.to_device(values)


_SPECIAL: dict[str, Callable[[str, Any], dict[str, Callable[[], tuple[Any, Any]]]]] = {
    "torch": _torch, "tensorflow": _tensorflow, "cupy": _cupy, "jax": _jax, "pycuda": _pycuda, "numba": _pycuda,
}  # fmt: skip
