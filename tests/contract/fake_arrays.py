"""The six frameworks' arrays in plain Python over `gpu_clocks`: on which streams their work is, what they wait for
themselves as producer and as consumer, and when they release memory (measured on an H200). Nothing else of them.

`World.modules` is to be put into `sys.modules`. Of every array `work()` is a kernel that writes it and `look()` one
that reads it, on its framework's stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import threading
import types
from typing import Any

from capsules import Consumed, produced
from gpu_clocks import Driver

NAMES = ("torch", "tensorflow", "cupy", "jax", "pycuda", "numba")
DTYPES = {
    "float32": (2, 32, "<f4"), "int64": (0, 64, "<i8"), "uint8": (1, 8, "|u1"), "bool": (6, 8, "|b1"),
    "bfloat16": (4, 16, None),
}  # fmt: skip


def row_major(shape: Any) -> tuple[int, ...]:
    return tuple(math.prod(max(n, 1) for n in shape[axis + 1 :]) for axis in range(len(shape)))


class DType:
    """As NumPy's."""

    isnative = True

    def __init__(self, name: Any) -> None:
        self.name = str(name)
        self.itemsize = DTYPES[self.name][1] // 8

    def __str__(self) -> str:
        return self.name


class Memory:
    """Of one framework. It goes back with the last array over it, to be used next on `stream`; None: on any, at once.

    `thread`: the only one on which it may (PyCUDA's).
    """

    def __init__(self, name: str, address: int, stream: int | None, thread: int | None) -> None:
        self.driver, self.address, self.stream, self.thread, self.name = now.driver, address, stream, thread, name

    def __del__(self) -> None:
        if self.thread not in (None, threading.get_ident()):
            self.driver.wrong.append("freed on another thread")
        if self.name in now.recycled:
            now.recycled[self.name].append(self.address)
        else:
            self.driver.free(self.address, self.stream)


class DeviceAllocation:
    """What PyCUDA's arrays have that come from no pool."""


class Array:
    """What all have in common."""

    of = ""

    def __init__(self, memory: Any, address: int, shape: Any, strides: Any, dtype: str, gpu: int) -> None:
        self.memory, self.address, self.dims, self.steps = memory, address, tuple(shape), tuple(strides)
        self.kind, self.gpu = dtype, gpu

    def work(self) -> int:
        return now.driver.write(now.own[self.of], self.address)

    def look(self) -> int:
        return now.driver.read(now.own[self.of], self.address)

    shape = property(lambda self: self.dims)
    size = property(lambda self: math.prod(self.dims))
    ptr = property(lambda self: self.address)
    nbytes = property(lambda self: self.size * DType(self.kind).itemsize)

    @property
    def byte_steps(self) -> tuple[int, ...]:
        return tuple(step * DType(self.kind).itemsize for step in self.steps)

    def interface(self, stream: int | None) -> dict[str, Any]:
        return {
            "shape": self.dims, "typestr": DTYPES[self.kind][2], "data": (self.address, False), "version": 3,
            "strides": self.byte_steps, "stream": stream,
        }  # fmt: skip

    def capsule(self) -> Any:
        """It keeps the array until somebody's deleter has run."""
        keep: list[Any] = [self]
        code, bits, _ = DTYPES[self.kind]
        return produced(
            self.address, self.dims, self.steps, device=(2, self.gpu), dtype=(code, bits, 1), deleted=keep.clear
        )

    def copied(self, gpu: int) -> Any:
        """On the framework's stream."""
        made = now.array(self.of, self.dims, self.kind, ordinal=gpu)
        self.look()
        made.work()
        size = DType(self.kind).itemsize
        for number, index in enumerate(itertools.product(*map(range, self.dims))):
            past = sum(at * step for at, step in zip(index, self.steps, strict=True))
            ctypes.memmove(made.address + number * size, self.address + past * size, size)
        return made


class Imported:
    """What the consumer of a capsule keeps. `before` runs before it releases the memory."""

    def __init__(self, consumed: Consumed, before: Any) -> None:
        self.consumed, self.before = consumed, before

    def __del__(self) -> None:
        self.before()
        self.consumed.done()


def imported(cls: Any, capsule: Any, before: Any = lambda: None) -> Any:
    consumed = Consumed(capsule)
    dtype = next(name for name, numbers in DTYPES.items() if numbers[:2] == (consumed.code, consumed.bits))
    strides = consumed.strides if consumed.strides is not None else row_major(consumed.shape)
    return cls(Imported(consumed, before), consumed.address, consumed.shape, strides, dtype, consumed.device)


class Tensor(Array):
    """`torch.Tensor`"""

    __module__ = "torch"
    of = "torch"
    is_quantized, is_nested, layout, requires_grad = False, False, "strided", False
    device = property(lambda self: types.SimpleNamespace(type="cuda", index=self.gpu))
    dtype = property(lambda self: f"torch.{self.kind}")

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def detach(self) -> Any:
        return self

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.steps

    def clone(self, memory_format: Any = None) -> Any:
        return self.copied(self.gpu)

    def to(self, place: str, copy: bool = False, memory_format: Any = None) -> Any:
        return self.copied(int(place.removeprefix("cuda:")))


