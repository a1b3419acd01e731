"""How often a reading asks the driver and the frameworks: one probe more is a probe too many, and is seen here.

The real adapters, guard and reader, over stand-ins of six live frameworks and stubs of NVML and of libcuda.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from six_live import NAMES, scenario
from stub_gpus import UUIDS, Run

FOUR = ("tensorflow", "torch", "jax", "cupy")
"""Those that ask the driver for nothing but the context."""
ROOT = Path(__file__).resolve().parents[2]
LIVE = """
sys.path.insert(0, {here!r})
import collections, six_live
from six_live import GIB, MIB, asked, driver_calls, nvml_calls
six_live.this_process()
live = six_live.bring({uuid!r}, *{names!r})
guard = memguard.init(six_live.budget(*{names!r}))
kept = [make() for make in live]
usages, drifts = collections.Counter(), collections.Counter()

def watched(counter, framework, name):
    original = getattr(framework, name)
    def call(*arguments):
        counter[framework.name] += 1
        return original(*arguments)
    setattr(framework, name, call)

for framework in guard.frameworks.values():
    watched(usages, framework, "usage")
    watched(drifts, framework, "drift")

def probes(call):
    before = nvml_calls()
    for counter in (asked, usages, drifts):
        counter.clear()
    driver_calls()
    call()
    memory, processes = (now - then for now, then in zip(nvml_calls(), before))
    return dict(nvml=[memory, processes], usage=dict(usages), drift=dict(drifts), asked=dict(asked),
                driver=dict(driver_calls()))

for _ in range(3):  # what is found out once
    memguard.ledger(), guard.sample()
"""
EACH = dict.fromkeys(NAMES, 1)
COUNTERS = {"torch statistics": 1, "tensorflow memory": 1, "jax statistics": 1, "cupy total_bytes": 1,
            "cupy used_bytes": 1}  # fmt: skip
DRIFT = {"cupy get_limit": 1}
"""What it takes to know that every cap still holds. Those of TensorFlow and JAX cannot change once they run."""


@pytest.fixture
def live(run: Run, build: Callable[..., Path], cuda: Path) -> Callable[..., dict[str, Any]]:
    """Run code in a process in which these frameworks are live under a budget."""

    def call(code: str, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
        begin = LIVE.format(here=str(Path(__file__).parent), uuid=UUIDS[0], names=names)
        env = {"LD_LIBRARY_PATH": f"{build()}:{cuda}", "CUDA_STUB_UUIDS": UUIDS[0]}
        return run(begin + code, scenario(UUIDS[0]), env=env)

    return call


def test_what_a_ledger_asks(live: Callable[..., dict[str, Any]]) -> None:
    """NVML before and after; each framework once for its figures, and once whether its cap still holds."""
    found = live(
        """
result["quiet"] = probes(memguard.ledger)
result["others"] = memguard.ledger().devices[0].row("other processes").bytes
result["before"] = memguard.ledger().devices[0].row("torch").in_use
six_live.in_use["torch"] += GIB
result["at work"] = probes(memguard.ledger)
result["after"] = memguard.ledger().devices[0].row("torch").in_use
"""
    )
    for one in (found["quiet"], found["at work"]):
        assert one["nvml"] == [2, 2] and one["usage"] == EACH and one["drift"] == EACH
        assert one["asked"] == {**COUNTERS, **DRIFT}
    assert (found["before"], found["after"], found["others"]) == (1 << 30, 2 << 30, 1 << 30)


def test_what_a_sample_asks(live: Callable[..., dict[str, Any]]) -> None:
    """NVML's processes, and whether the caps hold, with every tenth sample."""
    found = live(
        """
result["samples"] = [probes(guard.sample) for _ in range(40)]
"""
    )
    samples = found["samples"]
    assert all(one["nvml"][0] == 1 and one["usage"] == EACH for one in samples)
    listed = [bool(one["nvml"][1]) for one in samples]
    assert sum(one["nvml"][1] for one in samples) == 4 and listed == (listed[:10] * 4)
    checked = [bool(one["drift"]) for one in samples]
    assert [one["drift"] for one in samples if one["drift"]] == [EACH] * 4 and checked == (checked[:10] * 4)
    assert all(one["asked"] == {**COUNTERS, **(DRIFT if one["drift"] else {})} for one in samples)


