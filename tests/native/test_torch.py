"""The real torch, built without CUDA: its own queue and laziness, with stand-ins for what only a CUDA build has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memguard._base.types import TraceEvent
from memguard._frameworks.torch import history, settings

Run = Callable[..., dict[str, Any]]

SETUP = """
import torch
from memguard._frameworks.torch.adapter import Torch
host = Host()
framework, uuid, gpu = Torch(host), host.uuids[0], host.gpus[0]
def exact(found, total=TOTAL): return int(found.fractions[0] * total)
"""


def test_a_cpu_build_is_absent_and_nothing_is_imported_to_see_it(alone: Run) -> None:
    found = alone(
        """
        from memguard._frameworks.torch.adapter import Torch
        framework = Torch(Host())
        result["state"], result["why"] = framework.state().value, framework.why_absent()
        result["imported"] = "torch" in sys.modules
        """
    )
    assert found == {
        "state": "absent",
        "why": "this torch is built without CUDA; fix: install a CUDA build of torch",
        "imported": False,
    }


def test_an_imported_cpu_build_is_absent_and_never_initialised(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
result["state"] = framework.state().value
result["nothing"] = [framework.usage(gpu), framework.trim(gpu), framework.record(), framework.about()]
result["live"] = torch.cuda.is_initialized()
result["refused"] = raised(lambda: apply_caps(framework, {uuid: GIB}))
result["oom"] = [torch.OutOfMemoryError.__name__]
"""
    )
    assert found["state"] == "absent" and found["nothing"] == [None, None, None, {}] and not found["live"]
    assert "this build has no CUDA allocator" in found["refused"] and found["oom"] == ["OutOfMemoryError"]


def test_imported_under_the_hook(alone: Run) -> None:
    found = alone(
        """
        import importlib.machinery
        from memguard._frameworks.import_hook import ImportHook
        hook, seen = ImportHook(), []
        hook.watch("torch", lambda: seen.append(sys.modules["torch"].zeros(2).tolist()))
        import torch
        import importlib; importlib.reload(torch.version)
        result["seen"] = seen
        result["gone"] = hook not in sys.meta_path
        result["loader"] = type(torch.__loader__) is type(torch.__spec__.loader) is importlib.machinery.SourceFileLoader
        import importlib.resources
        result["data"] = importlib.resources.files("torch").joinpath("version.py").is_file()
        """
    )
    assert found == {"seen": [[0.0, 0.0]], "gone": True, "loader": True, "data": True}


def test_the_cap_waits_in_torchs_own_queue_and_is_set_when_torch_initialises(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
applied = apply_caps(framework, {uuid: 4 * GIB})
result["before"] = [torch.cuda.is_initialized(), found.started, dict(found.fractions), framework.usage(gpu)]
result["kind"] = [applied.enforcement.value, len(applied.notes), applied.permanent]
torch.cuda.init()
result["after"] = [torch.cuda.is_initialized(), found.started, exact(found)]
applied.undo()
result["undone"] = found.fractions[0]
"""
    )
    assert found["before"] == [False, 0, {}, None]
    assert found["kind"] == ["enforced", 1, None]
    assert found["after"] == [True, 1, 4 << 30] and found["undone"] == 1.0


def test_undone_before_torch_initialises_nothing_is_left_in_the_queue(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
before = list(torch.cuda._queued_calls)
applied = apply_caps(framework, {uuid: 4 * GIB})
result["queued"] = len(torch.cuda._queued_calls) - len(before)
mine = torch.cuda._queued_calls[-1][0]
applied.undo()
result["same"] = torch.cuda._queued_calls == before
torch.cuda.init()
mine()
result["fractions"] = found.fractions
"""
    )
    assert found == {"queued": 1, "same": True, "fractions": {}}, "nor where torch runs it all the same"


def test_every_cap_is_set_to_the_exact_byte(with_torch: Run) -> None:
    """PyTorch truncates fraction × total: whatever the two are, what comes out is the cap."""
    found = with_torch(
        SETUP
        + """
import random
from memguard._devices.catalog import CATALOGUE
found, rng = card(host), random.Random(1)
torch.cuda.init()
wrong, tried = [], 0
totals = [model.total - model.reserved for model in CATALOGUE.values()]
totals += [rng.randrange(GIB, 300 * GIB) for _ in range(40)]
for total in totals:
    found.total = total
    for _ in range(200):
        cap = rng.choice([rng.randrange(1, total // (2 * MIB) + 1) * 2 * MIB, rng.randrange(1, total + 1)])
        framework._set_fraction(torch, 0, cap)
        tried += 1
        if exact(found, total) != cap:
            wrong.append((cap, total, exact(found, total)))
result["wrong"], result["tried"] = wrong[:5], tried
"""
    )
    assert found["wrong"] == [] and found["tried"] >= 9600


def test_a_live_torch_is_capped_at_once_and_what_it_holds_above_is_told(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
torch.cuda.init()
found.stats = {"reserved_bytes": {"all": {"current": 5 * GIB}}, "allocated_bytes": {"all": {"current": GIB}}}
applied = apply_caps(framework, {uuid: 4 * GIB})
result["exact"], result["held"] = exact(found), framework.usage(gpu).held
framework.resize({uuid: 6 * GIB})
result["resized"] = exact(found)
applied.undo()
result["restored"] = found.fractions[0]
"""
    )
    assert found == {"exact": 4 << 30, "held": 5 << 30, "resized": 6 << 30, "restored": 1.0}


def test_expandable_segments_are_capped_one_piece_lower(with_torch: Run) -> None:
    """Measured: they are mapped in 20 MiB pieces and may pass the fraction by less than one."""
    found = with_torch(
        SETUP
        + """
found = card(host, expandable=True)
apply_caps(framework, {uuid: 4 * GIB})
torch.cuda.init()
result["exact"] = exact(found)
result["about"] = framework.about()
result["small"] = raised(lambda: framework.resize({uuid: 20 * MIB}))
result["stays"] = exact(found)
"""
    )
    assert found["exact"] == (4 << 30) - (20 << 20) and found["about"] == {"allocator": "expandable_segments"}
    assert "need a cap above 20.0 MiB" in found["small"] and found["stays"] == found["exact"]


def test_a_fraction_that_reads_back_differently_is_refused_and_taken_back(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
torch.cuda.init()
torch._C._cuda_getMemoryFraction = lambda ordinal: 1.0
result["text"] = raised(lambda: apply_caps(framework, {uuid: 4 * GIB}))
result["restored"], result["drift"] = found.fractions[0], drifts(framework)
"""
    )
    assert "set 4294967296 bytes, read back" in found["text"] and found["restored"] == 1.0 and found["drift"] == []


