"""The real JAX and TensorFlow, without a GPU, under `strategy: pool`: how their async allocators are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., dict[str, Any]]

JAX = """
sys.path.append(PLUGIN)
import jax
from memguard._frameworks.jax import adapter as module
from memguard._frameworks.jax.pooled import PooledJAX
from memguard._frameworks.shared_pool import SharedPool
host = Host()
uuid, gpu = host.uuids[0], host.gpus[0]
joint = SharedPool({uuid: 4 * GIB}, print, clients=["jax"])
framework = PooledJAX(host, joint)
def options(): return dict(jax.config.jax_pjrt_client_create_options or {})
"""
TENSORFLOW = """
import tensorflow as tf
from memguard._frameworks.tensorflow import adapter as module
from memguard._frameworks.shared_pool import SharedPool
from memguard._frameworks.tensorflow.pooled import PooledTensorFlow
host = Host()
uuid = host.uuids[0]
joint = SharedPool({uuid: 4 * GIB}, print, clients=["jax"])
framework = PooledTensorFlow(host, joint)
NAME = "TF_GPU_ALLOCATOR"
"""


def test_jax_is_asked_for_its_async_allocator_without_preallocation(with_jax: Run) -> None:
    found = with_jax(
        JAX
        + """
applied = apply_caps(framework, {uuid: 4 * GIB})
result["enforcement"], result["notes"] = applied.enforcement.value, list(applied.notes)
result["options"] = options()
result["nothing"] = [framework.usage(gpu), joint._counted(uuid)]
jax.config.update("jax_pjrt_client_create_options", {"allocator": "bfc"})
result["later"], result["warned"] = options()["allocator"], framework.notes
applied.undo(); applied.undo()
result["undone"], result["forgotten"] = options(), joint._counts == {}
"""
    )
    assert found["enforcement"] == "watched" and "watched, not capped" in found["notes"][-1]
    assert found["options"]["allocator"] == "cuda_async" and found["options"]["preallocate"] is False
    assert found["nothing"] == [None, {"jax": 0}]
    assert found["later"] == "cuda_async" and "allocator=bfc" in found["warned"][0]
    assert found["undone"] == {"allocator": "bfc"} and found["forgotten"]


def test_what_jax_says_it_uses_is_counted_and_a_silent_one_is_unknown(with_jax: Run) -> None:
    found = with_jax(
        JAX
        + """
applied = apply_caps(framework, {uuid: 4 * GIB})
(local,) = backend(0)
local.memory_stats = lambda: {"bytes_in_use": 5 * MIB}
result["usage"], result["counted"] = framework.usage(gpu)[:3], joint._counted(uuid)
local.memory_stats = lambda: None
result["silent"], result["none"] = framework.usage(gpu)[:3], joint._counted(uuid)
result["stays"] = raised(applied.undo)
result["standing"] = dict(module.permanent_caps)
"""
    )
    mib = 1 << 20
    assert found["usage"] == [5 * mib, 5 * mib, 0] and found["counted"] == {"jax": 5 * mib}
    assert found["silent"] == [None, None, None] and found["none"] == {"jax": 0}
    assert "stays on the default pool" in found["stays"] and found["standing"] == {}


def test_a_jax_that_is_live_or_has_another_allocator_is_refused(with_jax: Run) -> None:
    found = with_jax(
        JAX
        + """
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
result["setting"] = setting(lambda: apply_caps(framework, {uuid: 4 * GIB}))
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "cuda_async"
apply_caps(framework, {uuid: 4 * GIB}).undo()
backend(4 * GIB)
result["live"] = raised(lambda: apply_caps(framework, {uuid: 4 * GIB}))
"""
    )
    assert found["setting"] == "XLA_PYTHON_CLIENT_ALLOCATOR=platform"
    assert "its backend has started" in found["live"] and "strategy: caps" in found["live"]


def test_tensorflow_is_asked_by_its_variable_which_is_taken_back(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        TENSORFLOW
        + """
gpus()
applied = apply_caps(framework, {uuid: 4 * GIB})
result["enforcement"], result["notes"] = applied.enforcement.value, list(applied.notes)
result["asked"] = os.environ.get(NAME)
os.environ[NAME] = "cuda_malloc"
framework._limited_allocator()
result["later"], result["warned"] = os.environ.get(NAME), framework.notes
applied.undo()
result["undone"], result["forgotten"] = os.environ.get(NAME), joint._counts == {}
"""
    )
    assert found["enforcement"] == "watched" and "watched, not capped" in found["notes"][-1]
    assert found["asked"] == found["later"] == "cuda_malloc_async" and "cuda_malloc was set after" in found["warned"][0]
    assert found["undone"] is None and found["forgotten"]


def test_another_allocator_of_tensorflows_is_refused_and_without_a_gpu_nothing_is_set(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        TENSORFLOW
        + """
os.environ[NAME] = "cuda_malloc"
result["setting"] = setting(lambda: apply_caps(framework, {uuid: 4 * GIB}))
result["stays"] = os.environ.pop(NAME)
applied = apply_caps(framework, {uuid: 4 * GIB})
result["absent"], result["variable"] = applied.enforcement.value, os.environ.get(NAME)
"""
    )
    assert found["setting"] == "TF_GPU_ALLOCATOR=cuda_malloc" and found["stays"] == "cuda_malloc"
    assert found["absent"] == "absent" and found["variable"] is None
