"""GPU arrays between real processes on a real GPU: values, counting, and who is charged when either side dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
MIB = 1 << 20

PROLOGUE = r"""
import gc, subprocess, sys, time
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import numpy as np, pynvml
from memguard import exchange
from memguard._frameworks.arrays import lifetimes
pynvml.nvmlInit()

CHILD = '''
import json, os, sys, time
def say(x): print("SAYS " + json.dumps(x), flush=True)
def wait(): return sys.stdin.readline()
from memguard import exchange
from memguard._frameworks.arrays import lifetimes
def values(y):
    for name in ("cpu", "get", "copy_to_host"):
        if hasattr(y, name):
            y = getattr(y, name)()
            break
    import numpy
    return numpy.asarray(y)
'''

class Child:
    def __init__(self, code, *args):
        self.process = subprocess.Popen([sys.executable, "-c", CHILD + code, *map(str, args)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
    def says(self):
        for line in self.process.stdout:
            if line.startswith("SAYS "):
                return json.loads(line[5:])
        raise SystemExit(f"a child ended with {self.process.wait(60)}")
    def go(self):
        self.process.stdin.write("\n"); self.process.stdin.flush()
    def kill(self):
        self.process.kill(); self.process.wait(60)
    def done(self):
        self.process.stdin.close(); self.process.wait(60)

def charged(pid=None):
    # MiB that NVML charges to a process.
    found = 0
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        found += sum(p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                     if p.pid == (pid or os.getpid()))
    return found // MIB

def within(seconds, true):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline: time.sleep(0.01)
    return true()

def files(): return len(os.listdir("/proc/self/fd"))
"""
EXPECTED = "expected = np.arange(600_000, dtype='f4').reshape(600, 1000)\n"
MAKE = {
    "torch": "import torch\nx = torch.as_tensor(expected, device='cuda')\n",
    "tensorflow": "import tensorflow as tf\nwith tf.device('/GPU:0'): x = tf.constant(expected) + 0\n",
    "cupy": "import cupy\nx = cupy.asarray(expected)\n",
    "jax": "import jax.numpy as jnp\nx = jnp.asarray(expected)\n",
    "pycuda": "import pycuda.autoprimaryctx\nfrom pycuda import gpuarray\nx = gpuarray.to_gpu(expected)\n",
    "numba": "from numba import cuda\nx = cuda.to_device(expected)\n",
}
HOLD = """
{before}
y = exchange.attach(sys.argv[1], "{target}")
found = values(y)
say([float(found.sum(dtype="f8")), list(found.shape), str(found.dtype), exchange.last_route().way])
wait()
"""


def holding(target: str) -> str:
    before = "import pycuda.autoprimaryctx" if target == "pycuda" else ""
    return f"HOLD = {HOLD.format(before=before, target=target)!r}\n"


TOTAL = float(sum(range(600_000)))


@pytest.mark.parametrize("target", list(MAKE))
def test_each_framework_gets_what_torch_exported(run: Run, target: str) -> None:
    found = run(
        PROLOGUE
        + EXPECTED
        + MAKE["torch"]
        + holding(target)
        + """
handle = exchange.export(x)
result["kept"] = lifetimes.held_for_processes[0]
x.zero_(); torch.cuda.synchronize()
child = Child(HOLD, handle)
result["got"], result["attached"] = child.says(), handle.attached
child.done()
result["after"] = within(10, lambda: handle.attached == 0)
handle.close()
result["kept_after"] = lifetimes.held_for_processes[0]
""",
        timeout=300,
    )
    assert found["got"] == [TOTAL, [600, 1000], "float32", "shared"]
    assert (found["kept"], found["kept_after"], found["attached"], found["after"]) == (4 * MIB, 0, 1, True)


@pytest.mark.parametrize("source", list(MAKE))
def test_cupy_gets_what_each_framework_exported(run: Run, source: str) -> None:
    found = run(
        PROLOGUE
        + EXPECTED
        + MAKE[source]
        + holding("cupy")
        + """
with exchange.export(x) as handle:
    child = Child(HOLD, handle)
    result["got"] = child.says()
    child.done()
""",
        timeout=300,
    )
    assert found["got"] == [TOTAL, [600, 1000], "float32", "shared"]


def test_work_under_way_is_in_the_copy(run: Run) -> None:
    found = run(
        PROLOGUE
        + holding("cupy")
        + """
import torch
stale = 0
stream = torch.cuda.Stream()
x = torch.zeros(600, 1000, device="cuda")
for _ in range(20):
    x.zero_(); torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(1)
        with exchange.export(x) as handle:
            pass
        result["done"] = stream.query()
        stale += not result["done"]
with torch.cuda.stream(stream):
    torch.cuda._sleep(200_000_000); x.fill_(2)
    handle = exchange.export(x)
child = Child(HOLD, handle)
result.update(stale=stale, got=child.says()); child.done(); handle.close()
"""
    )
    assert found["stale"] == 0 and found["got"][0] == 1_200_000


def test_a_child_killed_while_attached_gives_everything_back(run: Run) -> None:
    found = run(
        PROLOGUE
        + holding("cupy")
        + """
import cupy
cupy.ones(10, "f4"); exchange.export(cupy.ones(10, "f4")).close()
cupy.get_default_memory_pool().free_all_blocks()
result["before"] = charged()
x = cupy.ones((256 << 20) // 4, "f4")
for copy in (True, False):
    handle = exchange.export(x, copy=copy)
    during = charged()
    child = Child(HOLD, handle)
    child.says(); child.kill()
    result[f"{copy}"] = [during, within(10, lambda: handle.attached == 0)]
    handle.close()
x = None
gc.collect(); time.sleep(0.5)
cupy.get_default_memory_pool().free_all_blocks()
result.update(after=charged(), kept=lifetimes.held_for_processes[0], lent=str(lifetimes.lent()))
"""
    )
    assert found["True"] == [found["before"] + 512, True] and found["False"] == [found["before"] + 256, True]
    assert found["after"] == found["before"] and found["kept"] == 0 and found["lent"] == "{}"


EXPORTER = """
import cupy
x = cupy.ones((256 << 20) // 4, "f4")
handle = exchange.export(x, copy=sys.argv[1] == "True")
say(str(handle)); wait()
"""


@pytest.mark.parametrize("copy", [True, False])
def test_who_attached_keeps_the_values_when_the_exporter_is_killed(run: Run, copy: bool) -> None:
    found = run(
        f"EXPORTER, COPY = {EXPORTER!r}, {copy}\n"
        + PROLOGUE
        + """
memguard.init({"version": 1, "device": {"limit": "16GiB"}, "frameworks": {"cupy": {"share": "50%"}}})
import cupy
cupy.zeros(1).sum()
exporter = Child(EXPORTER, COPY)
y = exchange.attach(exporter.says(), "cupy")
def ledger():
    part = memguard.ledger().devices[0]
    rows = {row.name: row.bytes for row in part.rows}
    total = sum(size or 0 for size in rows.values())
    return [(rows.get("exchange") or 0) // MIB, rows["unaccounted"] // MIB, total - part.device.total]
result["attached"] = [charged(), ledger()]
exporter.kill()
within(10, lambda: lifetimes.held_for_processes[0])
result["alone"] = [charged(), ledger(), lifetimes.held_for_processes[0] // MIB]
result["sum"] = float(y.sum(dtype="f8"))
y += 1
result["written"] = float(y.sum(dtype="f8"))
del y
gc.collect()
before = result["attached"][0]
gone = within(10, lambda: not lifetimes.held_for_processes[0] and charged() <= before + 32)
result["gone"] = [gone, charged(), ledger()]
cupy.get_default_memory_pool().free_all_blocks()
"""
    )
    count = (256 << 20) // 4
    assert (found["sum"], found["written"]) == (count, 2 * count)
    assert found["attached"][1][0] == 0 and found["alone"][2] == 256
    assert found["alone"][0] == found["attached"][0] + 256, "the driver counts it for who is left"
    assert found["alone"][1][0] == 256 and found["alone"][1][2] == 0 and abs(found["alone"][1][1]) <= 64
    assert found["gone"][0] and found["gone"][1] <= found["attached"][0] + 32 and found["gone"][2][0] == 0


@pytest.mark.parametrize(
    "make",
    [
        "import cupy\nx = cupy.arange(2 << 20, dtype='f4')\n",
        "import pycuda.autoprimaryctx\nfrom pycuda import gpuarray\nx = gpuarray.arange(0, 2 << 20, 1, dtype='f4')\n",
        "from numba import cuda\nx = cuda.to_device(np.arange(2 << 20, dtype='f4'))\n",
        "import torch\nx = torch.arange(8 << 20, dtype=torch.float32, device='cuda')[: 8 << 20]\n",
    ],
    ids=["cupy", "pycuda", "numba", "torch"],
)
def test_a_block_of_its_own_is_the_same_memory_in_both(run: Run, make: str) -> None:
    found = run(
        PROLOGUE
        + make
        + r'''
handle = exchange.export(x, copy=False)
child = Child("""
import cupy
y = exchange.attach(sys.argv[1], "cupy")
say([float(y[-1]), y.size, exchange.last_route().way]); y[:] = 7
cupy.cuda.Device().synchronize(); say(1); wait(); del y; time.sleep(1); say(2); wait()
""", handle)
result["got"] = child.says(); child.says()
host = x.cpu().numpy() if hasattr(x, "cpu") else x.get() if hasattr(x, "get") else x.copy_to_host()
result["written"] = [float(host.min()), float(host.max())]
handle.close()
result["lent"] = sum(sum(to.values()) for to in lifetimes.lent()[0].values())
result["kept"] = lifetimes.held_for_processes[0]
child.go(); child.says()
result["over"] = within(10, lambda: not lifetimes.lent())
child.done()
'''
    )
    size = found["got"][1]
    assert found["got"] == [size - 1, size, "shared"] and found["written"] == [7, 7]
    assert found["lent"] == 4 * size and found["kept"] == 0 and found["over"]


@pytest.mark.parametrize(
    "make",
    [
        "import torch\nx = torch.ones(1000, device='cuda')\n",
        "import torch\nx = torch.ones(1 << 20, device='cuda')\n",
        "import cupy\nx = cupy.ones(3 << 20, 'f4')[1 << 20 :]\n",
        "import cupy\nx = cupy.ones(1000, 'f4')\n",
        "import pycuda.autoprimaryctx\nfrom pycuda import gpuarray\nx = gpuarray.zeros(1000, 'f4') + 1\n",
        "import jax.numpy as jnp\nx = jnp.ones(1 << 20)\n",
        "import tensorflow as tf\nwith tf.device('/GPU:0'): x = tf.ones(1 << 20) + 0\n",
    ],
    ids=["torch-small", "torch-4MiB", "cupy-part", "cupy-small", "pycuda-small", "jax", "tensorflow"],
)
def test_memory_with_neighbours_is_not_shared_as_it_is(run: Run, make: str) -> None:
    found = run(
        PROLOGUE
        + make
        + """
try: exchange.export(x, copy=False)
except exchange.CannotShare as error: result["error"] = str(error)
result["lent"] = str(lifetimes.lent())
"""
    )
    assert "fix: copy=True" in found["error"] and "IPC handle" in found["error"] and found["lent"] == "{}"


def test_a_hundred_exports_leave_nothing_in_either_process(run: Run) -> None:
    found = run(
        PROLOGUE
        + r'''
import cupy
x = cupy.ones((32 << 20) // 4, "f4")
child = Child("""
import cupy, gc
def files(): return len(os.listdir("/proc/self/fd"))
cupy.zeros(1).sum()
for number, line in enumerate(iter(wait, "stop\\n")):
    y = exchange.attach(line, "cupy"); total = float(y.sum()); y = None
    time.sleep(0.5 if number == 9 else 0)
    say([total, files(), lifetimes.held_for_processes[0]])
time.sleep(1); say([0, files(), lifetimes.held_for_processes[0]]); wait()
""")
seen = []
for number in range(110):
    handle = exchange.export(x)
    child.process.stdin.write(f"{handle}\n"); child.process.stdin.flush()
    seen.append(child.says())
    handle.close()
    if number == 9:
        time.sleep(1)
        mine = [charged(), files(), charged(child.process.pid)]
child.process.stdin.write("stop\n"); child.process.stdin.flush()
last = child.says()
within(5, lambda: files() <= mine[1])
result.update(totals=len({one[0] for one in seen}), mine=mine, now=[charged(), files(), charged(child.process.pid)],
              kept=[lifetimes.held_for_processes[0], last[2]], child=[seen[9][1], last[1]])
child.done()
''',
        timeout=300,
    )
    assert found["totals"] == 1 and found["mine"] == found["now"] and found["kept"] == [0, 0]
    assert found["child"][1] <= found["child"][0]


def test_two_at_once_share_one_memory_and_what_is_written(run: Run) -> None:
    found = run(
        PROLOGUE
        + holding("torch")
        + r'''
import torch
x = torch.ones(600, 1000, device="cuda")
handle = exchange.export(x)
first = Child("""
import cupy
y = exchange.attach(sys.argv[1], "cupy"); y[0, 0] = 100; cupy.cuda.Device().synchronize(); say(1); wait()
say(float(y.sum())); wait()
""", handle)
first.says()
second = Child(HOLD, handle)
result["second"], result["attached"] = second.says()[0], handle.attached
handle.close()
before = charged()
first.go()
result["first"] = first.says()
second.done(); first.done()
'''
    )
    assert found["second"] == found["first"] == 600_099 and found["attached"] == 2


def test_a_full_card_says_how_much_is_missing(run: Run) -> None:
    found = run(
        PROLOGUE
        + """
import cupy
from memguard._devices import shared_memory
x = cupy.ones(1 << 20, "f4")
try:
    cuda = shared_memory._driver()
    from memguard._devices import contexts
    with contexts.entered(contexts.primary(0)):
        shared_memory._create(cuda, 0, 1 << 42)
except shared_memory.NoRoom as error:
    result.update(text=str(error), free=error.free)
"""
    )
    assert "CUDA: no room for 4" in found["text"] and found["free"] > 0


def test_a_child_without_cuda_gets_one_context_and_no_other(run: Run) -> None:
    found = run(
        PROLOGUE
        + r'''
import torch
x = torch.ones(600, 1000, device="cuda")
handle = exchange.export(x)
child = Child("""
y = exchange.attach(sys.argv[1], "cupy")
say(float(y.sum())); wait()
import torch
torch.ones(10, device="cuda").sum().item(); say(1); wait()
""", handle)
result["sum"] = child.says()
result["cupy"] = charged(child.process.pid)
child.go(); child.says()
result["torch"] = charged(child.process.pid)
child.done(); handle.close()
'''
    )
    assert found["sum"] == 600_000
    assert found["torch"] - found["cupy"] < 300, "another context would be 518 MiB"


def test_a_child_with_numpy_alone_gets_a_copy_on_the_host(run: Run) -> None:
    found = run(
        PROLOGUE
        + """
import torch
x = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
with exchange.export(x) as handle:
    child = Child('''
y = exchange.attach(sys.argv[1], "numpy", copy=True)
say([float(y.sum(dtype="float64")), "torch" in sys.modules, "cupy" in sys.modules])
''', handle)
    result["said"] = child.says()
    child.done()
"""
    )
    assert found["said"] == [float(sum(range(1 << 20))), False, False]