def test_a_refusal_in_the_queue_comes_out_of_torchs_own_initialisation(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
found.multiprocessors = 1
apply_caps(framework, {uuid: 4 * GIB})
try:
    torch.cuda.init()
except torch.cuda.DeferredCudaCallError as error:
    result["text"], result["cause"] = str(error), type(error.__cause__).__name__
result["live"] = torch.cuda.is_initialized()
result["fractions"] = found.fractions
"""
    )
    assert found["cause"] == "CapNotApplied" and not found["live"] and found["fractions"] == {}
    for part in ("1 multiprocessors, the driver says 132", "SIGFPE", "import torch before tensorflow"):
        assert part in found["text"]


def test_usage_from_torchs_statistics(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
torch.cuda.init()
def stats(**values): return {name: {"all": both} for name, both in values.items()}
found.stats = stats(
    reserved_bytes={"current": 100 * MIB, "peak": 200 * MIB}, allocated_bytes={"current": 40 * MIB, "peak": 90 * MIB},
    active_bytes={"current": 44 * MIB}, inactive_split_bytes={"current": 16 * MIB},
)
result["whole"] = framework.usage(gpu)._asdict()
found.stats = stats(reserved_bytes={"current": 100 * MIB}, allocated_bytes={"current": 40 * MIB})
result["less"] = framework.usage(gpu)._asdict()
found.stats = {}
result["none"] = framework.usage(gpu)._asdict()
from dataclasses import replace
result["stranger"] = framework.usage(replace(gpu, uuid="GPU-other"))
"""
    )
    mib = 1 << 20
    bounds = {"held_at_least": None, "held_at_most": None}
    assert found["whole"] == {
        "held": 100 * mib, "in_use": 40 * mib, "reclaimable": 40 * mib, "peak": 90 * mib, **bounds,
    }  # fmt: skip
    assert found["less"]["reclaimable"] == 60 * mib and found["less"]["peak"] is None
    assert found["none"] == {"held": None, "in_use": None, "reclaimable": None, "peak": None, **bounds}
    assert found["stranger"] is None


def test_a_gpu_that_torch_never_used_has_no_row(with_torch: Run) -> None:
    """Live on all GPUs at once, it holds memory on few: a full card that it does not use is not its own."""
    found = with_torch(
        """
import torch
from memguard._frameworks.torch.adapter import Torch
host = Host("h200", "h200")
found = card(host)
framework = Torch(host)
apply_caps(framework, dict.fromkeys(host.uuids, 4 * GIB))
torch.cuda.init()
def stats(ordinal):
    current, peak, ever = figures[ordinal]
    return {"reserved_bytes": {"all": {"current": current, "peak": peak, "allocated": ever}},
            "allocated_bytes": {"all": {"current": current, "peak": peak}}}
torch._C._cuda_memoryStats = stats
def rows(): return [usage and usage.held for usage in map(framework.usage, host.gpus)]
figures = [(MIB, MIB, MIB), (0, 0, 0)]
result["one"] = rows()
figures = [(0, MIB, MIB), (0, 0, MIB)]
result["freed"] = rows()
class Pool:
    high = 0
    def reserved(self): return self.high // 2
    def used(self): return 0
    def peak(self): return self.high
figures = [(0, 0, 0), (0, 0, 0)]
framework._pools = {uuid: Pool() for uuid in host.uuids}
result["pool"] = rows()
framework._pools[host.uuids[1]].high = 4
result["pooled"] = rows()
Pool.used = lambda self: self.high // 4
sizes = (4, 64 * MIB, 256 * MIB)
result["returns"] = []
for framework._pools[host.uuids[1]].high in sizes:
    usage = framework.usage(host.gpus[1])
    result["returns"].append([usage.held, usage.in_use, usage.reclaimable])
"""
    )
    mib = 1 << 20
    assert found.pop("returns") == [[2, 1, 0], [32 * mib, 16 * mib, 0], [128 * mib, 64 * mib, None]]
    assert found == {"one": [1 << 20, None], "freed": [0, 0], "pool": [None, None], "pooled": [None, 2]}


def test_a_fraction_that_somebody_set_since_is_not_overwritten_by_the_undo(with_torch: Run) -> None:
    found = with_torch(
        """
import torch
from memguard._frameworks.torch.adapter import Torch
host = Host("h200", "h200", "h200")
found = card(host)
torch._C._cuda_getMemoryFraction = lambda n: int(found.fractions.get(n, 1.0) * TOTAL) / TOTAL  # as torch computes it
torch.cuda.init()
applied = apply_caps(Torch(host), dict.fromkeys(host.uuids, 4 * GIB + 2 * MIB))
found.fractions[1], found.fractions[2] = 0.001, 0.9
applied.undo()
result["left"] = [found.fractions[n] for n in range(3)]
"""
    )
    assert found["left"] == [1.0, 0.001, 0.9]


def test_an_undo_takes_everything_back_whatever_fails(with_torch: Run) -> None:
    found = with_torch(
        """
import torch
from memguard.errors import DeviceError
from memguard._frameworks.torch.adapter import Torch
host = Host("h200", "h200")
found = card(host)
torch.cuda.init()
framework, done = Torch(host), []
applied = apply_caps(framework, dict.fromkeys(host.uuids, 4 * GIB))
class Pool:
    def restore(self):
        done.append(1)
        raise DeviceError("CUDA: cuDeviceSetMemPool")
framework._pools = {uuid: Pool() for uuid in host.uuids}
try:
    applied.undo()
except DeviceError as error:
    result["text"] = str(error)
result["done"], result["left"] = done, [found.fractions[n] for n in (0, 1)]
applied.undo()
result["again"] = done
"""
    )
    assert found == {"text": "CUDA: cuDeviceSetMemPool", "done": [1, 1], "left": [1.0, 1.0], "again": [1, 1]}


@pytest.mark.parametrize(
    "change",
    [
        "found.multiprocessors = 1",
        "del torch.cuda._lazy_call; torch.cuda.is_initialized = lambda: False",
        "torch._C._cuda_getMemoryFraction = lambda n: 0.5 if n == 1 in found.fractions else found.fractions.get(n, 1)",
        "torch.cuda.get_device_properties = broken",
    ],
)
def test_after_a_refusal_nothing_stays(with_torch: Run, change: str) -> None:
    found = with_torch(
        f"""
import torch
from memguard._frameworks.torch.adapter import Torch
host = Host("h200", "h200")
found = card(host)
torch.cuda.init()
framework = Torch(host)
def broken(ordinal): raise RuntimeError("no properties")
{change}
try:
    apply_caps(framework, dict.fromkeys(host.uuids, 4 * GIB))
except Exception as error:
    result["error"] = type(error).__name__
result["caps"] = [framework._caps, framework._before, framework._set, framework._expandable]
result["left"] = [found.fractions.get(n, 1.0) for n in (0, 1)]
"""
    )
    assert found["error"] in ("CapNotApplied", "RuntimeError")
    assert found["caps"] == [{}, {}, {}, None] and found["left"] == [1.0, 1.0]