def test_what_require_asks(live: Callable[..., dict[str, Any]]) -> None:
    """Its own framework and its cap, and the card; siblings only where something would have to be trimmed."""
    found = live(
        """
result["fits"] = probes(lambda: memguard.require("torch", "1GiB"))
def refused():
    try:
        memguard.require("torch", "500GiB")
    except memguard.BudgetExceeded as error:
        result["error"] = str(error)
result["too much"] = probes(refused)
"""
    )
    fits, refused = found["fits"], found["too much"]
    assert fits["nvml"] == [1, 0] and fits["usage"] == {"torch": 1} and fits["drift"] == {"torch": 1}
    assert fits["asked"] == {"torch statistics": 1}
    assert refused["nvml"] == [2, 0] and refused["usage"] == {**EACH, "torch": 2}
    assert refused["drift"] == {"torch": 1}
    assert "its cap is" in found["error"]


def test_what_a_workload_asks(live: Callable[..., dict[str, Any]]) -> None:
    """Its own framework, before and after."""
    found = live(
        """
def work(**more):
    with memguard.workload("step", framework="torch", **more):
        pass
result["empty"] = [probes(work) for _ in range(30)]
result["needs"] = probes(lambda: work(needs="1GiB"))
"""
    )
    for one in found["empty"]:
        assert one["nvml"] == [0, 0] and one["usage"] == {"torch": 2} and not one["drift"]
        assert one["asked"] == {"torch statistics": 2}
    needs = found["needs"]
    assert needs["nvml"] == [1, 0] and needs["usage"] == {"torch": 3} and needs["drift"] == {"torch": 1}


def test_what_the_driver_is_asked(live: Callable[..., dict[str, Any]]) -> None:
    """Whether another context is current here. That it has a primary one is known, as NVML lists its memory."""
    found = live(
        """
result["ledger"], result["sample"] = probes(memguard.ledger), probes(guard.sample)
result["require"] = probes(lambda: memguard.require("torch", "1GiB"))
""",
        FOUR,
    )
    here = {"cuCtxGetDevice": 1}
    assert found["sample"]["driver"] in (here, {"cuCtxGetDevice": 2})  # the second with a check for drift
    assert found["require"]["driver"] == {}
    assert Counter(found["ledger"]["driver"]) == Counter(cuCtxGetDevice=2, cuCtxGetCurrent=1)


CALLS = {"ledger": 105, "sample": 38, "require": 28, "workload": 37, "tick": 68, "busy tick": 103}
"""The most calls of memguard's own functions in each reading, on any Python: newer ones count fewer."""


