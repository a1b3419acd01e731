"""All six frameworks live in one process without a GPU: the real adapters over stand-ins and the stubs of the driver.

JAX, CuPy, PyCUDA and Numba are the models of tests/contract. Of torch and TensorFlow there is here what a reading and
`memguard.init` ask. `asked` counts what the stand-ins were asked for. The libraries come from `LD_LIBRARY_PATH`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

CONTRACT = Path(__file__).resolve().parents[1] / "contract"
FOLDERS = (".", "fake_pycuda", "fake_numba", "fake_cupy", "fake_jax/model", "fake_jax/plugin")
NAMES = ("tensorflow", "torch", "jax", "cupy", "pycuda", "numba")
GIB, MIB = 1 << 30, 1 << 20
PRIMARY = 0x7F0000001000
"""The stub's primary context of GPU 0."""
asked: Counter[str] = Counter()
"""How often each counter of a framework was asked for."""
in_use = {"torch": GIB, "tensorflow": GIB}
"""The bytes that live arrays of torch and TensorFlow occupy."""
RESERVED = 8 * GIB
"""What torch holds all the time, as a program has it that has run for a while."""


def scenario(uuid: str) -> dict[str, object]:
    """An H200 for the stub of NVML, on which this process has 26 GiB and another one 1 GiB. See `this_process`."""
    return {
        "count": 1, "uuid0": uuid, "name0": "NVIDIA H200", "arch0": 9, "total0": 143_771 * MIB, "reserved0": 615 * MIB,
        "used0": 27 * GIB, "processes0": f"PID:{26 * GIB},4711:{GIB}",
    }  # fmt: skip


def budget(*names: str) -> dict[str, Any]:
    """A share for each of the frameworks, of all six if none is named."""
    frameworks: dict[str, dict[str, Any]] = {name: {"share": "15%"} for name in names or NAMES}
    if "tensorflow" in frameworks:
        frameworks["tensorflow"]["growth"] = False
    return {"version": 1, "device": {"limit": "60GiB"}, "frameworks": frameworks}


def bring(uuid: str, *names: str) -> list[Callable[[], Any]]:
    """Put the stand-ins in place, as imported frameworks. Each answer makes one live: call them after `init`."""
    sys.path[:0] = [str(CONTRACT / folder) for folder in FOLDERS]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "NumbaCudaFinder"]
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuInit(0) == 0 and cuda.cuCtxPushCurrent_v2(ctypes.c_void_p(PRIMARY)) == 0
    return [MAKE[name](uuid) for name in names or NAMES]


def allocators() -> dict[str, Callable[[int], Any]]:
    """How each takes n bytes; what is returned gives them back when it dies."""

    class Block:
        def __init__(self, name: str, size: int) -> None:
            self.name, self.size = name, size
            in_use[name] += size

        def __del__(self) -> None:
            in_use[self.name] -= self.size

    modules = sys.modules
    return {
        "tensorflow": lambda size: Block("tensorflow", size),
        "torch": lambda size: Block("torch", size),
        "jax": modules["jax"].numpy.empty,
        "cupy": modules["cupy"].cuda.alloc,
        "pycuda": modules["pycuda.driver"].mem_alloc,
        "numba": modules["numba.cuda"].device_array,
    }


def _module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(content, __spec__=ModuleSpec(name, None))
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