@pytest.mark.parametrize("expandable", [True, False])
def test_what_a_request_takes_is_foretold_without_a_snapshot(with_torch: Run, expandable: bool) -> None:
    found = with_torch(
        SETUP
        + f"""
found = card(host, expandable={expandable})
torch.cuda.init()
read, asked = torch._C._cuda_memorySnapshot, []
torch._C._cuda_memorySnapshot = lambda *args: asked.append(1) or read(*args)
foretold = [framework.footprint(64 * MIB)]
early = len(asked)
applied = apply_caps(framework, {{uuid: 4 * GIB}})
applied_at = len(asked)
foretold += [framework.footprint(64 * MIB) for _ in range(5)]
result["asked"] = [early, len(asked) - applied_at]
applied.undo()
foretold.append(framework.footprint(64 * MIB))
result["undone"], result["foretold"] = len(asked) - applied_at, sorted(set(foretold))
"""
    )
    assert found == {"asked": [1, 0], "undone": 1, "foretold": [(84 if expandable else 64) << 20]}


def test_a_trim_empties_the_cache_but_never_while_a_graph_is_captured(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
framework.trim(gpu)
result["not live"] = found.emptied
torch.cuda.init()
found.capturing = True
framework.trim(gpu)
result["capturing"] = found.emptied
found.capturing = False
framework.trim(gpu)
result["free"] = found.emptied
"""
    )
    assert found == {"not live": 0, "capturing": 0, "free": 1}


def test_torch_gives_back_its_whole_cache_and_a_driver_pool_whole_pieces(with_torch: Run) -> None:
    """`cuMemPoolTrimTo` leaves at least what it is told to keep: so that is rounded down to pieces of 32 MiB."""
    found = with_torch(
        SETUP
        + """
from types import SimpleNamespace
found = card(host)
framework.trim_partly(gpu, 1)
result["not live"] = found.emptied
apply_caps(framework, {uuid: 4 * GIB})
torch.cuda.init()
framework.trim_partly(gpu, 1)
result["native"] = found.emptied
kept, synchronized = [], []
torch.cuda.synchronize = synchronized.append
framework._pools[uuid] = SimpleNamespace(reserved=lambda: 320 * MIB, trim=kept.append)
for needed in (1, 32 * MIB, 33 * MIB, GIB):
    framework.trim_partly(gpu, needed)
found.capturing = True
framework.trim_partly(gpu, GIB)
result["kept"] = [size // MIB for size in kept]
result["waited"], result["emptied"] = len(synchronized), found.emptied
"""
    )
    assert found == {"not live": 0, "native": 1, "kept": [288, 288, 256, 0], "waited": 4, "emptied": 1}


def test_gpus_are_matched_by_uuid_and_never_by_number(with_torch: Run) -> None:
    """CUDA_VISIBLE_DEVICES=1,0 reverses CUDA's order and not NVML's."""
    found = with_torch(
        """
import torch
from memguard._frameworks.torch.adapter import Torch
host = Host("h200", "h200")
found = card(host, order=(1, 0))
framework = Torch(host)
apply_caps(framework, {host.uuids[0]: 4 * GIB, host.uuids[1]: 8 * GIB})
torch.cuda.init()
result["caps"] = [round(found.fractions[ordinal] * TOTAL) for ordinal in (0, 1)]
"""
    )
    assert found["caps"] == [8 << 30, 4 << 30]


def test_a_gpu_that_the_budget_does_not_have_is_left_alone(with_torch: Run) -> None:
    found = with_torch(
        """
import torch
from memguard._frameworks.torch.adapter import Torch
host = Host("h200", "h200")
found = card(host)
applied = apply_caps(Torch(host), {host.uuids[1]: 8 * GIB})
torch.cuda.init()
result["set"] = list(found.fractions)
"""
    )
    assert found["set"] == [1]


def test_a_cap_changed_before_torch_initialises_is_the_one_that_is_set(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
apply_caps(framework, {uuid: 4 * GIB})
framework.resize({uuid: 6 * GIB})
result["before"] = dict(found.fractions)
torch.cuda.init()
result["exact"] = exact(found)
"""
    )
    assert found == {"before": {}, "exact": 6 << 30}


def test_a_forked_child_sets_nothing_when_it_initialises(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
apply_caps(framework, {uuid: 4 * GIB})
framework.forked()
found.multiprocessors = 1
torch.cuda.init()
result["fractions"] = found.fractions
"""
    )
    assert found["fractions"] == {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("torch.version.hip = '6.2'", "this is a ROCm build"),
        ("del torch._C._cuda_setMemoryFraction", "this build has no CUDA allocator"),
        ("del torch.cuda._lazy_call", "has no torch.cuda._lazy_call"),
    ],
)
def test_builds_that_cannot_be_capped_are_refused(with_torch: Run, change: str, text: str) -> None:
    found = with_torch(
        f"{SETUP}\nfound = card(host)\n{change}\nresult['text'] = raised(lambda: apply_caps(framework, {{uuid: GIB}}))"
    )
    assert text in found["text"] and "fix: " in found["text"]


def test_the_async_backend_cannot_be_capped_without_a_driver_pool(with_torch: Run) -> None:
    """Measured: it compares the fraction with bytes in use, and let its pool hold 4 % more."""
    found = with_torch(
        SETUP
        + """
found = card(host, backend="cudaMallocAsync")
torch.cuda.init()
result["text"], result["fractions"] = raised(lambda: apply_caps(framework, {uuid: 4 * GIB})), found.fractions
result["record"] = framework.record()
"""
    )
    assert "nothing has initialised CUDA" in found["text"] and "cudaMallocAsync" in found["text"]
    assert "fix: use PyTorch's native allocator" in found["text"]
    assert found["fractions"] == {} and found["record"] is None


def test_an_older_torch_that_does_not_read_fractions_back(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
del torch._C._cuda_getMemoryFraction
applied = apply_caps(framework, {uuid: 4 * GIB})
torch.cuda.init()
result["exact"] = exact(found)
"""
    )
    assert found["exact"] == 4 << 30


def test_under_the_guard_from_init_to_shutdown(with_torch: Run) -> None:
    found = with_torch(
        """
import torch
from memguard._guard.guard import Guard
from memguard._budget import from_mapping
from memguard._frameworks.torch import settings
settings.cuda_version = lambda: "13.0"
host = Host()
found = card(host)
guard = Guard(from_mapping({"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}}), host)
guard.start()
result["row"] = guard.ledger().devices[0].row("torch").enforcement
torch.cuda.init()
result["exact"] = int(found.fractions[0] * TOTAL)
found.stats = {"reserved_bytes": {"all": {"current": GIB}}, "allocated_bytes": {"all": {"current": GIB}}}
result["held"] = guard.ledger().devices[0].row("torch").bytes
result["stays"] = guard.stop()
result["restored"] = found.fractions[0]
"""
    )
    assert found == {"row": "enforced", "exact": 4 << 30, "held": 1 << 30, "stays": [], "restored": 1.0}


def test_the_private_names_that_memguard_uses_exist_in_this_torch(with_torch: Run) -> None:
    found = with_torch(
        """
import torch
result["lazy_call"] = callable(torch.cuda._lazy_call)
result["queue"] = type(torch.cuda._queued_calls).__name__
result["entries"] = [callable(entry[0]) for entry in torch.cuda._queued_calls]
result["oom"] = issubclass(torch.OutOfMemoryError, RuntimeError)
result["history"] = [callable(torch.cuda.memory._snapshot), callable(torch.cuda.memory._record_memory_history)]
"""
    )
    assert found["lazy_call"] and found["queue"] == "list" and found["oom"]
    assert found["entries"] and all(found["entries"]) and all(found["history"])


# refused requests


def test_the_observer_is_attached_once_and_only_when_torch_is_live(with_torch: Run) -> None:
    """It cannot be taken back, so it tells nobody after the undo, in a forked child and of a GPU without a cap."""
    found = with_torch(
        SETUP
        + """
from memguard._frameworks.torch import adapter
found, told = card(host), []
framework.on_refusal = lambda moment: told.append(moment)
applied = apply_caps(framework, {uuid: 4 * GIB})
result["before"] = len(found.observers)
torch.cuda.init()
result["live"] = len(found.observers)
(observer,) = found.observers
observer(0, 2 * GIB, 4 * GIB, 100 * GIB)
observer(1, 2 * GIB, 4 * GIB, 100 * GIB)
result["told"] = [[m.framework, m.source, m.uuid == uuid, m.requested, m.free, m.thread > 0] for m in told]
framework.on_refusal = lambda moment: 1 / 0
result["raises"] = observer(0, GIB, 4 * GIB, GIB)
framework.on_refusal = lambda moment: told.append(moment)
framework.resize({uuid: 6 * GIB})
pid = os.fork()
if pid == 0:
    observer(0, GIB, 4 * GIB, GIB)
    os._exit(0 if len(told) == 1 else 1)
result["child"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
applied.undo()
observer(0, GIB, 4 * GIB, GIB)
result["after"] = len(told)
second = Torch(host)
second.on_refusal = lambda moment: told.append(moment)
apply_caps(second, {uuid: 4 * GIB})
observer(0, GIB, 4 * GIB, GIB)
result["second"], result["attached"] = len(told), len(found.observers)
result["unseen"] = [framework.unseen(), second.unseen()]
"""
    )
    assert found["before"] == 0 and found["live"] == 1 and found["told"] == [
        ["torch", "observer", True, 2 << 30, 100 << 30, True]
    ]  # fmt: skip
    assert found["raises"] is None and found["child"] == 0 and found["after"] == 1
    assert found["second"] == 2 and found["attached"] == 1 and found["unseen"] == [None, None]


def test_nothing_comes_out_of_the_observer_whatever_listens_to_the_log(with_torch: Run) -> None:
    """It is called from C++: an error there would take the place of torch's own."""
    found = with_torch(
        SETUP
        + """
import logging
class Wordless(RuntimeError):
    def __str__(self): raise ValueError("no words")
def refuse(*args): raise Wordless
found = card(host)
apply_caps(framework, {uuid: 4 * GIB})
torch.cuda.init()
(observer,) = found.observers
handler = logging.Handler()
handler.handle = refuse
logging.getLogger("memguard").addHandler(handler)
logging.getLogger("memguard").setLevel(logging.DEBUG)
framework.on_refusal = refuse
result["recorded"] = observer(0, 2 * GIB, 4 * GIB, 100 * GIB)
torch._C._cuda_memoryStats = refuse
result["read"] = observer(0, 2 * GIB, 4 * GIB, 100 * GIB)
"""
    )
    assert found["recorded"] is None and found["read"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("del torch._C._cuda_attach_out_of_memory_observer", "native allocator has no observer"),
        ("torch._C._cuda_getAllocatorBackend = lambda: 'other'", "other allocator has no observer"),
        ("def no(f): raise RuntimeError('not yet')\ntorch._C._cuda_attach_out_of_memory_observer = no", "not yet"),
    ],
)
def test_a_torch_without_observer_is_capped_and_says_what_is_not_seen(with_torch: Run, change: str, words: str) -> None:
    found = with_torch(
        f"{SETUP}\nfound = card(host)\n{change}\ntorch.cuda.init()\napply_caps(framework, {{uuid: 4 * GIB}})\n"
        "result['unseen'], result['exact'] = framework.unseen(), exact(found)"
    )
    assert words in found["unseen"] and found["exact"] == 4 << 30