class EagerTensor(Array):
    """TensorFlow's. Exporting it waits for its stream, importing for nothing; it lets go while its work still runs."""

    __module__ = "tensorflow.python.framework.ops"
    of = "tensorflow"
    dtype = property(lambda self: types.SimpleNamespace(name=self.kind))

    def numpy(self) -> Any:
        raise NotImplementedError

    @staticmethod
    def to_dlpack(x: Any) -> Any:
        now.driver.wait_for(now.own["tensorflow"])
        return x.capsule()


class ndarray(Array):  # noqa: N801
    """`cupy.ndarray`"""

    __module__ = "cupy"
    of = "cupy"
    dtype = property(lambda self: DType(self.kind))
    device = property(lambda self: types.SimpleNamespace(id=self.gpu))
    strides = property(lambda self: self.byte_steps)
    data = property(lambda self: types.SimpleNamespace(ptr=self.address))

    def copy(self, order: str = "C") -> Any:
        return self.copied(self.gpu)

    @staticmethod
    def from_dlpack(x: Any) -> Any:
        if not hasattr(x, "__dlpack_device__"):  # a capsule, as its documentation has it
            return imported(ndarray, x)
        assert x.__dlpack_device__()[0] == 2
        return imported(ndarray, x.__dlpack__(stream=now.own["cupy"]))


class ArrayImpl(Array):
    """`jax.Array`: it makes others wait itself, names the stream it will use, and lets go when its work is done."""

    __module__ = "jaxlib._jax"
    of = "jax"
    is_fully_addressable = True
    sharding = property(lambda self: types.SimpleNamespace(device_set=self.devices()))
    dtype = property(lambda self: DType(self.kind))

    def is_deleted(self) -> bool:
        return False

    def devices(self) -> tuple[Any]:
        return (types.SimpleNamespace(platform="gpu", local_hardware_id=self.gpu),)

    def unsafe_buffer_pointer(self) -> int:
        return self.address

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        if stream is None:
            now.driver.wait_for(now.own["jax"])
        else:
            now.driver.tell(stream, now.own["jax"])
        return self.capsule()

    @staticmethod
    def from_dlpack(x: Any) -> Any:
        world, stream = now, now.own["jax"]
        capsule = x.__dlpack__(stream=stream, max_version=(1, 1), copy=None)
        return imported(ArrayImpl, capsule, lambda: world.driver.wait_for(stream))


