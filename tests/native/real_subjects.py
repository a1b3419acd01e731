"""The real torch and TensorFlow as subjects of the contract suite, on a model of the memory that a CPU build lacks.

Their own Python code runs: queues, configuration, statistics, history, errors. The bytes are counted by the models in
`memguard/_frameworks/simulated/allocators.py`.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_ins import Host, card, gpus

from memguard._base.units import MIB
from memguard._devices.simulated import SimulatedOutOfMemory
from memguard._frameworks import registry
from memguard._frameworks.simulated.allocators import (
    AllocationRefused,
    Allocator,
    BFCAllocator,
    TorchCachingAllocator,
    tensorflow_default_limit,
)
from memguard._frameworks.torch import settings

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
import test_frameworks as contract


class Block:
    """An allocation that frees itself."""

    def __init__(self, free: Callable[[], None]) -> None:
        self._free = free

    def __del__(self) -> None:
        self._free()


class Real(contract.Subject):
    """Imported already, because importing takes seconds: until `bring` its modules are hidden."""

    module: str

    def __init__(self) -> None:
        self.host = Host()
        self.framework = registry.create(self.module, self.host)
        found = [name for name in sys.modules if name.partition(".")[0] == self.module]
        self._hidden = {name: sys.modules.pop(name) for name in found}
        self._used = 0

    def bring(self) -> None:
        sys.modules.update(self._hidden)

    def take(self, size: int) -> None:
        usable = self.gpu.usable
        if self._used + size > usable:
            raise SimulatedOutOfMemory(size, usable - self._used)
        self._used += size

    def give(self, size: int) -> None:
        self._used -= size


class Torch(Real):
    """torch's fraction, queue, statistics and history; the blocks are those of the model."""

    module = "torch"
    marks = False

    def __init__(self) -> None:
        super().__init__()
        settings.cuda_version = lambda: "13.0"  # of a build with CUDA
        self.allocator = TorchCachingAllocator(self.take, self.give)
        self.history: list[dict[str, Any]] = []
        self.recording = False

    def bring(self) -> None:
        super().bring()
        import torch

        self.card = card(self.host)
        torch._C._cuda_memoryStats = lambda ordinal: self.stats()
        torch.cuda.empty_cache = self.allocator.trim
        torch._C._cuda_memorySnapshot = lambda _: {
            "allocator_settings": {"expandable_segments": False},
            "device_traces": [list(self.history)],
        }
        torch._C._cuda_record_memory_history = self.record

    def record(self, enabled: str | None, *_: Any, **__: Any) -> None:
        self.recording = enabled is not None
        self.history.clear()

    def stats(self) -> dict[str, Any]:
        found = self.allocator
        stuck = found.held - found.in_use - found.reclaimable
        figures = {
            "reserved_bytes": (found.held, found.peak_held),
            "allocated_bytes": (found.in_use, found.peak_in_use),
            "active_bytes": (found.in_use, found.peak_in_use),
            "inactive_split_bytes": (stuck, stuck),
        }
        return {
            name: {"all": {"current": now, "peak": peak, "allocated": peak, "freed": peak - now}}
            for name, (now, peak) in figures.items()
        }

    def allocate(self, nbytes: int) -> Any:
        import torch

        torch.cuda.init()
        fraction = self.card.fractions.get(0, 1.0)
        self.allocator.cap = None if fraction == 1.0 else int(fraction * self.card.total)
        try:
            block = self.allocator.allocate(nbytes)
        except AllocationRefused as error:
            for observer in self.card.observers:
                observer(0, nbytes, self.card.total, self.gpu.usable - self._used)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes / MIB:.2f} MiB.") from error
        self.note("alloc", block, nbytes)

        def free() -> None:
            self.allocator.free(block)
            self.note("free_requested", block, nbytes)

        return Block(free)

    def note(self, action: str, block: int, size: int) -> None:
        if self.recording:
            self.history.append({"action": action, "addr": block, "size": size, "time_us": int(time.time() * 1e6)})

    def own_error(self) -> type[Exception]:
        import torch

        return torch.OutOfMemoryError


class TensorFlow(Real):
    """TensorFlow's device list and logical devices; the pool is the model of its BFC allocator."""

    module = "tensorflow"

    def __init__(self) -> None:
        super().__init__()
        self.allocator: Allocator | None = None

    def bring(self) -> None:
        super().bring()
        import tensorflow as tf

        (self.physical,) = gpus()
        tf.config.experimental.get_memory_info = lambda name: {
            "current": self.allocator.in_use if self.allocator else 0,
            "peak": self.allocator.peak_in_use if self.allocator else 0,
        }

    def start(self) -> Allocator:
        """As the first operation does: the allocator gets the limit that the logical device has now."""
        import tensorflow as tf
        from tensorflow.python.eager import context

        configured = tf.config.get_logical_device_configuration(self.physical)
        limit = configured[0].memory_limit * MIB if configured else tensorflow_default_limit(self.gpu.usable, "hopper")
        context.context()._context_handle = object()
        return BFCAllocator(self.take, self.give, limit, growth=True)

    def allocate(self, nbytes: int) -> Any:
        import tensorflow as tf

        if self.allocator is None:
            self.allocator = self.start()
        allocator = self.allocator
        try:
            block = allocator.allocate(nbytes)
        except AllocationRefused as error:
            text = f"OOM when allocating tensor with shape[{nbytes}] and type int8"
            raise tf.errors.ResourceExhaustedError(None, None, text) from error
        return Block(lambda: allocator.free(block))

    def own_error(self) -> type[Exception]:
        import tensorflow as tf

        found: type[Exception] = tf.errors.ResourceExhaustedError
        return found


SUBJECTS: dict[str, type[Real]] = {"torch": Torch, "tensorflow": TensorFlow}
CASES = sorted(name for name in vars(contract.TestWorking) if name.startswith("test_"))


def check(module: str, case: str) -> None:
    """Run one test of the contract suite."""
    test = getattr(contract.TestWorking(), case)
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        given = {"subject": SUBJECTS[module](), "monkeypatch": monkeypatch, "tmp_path": Path(folder)}
        test(**{name: given[name] for name in inspect.signature(test).parameters})