def test_a_caught_error_and_one_that_leaves_a_block_under_the_guard(with_torch: Run) -> None:
    """The figures are of the observer's call, on whatever thread, and not of when the exception is seen."""
    found = with_torch(
        """
import torch, threading, memguard
from memguard import api
from memguard._runtime import runtime
from memguard._frameworks.torch import settings
settings.cuda_version = lambda: "13.0"
host = Host()
found = card(host)
runtime.open_host = lambda simulate: host
guard = memguard.init({"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}})
torch.cuda.init()
(observer,) = found.observers
def holds(held, used):
    sizes = {"reserved_bytes": held, "allocated_bytes": used, "active_bytes": used, "inactive_split_bytes": held - used}
    found.stats = {name: {"all": {"current": size}} for name, size in sizes.items()}
def fail(size):
    holds(3900 * MIB, 3800 * MIB)
    thread = threading.Thread(target=observer, args=(0, size, 4 * GIB, 100 * GIB))  # as backward does
    thread.start()
    thread.join()
    holds(3900 * MIB, 1000 * MIB)
    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB. GPU 0 has")
def told():
    report = memguard.last_oom()
    return [report.reason, report.caught, report.moment.in_use // MIB, report.moment.source, report.why]
try: fail(GIB)
except torch.OutOfMemoryError: pass
result["caught"] = told()
try:
    with memguard.workload("step", framework="torch"): fail(GIB + 100 * MIB)
except torch.OutOfMemoryError as error: pass
result["left"] = told()
row = memguard.ledger().devices[0].row("torch")
result["refused"] = row.refused
memguard.shutdown()
"""
    )
    assert found["caught"][:4] == ["cap", True, 3800, "observer"] and found["refused"] == 2
    assert found["left"][:4] == ["cap", False, 3800, "observer"]
    assert found["left"][4] == (
        "its cap of 4.00 GiB was reached: it held 3.81 GiB (3.71 GiB in use) when the request failed; "
        "now 1000.0 MiB are in use"
    )


