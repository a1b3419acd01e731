"""memguard's PyTorch against the real one: what a CPU build lacks, and only that, is stood in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., dict[str, Any]]

STAND_INS = """
from types import SimpleNamespace
import torch
from memguard.frameworks.torch import Torch
TOTAL = 150109880320
fractions = {0: 1.0}
memory = {"reserved": 0, "allocated": 0, "expandable": False, "backend": "native"}
def stat(value): return {"all": {"current": value, "peak": value}}
torch._C._cuda_setMemoryFraction = lambda fraction, i: fractions.__setitem__(i, fraction)
torch._C._cuda_getMemoryFraction = lambda i: fractions[i]
torch._C._cuda_memoryStats = lambda i: {"reserved_bytes": stat(memory["reserved"]),
    "allocated_bytes": stat(memory["allocated"]), "active_bytes": stat(memory["allocated"]),
    "inactive_split_bytes": stat(0)}
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda i: SimpleNamespace(
    uuid=device.uuid[4:], total_memory=TOTAL, multi_processor_count=132)
torch.cuda.get_allocator_backend = lambda: memory["backend"]
torch.cuda.memory._snapshot = lambda: {"allocator_settings": {"expandable_segments": memory["expandable"]}}
framework = Torch(host)
def initialise():
    # what torch.cuda._lazy_init does once the driver answers
    for call, _ in torch.cuda._queued_calls:
        if "memguard" in call.__module__: call()
    torch.cuda._initialized = True
"""


def test_a_cpu_build_is_recognised_without_importing_it(run: Run) -> None:
    found = run(
        """
from memguard.frameworks.torch import Torch
framework = Torch(host)
result.update(state=framework.state().value, why=framework.why_absent(), imported="torch" in sys.modules)
import torch
result["state_imported"] = framework.state().value
"""
    )
    assert found["state"] == found["state_imported"] == "absent"
    assert "built without CUDA" in found["why"] and not found["imported"]


def test_the_cap_waits_in_torchs_own_queue_and_is_exact_for_any_total(run: Run) -> None:
    found = run(
        STAND_INS
        + """
import random
before = len(torch.cuda._queued_calls)
applied = framework.apply({device.uuid: 4 * GIB}, {})
result["queued"] = len(torch.cuda._queued_calls) - before
result["early"] = fractions[0]
initialise()
result["bytes"] = int(fractions[0] * TOTAL)
rng, wrong = random.Random(1), []
for _ in range(20000):
    TOTAL = rng.randrange(2 << 30, 300 << 30)
    cap = rng.randrange(1, TOTAL // (2 * MIB)) * 2 * MIB
    framework._set_fraction(torch, 0, cap)
    if int(fractions[0] * TOTAL) != cap: wrong.append([TOTAL, cap])
result["wrong"] = wrong
applied.undo()
result.update(queue_after=len(torch.cuda._queued_calls) - before, restored=fractions[0])
"""
    )
    assert found["queued"] == 1 and found["early"] == 1.0
    assert found["bytes"] == 4 << 30 and found["wrong"] == []
    assert found["queue_after"] == 0 and found["restored"] == 1.0


def test_undone_before_torch_initialises_nothing_is_ever_set(run: Run) -> None:
    found = run(
        STAND_INS
        + """
held_back = []
torch.cuda._lazy_call = lambda call, **_: held_back.append(call)      # a torch whose queue is not a list
applied = framework.apply({device.uuid: 4 * GIB}, {})
applied.undo()
for call in held_back: call()
result.update(fraction=fractions[0], calls=len(held_back))
"""
    )
    assert found["calls"] == 1 and found["fraction"] == 1.0


def test_a_live_torch_is_capped_at_once_and_its_excess_reported(run: Run) -> None:
    found = run(
        STAND_INS
        + """
torch.cuda._initialized = True
memory.update(reserved=5 * GIB, allocated=3 * GIB)
applied = framework.apply({device.uuid: 4 * GIB}, {})
result.update(bytes=int(fractions[0] * TOTAL), residual=applied.residual[device.uuid])
usage = framework.usage(device)
result["usage"] = [usage.held, usage.in_use, usage.reclaimable]
framework.resize({device.uuid: 6 * GIB}); result["resized"] = int(fractions[0] * TOTAL)
applied.undo(); result["restored"] = fractions[0]
"""
    )
    assert found["bytes"] == 4 << 30 and found["residual"] == 1 << 30
    assert found["usage"] == [5 << 30, 3 << 30, 2 << 30]
    assert found["resized"] == 6 << 30 and found["restored"] == 1.0


def test_expandable_segments_get_a_fraction_of_one_piece_less(run: Run) -> None:
    found = run(
        STAND_INS
        + """
torch.cuda._initialized = True
memory["expandable"] = True
framework.apply({device.uuid: 4 * GIB}, {})
result["bytes"] = int(fractions[0] * TOTAL)
try:
    framework.resize({device.uuid: 20 * MIB})
except CapNotApplied as error:
    result["small"] = str(error)
"""
    )
    assert found["bytes"] == (4 << 30) - (20 << 20)
    assert "above 20.0 MiB" in found["small"]


def test_a_fraction_that_does_not_read_back_is_refused_and_taken_back(run: Run) -> None:
    found = run(
        STAND_INS
        + """
torch.cuda._initialized = True
torch._C._cuda_setMemoryFraction = lambda fraction, i: fractions.__setitem__(i, min(1.0, fraction * 2))
try:
    framework.apply({device.uuid: 4 * GIB}, {})
except CapNotApplied as error:
    result["text"] = str(error)
result["restored"] = fractions[0]
"""
    )
    assert "read back" in found["text"] and found["restored"] == 1.0


def test_misread_device_properties_are_named_before_they_kill(run: Run) -> None:
    found = run(
        STAND_INS
        + """
host.multiprocessors = lambda uuid: 132
torch.cuda.get_device_properties = lambda i: SimpleNamespace(
    uuid=device.uuid[4:], total_memory=TOTAL, multi_processor_count=1)
torch.cuda._initialized = True
try:
    framework.apply({device.uuid: 4 * GIB}, {})
except CapNotApplied as error:
    result["text"] = str(error)
result["fraction"] = fractions[0]
"""
    )
    assert "1 multiprocessors, the driver says 132" in found["text"] and "SIGFPE" in found["text"]
    assert found["fraction"] == 1.0


def test_the_private_names_that_memguard_uses_exist_in_this_torch(run: Run) -> None:
    found = run(
        """
import torch
result["lazy_call"] = callable(torch.cuda._lazy_call)
result["queue"] = type(torch.cuda._queued_calls).__name__
result["oom"] = issubclass(torch.OutOfMemoryError, RuntimeError)
result["entry"] = [type(x).__name__ for x in torch.cuda._queued_calls[0]]
result["snapshot"] = callable(torch.cuda.memory._snapshot) and callable(torch.cuda.memory._record_memory_history)
"""
    )
    assert found["lazy_call"] and found["queue"] == "list" and found["oom"] and found["snapshot"]
    assert found["entry"][0] in ("function", "method")


def test_the_import_hook_carries_the_real_import(run: Run) -> None:
    found = run(
        """
from memguard.frameworks.late import ImportHook
hook, seen = ImportHook(), []
hook.watch("torch", lambda: seen.append(sys.modules["torch"].__version__))
import torch
result.update(seen=seen, loader=type(torch.__spec__.loader).__module__, left=hook in sys.meta_path)
result["sum"] = float(torch.ones(3).sum())
"""
    )
    assert len(found["seen"]) == 1 and not found["left"] and found["sum"] == 3.0
    assert not found["loader"].startswith("memguard")
