"""Each reason not to suspend that one card can provoke, and what `suspend.py` finds then.

A reason is provoked within the target, or from outside. Then the process must be refused with that reason and a remedy,
nothing may have changed, and once the reason is gone it leaves its GPU and comes back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import _listed
from _run import MIB
from _suspend_children import Card, command, target

FRAMEWORK = {
    "managed memory of cupy": "cupy",
    "managed memory of numba": "numba",
}
"""Of which framework the target is; torch otherwise."""


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
    """A process of its own, not a child of this one as far as its GPU counts: it is ended by closing its stdin."""
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
    """Kineto keeps CUPTI after its end, also with TEARDOWN_CUPTI=1 (torch 2.11, driver 580.159): the lock says 801."""
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
    """By a stand-in: the machine says that 64 MiB are available."""
    from memguard._devices import machine_memory

    available = machine_memory.available
    machine_memory.available = lambda *_: 64 * MIB  # type: ignore[assignment]
    yield
    machine_memory.available = available


PROVOKED: dict[str, Callable[[], Any]] = {
    "managed memory of cupy": managed_cupy,
    "managed memory of numba": managed_numba,
    "torch gave a tensor": torch_export,
    "torch opened a tensor": torch_import,
    "memguard.exchange gave an array": exchange_export,
    "a capture": capture,
    "torch.profiler": profiler,
    "NCCL, one rank": nccl,
    "a child with a context": child,
    "too little host memory": host_memory,
}
"""Within the target, by the names of `_listed.REFUSED`. `stopped` is done by the parent."""


def refused(what: str) -> dict[str, Any]:
    """One reason: refused, unchanged; gone: off and back."""
    card = Card()
    allows: dict[str, Any] = {"by_others": True, "limit": "8GiB"} if what == _listed.STOPPED else {}
    with target(FRAMEWORK.get(what, "torch"), size=16 * MIB, **allows) as child:
        if what == _listed.STOPPED:
            return _stopped(child)
        child.must("provoke", 90, what=what)
        begun = time.monotonic()
        off = child.ask("off", 60)
        error = off.get("error")
        found = {
            "refused": bool(error) and error["exception"] == "CannotSuspend",
            "codes": error["codes"] if error else [],
            "text": error["text"] if error else "",
            "seconds": round(time.monotonic() - begun, 3),
            "on_card": card.of(child.pid) is not None,
            "wrong": None,
        }
        if not found["refused"] and not error:  # it went off all the same: what comes of it is told
            found["came_back"] = "error" not in child.ask("on", 60, timeout=30)
        during = what == "a capture"  # reading arrays back would end it
        found["wrong"] = 0 if during else child.must("check")["wrong"]
        child.must("calm", 90)
        if during:
            found["wrong"] = child.must("check")["wrong"]
        after = child.ask("off", 60)
        found["after"] = after["error"]["text"] if after.get("error") else None
        if found["after"] is None:
            child.must("on", 60, timeout=30)
        found["wrong_after"] = child.must("check")["wrong"]
        return found


def _stopped(child: Any) -> dict[str, Any]:
    """From outside: nobody suspends itself while it is stopped."""
    card = Card()
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(0.2)
    try:
        begun = time.monotonic()
        said = command("suspend", str(child.pid), limit=60)
        seconds = time.monotonic() - begun
    finally:
        os.kill(child.pid, signal.SIGCONT)
    text = said["err"] + said["out"]
    found = {
        "refused": said["rc"] != 0,
        "codes": ["stopped"] if "stopped" in text else [],
        "text": text[-600:],
        "seconds": round(seconds, 3),
        "on_card": card.of(child.pid) is not None,
        "wrong": child.must("check")["wrong"],
    }
    child.touched = True
    after = child.ask("off", 60)
    found["after"] = after["error"]["text"] if after.get("error") else None
    if found["after"] is None:
        child.must("on", 60, timeout=30)
    found["wrong_after"] = child.must("check")["wrong"]
    return found