# what the user has set


def test_without_its_caching_allocator_there_is_no_cap(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
found = card(host)
text = raised(lambda: apply_caps(framework, {uuid: GIB}))
result["text"], result["queued"] = text, any("memguard" in str(entry[0]) for entry in torch.cuda._queued_calls)
result["setting"] = setting(lambda: apply_caps(framework, {uuid: GIB}))
"""
    )
    assert "switches off the caching allocator" in found["text"] and "unset it" in found["text"]
    assert found["setting"] == "PYTORCH_NO_CUDA_MEMORY_CACHING" and not found["queued"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("per_process_memory_fraction:0.5", True),
        ("expandable_segments:False,per_process_memory_fraction: .5 ,max_split_size_mb:64", True),
        ("per_process_memory_fraction:5e-1", True),
        ("per_process_memory_fraction:1.0", True),
        ("per_process_memory_fraction:0.01", False),
        ("per_process_memory_fraction:1e-2", False),
        ("per_process_memory_fraction:nan", False),
        ("per_process_memory_fraction:half", False),
        ("max_split_size_mb:64", False),
        ("", False),
    ],
)
def test_a_looser_fraction_in_the_environment_is_a_conflict_before_torch_is_live(
    with_torch: Run, name: str, text: str, refused: bool
) -> None:
    found = with_torch(
        SETUP
        + f"""
os.environ[{name!r}] = {text!r}
found = card(host)
result["setting"] = setting(lambda: apply_caps(framework, {{uuid: 4 * GIB}}))
result["live"] = torch.cuda.is_initialized()
"""
    )
    assert found == {"setting": f"{name}={text}" if refused else None, "live": False}


def test_of_the_two_variables_torch_reads_the_first(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "per_process_memory_fraction:0.9"
os.environ["PYTORCH_ALLOC_CONF"] = "per_process_memory_fraction:0.01"
result["first"] = setting(lambda: apply_caps(framework, {uuid: 4 * GIB}))
os.environ["PYTORCH_ALLOC_CONF"] = "per_process_memory_fraction:0.8"
result["looser"] = setting(lambda: apply_caps(framework, {uuid: 4 * GIB}))
os.environ["PYTORCH_ALLOC_CONF"] = ""
result["empty"] = setting(lambda: apply_caps(framework, {uuid: 4 * GIB}))
"""
    )
    assert found["first"] is None and found["looser"] == "PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.8"
    assert found["empty"] == "PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.9"


def test_a_fraction_of_the_environment_is_held_against_the_caps_of_its_gpus_only(with_torch: Run) -> None:
    found = with_torch(
        """
import torch
from memguard._frameworks.torch.adapter import Torch
os.environ["PYTORCH_ALLOC_CONF"] = "per_process_memory_fraction:0.1"
host = Host("h200", "h200")
found = card(host)
result["one"] = setting(lambda: apply_caps(Torch(host), {host.uuids[1]: 100 * GIB}))
result["both"] = setting(lambda: apply_caps(Torch(host), {host.uuids[0]: 100 * GIB, host.uuids[1]: GIB}))
"""
    )
    assert found["one"] is None and found["both"] is not None


@pytest.mark.parametrize("live", [True, False])
def test_a_stricter_fraction_of_the_users_own_stays(with_torch: Run, live: bool) -> None:
    found = with_torch(
        SETUP
        + f"""
found = card(host)
found.fractions[0] = 0.01  # set_per_process_memory_fraction, or what the environment came to
if {live}: torch.cuda.init()
applied = apply_caps(framework, {{uuid: 4 * GIB}})
torch.cuda.init()
result["fraction"], result["notes"], result["drift"] = found.fractions[0], framework.notes, drifts(framework)
framework.resize({{uuid: GIB}})
result["lower"] = exact(found)
framework.resize({{uuid: 4 * GIB}})
result["again"], result["notes again"] = round(found.fractions[0], 6), len(framework.notes)
applied.undo()
result["undone"] = found.fractions[0]
"""
    )
    assert round(found["fraction"], 6) == 0.01 and found["drift"] == [] and found["lower"] == 1 << 30
    assert found["notes"] == ["torch: its own fraction of 0.01 is stricter than the cap and stays"]
    assert found["again"] == 0.01 and found["notes again"] == 1 and found["undone"] == 0.01


def test_a_looser_fraction_of_the_users_own_is_a_conflict_and_nothing_stays(with_torch: Run) -> None:
    found = with_torch(
        """
import torch
from memguard._frameworks.torch.adapter import Torch
host = Host("h200", "h200")
found = card(host)
framework = Torch(host)
torch.cuda.init()
found.fractions[1] = 0.5
caps = dict.fromkeys(host.uuids, 4 * GIB)
result["text"] = raised(lambda: apply_caps(framework, caps))
result["setting"] = setting(lambda: apply_caps(framework, caps))
result["left"], result["drift"] = [found.fractions.get(n, 1.0) for n in (0, 1)], drifts(framework)
found.fractions[1] = 1.0
result["applied"] = apply_caps(framework, caps).enforcement.value
"""
    )
    assert found["setting"] == "torch.cuda.set_per_process_memory_fraction(0.5)"
    assert "allows 69.90 GiB, more than the cap of 4.00 GiB" in found["text"]
    assert found["left"] == [1.0, 0.5] and found["drift"] == [] and found["applied"] == "enforced"


