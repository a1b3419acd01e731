"""Whether the real frameworks keep what a suspension asks them for where it is looked for: profilers, shared memory,
process groups. Without a GPU, so of CUDA's own memory only the keys of torch's cache are put in by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., dict[str, Any]]

LOOK = """
from memguard._node.suspend.checks import in_process_checks
def look(): return in_process_checks.look()._asdict()
"""
NOTHING: dict[str, list[str]] = {"ipc": [], "nccl": [], "captures": [], "profilers": [], "unseen": [], "natives": []}


def test_torch_profiles(with_torch: Run) -> None:
    found = with_torch(
        LOOK
        + """
import torch, torch.profiler
result["before"] = look()
given = dict(activities=[torch.profiler.ProfilerActivity.CPU])
with torch.profiler.profile(**given) as kept:
    result["within"] = look()["profilers"]
result["after"] = look()
steps = torch.profiler.schedule(wait=1, warmup=1, active=1)
with torch.profiler.profile(schedule=steps, **given) as run:
    result["waits"] = look()["profilers"]
    run.step()
    result["warms"] = look()["profilers"]
    run.step()
    result["records"] = look()["profilers"]
    run.step()
result["end"] = look()
with torch.autograd.profiler.profile():
    result["older"] = look()["profilers"]
"""
    )
    runs = ["torch.profiler runs"]
    assert found["before"] == found["after"] == found["end"] == NOTHING
    assert found["within"] == found["warms"] == found["records"] == found["older"] == runs
    assert found["waits"] == []


def test_torch_shares(with_torch: Run) -> None:
    """Host memory is shared without CUDA. `reduce_tensor` and `rebuild_cuda_tensor` have these keys."""
    found = with_torch(
        LOOK
        + """
import inspect, torch
import torch.multiprocessing as mp
from torch.multiprocessing import reductions
x = torch.ones(4)
for strategy in sorted(mp.get_all_sharing_strategies()):
    mp.set_sharing_strategy(strategy)
    reductions.reduce_storage(torch.ones(4).untyped_storage())
    kept = torch.ones(9).untyped_storage()
    reductions.reduce_storage(kept)
result["host"], result["keys"] = look(), len(reductions.shared_cache)
storage = x.untyped_storage()
reductions.shared_cache[b"h" * 64] = reductions.StorageWeakRef(storage)
reductions.shared_cache[(b"h" * 64, 512)] = reductions.StorageWeakRef(storage)
result["both"] = look()["ipc"]
del x, storage
result["deleted"] = look()
source = inspect.getsource(reductions)
result["as read"] = ["shared_cache[handle] = StorageWeakRef(storage)" in source,
    "shared_cache[(storage_handle, storage_offset_bytes)] = StorageWeakRef(" in source]
"""
    )
    assert found["keys"] >= 2 and found["host"] == found["deleted"] == NOTHING
    assert found["both"] == [
        "torch.multiprocessing: 1 tensor given to other processes",
        "torch.multiprocessing: 1 tensor of other processes opened",
    ]
    assert found["as read"] == [True, True]


def test_process_groups_of_torch(with_torch: Run) -> None:
    found = with_torch(
        LOOK
        + """
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
result["none"] = look()
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
result["gloo"] = look()
group = dist.group.WORLD
c10d._world.pg_map[group] = ("nccl", store)
result["nccl"] = look()["nccl"]
c10d._world.pg_map[group] = ("gloo", store)
dist.destroy_process_group()
result["over"] = look()
"""
    )
    assert found["none"] == found["gloo"] == found["over"] == NOTHING
    assert found["nccl"] == ["torch.distributed: 1 process group of NCCL"]


def test_jax_profiles(with_jax: Run) -> None:
    found = with_jax(
        LOOK
        + """
import tempfile, jax
result["before"] = look()
with tempfile.TemporaryDirectory() as folder:
    jax.profiler.start_trace(folder)
    result["within"] = look()["profilers"]
    jax.profiler.stop_trace()
result["after"] = look()
"""
    )
    assert found["before"] == found["after"] == NOTHING
    assert found["within"] == ["jax.profiler runs"]


def test_tensorflow_profiles(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        LOOK
        + """
import tempfile
import tensorflow as tf
result["before"] = look()
with tempfile.TemporaryDirectory() as folder:
    tf.profiler.experimental.start(folder)
    result["within"] = look()["profilers"]
    tf.profiler.experimental.stop(save=False)
result["after"] = look()
"""
    )
    assert found["before"] == found["after"] == NOTHING
    assert found["within"] == ["tf.profiler runs"]


def test_handles_of_numba(with_numba: Run) -> None:
    found = with_numba(
        LOOK
        + """
from numba.cuda.cudadrv import driver
result["before"] = look()
made = driver.IpcHandle(None, b"", 8)
result["made"] = look()["ipc"]
made._impl = object()
result["opened"] = look()["ipc"]
del made
result["after"] = look()
"""
    )
    assert found["before"] == found["after"] == NOTHING
    assert found["made"] == ["numba: 1 IPC handle made"]
    assert found["opened"] == ["numba: 1 IPC handle of other processes opened"]


def test_cupy_without_a_context(with_cupy: Run) -> None:
    found = with_cupy(
        LOOK
        + """
import gc, cupyx.distributed
from cupyx.distributed import _nccl_comm
result["before"] = look()
one = _nccl_comm.NCCLBackend.__new__(_nccl_comm.NCCLBackend)
result["one"], result["kept"] = look()["nccl"], gc.is_tracked(one)
"""
    )
    assert found["before"] == NOTHING
    assert found["one"] == ["cupyx.distributed: 1 communicator"] and found["kept"]
