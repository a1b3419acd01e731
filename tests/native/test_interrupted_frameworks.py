"""Ctrl-C at each point of `apply` and of its undo, with the real torch, TensorFlow and JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
CODE = "from support.interrupted import interrupt_at_each_point\nhost = Host('h200', 'h200')\n"


@pytest.mark.parametrize("live", [False, True])
def test_torch(with_torch: Run, live: bool) -> None:
    found = with_torch(
        f"""
{CODE}
import torch
from memguard._frameworks.torch.adapter import Torch
found = card(host)
if {live}: torch.cuda.init()
names = ["_cuda_setMemoryFraction", "_cuda_changeCurrentAllocator", "_cuda_cudaCachingAllocator_enable"]
def state():
    fractions = [found.fractions.get(n, 1.0) for n in (0, 1)]
    return fractions, [getattr(torch._C, name, None) for name in names], len(torch.cuda._queued_calls)
result["points"] = interrupt_at_each_point(lambda: Torch(host), state)
"""
    )
    assert found["points"] > 20


def test_tensorflow(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        f"""
{CODE}
import tensorflow as tf
from memguard._frameworks.tensorflow.adapter import TensorFlow
from tensorflow.python.eager import context
cards = gpus(2)
def state():
    limits = [tf.config.get_logical_device_configuration(gpu) for gpu in cards]
    return str(limits), os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH"), context.Context.set_memory_growth
result["points"] = interrupt_at_each_point(lambda: TensorFlow(host), state)
"""
    )
    assert found["points"] > 20


def test_jax(with_jax: Run) -> None:
    found = with_jax(
        f"""
{CODE}
import jax
sys.path.append(PLUGIN)
from memguard._frameworks.jax.adapter import JAX
def state(): return jax.config.jax_pjrt_client_create_options, type(jax.config).update
result["points"] = interrupt_at_each_point(lambda: JAX(host), state)
"""
    )
    assert found["points"] > 20