def test_a_looser_fraction_set_before_torch_is_live_comes_out_of_its_initialisation(with_torch: Run) -> None:
    found = with_torch(
        """
import torch
from memguard._frameworks.torch.adapter import Torch
host = Host("h200", "h200")
found = card(host)
apply_caps(Torch(host), dict.fromkeys(host.uuids, 4 * GIB))
found.fractions[1] = 0.5
try:
    torch.cuda.init()
except torch.cuda.DeferredCudaCallError as error:
    result["cause"], result["text"] = type(error.__cause__).__name__, str(error)
result["left"], result["live"] = [found.fractions[n] for n in (0, 1)], torch.cuda.is_initialized()
"""
    )
    assert found["cause"] == "ConflictingSetting" and "set_per_process_memory_fraction(0.5)" in found["text"]
    assert found["left"] == [1.0, 0.5] and not found["live"], "the first GPU's is taken back"


def test_a_resize_is_no_conflict_with_a_fraction_that_was_there_before(with_torch: Run) -> None:
    """Stricter than the first cap it stayed; lower caps are the budget's own."""
    found = with_torch(
        SETUP
        + """
found = card(host)
torch.cuda.init()
found.fractions[0] = 0.5
apply_caps(framework, {uuid: 100 * GIB})
result["own"] = round(found.fractions[0], 6)
result["resized"] = raised(lambda: framework.resize({uuid: 4 * GIB}))
result["exact"] = exact(found)
"""
    )
    assert found == {"own": 0.5, "resized": None, "exact": 4 << 30}


def test_a_fraction_raised_later_is_told_and_a_lowered_one_is_not(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
applied = apply_caps(framework, {uuid: 4 * GIB})
result["not live"] = drifts(framework)
torch.cuda.init()
result["set"] = drifts(framework)
before = found.fractions[0]
found.fractions[0] = 0.9
result["looser"] = drifts(framework)
found.fractions[0] = 0.001
result["lowered"] = drifts(framework)
found.fractions[0] = 0.9
del torch._C._cuda_getMemoryFraction
result["older"] = drifts(framework)
applied.undo()
result["undone"] = drifts(framework)
"""
    )
    assert found["not live"] == found["set"] == found["lowered"] == found["undone"] == found["older"] == []
    (said,) = found["looser"]
    assert "fraction on cuda:0 was raised from 0.0286" in said and "to 0.9 after memguard.init" in said


RMM = """
import types
class Resource:
    def __init__(self, upstream=None, allocation_limit=0): self.limit = allocation_limit
    def get_allocated_bytes(self): return 7
class CudaMemoryResource(Resource): pass
class LimitingResourceAdaptor(Resource): pass
resources = {0: CudaMemoryResource(), 1: CudaMemoryResource()}
def rmm():
    sys.modules["rmm"] = types.ModuleType("rmm")
    sys.modules["rmm.allocators.torch"] = types.ModuleType("rmm.allocators.torch")
    sys.modules["rmm"].mr = types.SimpleNamespace(
        CudaMemoryResource=CudaMemoryResource, LimitingResourceAdaptor=LimitingResourceAdaptor,
        get_per_device_resource=resources.__getitem__, set_per_device_resource=resources.__setitem__)
"""


def test_an_allocator_of_the_users_own_is_a_conflict(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host, backend="pluggable")
result["setting"] = setting(lambda: apply_caps(framework, {uuid: GIB}))
result["live"], result["fractions"] = torch.cuda.is_initialized(), found.fractions
"""
    )
    assert found == {"setting": "torch.cuda.memory.change_current_allocator", "live": False, "fractions": {}}


@pytest.mark.parametrize("live", [True, False])
def test_rmms_allocator_is_limited_in_rmm(with_torch: Run, live: bool) -> None:
    found = with_torch(
        SETUP
        + RMM
        + f"""
found = card(host, backend="pluggable")
rmm()
if {live}: torch.cuda.init()
applied = apply_caps(framework, {{uuid: GIB}})
result["applied"] = [applied.enforcement.value, "RMM" in applied.notes[0], resources[0].limit]
result["live"] = torch.cuda.is_initialized()
torch.cuda.init()
result["usage"], result["drift"] = framework.usage(gpu).held, drifts(framework)
result["resize"] = raised(lambda: framework.resize({{uuid: 2 * GIB}})) is not None
applied.undo()
result["undone"], result["fractions"] = type(resources[0]).__name__, found.fractions
"""
    )
    assert found["applied"] == ["enforced", True, 1 << 30] and found["live"] is live, "asking makes nothing live"
    assert found["usage"] == 7 and found["drift"] == [] and found["resize"]
    assert found["undone"] == "CudaMemoryResource" and found["fractions"] == {}


def test_an_allocator_swapped_before_torch_is_live_comes_out_of_its_initialisation(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
apply_caps(framework, {uuid: GIB})
torch._C._cuda_getAllocatorBackend = lambda: "pluggable"
try:
    torch.cuda.init()
except torch.cuda.DeferredCudaCallError as error:
    result["cause"], result["text"] = type(error.__cause__).__name__, str(error)
result["fractions"] = found.fractions
framework.forked()
torch.cuda.init()
result["child"] = torch.cuda.is_initialized()
"""
    )
    assert found["cause"] == "ConflictingSetting" and "change_current_allocator" in found["text"]
    assert found["fractions"] == {} and found["child"], "a budget of the parent stops no child"


@pytest.mark.parametrize("pool", [False, True])
def test_rmms_allocator_swapped_in_before_torch_is_live_is_limited_or_told(with_torch: Run, pool: bool) -> None:
    found = with_torch(
        SETUP
        + RMM
        + f"""
found = card(host)
applied = apply_caps(framework, {{uuid: GIB}})
rmm()
if {pool}: resources[0] = Resource()
torch._C._cuda_getAllocatorBackend = lambda: "pluggable"
torch.cuda.init()
result["limit"], result["drift"], result["notes"] = resources[0].limit, drifts(framework), framework.notes
applied.undo()
result["undone"], result["fractions"] = type(resources[0]).__name__, found.fractions
"""
    )
    assert found["fractions"] == {}
    if pool:
        assert found["limit"] == 0 and "may hold more than is in use" in found["drift"][0] and found["notes"] == []
    else:
        assert found["limit"] == 1 << 30 and found["drift"] == [] and "capped through RMM" in found["notes"][0]
        assert found["undone"] == "CudaMemoryResource"


def test_an_allocator_swapped_later_is_told(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
apply_caps(framework, {uuid: GIB})
torch.cuda.init()
torch._C._cuda_getAllocatorBackend = lambda: "pluggable"
result["drift"] = drifts(framework)
def stats(ordinal): raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")
torch._C._cuda_memoryStats = stats
result["usage"] = framework.usage(gpu)._asdict()
"""
    )
    assert "its allocator was replaced after memguard.init" in found["drift"][0]
    assert set(found["usage"].values()) == {None}


