"""memguard's TensorFlow against the real one. A CPU machine has no GPU: where one is needed, TensorFlow's own list of
physical devices gets one more entry, and every call on it is TensorFlow's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., dict[str, Any]]

WITH_A_GPU = """
import tensorflow as tf
from tensorflow.python.eager import context
from memguard.frameworks.tensorflow import TensorFlow
tf.config.list_physical_devices()
inner = context.context()
gpu = context.PhysicalDevice(name="/physical_device:GPU:0", device_type="GPU")
inner._physical_devices.append(gpu)
framework = TensorFlow(host)
"""


def test_looking_does_not_make_it_live_and_an_operation_does(run: Run) -> None:
    found = run(
        """
from memguard.frameworks.tensorflow import TensorFlow
framework = TensorFlow(host)
states = [framework.state().value, "tensorflow" in sys.modules]
import tensorflow as tf
states.append(framework.state().value)
framework.usage(device); tf.config.list_physical_devices()
states.append(framework.state().value)
tf.zeros((2,))
states.append(framework.state().value)
result["states"] = states
"""
    )
    assert found["states"] == ["importable", False, "imported", "imported", "live"]


def test_without_a_gpu_its_share_stays_free_and_it_says_why(run: Run) -> None:
    found = run(
        """
import tensorflow as tf
from memguard.frameworks.tensorflow import TensorFlow
before = dict(os.environ)
applied = TensorFlow(host).apply({device.uuid: 4 * GIB}, {"growth": True})
result.update(enforcement=applied.enforcement.value, notes=applied.notes, same=dict(os.environ) == before)
"""
    )
    assert found["enforcement"] == "absent" and "sees no GPU" in found["notes"][0] and found["same"]


def test_the_limit_is_set_in_mib_read_back_and_undone(run: Run) -> None:
    found = run(
        WITH_A_GPU
        + """
applied = framework.apply({device.uuid: 4 * GIB}, {"growth": True})
result["limit"] = tf.config.get_logical_device_configuration(gpu)[0].memory_limit
result["growth"] = os.environ["TF_FORCE_GPU_ALLOW_GROWTH"]
applied.undo()
result["after"] = tf.config.get_logical_device_configuration(gpu)
result["environment"] = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
result["state"] = framework.state().value
again = framework.apply({device.uuid: 2 * GIB}, {"growth": False})
result["again"] = tf.config.get_logical_device_configuration(gpu)[0].memory_limit
result["no_growth"] = os.environ["TF_FORCE_GPU_ALLOW_GROWTH"]
"""
    )
    assert found["limit"] == 4096 and found["growth"] == "true"
    assert not found["after"] and found["environment"] is None and found["state"] == "imported"
    assert found["again"] == 2048 and found["no_growth"] == "false"


def test_growth_set_by_the_user_comes_back(run: Run) -> None:
    found = run(
        WITH_A_GPU
        + """
framework.apply({device.uuid: 4 * GIB}, {"growth": True}).undo()
result["environment"] = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
""",
        env={"TF_FORCE_GPU_ALLOW_GROWTH": "false"},
    )
    assert found["environment"] == "false"


def test_a_stricter_limit_of_the_users_own_stays_and_a_looser_one_is_refused(run: Run) -> None:
    for own, limit in ((1024, 1024), (8192, None)):
        found = run(
            WITH_A_GPU
            + f"""
tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit={own})])
before = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
try:
    framework.apply({{device.uuid: 4 * GIB}}, {{"growth": True}})
    result["limit"] = tf.config.get_logical_device_configuration(gpu)[0].memory_limit
except CapNotApplied as error:
    result["limit"], result["text"] = None, str(error)
    result["restored"] = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == before
"""
        )
        assert found["limit"] == limit
        if limit is None:
            assert "looser than the cap" in found["text"] and found["restored"]


def test_live_or_async_is_refused_with_the_remedy(run: Run) -> None:
    live = run(
        WITH_A_GPU
        + """
inner._context_handle = object()          # as after the first operation; an operation would need the GPU
try:
    framework.apply({device.uuid: 4 * GIB}, {})
except CapNotApplied as error:
    result["text"] = str(error)
inner._context_handle = None
"""
    )
    assert "live before memguard.init()" in live["text"] and "fix:" in live["text"]
    with_async = run(
        WITH_A_GPU
        + """
try:
    framework.apply({device.uuid: 4 * GIB}, {})
except CapNotApplied as error:
    result["text"] = str(error)
""",
        env={"TF_GPU_ALLOCATOR": "cuda_malloc_async"},
    )
    assert "ignores memory_limit" in with_async["text"] and "unset TF_GPU_ALLOCATOR" in with_async["text"]


def test_a_gpu_that_is_not_in_the_budget_is_refused(run: Run) -> None:
    found = run(
        WITH_A_GPU
        + """
inner._physical_devices.append(context.PhysicalDevice(name="/physical_device:GPU:1", device_type="GPU"))
try:
    framework.apply({device.uuid: 4 * GIB}, {})
except CapNotApplied as error:
    result["text"] = str(error)
result["left"] = tf.config.get_logical_device_configuration(gpu)
result["environment"] = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
"""
    )
    assert "GPU:1 cannot be matched" in found["text"]
    assert not found["left"] and found["environment"] is None


def test_the_import_hook_carries_the_real_import(run: Run) -> None:
    found = run(
        """
from memguard.frameworks.late import ImportHook
hook, seen = ImportHook(), []
hook.watch("tensorflow", lambda: seen.append(hasattr(sys.modules["tensorflow"], "config")))
import tensorflow as tf
result.update(seen=seen, left=hook in sys.meta_path, sum=float(tf.reduce_sum(tf.ones((3,)))))
"""
    )
    assert found["seen"] == [True] and not found["left"] and found["sum"] == 3.0
