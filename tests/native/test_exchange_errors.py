"""Views that are freed while an exception propagates: the user gets the exception, and the memory is released."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., dict[str, Any]]


def test_an_error_in_an_expression_with_a_view_in_it_is_the_users_own(with_torch: Run) -> None:
    found = with_torch(
        """
        import gc, numpy, weakref
        from memguard import exchange
        from memguard._frameworks.arrays import lifetimes
        class Producer(numpy.ndarray): pass
        producer = numpy.arange(4.0).view(Producer)
        alive = weakref.ref(producer)
        try:
            exchange.to(producer, "torch") + exchange.to(numpy.arange(3.0), "torch")
        except BaseException as error:
            result["error"], result["text"] = type(error).__name__, str(error)
        result["open"] = len(lifetimes._open)
        del producer
        gc.collect()
        result["alive"] = alive() is not None
        """
    )
    assert found["error"] == "RuntimeError" and "size of tensor" in found["text"]
    assert found["open"] == 0 and not found["alive"]


ENDING = """
import numpy, torch
from memguard import exchange
producer = numpy.arange(4.0)
views = [exchange.to(producer, "torch"), exchange.to(torch.arange(4.0), "numpy")]
loop = [views]
loop.append(loop)
class Late:
    view = exchange.to(producer, "torch")
    def __del__(self): self.view + 1
late = Late()
"""


def test_views_that_outlive_the_interpreter_end_in_silence(alone: Run) -> None:
    found = alone(
        f"""
        import subprocess, sys
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", {ENDING!r}], capture_output=True, text=True)
        result["rc"], result["stderr"] = done.returncode, done.stderr
        """
    )
    assert found == {"rc": 0, "stderr": ""}