# what lives beside the cap


GROUPS = """
import torch.distributed as dist
from torch.distributed import distributed_c10d
class NCCL:
    def __init__(self, initialised): self.initialised = initialised
    def _is_initialized(self): return self.initialised
class Group:
    def __init__(self, backend): self.backend = backend
    def _get_backend(self, device):
        assert device == torch.device("cuda")
        if isinstance(self.backend, Exception): raise self.backend
        return self.backend
def add(*backends):
    groups = [Group(backend) for backend in backends]
    distributed_c10d._world.pg_map.update({group: ("nccl", None) for group in groups})
    return groups
"""


def test_each_communicator_that_has_communicated_is_a_library(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + GROUPS
        + """
named = lambda: sorted(framework.libraries())
result["none"] = named()
lazy, first, second = NCCL(False), NCCL(True), NCCL(True)
add(lazy)
result["before its first collective"] = named()
groups = add(first, second, object(), RuntimeError("No backend type associated with device type cuda"))
result["two"] = named()
lazy.initialised = True
result["three"] = named()
del distributed_c10d._world.pg_map[groups[0]]
result["one destroyed"] = named()
"""
    )
    assert found["none"] == found["before its first collective"] == []
    assert found["two"] == found["one destroyed"] == ["nccl 1", "nccl 2"]
    assert found["three"] == ["nccl 1", "nccl 2", "nccl 3"]


def test_a_real_group_of_gloo_counts_nothing(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + GROUPS
        + """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
further = dist.new_group([0])
result["groups"], result["gloo"] = len(distributed_c10d._world.pg_map), sorted(framework.libraries())
add(NCCL(True))
result["beside"] = sorted(framework.libraries())
distributed_c10d._world.pg_map.popitem()
dist.destroy_process_group()
result["destroyed"] = [len(distributed_c10d._world.pg_map), sorted(framework.libraries())]
"""
    )
    assert found == {"groups": 2, "gloo": [], "beside": ["nccl 1"], "destroyed": [0, []]}


def test_a_torch_that_never_communicated_is_not_asked(alone: Run) -> None:
    found = alone(
        """
        from memguard._frameworks.torch.adapter import Torch
        framework = Torch(Host())
        result["before"] = [sorted(framework.libraries()), "torch" in sys.modules]
        import torch
        sys.modules.pop("torch.distributed.distributed_c10d", None)
        result["without"] = sorted(framework.libraries())
        """
    )
    assert found == {"before": [[], False], "without": []}


