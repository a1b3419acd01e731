"""Settings that a program makes after `memguard.init`: the smaller of the two limits holds, and it is said at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]

HELPERS = """
import logging, pathlib, tempfile
heard = []
class Handler(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING: heard.append(record.getMessage())
logging.getLogger("memguard").addHandler(Handler())
folder = pathlib.Path(tempfile.mkdtemp())
def init(**limits):
    return memguard.init({"version": 1, "device": {"limit": "12GiB"},
        "frameworks": {name: {"limit": limit} for name, limit in limits.items()},
        "monitor": {"interval": "1h", "timeline": str(folder / "run.jsonl")}})
def fill(take, error, most=80):
    live = []
    while len(live) < most:
        try:
            live.append(take())
        except error:
            break
    return live
def end(name):
    row = memguard.ledger().devices[0].row(name)
    result["row"] = [row.enforcement, row.cap, row.bytes]
    result["heard"] = heard
    memguard.shutdown()
    (path,) = folder.iterdir()
    notes = [event for event in memguard.load_timeline(path).events() if event.kind == "note"]
    result["events"] = [event.text for event in notes if event.framework == name]
"""
TENSORFLOW = """
guard = init(tensorflow="1GiB")
import tensorflow as tf
"""
FILL_TENSORFLOW = """
live = fill(lambda: tf.ones((16 * MIB,)), tf.errors.ResourceExhaustedError)
result["live"] = len(live)
end("tensorflow")
"""


def said(found: dict[str, Any], words: str) -> None:
    """A warning at the call, and the same in the timeline."""
    (warning,) = (text for text in found["heard"] if words in text)
    assert "cap" in warning and warning in found["events"], found


@pytest.mark.parametrize("kind", ["LogicalDeviceConfiguration", "VirtualDeviceConfiguration"])
def test_a_tutorials_larger_limit_does_not_lift_tensorflows_cap(run: Run, kind: str) -> None:
    setter = {
        "LogicalDeviceConfiguration": "tf.config.set_logical_device_configuration",
        "VirtualDeviceConfiguration": "tf.config.experimental.set_virtual_device_configuration",
    }[kind]
    entry = f"tf.config.{'experimental.' if kind.startswith('Virtual') else ''}{kind}"
    found = run(
        HELPERS
        + TENSORFLOW
        + f"""
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    try:
        {setter}(gpus[0], [{entry}(memory_limit=4096)])
        logical_gpus = tf.config.list_logical_devices("GPU")
        result["gpus"] = [len(gpus), len(logical_gpus)]
    except RuntimeError as error:
        result["error"] = str(error)
"""
        + FILL_TENSORFLOW,
        timeout=180,
    )
    assert "error" not in found and found["gpus"][0] == found["gpus"][1] and 10 <= found["live"] <= 16
    assert found["row"][:2] == ["enforced", 1 << 30]
    said(found, "set_logical_device_configuration (4.00 GiB) asks for more than the cap of 1.00 GiB on GPU:0")


def test_growth_for_every_gpu_as_tutorials_set_it(run: Run) -> None:
    found = run(
        HELPERS
        + TENSORFLOW
        + """
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
"""
        + FILL_TENSORFLOW,
        timeout=180,
    )
    assert 10 <= found["live"] <= 16 and found["row"][0] == "enforced" and found["heard"] == []


@pytest.mark.parametrize(
    "config",
    [
        "None",
        "v1.ConfigProto()",
        "v1.ConfigProto(gpu_options=v1.GPUOptions(per_process_gpu_memory_fraction=0.5))",
        "v1.ConfigProto(gpu_options=v1.GPUOptions(allow_growth=True))",
    ],
)
@pytest.mark.parametrize("eager", [True, False])
def test_a_tf1_session_stays_within_the_cap(run: Run, config: str, eager: bool) -> None:
    found = run(
        HELPERS
        + TENSORFLOW
        + f"""
v1 = tf.compat.v1
if not {eager}: v1.disable_eager_execution()
with tf.Graph().as_default(), v1.Session(config={config}) as session:
    size = v1.placeholder(tf.int32, ())
    total = tf.reduce_sum(tf.random.uniform(tf.reshape(size, (1,))) * 0.0 + 1.0)
    result["small"] = float(session.run(total, {{size: 32 * MIB}}))
    try:
        session.run(total, {{size: 600 * MIB}})
        result["large"] = "served"
    except tf.errors.ResourceExhaustedError:
        result["large"] = "refused"
    result["own"] = memguard.ledger().devices[0].process
result["heard"] = heard
""",
        timeout=240,
    )
    assert found["small"] == 32 << 20 and found["large"] == "refused"
    assert found["own"] is None or found["own"] < 3 << 30, "the pool, the context and workspaces"
    assert len(found["heard"]) == ("fraction" in config)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    "setter",
    [
        "torch.cuda.set_per_process_memory_fraction(1.0)",
        "torch.cuda.memory.set_per_process_memory_fraction(0.9, 0)",
        "torch.cuda.memory._set_allocator_settings('per_process_memory_fraction:0.9')",
    ],
)
def test_a_larger_fraction_does_not_lift_torchs_cap(run: Run, setter: str, live: bool) -> None:
    found = run(
        HELPERS
        + f"""
import warnings
warnings.simplefilter("ignore", FutureWarning)
import torch
if {live}: torch.zeros(1, device="cuda")
guard = init(torch="1GiB")
{setter}
live = fill(lambda: torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError)
result["live"] = len(live)
end("torch")
result["after"] = torch._C._cuda_getMemoryFraction(0)
"""
    )
    assert found["live"] in (15, 16) and found["row"][:2] == ["enforced", 1 << 30] and found["row"][2] <= 1 << 30
    if "settings" not in setter:  # which torch may read only when it starts, or not at all
        said(found, "more than its cap")
    assert found["after"] in (1.0, 0.9), "the undo gives what was asked for"


def test_a_lower_fraction_is_accepted_in_silence(run: Run) -> None:
    found = run(
        HELPERS
        + """
import torch
guard = init(torch="4GiB")
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(GIB / total)
live = fill(lambda: torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError)
result["live"] = len(live)
end("torch")
"""
    )
    assert found["live"] in (15, 16) and found["heard"] == [] and found["row"][0] == "enforced"


def test_an_allocator_that_cannot_be_limited_is_an_error_at_the_call(run: Run) -> None:
    found = run(
        HELPERS
        + """
import torch
class Theirs:
    def allocator(self): raise AssertionError("torch is not asked")
guard = init(torch="1GiB")
real = torch._C._cuda_changeCurrentAllocator.__wrapped__
try:
    torch.cuda.memory.change_current_allocator(type("A", (), {"allocator": lambda self: None})())
except memguard.ConflictingSetting as error:
    result["error"] = str(error)
live = fill(lambda: torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError)
result["live"] = len(live)
end("torch")
"""
    )
    assert "change_current_allocator" in found["error"] and found["live"] == 16 and found["row"][0] == "enforced"


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("size", ["size=0", "size=8 * GIB", "fraction=0.9", "size=1 * GIB + 1"])
def test_a_larger_limit_does_not_lift_cupys_cap(run: Run, size: str, live: bool) -> None:
    found = run(
        HELPERS
        + f"""
import cupy
guard = init(cupy="1GiB")
if {live}: x = cupy.zeros(1)
pool = cupy.get_default_memory_pool()
pool.set_limit({size})
live = fill(lambda: cupy.empty(64 * MIB, cupy.uint8), cupy.cuda.memory.OutOfMemoryError)
result["live"], result["limit"] = len(live), pool.get_limit()
end("cupy")
result["after"] = pool.get_limit()
"""
    )
    assert found["live"] in (15, 16) and found["limit"] == 1 << 30 and found["row"][:2] == ["enforced", 1 << 30]
    assert found["after"] != 1 << 30
    if size != "size=0" or live:
        said(found, "limit")


def test_another_pool_shares_cupys_cap(run: Run) -> None:
    found = run(
        HELPERS
        + """
import cupy
guard = init(cupy="1GiB")
take = lambda: cupy.empty(64 * MIB, cupy.uint8)
first = [take() for _ in range(6)]
own = cupy.cuda.MemoryPool()
cupy.cuda.set_allocator(own.malloc)
second = fill(take, cupy.cuda.memory.OutOfMemoryError)
result["counts"] = [len(second), own.used_bytes() // MIB]
first.clear()
second += fill(take, cupy.cuda.memory.OutOfMemoryError)
result["counts"].append(len(second))
result["allocator"] = cupy.cuda.get_allocator() is guard.frameworks["cupy"]._allocate
end("cupy")
result["mine"] = cupy.cuda.get_allocator().__self__ is own
"""
    )
    assert found["counts"] == [10, 640, 16] and found["allocator"] and found["mine"]
    assert found["row"] == ["enforced", 1 << 30, 1 << 30] and found["heard"] == []


@pytest.mark.parametrize(
    "change",
    ["cupy.cuda.set_allocator(None)", "cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)"],
)
def test_an_allocator_of_cupys_that_cannot_be_held_is_told_at_the_call(run: Run, change: str) -> None:
    found = run(
        HELPERS
        + f"""
import cupy
guard = init(cupy="1GiB")
x = cupy.zeros(1)
{change}
result["at once"] = list(heard)
end("cupy")
"""
    )
    (text,) = found["at once"]
    assert "its allocator was replaced after memguard.init" in text and found["row"][0] == "watched"
    assert any("its cap no longer holds" in event for event in found["events"])


@pytest.mark.parametrize(
    "change",
    [
        "jax.config.update('jax_pjrt_client_create_options', {'memory_fraction': 0.9})",
        "jax.config.update('jax_pjrt_client_create_options', {'allocator': 'cuda_async'})",
        "os.environ.update(XLA_PYTHON_CLIENT_ALLOCATOR='platform', XLA_CLIENT_MEM_FRACTION='0.9')",
        "jax.config.update('jax_pjrt_client_create_options', None)",
    ],
)
def test_later_options_do_not_lift_jaxs_cap(run: Run, change: str) -> None:
    found = run(
        HELPERS
        + f"""
guard = init(jax="1GiB")
import jax, jax.numpy as jnp
{change}
live = fill(lambda: jnp.ones((64 * MIB,), jnp.uint8).block_until_ready(), jax.errors.JaxRuntimeError)
result["live"], result["limit"] = len(live), jax.devices()[0].memory_stats()["bytes_limit"]
end("jax")
""",
        timeout=180,
    )
    assert 10 <= found["live"] <= 16 and found["limit"] <= 1 << 30 and found["row"][0] == "enforced"
    if "{" in change:
        said(found, "past its cap of 1.00 GiB")


@pytest.mark.parametrize("first", ["gpuarray", "tools", "cumath", "elementwise", "autoinit"])
def test_pycudas_first_example_in_its_own_order(run: Run, first: str) -> None:
    found = run(
        HELPERS
        + f"""
guard = init(pycuda="1GiB")
import pycuda.{first}
import pycuda.autoinit
import numpy, pycuda.driver as drv, pycuda.gpuarray as gpuarray, pycuda.tools as tools
a = gpuarray.to_gpu(numpy.arange(1000, dtype=numpy.float32))
result["sum"] = float(a.get().sum())
pool = tools.DeviceMemoryPool()
live = fill(lambda: gpuarray.empty(60 * MIB, numpy.uint8, allocator=pool.allocate), drv.MemoryError)
result["with pool"] = len(live)
live.clear()
pool.free_held()
live = fill(lambda: gpuarray.empty(60 * MIB, numpy.uint8), drv.MemoryError)
result["live"] = len(live)
end("pycuda")
live.clear()
"""
    )
    assert found["sum"] == 499500.0 and found["row"][:2] == ["enforced", 1 << 30] and found["row"][2] <= 1 << 30
    assert 14 <= found["with pool"] <= 17 and 14 <= found["live"] <= 17


def test_a_pool_of_pycudas_made_before_shares_the_cap(run: Run) -> None:
    found = run(
        HELPERS
        + """
import pycuda.autoprimaryctx
import numpy, pycuda.driver as drv, pycuda.tools as tools
pool = tools.DeviceMemoryPool()
guard = init(pycuda="1GiB")
live = fill(lambda: pool.allocate(60 * MIB), drv.MemoryError)
result["live"] = len(live)
end("pycuda")
live.clear()
pool.free_held()
"""
    )
    assert 14 <= found["live"] <= 17 and found["row"][2] <= 1 << 30


@pytest.mark.parametrize("device", ["driver.binding.CUdevice(0)", "driver.driver.get_device(0)"])
def test_numba_in_a_primary_context_that_somebody_else_made(run: Run, device: str) -> None:
    """As numba-cuda's Test3rdPartyContext makes it."""
    found = run(
        HELPERS
        + f"""
guard = init(numba="1GiB")
from numba import cuda
from numba.cuda.cudadrv import driver
the_driver = driver.driver
handle = the_driver.cuDevicePrimaryCtxRetain(driver.binding.CUdevice(0))
context = driver.Context({device}, handle)
context.push()
mine = cuda.current_context()
result["same"] = int(mine.handle) == int(context.handle)
theirs = [context.memalloc(64 * MIB) for _ in range(6)]
live = fill(lambda: cuda.device_array(64 * MIB, "u1"), driver.CudaAPIError)
result["live"] = len(live)
more = fill(lambda: context.memalloc(64 * MIB), driver.CudaAPIError)
result["more"] = len(more)
row = memguard.ledger().devices[0].row("numba")
result["row"] = [row.enforcement, row.bytes]
live.clear(); theirs.clear()
context.pop()
the_driver.cuDevicePrimaryCtxRelease(driver.binding.CUdevice(0))
memguard.shutdown()
"""
    )
    assert found["same"] and found["live"] == 10 and found["more"] == 0 and found["row"] == ["enforced", 1 << 30]


def test_numbas_own_manager_set_again_stays_capped(run: Run) -> None:
    found = run(
        HELPERS
        + """
guard = init(numba="1GiB")
from numba import cuda
from numba.cuda.cudadrv import driver
cuda.set_memory_manager(driver.NumbaCUDAMemoryManager)
live = fill(lambda: cuda.device_array(64 * MIB, "u1"), driver.CudaAPIError)
result["live"] = len(live)
end("numba")
"""
    )
    assert found["live"] == 16 and found["row"][0] == "enforced" and found["heard"] == []


def test_a_tutorial_with_tensorflow_and_pycuda_and_one_line_more(run: Run) -> None:
    """Limits of its own for TensorFlow, PyCUDA imported at the top, a second context, and arrays of both."""
    found = run(
        HELPERS
        + """
guard = init(tensorflow="512MiB", pycuda="256MiB")
import tensorflow as tf
import pycuda.driver as cuda
import pycuda.autoinit
import numpy as np
gpus = tf.config.list_physical_devices('GPU')
if gpus:
  try:
    tf.config.set_logical_device_configuration(
        gpus[0],
        [tf.config.LogicalDeviceConfiguration(memory_limit=1024)]) # Limit memory for demo
  except RuntimeError as e:
    print(e)
a = tf.constant(np.random.rand(100,100).astype(np.float32))
b = tf.matmul(a, a)
dev = cuda.Device(0)
ctx = dev.make_context()
gpu_data = cuda.mem_alloc(1024 * 1024)
x_np = np.array([7.0], dtype=np.float32)
x_gpu = cuda.mem_alloc(x_np.nbytes)
cuda.memcpy_htod(x_gpu, x_np)
back = np.zeros_like(x_np)
cuda.memcpy_dtoh(back, x_gpu)
result["back"] = float(back[0])
live = fill(lambda: tf.ones((4 * MIB,)), tf.errors.ResourceExhaustedError)
result["live"] = len(live)
ctx.pop()
end("tensorflow")
""",
        timeout=180,
    )
    assert found["back"] == 7.0 and 16 <= found["live"] <= 32 and found["row"][:2] == ["enforced", 512 << 20]
    said(found, "(1.00 GiB) asks for more than the cap of 512.0 MiB")