class GPUArray(Array):
    """PyCUDA's. It names no stream: its work may be on any."""

    __module__ = "pycuda.gpuarray"
    of = "pycuda"
    dtype = property(lambda self: DType(self.kind))
    __cuda_array_interface__ = property(lambda self: self.interface(None))

    def __init__(self, shape: Any, dtype: Any, *, gpudata: int, base: Any, strides: Any) -> None:
        steps = tuple(stride // dtype.itemsize for stride in strides)
        super().__init__(base, gpudata, shape, steps, str(dtype), 0)

    @property
    def gpudata(self) -> Any:
        return self.memory if "pycuda" in now.recycled else DeviceAllocation()

    @staticmethod
    def empty(shape: Any, dtype: Any) -> Any:
        return now.array("pycuda", shape, str(dtype))


class DeviceNDArray(Array):
    """Numba's. `named` is the stream it was made with, which its interface names."""

    __module__ = "numba.cuda.cudadrv.devicearray"
    of = "numba"
    named: int | None = None
    dtype = property(lambda self: DType(self.kind))
    __cuda_array_interface__ = property(lambda self: self.interface(self.named))

    def copy_to_host(self) -> Any:
        raise NotImplementedError

    @staticmethod
    def as_cuda_array(x: Any, sync: bool = True) -> Any:
        found = x.__cuda_array_interface__
        if sync and found["stream"] is not None:
            now.driver.wait_for(found["stream"])
        dtype = next(name for name, numbers in DTYPES.items() if numbers[2] == found["typestr"])
        size = DType(dtype).itemsize
        strides = row_major(found["shape"]) if found["strides"] is None else [s // size for s in found["strides"]]
        made = DeviceNDArray(x, found["data"][0], found["shape"], strides, dtype, 0)
        made.named = found["stream"]
        return made


def device_array(shape: Any, dtype: Any, stream: Any = 0) -> Any:
    """Numba's. It is bound to the stream."""
    made = now.array("numba", shape, str(dtype))
    made.named = stream.ptr if stream else None
    return made


class NumbaCUDAMemoryManager:
    """Numba's own, whose free waits. A pool is somebody else's (RMM's)."""


CLASSES: dict[str, Any] = {
    "torch": Tensor, "tensorflow": EagerTensor, "cupy": ndarray, "jax": ArrayImpl, "numba": DeviceNDArray,
}  # fmt: skip
now: World


class World:
    """The modules, and the stream of each framework's work (`own`), which a test may set for torch and CuPy."""

    def __init__(self, driver: Driver) -> None:
        global now
        now, self.driver = self, driver
        self.recycled: dict[str, list[int]] = {}  # of PyCUDA or Numba, if it has a pool: what is idle in it
        self.own = {name: driver.stream() for name in NAMES}
        self.modules = {
            "torch": self._torch(), "tensorflow": self._tensorflow(), "cupy": self._cupy(), "jax": self._jax(),
        }  # fmt: skip
        gpuarray = _module("pycuda.gpuarray", GPUArray=GPUArray, empty=GPUArray.empty)
        cuda = _module(
            "numba.cuda", is_cuda_array=lambda x: hasattr(x, "__cuda_array_interface__"),
            as_cuda_array=DeviceNDArray.as_cuda_array, device_array=device_array,
            external_stream=lambda handle: types.SimpleNamespace(ptr=handle),
            gpus=[contextlib.nullcontext(), contextlib.nullcontext()], current_context=self._numba_context,
        )  # fmt: skip
        manager = _module("numba.cuda.cudadrv.driver", NumbaCUDAMemoryManager=NumbaCUDAMemoryManager)
        self.modules["numba.cuda.cudadrv.driver"] = manager
        drv = _module("pycuda.driver", DeviceAllocation=DeviceAllocation)
        self.modules |= {"pycuda": _module("pycuda", gpuarray=gpuarray), "pycuda.gpuarray": gpuarray}
        self.modules["pycuda.driver"] = drv
        self.modules |= {"numba": _module("numba", cuda=cuda), "numba.cuda": cuda}

    def array(self, name: str, shape: Any = (64, 4), dtype: str = "float32", strides: Any = None, **where: Any) -> Any:
        """A new array of the framework; `ordinal`, `context` and `past` as the driver's `alloc` has them."""
        strides = row_major(shape) if strides is None else strides
        size = DType(dtype).itemsize
        reach = 1 + sum(max(n - 1, 0) * abs(stride) for n, stride in zip(shape, strides, strict=True))
        idle = self.recycled.get(name)
        address = idle.pop() if idle else self.driver.alloc(reach * size, **where)
        in_order = self.own[name] if name in ("torch", "cupy", "jax", "tensorflow") else None
        memory = Memory(name, address, in_order, threading.get_ident() if name == "pycuda" else None)
        if name == "pycuda":
            steps = tuple(stride * size for stride in strides)
            return GPUArray(shape, DType(dtype), gpudata=address, base=memory, strides=steps)
        return CLASSES[name](memory, address, shape, strides, dtype, where.get("ordinal", 0))

    def _numba_context(self) -> Any:
        return types.SimpleNamespace(memory_manager=object() if "numba" in self.recycled else NumbaCUDAMemoryManager())

    def _torch(self) -> Any:
        current = lambda device: types.SimpleNamespace(cuda_stream=self.own["torch"])  # noqa: E731
        ways = types.SimpleNamespace(from_dlpack=lambda capsule: imported(Tensor, capsule))
        return _module(
            "torch", Tensor=Tensor, strided="strided", contiguous_format="contiguous",
            cuda=types.SimpleNamespace(current_stream=current), utils=types.SimpleNamespace(dlpack=ways),
        )  # fmt: skip

    def _tensorflow(self) -> Any:
        ways = types.SimpleNamespace(
            to_dlpack=EagerTensor.to_dlpack, from_dlpack=lambda capsule: imported(EagerTensor, capsule)
        )
        gpus = [types.SimpleNamespace(name=f"/physical_device:GPU:{number}") for number in (0, 1)]
        others = {name: type(name, (), {}) for name in ("Variable", "SparseTensor", "RaggedTensor")}
        return _module(
            "tensorflow", Tensor=EagerTensor, executing_eagerly=lambda: True, **others,
            errors=types.SimpleNamespace(OpError=type("OpError", (Exception,), {})),
            config=types.SimpleNamespace(get_visible_devices=lambda kind: gpus),
            experimental=types.SimpleNamespace(dlpack=ways),
        )  # fmt: skip

    def _cupy(self) -> Any:
        current = lambda device=None: types.SimpleNamespace(ptr=self.own["cupy"])  # noqa: E731
        cuda = types.SimpleNamespace(get_current_stream=current, Device=lambda number: contextlib.nullcontext())
        return _module("cupy", ndarray=ndarray, from_dlpack=ndarray.from_dlpack, cuda=cuda)

    def _jax(self) -> Any:
        return _module(
            "jax", Array=ArrayImpl, core=types.SimpleNamespace(Tracer=type("Tracer", (), {})),
            config=types.SimpleNamespace(jax_enable_x64=True),
            dlpack=types.SimpleNamespace(from_dlpack=ArrayImpl.from_dlpack),
        )  # fmt: skip


def _module(name: str, **names: Any) -> Any:
    made = types.ModuleType(name)
    vars(made).update(names)
    return made