def test_a_capture_is_seen_and_looking_makes_nothing_live(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found = card(host)
found.capturing = True
result["not live"] = [framework.capturing(), torch.cuda.is_initialized()]
torch.cuda.init()
result["live"] = framework.capturing()
found.capturing = False
result["over"] = framework.capturing()
"""
    )
    assert found == {"not live": [False, False], "live": True, "over": False}


# as text, without torch


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", None),
        ("from typing import Optional\ncuda: Optional[str] = '13.0'\nhip = None\n", "13.0"),
        ("cuda = '11.8'\n", "11.8"),
        ("cuda: str | None = '12.8'\n", "12.8"),
        ("debug = False\nnot_cuda = '12.8'\n", None),
        (None, None),
    ],
)
def test_the_cuda_version_is_read_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, version: str | None
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    if text is not None:
        (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert settings.cuda_version() == version


def test_torchs_history_as_a_trace() -> None:
    def entry(action: str, address: int, size: int, time: int) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "time_us": time}

    first = [
        entry("free_requested", 9, 100, 1_000_000),  # allocated before the recording
        entry("alloc", 1, 512, 2_000_000),
        entry("segment_alloc", 1, 2_097_152, 2_000_000),
        entry("free_requested", 1, 512, 3_000_000),
        entry("free_completed", 1, 512, 3_000_001),
        entry("alloc", 1, 1024, 4_000_000),  # the same address again
    ]
    second = [entry("alloc", 1, 7, 2_500_000), entry("free_requested", 1, 7, 2_600_000)]
    assert history.events([first, second]) == [
        TraceEvent(2.0, "torch", "alloc", 1, 512),
        TraceEvent(3.0, "torch", "free", 1),
        TraceEvent(4.0, "torch", "alloc", 2, 1024),
        TraceEvent(2.5, "torch", "alloc", 3, 7, device=1),
        TraceEvent(2.6, "torch", "free", 3, device=1),
    ]


# settings that the user makes later

LATER = (
    SETUP
    + """
import logging
heard = []
class Handler(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING: heard.append(record.getMessage())
logging.getLogger("memguard").addHandler(Handler())
found = card(host)
torch.cuda.current_device = lambda: 0
changed = []
framework.on_change = lambda: changed.append(drifts(framework))
"""
)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("asked", [1.0, 0.9, 0.5, 0.0287, 0.01, 0.0])
def test_a_later_fraction_meets_the_cap_by_every_name(with_torch: Run, live: bool, asked: float) -> None:
    found = with_torch(
        LATER
        + f"""
import inspect
from torch.cuda import set_per_process_memory_fraction as taken_before
named = [torch.cuda.set_per_process_memory_fraction, torch.cuda.memory.set_per_process_memory_fraction]
signatures = [inspect.signature(f) for f in named]
if {live}: torch.cuda.init()
applied = apply_caps(framework, {{uuid: 4 * GIB}})
for setter in (*named, taken_before, torch._C._cuda_setMemoryFraction):
    setter({asked}, 0)
result["exact"], result["drift"], result["heard"] = exact(found), drifts(framework), heard
result["same"] = named[0] is torch.cuda.set_per_process_memory_fraction is named[1] is taken_before
framework.resize({{uuid: 8 * GIB}})
result["resized"] = exact(found)
applied.undo()
result["undone"] = found.fractions[0]
setter(1.0, 0)
result["free"] = [found.fractions[0], len(heard)]
"""
    )
    cap, total = 4 << 30, 143_156 << 20
    assert found["exact"] == min(cap, int(asked * total)) and found["drift"] == [] and found["same"]
    assert found["resized"] == min(2 * cap, int(asked * total))
    assert found["undone"] == asked, "what the user asked for"
    larger = int(asked * total) > cap
    assert len(found["heard"]) == larger and found["free"] == [1.0, larger]
    assert not larger or "more than its cap, which is 0.02861: the cap holds" in found["heard"][0]


def test_lower_and_back_up_again(with_torch: Run) -> None:
    found = with_torch(
        LATER
        + """
apply_caps(framework, {uuid: 4 * GIB})
torch.cuda.init()
steps = []
for fraction in (0.01, 0.02, 0.9, 0.001, 1.0):
    torch.cuda.set_per_process_memory_fraction(fraction)
    steps.append(exact(found))
result["steps"], result["drift"], result["heard"] = steps, drifts(framework), len(heard)
found.fractions[0] = 0.5  # past all calls
result["poked"] = drifts(framework)
"""
    )
    total = 143_156 << 20
    assert found["steps"] == [int(0.01 * total), int(0.02 * total), 4 << 30, int(0.001 * total), 4 << 30]
    assert found["drift"] == [] and found["heard"] == 2 and "raised from 0.02861 to 0.5" in found["poked"][0]


def test_a_gpu_without_a_cap_takes_every_fraction(with_torch: Run) -> None:
    found = with_torch(
        LATER.replace("Host()", 'Host("h200", "h200")')
        + """
apply_caps(framework, {uuid: 4 * GIB})
torch.cuda.init()
torch.cuda.set_per_process_memory_fraction(0.9, 1)
result["fractions"], result["heard"] = found.fractions[1], heard
"""
    )
    assert found == {"fractions": 0.9, "heard": []}


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("per_process_memory_fraction:0.9", 4 << 30),
        ("per_process_memory_fraction:0.001", int(0.001 * (143_156 << 20))),
        ("expandable_segments:True", (4 << 30) - (20 << 20)),
        ("expandable_segments:True,per_process_memory_fraction:0.9", (4 << 30) - (20 << 20)),
        ("max_split_size_mb:64", 4 << 30),
    ],
)
def test_the_allocators_settings_meet_the_cap(with_torch: Run, live: bool, text: str, holds: int) -> None:
    found = with_torch(
        LATER
        + f"""
import re, warnings
def configure(env):
    match = re.search(r"fraction:([0-9.]+)", env)
    if match: found.fractions[0] = float(match[1])
    if "expandable" in env:
        torch._C._cuda_memorySnapshot = lambda _: {{"allocator_settings": {{"expandable_segments": True}}}}
torch._C._accelerator_setAllocatorSettings = configure
applied = apply_caps(framework, {{uuid: 4 * GIB}})
if {live}: torch.cuda.init()
warnings.simplefilter("ignore")
torch.cuda.memory._set_allocator_settings({text!r})
torch.cuda.init()
result["exact"], result["drift"], result["heard"] = exact(found), drifts(framework), len(heard)
applied.undo()
result["undone"], result["back"] = found.fractions[0], torch._C._accelerator_setAllocatorSettings is configure
"""
    )
    assert found["exact"] == holds and found["drift"] == [] and found["heard"] == ("0.9" in text) and found["back"]
    assert found["undone"] == (0.9 if "0.9" in text else 0.001 if "0.001" in text else 1.0)


def test_an_allocator_that_cannot_be_limited_is_an_error_at_the_call(with_torch: Run) -> None:
    found = with_torch(
        LATER
        + """
import types
swapped = []
torch._C._cuda_changeCurrentAllocator = swapped.append
allocator = types.SimpleNamespace(allocator=lambda: "theirs")
applied = apply_caps(framework, {uuid: 4 * GIB})
result["setting"] = setting(lambda: torch.cuda.memory.change_current_allocator(allocator))
result["swapped"] = list(swapped)
torch.cuda.init()
result["exact"] = exact(found)
torch.cuda.memory.change_current_allocator(allocator)  # live: torch's own refusal, which is not modelled
applied.undo()
torch.cuda.memory.change_current_allocator(allocator)
result["free"] = swapped
"""
    )
    assert found["setting"] == "torch.cuda.memory.change_current_allocator" and found["swapped"] == []
    assert found["exact"] == 4 << 30 and found["free"] == ["theirs", "theirs"]


def test_a_cache_switched_off_in_the_environment_later_comes_out_of_torchs_initialisation(with_torch: Run) -> None:
    found = with_torch(
        LATER
        + """
apply_caps(framework, {uuid: GIB})
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
try:
    torch.cuda.init()
except torch.cuda.DeferredCudaCallError as error:
    result["text"] = str(error)
"""
    )
    assert "switches off the caching allocator" in found["text"]


def test_switching_the_cache_off_is_told_at_once(with_torch: Run) -> None:
    found = with_torch(
        LATER
        + """
torch._C._cuda_cudaCachingAllocator_enable = lambda value: None
apply_caps(framework, {uuid: 4 * GIB})
torch.cuda.init()
torch.cuda.caching_allocator_enable(False)
torch.cuda.caching_allocator_enable(True)
result["changed"] = changed
"""
    )
    assert "caching_allocator_enable(False)" in found["changed"][0][0] and found["changed"][1] == []


def test_an_interrupted_apply_leaves_nothing_replaced(with_torch: Run) -> None:
    found = with_torch(
        LATER
        + """
from memguard._frameworks.replacements import Replacements
torch._C._cuda_changeCurrentAllocator = torch._C._cuda_cudaCachingAllocator_enable = lambda value: None
names = ["_cuda_setMemoryFraction", "_cuda_changeCurrentAllocator", "_cuda_cudaCachingAllocator_enable",
    "_accelerator_setAllocatorSettings"]
before, put = [getattr(torch._C, name) for name in names], Replacements.put
for step in range(5):
    left = [step]
    def interrupted(self, *args):
        if not left[0]: raise KeyboardInterrupt
        left[0] -= 1
        return put(self, *args)
    Replacements.put = interrupted
    try:
        apply_caps(Torch(host), {uuid: GIB})
    except KeyboardInterrupt:
        result[str(step)] = [getattr(torch._C, name) for name in names] == before
"""
    )
    assert found == {str(step): True for step in range(5)}


def test_nothing_of_a_failed_run_is_alive_in_the_next(with_torch: Run) -> None:
    """The error comes out of autograd, with the tensors that it saved."""
    found = with_torch(
        """
        import memguard, torch
        from retried import begin, know, left
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                context.save_for_backward(x)
                return x * 2
            @staticmethod
            def backward(context, gradient):
                held = know(torch.zeros(10))
                if len(left) == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                return gradient
        class Layer(torch.nn.Module):
            def forward(self, x):
                local = know(x * 3)
                return Scaled.apply(local)
        model = torch.nn.Sequential(Layer(), Layer())
        def step():
            begin()
            x = know(torch.ones(5, requires_grad=True))
            y = know(model(x))
            y.sum().backward()
            return "fine"
        result["found"], result["left"] = memguard.retry.call(step), left
        """
    )
    assert found["found"] == "fine" and found["left"] == [0, 0]
