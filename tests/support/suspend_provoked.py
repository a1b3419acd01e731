"""Each reason not to suspend that one GPU can provoke, within the process to be suspended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from bench.programs.six import MIB


@contextlib.contextmanager
def managed_cupy() -> Iterator[None]:
    import cupy

    one = cupy.cuda.malloc_managed(2 * MIB)
    cupy.cuda.runtime.memset(one.ptr, 1, 2 * MIB)
    cupy.cuda.Device().synchronize()
    yield
    del one


@contextlib.contextmanager
def managed_numba() -> Iterator[None]:
    from numba import cuda

    one = cuda.managed_array(MIB, "uint8")
    one[:] = 1
    yield
    del one
    cuda.current_context().deallocations.clear()


_IMPORTER = """
import sys, pickle, base64, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
torch.zeros(1, device="cuda")
made, arguments = pickle.loads(base64.b64decode(sys.stdin.readline()))
tensor = made(*arguments)
print("opened", float(tensor.sum()), flush=True)
sys.stdin.read()
"""
_EXPORTER = """
import sys, pickle, base64, torch
from torch.multiprocessing.reductions import reduce_tensor
tensor = torch.ones(1 << 20, device="cuda")
print(base64.b64encode(pickle.dumps(reduce_tensor(tensor))).decode(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _python(code: str) -> Iterator[subprocess.Popen[str]]:
    """A separate process, with its own use of the GPU: closing its stdin ends it."""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        if process.poll() is None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def torch_export() -> Iterator[None]:
    """A tensor that another process has opened."""
    import base64
    import gc
    import pickle

    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    tensor = torch.ones(1 << 20, device="cuda")
    with _python(_IMPORTER) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(base64.b64encode(pickle.dumps(reduce_tensor(tensor))).decode() + "\n")
        process.stdin.flush()
        if not process.stdout.readline().startswith("opened"):
            raise RuntimeError("the other process did not open the tensor")
        yield
    del tensor
    gc.collect()
    torch.cuda.ipc_collect()


@contextlib.contextmanager
def torch_import() -> Iterator[None]:
    """A tensor of another process."""
    import base64
    import gc
    import pickle

    import torch

    with _python(_EXPORTER) as process:
        assert process.stdout is not None
        made, arguments = pickle.loads(base64.b64decode(process.stdout.readline()))
        tensor = made(*arguments)
        tensor.sum().item()
        yield
        del tensor, made, arguments
        gc.collect()
        torch.cuda.ipc_collect()


@contextlib.contextmanager
def exchange_export() -> Iterator[None]:
    import torch

    from memguard import exchange

    with exchange.export(torch.ones(1 << 20, device="cuda")):
        yield


@contextlib.contextmanager
def capture() -> Iterator[None]:
    import torch

    graph, x = torch.cuda.CUDAGraph(), torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x + 1
        yield
    graph.replay()
    torch.cuda.synchronize()
    assert bool((y == 2).all()), "the capture was lost"


@contextlib.contextmanager
def profiler() -> Iterator[None]:
    """Kineto stays attached to CUPTI after it ends, even with TEARDOWN_CUPTI=1 (torch 2.11, driver 580.159): the lock
    returns 801."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.ones(1024, device="cuda").sum().item()
        yield


@contextlib.contextmanager
def nccl() -> Iterator[None]:
    import torch
    import torch.distributed as distributed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
    distributed.init_process_group("nccl", rank=0, world_size=1)
    distributed.all_reduce(torch.ones(8, device="cuda"))
    torch.cuda.synchronize()
    yield
    distributed.destroy_process_group()


@contextlib.contextmanager
def child() -> Iterator[None]:
    with _python("import torch, sys\ntorch.zeros(1, device='cuda')\nprint(1, flush=True)\nsys.stdin.read()") as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield


@contextlib.contextmanager
def host_memory() -> Iterator[None]:
    """Replaced by a stand-in: the machine reports 64 MiB of available memory."""
    from memguard._devices import proc

    available = proc.available_memory
    proc.available_memory = lambda *_: 64 * MIB  # type: ignore[assignment]
    yield
    proc.available_memory = available


PROVOKED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "managed memory of cupy": (managed_cupy, "managed-memory", "cupy"),
    "managed memory of numba": (managed_numba, "managed-memory", "numba"),
    "torch gave a tensor": (torch_export, "cuda-ipc", "torch"),
    "torch opened a tensor": (torch_import, "cuda-ipc", "torch"),
    "memguard.exchange gave an array": (exchange_export, "cuda-ipc", "torch"),
    "a capture": (capture, "capture", "torch"), "torch.profiler": (profiler, "profiler", "torch"),
    "NCCL, one rank": (nccl, "nccl", "torch"), "a child with a context": (child, "children", "torch"),
    "too little host memory": (host_memory, "host-memory", "torch"),
}  # fmt: skip
"""How to provoke it, the code that must be among the reasons, and the process's framework."""