def _counted(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        asked[name] += 1
        return answer(*arguments)

    return call


def _torch(uuid: str) -> Callable[[], Any]:
    fractions: dict[int, float] = {}

    def figure(size: int) -> dict[str, dict[str, int]]:
        return {"all": {"current": size, "peak": size, "allocated": size, "freed": 0}}

    def stats(ordinal: int) -> dict[str, Any]:
        size = in_use["torch"]
        return {
            "reserved_bytes": figure(RESERVED), "allocated_bytes": figure(size), "active_bytes": figure(size),
            "inactive_split_bytes": figure(0),
        }  # fmt: skip

    about = types.SimpleNamespace(total_memory=143_156 * MIB, uuid=uuid[4:], multi_processor_count=132)
    module = _module("torch", __version__="2.11.0")
    _module("torch.version", hip=None, cuda="13.0")
    _module(
        "torch._C", _cuda_memoryStats=_counted("torch statistics", stats),
        _cuda_setMemoryFraction=lambda fraction, ordinal: fractions.update({ordinal: fraction}),
        _cuda_getMemoryFraction=lambda ordinal: fractions.get(ordinal, 1.0),
        _cuda_getAllocatorBackend=lambda: "native", _cuda_attach_out_of_memory_observer=lambda told: None,
    )  # fmt: skip
    _module(
        "torch.cuda", is_initialized=lambda: True, device_count=lambda: 1, get_device_properties=lambda _: about,
        get_allocator_backend=module._C._cuda_getAllocatorBackend, empty_cache=lambda: None,
        is_current_stream_capturing=lambda: False,
    )  # fmt: skip
    _module("torch.cuda.memory", _snapshot=lambda: {"allocator_settings": {"expandable_segments": False}})
    return lambda: None


def _tensorflow(uuid: str) -> Callable[[], Any]:
    class LogicalDeviceConfiguration:
        def __init__(self, memory_limit: int) -> None:
            self.memory_limit = memory_limit

    class Context:
        _context_handle: object = None

        def __init__(self) -> None:
            self._virtual_device_map: dict[Any, Any] = {}

        def set_logical_device_configuration(self, device: Any, wanted: Any) -> None:
            self._virtual_device_map[device] = wanted

    context = Context()

    def now() -> Context:
        found: Context = sys.modules["tensorflow.python.eager.context"].context_safe()
        return found

    gpu = type("PhysicalDevice", (), {"name": "/physical_device:GPU:0", "device_type": "GPU"})()
    module = _module("tensorflow", __version__="2.21.0")
    _module("tensorflow.python")
    _module("tensorflow.python.eager")
    _module(
        "tensorflow.python.eager.context", Context=Context, context_safe=lambda: context,
        LogicalDeviceConfiguration=LogicalDeviceConfiguration,
    )  # fmt: skip
    info = _counted("tensorflow memory", lambda device: dict.fromkeys(("current", "peak"), in_use["tensorflow"]))
    _module(
        "tensorflow.config", list_physical_devices=_counted("tensorflow devices", lambda kind: [gpu]),
        get_visible_devices=lambda kind: [gpu], LogicalDeviceConfiguration=LogicalDeviceConfiguration,
        get_logical_device_configuration=lambda device: now()._virtual_device_map.get(device),
        set_logical_device_configuration=lambda device, wanted: now().set_logical_device_configuration(device, wanted),
        experimental=types.SimpleNamespace(get_memory_info=info),
    )  # fmt: skip
    module.test = types.SimpleNamespace(is_built_with_cuda=lambda: True)  # type: ignore[attr-defined]

    def start() -> None:
        context._context_handle = object()

    return start


def _jax(uuid: str) -> Callable[[], Any]:
    import jax
    from jax._src import xla_bridge

    xla_bridge._Device.memory_stats = _counted("jax statistics", xla_bridge._Device.memory_stats)
    return lambda: jax.numpy.empty(GIB)


def _cupy(uuid: str) -> Callable[[], Any]:
    import cupy

    for name in ("total_bytes", "used_bytes", "get_limit"):
        original = getattr(cupy.cuda.memory.MemoryPool, name)
        counted = _counted(f"cupy {name}", original)
        setattr(cupy.cuda.memory.MemoryPool, name, lambda pool, counted=counted: counted(pool))
    return lambda: cupy.cuda.alloc(64 * MIB)


def _pycuda(uuid: str) -> Callable[[], Any]:
    from pycuda import driver

    driver.init()
    shared = driver.Context(0, primary=True, handle=PRIMARY)  # the handle that the driver's stub knows
    driver._primary[0] = {threading.get_ident(): shared}

    def start() -> Any:
        driver.Device(0).make_context()
        return driver.mem_alloc(64 * MIB)

    return start


def _numba(uuid: str) -> Callable[[], Any]:
    import numba.cuda

    sys.modules["numba.cuda.cudadrv.driver"].Device.uuids = (uuid,)
    return lambda: numba.cuda.device_array(64 * MIB)


MAKE: dict[str, Callable[[str], Callable[[], Any]]] = {
    "tensorflow": _tensorflow,
    "torch": _torch,
    "jax": _jax,
    "cupy": _cupy,
    "pycuda": _pycuda,
    "numba": _numba,
}


def driver_calls() -> Counter[str]:
    """The calls of the stub of libcuda since the last time; 64 are remembered."""
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.stub_asked.restype = ctypes.c_char_p
    found: Counter[str] = Counter()
    for number in range(64):
        name = cuda.stub_asked(number)
        if name is None:
            break
        found[name.decode()] += 1
    cuda.stub_forget()
    return found


def nvml_calls() -> tuple[int, int]:
    """How often the stub of NVML was asked for a GPU's memory, and for its processes."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    return nvml.stub_nvml_calls(0), nvml.stub_nvml_calls(1)


def this_process() -> None:
    """Write this process into the scenario, which the stub reads at its first call."""
    path = Path(os.environ["NVML_STUB"])
    lines = dict(line.split("=", 1) for line in path.read_text().splitlines())
    lines["processes0"] = str(lines["processes0"]).replace("PID", str(os.getpid()))
    path.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
