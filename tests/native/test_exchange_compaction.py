"""Arrays of unknown libraries that have gaps or negative strides: an imported framework makes the compact copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., dict[str, Any]]

SETUP = """
import numpy
from memguard import exchange
from memguard.errors import CannotShare
from memguard._frameworks.arrays import lifetimes

class Unknown:
    def __init__(self, array): self._array = array
    def __dlpack__(self, **asked): return self._array.__dlpack__(**asked)
    def __dlpack_device__(self): return self._array.__dlpack_device__()

base = numpy.arange(48, dtype="float32").reshape(6, 8)
odd = {"reversed": base[::-1], "both": base[::-1, ::-2], "stepped": base[::2], "transposed": base.T, "plain": base}
"""


def test_pytorch_compacts_arrays_of_unknown_libraries(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
for name, array in odd.items():
    copied = exchange.to(Unknown(array), "numpy", copy=True)
    result[name] = bool((copied == array).all()), not numpy.shares_memory(copied, base), copied.flags.c_contiguous
    tensor = exchange.to(Unknown(array), "torch", copy=True)
    result[name] += (bool((tensor.numpy() == array).all()), tensor.is_contiguous())
result["open"] = len(lifetimes._open)
"""
    )
    assert found.pop("open") == 0
    assert found == dict.fromkeys(("reversed", "both", "stepped", "transposed", "plain"), [True] * 5)


def test_without_such_a_framework_the_refusal_names_the_remedy(alone: Run) -> None:
    found = alone(
        SETUP
        + """
try:
    from memguard.exchange import transfer
    from memguard.exchange.adapters import registry
    producer = registry.of(Unknown(base[::-1]))
    transfer.compacted(Unknown(base[::-1]), producer, producer.offer(Unknown(base[::-1])))
except CannotShare as error:
    result["reason"], result["remedy"] = error.reason, error.remedy
"""
    )
    assert "no framework is imported that could copy it" in found["reason"]
    assert found["remedy"] == "make it contiguous first, or import torch or cupy"