def test_how_much_of_memguard_a_reading_runs(live: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Counted, not timed. A program at work finds the CPU's caches cold, and each function that runs is fetched again:
    so their number is what a reading costs. In a busy tick half a second has passed, and every framework's figures
    have changed."""
    found = live(
        f"""
from memguard import api
config = six_live.budget()
config["monitor"] = {{"interval": "1000s", "timeline": {str(tmp_path / "tick.jsonl")!r}}}
guard = memguard.init(config, replace=True)
monitor, package = api.current_session().monitor, memguard.__path__[0]
allocate = six_live.allocators()

def workload():
    with memguard.workload("step", framework="torch"):
        pass

def tick():
    monitor._tick(lambda: False)

def busy():
    now[0] += 0.5
    tick()

def calls(reading, times=20, before=lambda: None):
    count = collections.Counter()
    def see(frame, event, argument):
        count[event == "call" and frame.f_code.co_filename.startswith(package)] += 1
    for _ in range(12):
        before()
        reading()
    for _ in range(times):
        before()
        sys.setprofile(see)
        reading()
        sys.setprofile(None)
    return count[True] / times

def work():
    kept[6:] = [allocate[name]((2 + len(kept) % 2) * MIB) for name in ("tensorflow", "torch", "jax")]
    kept.extend([None] * (len(kept) % 2))

readings = dict(ledger=memguard.ledger, sample=guard.sample, require=lambda: memguard.require("torch", "1GiB"),
                workload=workload, tick=tick)
result["calls"] = {{name: calls(reading) for name, reading in readings.items()}}
import time
now, clock = [time.time()], time.time
time.time = lambda: now[0]
result["calls"]["busy tick"] = calls(busy, before=work)
time.time = clock
memguard.shutdown()
result["lines"] = sum('"sample":' in line for path in pathlib.Path({str(tmp_path)!r}).glob("*.jsonl")
                      for line in path.read_text().splitlines())
"""
    )
    assert {name for name, count in found["calls"].items() if not 10 < count <= CALLS[name]} == set(), found["calls"]
    assert found["calls"].keys() == CALLS.keys() and found["lines"] >= 64


@pytest.mark.parametrize("kind", ["ordinary", "without weak references"])
def test_a_limit_that_cannot_change_is_asked_for_again_of_another_backend(
    live: Callable[..., dict[str, Any]], kind: str
) -> None:
    """JAX's backends can be cleared, and TensorFlow's context reset: the next reading finds that."""
    found = live(
        f"""
bridge, eager = sys.modules["jax._src.xla_bridge"], sys.modules["tensorflow.python.eager.context"]
class Without:
    __slots__ = ("_local",)
    __init__, local_devices = bridge._Client.__init__, bridge._Client.local_devices
Client = bridge._Client if {kind!r} == "ordinary" else Without
def drifted():
    return [note.partition(":")[0] for note in memguard.ledger().notes if "started" in note or "removed" in note]
before, context = bridge._backends["cuda"], eager.context_safe()
result["none"] = drifted()
bridge._backends["cuda"] = Client()
result["same"] = drifted()
bridge._backends["cuda"] = another = Client()
another._local[0].pool.limit = 100 * GIB
result["jax"] = [drifted() for _ in range(3)]
bridge._backends["cuda"] = before
fresh = eager.Context()
fresh._context_handle = object()
eager.context_safe = lambda: fresh
result["tensorflow"] = [drifted() for _ in range(3)]
eager.context_safe = lambda: context
result["back"] = [drifted() for _ in range(3)]
"""
    )
    assert found["none"] == [] and found["same"] == [] and found["jax"] == [["jax"]] * 3
    assert found["tensorflow"] == [["tensorflow"]] * 3 and found["back"] == [[]] * 3


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 65, 80])
def test_every_process_is_listed_with_one_call_or_two(run: Run, build: Callable[..., Path], count: int) -> None:
    """With more processes than there is room for, NVML says how many there are, and is asked again."""
    listed = ",".join(f"{1000 + pid}:{(pid + 1) << 20}" for pid in range(count))
    found = run(
        """
import ctypes
nvml = Nvml()
uuid = nvml.devices()[0].uuid
stub = ctypes.CDLL("libnvidia-ml.so.1")
before = stub.stub_nvml_calls(1)
result["found"] = nvml.processes(uuid)
result["calls"] = stub.stub_nvml_calls(1) - before
nvml.memory(uuid)  # once a reading has worked, NVML's functions are known
before = stub.stub_nvml_calls(1)
result["again"] = nvml.processes(uuid)
result["more calls"] = stub.stub_nvml_calls(1) - before
result["prepared"] = len(nvml._ready)
""",
        processes0=listed,
    )
    assert found["found"] == found["again"] == {str(1000 + pid): (pid + 1) << 20 for pid in range(count)}
    assert found["calls"] == found["more calls"] == (1 if count <= 32 else 2) and found["prepared"] == 1


def test_without_nvidia_ml_pys_way_to_a_call_its_own_function_serves(run: Run) -> None:
    found = run(
        """
import pynvml
nvml = Nvml()
uuid = nvml.devices()[0].uuid
first = nvml.processes(uuid)
del pynvml._nvmlGetFunctionPointer_cache, pynvml._nvmlGetFunctionPointer
pynvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
    type("Process", (), {"pid": 7, "usedGpuMemory": None}), type("Process", (), {"pid": 8, "usedGpuMemory": 5})]
result["found"] = [first, nvml.processes(uuid)]
""",
        processes0="11:4096,12:na",
    )
    assert found["found"] == [{"11": 4096, "12": None}, {"7": None, "8": 5}]
