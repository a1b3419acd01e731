"""The moment of an out-of-memory error on a real GPU: what the failing code held, and errors that a program catches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
START = """
import glob, subprocess, sys, tempfile, threading
FOLDER = tempfile.mkdtemp()
def budget(name, cap="4GiB", **more):
    return {"version": 1, "device": {"limit": "12GiB"}, "frameworks": {name: {"limit": cap}, **more},
            "monitor": {"interval": "250ms", "timeline": os.path.join(FOLDER, "run.jsonl")}}
def about(report):
    if report is None:
        return None
    plain = report.as_dict()
    plain.pop("ledger"), plain.pop("samples")
    return {**plain, "who": report.requester}
def step(name, work):
    try:
        with memguard.workload("step", framework=name):
            work()
        result["raised"] = "nothing"
    except Exception as error:
        result["raised"] = type(error).__name__
    result["report"] = about(memguard.last_oom())
def caught(name, work, retry):
    try:
        work()
        result["raised"] = "nothing"
    except Exception as error:
        result["raised"] = type(error).__name__
    retry()
    result["report"] = about(memguard.last_oom())
    row = memguard.ledger().devices[0].row(name)
    result["refused"] = row.refused
    result["table"] = str(memguard.ledger())
def end():
    memguard.shutdown()
    (path,) = glob.glob(os.path.join(FOLDER, "run*.jsonl"))
    timeline = memguard.load_timeline(path)
    result["events"] = [e._asdict() for e in timeline.events() if e.kind == "refused"]
    result["ooms"] = len(list(timeline.ooms()))
    done = subprocess.run([sys.executable, "-m", "memguard", "replay", path, "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    result["replay"] = {row["framework"]: row["requests"] for row in found["frameworks"]}
    result["fits"] = found["fits"]
"""
GIB, MIB = 1 << 30, 1 << 20
CAP = 4 * GIB


def own(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The holders of the process itself: beside it the GPU may have any others."""
    return [holder for holder in report["holders"] if holder["kind"] != "process"]


def check(report: dict[str, Any], name: str, asked: int | None, source: str, least: float = 0.85) -> None:
    """Its cap was reached, `name` asked and holds most, and the figures are of then."""
    assert (report["who"], report["requester"], report["reason"]) == (name, name, "cap"), report["why"]
    if asked is not None:
        assert abs(report["requested"] - asked) <= asked // 100, report["requested"]
    assert report["moment"]["source"] == source, report["moment"]
    assert report["moment"]["in_use"] >= least * CAP, report["moment"]
    assert own(report)[0]["name"] == name and own(report)[0]["bytes"] >= least * CAP
    assert "something else" not in report["why"] and "in pieces" not in str(report["remedies"][:1])
    assert "raise" in report["remedies"][0]["text"], report["remedies"]


TORCH = (
    START
    + "memguard.init(budget('torch'))\nimport torch\n"
    + "def take(n): return torch.empty(n, dtype=torch.uint8, device='cuda')\n"
)
TORCHES = {
    "native": {},
    "expandable segments": {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": ""},
    "cudaMallocAsync": {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_CUDA_ALLOC_CONF": ""},
}


@pytest.mark.parametrize("kind", TORCHES)
def test_torch_a_list_comprehension(run: Run, kind: str) -> None:
    found = run(TORCH + "step('torch', lambda: [take(256 * MIB) for _ in range(40)])\nend()\n", env=TORCHES[kind])
    assert found["raised"] == "OutOfMemoryError"
    report = found["report"]
    assert (report["who"], report["reason"]) == ("torch", "cap"), report["why"]
    if kind != "cudaMallocAsync":
        check(report, "torch", 256 * MIB, "observer")
        assert report["why"].startswith("its cap of 4.00 GiB was reached") and "now" in report["why"]
        assert found["replay"]["torch"] == 1 and not found["fits"] and found["ooms"] == len(found["events"]) == 1


FORWARD = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4096, 4096)
    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x))
model = torch.nn.Sequential(*[Layer() for _ in range(12)]).cuda()
x = torch.randn(16384, 4096, device="cuda")  # 256 MiB for each activation
"""


def test_torch_a_forward_pass(run: Run) -> None:
    found = run(TORCH + FORWARD + "step('torch', lambda: model(x).sum())\n")
    assert found["raised"] == "OutOfMemoryError"
    check(found["report"], "torch", 256 * MIB, "observer", 0.8)


def test_torch_a_backward_pass(run: Run) -> None:
    """The gradient of a wide product is asked for on autograd's own thread."""
    found = run(
        TORCH
        + """
x = torch.randn(8 * MIB // 4, device="cuda", requires_grad=True)
def train():
    w = torch.ones(100, 1, device="cuda")
    y = x.reshape(1, -1) * w             # 800 MiB
    z = torch.sin(y)                     # 800 MiB
    u = torch.cos(z)                     # 800 MiB
    v = torch.exp(u).sum()               # 800 MiB
    v.backward()                         # 800 MiB for each gradient
step('torch', train)
"""
    )
    assert found["raised"] == "OutOfMemoryError"
    check(found["report"], "torch", 800 * MIB, "observer", 0.7)


def test_torch_caught_and_retried(run: Run) -> None:
    found = run(
        TORCH
        + """
def work():
    kept = [take(512 * MIB) for _ in range(40)]
caught('torch', work, lambda: take(GIB))
for _ in range(200):
    try:
        take(6 * GIB)
    except torch.OutOfMemoryError:
        pass
result["total"] = memguard.ledger().devices[0].row("torch").refused
result["last"] = about(memguard.last_oom())
end()
"""
    )
    assert found["raised"] == "OutOfMemoryError" and found["report"]["caught"] is True
    check(found["report"], "torch", 512 * MIB, "observer")
    assert found["refused"] == 1 and "* torch: was refused memory once at" in found["table"]
    assert found["total"] == 201 and found["last"]["requested"] == 6 * GIB and found["last"]["reason"] == "cap"
    assert found["replay"]["torch"] == 201 and not found["fits"] and len(found["events"]) < 10 and found["ooms"] == 0
    assert "memguard: torch" not in found["stderr"], "nothing is printed for a caught error"


def test_torchs_observer_is_attached_once_and_inert_after_shutdown(run: Run) -> None:
    found = run(
        TORCH
        + """
from memguard._frameworks.torch import adapter
torch.zeros(1, device="cuda")
calls = []
attach = torch._C._cuda_attach_out_of_memory_observer
torch._C._cuda_attach_out_of_memory_observer = lambda f: calls.append(1)
memguard.shutdown()
result["off"] = adapter._observer is None
try: take(1 << 50)
except torch.OutOfMemoryError: pass
result["none"] = memguard.last_oom() is None
memguard.init(budget('torch'))
result["again"] = len(calls)
try: take(1 << 50)
except torch.OutOfMemoryError: pass
result["report"] = about(memguard.last_oom())
result["refused"] = memguard.ledger().devices[0].row("torch").refused
pid = os.fork()
if pid == 0:
    adapter._on_refused(0, 1, 2, 3)
    os._exit(0 if memguard.last_oom() is None else 1)
result["child"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    )
    assert found["off"] and found["none"] and found["again"] == 0 and found["refused"] == 1 and found["child"] == 0
    assert found["report"]["reason"] == "cap"


def test_init_makes_no_context_if_torch_is_imported_and_not_live(run: Run) -> None:
    found = run(
        START
        + """
import torch, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
def ours(): return [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
memguard.init(budget('torch'))
memguard.ledger()
result.update(live=torch.cuda.is_initialized(), context=ours())
"""
    )
    assert not found["live"] and found["context"] == []


def test_torch_two_threads_at_once(run: Run) -> None:
    found = run(
        TORCH
        + """
barrier = threading.Barrier(2)
seen = []
def work(n):
    barrier.wait()
    try:
        with memguard.workload("step", framework="torch"):
            [take(n) for _ in range(100)]
    except torch.OutOfMemoryError:
        seen.append(n)
threads = [threading.Thread(target=work, args=(n * MIB,)) for n in (128, 192)]
for t in threads: t.start()
for t in threads: t.join(60)
result["seen"] = len(seen)
result["reason"] = memguard.last_oom().reason
result["refused"] = memguard.ledger().devices[0].row("torch").refused
end()
"""
    )
    assert found["seen"] >= 1 and found["reason"] == "cap" and found["refused"] >= found["seen"]
    assert found["replay"]["torch"] == found["refused"]
    lines = [line for line in found["stderr"].splitlines() if line.startswith("memguard: torch")]
    assert "ran out" in lines[0], lines


OTHERS = {
    "cupy": "import cupy\ndef take(n): return cupy.empty(n, cupy.uint8)\n",
    "numba": "from numba import cuda\nimport numpy\ndef take(n): return cuda.device_array(n, numpy.uint8)\n",
    "pycuda": "import pycuda.autoinit, pycuda.driver as drv\ndef take(n): return drv.mem_alloc(n)\n",
}


@pytest.mark.parametrize("name", OTHERS)
def test_memguards_own_refusals(run: Run, name: str) -> None:
    found = run(
        START + f"memguard.init(budget({name!r}))\n" + OTHERS[name]
        + f"step({name!r}, lambda: [take(256 * MIB) for _ in range(40)])\nend()\n"
    )  # fmt: skip
    check(found["report"], name, 256 * MIB, "refusal", 0.8)
    assert found["report"]["requested"] == 256 * MIB and found["report"]["caught"] is False
    assert found["replay"][name] == 1 and len(found["events"]) == found["ooms"] == 1


@pytest.mark.parametrize("name", OTHERS)
def test_memguards_own_refusals_caught_and_retried(run: Run, name: str) -> None:
    found = run(
        START + f"memguard.init(budget({name!r}))\n" + OTHERS[name]
        + f"""
def work():
    kept = [take(512 * MIB) for _ in range(40)]
caught({name!r}, work, lambda: take(GIB))
end()
"""
    )  # fmt: skip
    assert found["raised"] != "nothing" and found["report"]["caught"] is True and found["refused"] == 1
    check(found["report"], name, 512 * MIB, "refusal", 0.7)
    assert found["replay"][name] == 1 and not found["fits"] and found["ooms"] == 0
    assert f"memguard: {name}" not in found["stderr"]


def test_jax_arrays_in_a_list(run: Run) -> None:
    found = run(
        START
        + """
memguard.init(budget('jax'))
import jax, jax.numpy as jnp
def work(): [jnp.ones(256 * MIB // 4, jnp.float32).block_until_ready() for _ in range(40)]
step('jax', work)
end()
"""
    )
    check(found["report"], "jax", 256 * MIB, "peak", 0.7)
    assert "at its peak" in found["report"]["why"] and found["replay"]["jax"] == 1 and not found["fits"]


def test_tensors_of_tensorflow_in_a_list(run: Run) -> None:
    found = run(
        START
        + """
memguard.init(budget('tensorflow'))
import tensorflow as tf
def work(): [tf.ones(256 * MIB // 4, tf.float32) for _ in range(40)]
step('tensorflow', work)
end()
""",
        timeout=200,
    )
    report = found["report"]
    assert (report["who"], report["reason"]) == ("tensorflow", "cap"), report["why"]
    assert report["moment"]["source"] == "peak" and report["moment"]["in_use"] >= 0.7 * CAP
    assert own(report)[0]["name"] == "tensorflow" and found["replay"]["tensorflow"] == 1


def test_a_session_of_tensorflow_1_whose_use_is_unknown(run: Run) -> None:
    found = run(
        START
        + """
memguard.init(budget('tensorflow'))
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
with tf.device("/GPU:0"):
    arrays = [tf.random.normal([8192, 8192])]
    for number in range(24): arrays.append(tf.roll(arrays[-1], shift=number + 1, axis=0))
    with tf.control_dependencies(arrays[-1:]): total = tf.add_n([tf.reduce_sum(one) for one in arrays])
def work():
    with tf.Session() as session: session.run(total)
step('tensorflow', work)
part = memguard.ledger().devices[0]
row = part.row("tensorflow")
result.update(row=[row.bytes, row.in_use, row.at_most], exact=part.sum == part.device.total)
""",
        timeout=200,
    )
    report = found["report"]
    assert (report["who"], report["reason"], report["requested"]) == ("tensorflow", "cap", 256 * MIB), report["why"]
    assert "is in use is unknown" in report["why"] and found["row"] == [None, None, CAP] and found["exact"]
    first = own(report)[0]
    assert first["name"] == "tensorflow" and first["upper_bound"] and 0.7 * CAP <= first["bytes"] <= CAP
    assert "raise" in report["remedies"][0]["text"], report["remedies"]


def test_a_kernel_of_tensorflow_whose_error_names_no_size(run: Run) -> None:
    found = run(
        START
        + """
memguard.init(budget('tensorflow'))
import tensorflow as tf
x = tf.zeros([65536, 1024])
@tf.function(jit_compile=False)
def all_of_it():
    kept = [x]
    for _ in range(40): kept.append(tf.math.erfc(kept[-1]))
    return kept
step('tensorflow', all_of_it)
""",
        timeout=200,
    )
    report = found["report"]
    assert (report["who"], report["requested"], report["reason"]) == ("tensorflow", None, "cap"), report["why"]
    assert "of unknown size did not fit under its cap" in report["why"]
    assert "to at least" in report["remedies"][0]["text"] and "page-locked" not in str(report["remedies"])


def test_torch_private_pools_of_graphs_in_an_error_that_the_program_catches(run: Run) -> None:
    found = run(
        TORCH
        + """
graphs, pool_of = [], []
def capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [take(256 * MIB) for _ in range(4)]
        del kept  # idle from now on, and the graph's own
    graphs.append(graph)
def work():
    for _ in range(8): capture()
caught('torch', work, lambda: None)
"""
    )
    assert found["raised"] != "nothing"
    report = found["report"]
    assert (report["reason"], report["caught"]) == ("cap", True), report["why"]
    assert report["moment"]["reclaimable"] == 0 and report["moment"]["in_use"] >= 0.7 * CAP


@pytest.mark.whole_card
def test_a_siblings_cache_that_fills_the_card_comes_back_within_the_request(run: Run) -> None:
    """torch's cache fills the card: what CuPy asks for is had from it, and there is nothing to report."""
    found = run(
        START
        + """
import pynvml
pynvml.nvmlInit()
total = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free
guard = memguard.init({"version": 1, "device": {"limit": "95%"}, "frameworks": {"torch": {"share": "60%"},
                       "cupy": {"share": "40%"}}})
import torch, cupy
caps = guard.plan.devices[0].caps
room = torch.cuda.mem_get_info()[0]
kept = torch.empty(int(caps["torch"] * 0.95), dtype=torch.uint8, device="cuda")
room = torch.cuda.mem_get_info()[0]
del kept
filler = None
need = int(caps["cupy"] * 0.9)
if room > need:                        # another library fills what is left
    import ctypes
    lib = ctypes.CDLL("libcuda.so.1")
    filler = ctypes.c_void_p()
    assert lib.cuMemAlloc_v2(ctypes.byref(filler), ctypes.c_size_t(room - need // 2)) == 0
try:
    cupy.empty(need, cupy.uint8)
    result["raised"] = "nothing"
except cupy.cuda.memory.OutOfMemoryError:
    result["raised"] = "OutOfMemoryError"
memguard.trim("torch")
result["report"] = about(memguard.last_oom())
""",
        timeout=200,
    )
    assert found["raised"] == "nothing" and found["report"] is None
