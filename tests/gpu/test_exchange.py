"""Exchange of arrays between frameworks on a real GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gpus_here import EXCHANGE, TWO_GPUS
from support.arrays import TAKES

Run = Callable[..., dict[str, Any]]


def test_every_pair_shares_its_pointer_each_dtype_and_nothing_is_lost(run: Run) -> None:
    found = run(
        EXCHANGE
        + """
result.update(exchanged.pairs())
result["dtypes"] = exchanged.dtypes()
result["leak"] = exchanged.leak(10_000 if THOROUGH else 900)
""",
        env={"JAX_ENABLE_X64": "1"},
        timeout=200,
    )
    assert len(found["pairs"]) == 30 + 6 * (2 - len(found["not_installed"]))
    for name, one in found["pairs"].items():  # from the six frameworks, and from buffers of RMM and cuda.core
        assert {one.get(key) for key in ("same_pointer", "right", "copy", "outlives")} == {True}, (name, one)
    assert found["open"] == found["dtypes"]["open"] == 0
    shared = "bool", "int8", "int64", "float16", "float32", "complex64"
    made: dict[str, set[str]] = {name: set() for name in TAKES}
    for pair, outcomes in found["dtypes"]["dtypes"].items():
        source, target = pair.split(" > ")
        for dtype, said in outcomes.items():
            if not said.startswith("not made"):
                made[source].add(dtype)
                documented = said == "shared" if dtype in TAKES[target] else said.startswith("CannotShare")
                assert documented, (pair, dtype, said)
        assert {outcomes[dtype] for dtype in shared} == {"shared"}, (pair, outcomes)
    few = {name: dtypes for name, dtypes in made.items() if len(dtypes) < min(len(TAKES[name]), 14)}
    assert len(found["dtypes"]["dtypes"]) == 30 and not few, few
    leak = found["leak"]
    assert leak["nvml_after"] == leak["nvml_before"] > 0 and leak["open"] == 0
    assert leak["rss_growth_kib"] < 16 << 10


def test_a_process_ends_well_with_views_of_every_pair_alive(run: Run) -> None:
    found = run(
        EXCHANGE
        + """
import numpy as np
arrays.start(*arrays.NAMES)
values = np.arange(1024, dtype=np.float32)
keep = [exchange.to(arrays.make(a, values), b) for a, b in arrays.PAIRS]
keep.append(keep)  # nothing lets go of them before the end
result["views"] = len(keep) - 1
""",
        timeout=120,
    )
    assert found["views"] == 30
    for sign in ("Exception ignored", "Traceback", "terminate called", "Fatal"):
        assert sign not in found["stderr"], found["stderr"][-3000:]


SOURCES = ("torch", "cupy", "pycuda", "numba"), ("tensorflow", "jax", "rmm", "cuda.core")
LEAST = dict(zip((*SOURCES[0], *SOURCES[1]), (80, 80, 60, 60, 40, 25, 10, 10), strict=True))
"""Minimum number of exchanges of each one's unusual arrays: fewer would mean that creating them failed."""


@pytest.mark.parametrize("sources", SOURCES, ids=lambda sources: sources[0])
def test_unusual_arrays_get_the_documented_answer_without_a_crash(run: Run, sources: tuple[str, ...]) -> None:
    def one(source: str) -> dict[str, Any]:
        return run(EXCHANGE + f"\nresult.update(exchanged.edges({source!r}))\n", timeout=240)

    with ThreadPoolExecutor(len(sources)) as pool:
        every = dict(zip(sources, pool.map(one, sources), strict=True))
    for source, found in every.items():
        cases = found["cases"]
        assert not found["deaths"] and found["open"] == 0, (source, found["deaths"], found["open"])
        assert len(cases) >= LEAST[source], (source, len(cases))
        wrong = [case for case in cases if (case["outcome"], case["copy"]) != (case["expected"], case["expected_copy"])]
        assert not wrong, (source, wrong)
    for source in {"torch", "cupy"} & set(sources):
        misaligned = [case for case in every[source]["cases"] if case["case"] == "misaligned by 4"]
        assert {case["outcome"] for case in misaligned} == {"shared", "refused"}


@pytest.mark.parametrize("how", ["misaligned", "reversed"])
def test_by_hand_an_unusual_array_crashes_the_process(run: Run, how: str) -> None:
    """Show that memguard's refusals are necessary: 4 bytes past a multiple of 64 into TensorFlow, a negative stride
    into PyTorch."""
    found = run(
        EXCHANGE
        + f"""
import subprocess, sys
command = [sys.executable, exchanged.__file__, {how!r}]
result["rc"] = subprocess.run(command, capture_output=True, timeout=90).returncode
"""
    )
    assert found["rc"] < 0


@pytest.mark.parametrize("sources", [("torch", "numba", "tensorflow"), ("cupy", "jax", "pycuda")], ids=lambda s: s[0])
def test_no_exchange_is_stale_while_the_producer_still_works(
    run: Run, thorough: bool, sources: tuple[str, ...]
) -> None:
    rounds = 1000 if thorough else 60
    found = run(
        EXCHANGE
        + f"""
for source in {sources!r}:
    one = exchanged.order(source, {rounds})
    result[source] = one["order"]
    assert one["open"] == 0, (source, one["open"])
""",
        timeout=720 if thorough else 200,
    )
    pairs = {name: one for source in sources for name, one in found[source].items()}
    assert len(pairs) == 15
    for name, one in pairs.items():  # rounds in which the kernel was not seen running do not count
        assert one["stale"] == 0 and one["running_before"] >= rounds, (name, one)
    if "torch" in sources:  # the host does not wait if both frameworks expose their streams
        assert found["torch"]["torch > cupy"]["running_after"] >= 0.9 * rounds


def test_by_hand_without_ordering_some_are_stale(run: Run) -> None:
    found = run(
        EXCHANGE
        + """
from support import order
result["ways"] = order.controls(50 if THOROUGH else 20)["ways"]
"""
    )
    assert any(one["stale"] for one in found["ways"].values()), found["ways"]


def test_lent_memory_is_in_the_ledger_while_a_view_lives_and_charged_once(run: Run) -> None:
    found = run(EXCHANGE + "\nresult.update(exchanged.lent())\n", timeout=150)
    assert len(found["lent"]) == 30
    for pair, one in found["lent"].items():
        assert (one["before"], one["lent"], one["after"]) == (0, one["nbytes"], 0), (pair, one)
        assert one["nvml"] > 0 == one["nvml_growth"] == one["sum_minus_total"], (pair, one)


def test_memory_is_not_used_again_while_a_dropped_view_is_still_read(run: Run, thorough: bool) -> None:
    rounds = 100 if thorough else 60
    found = run(EXCHANGE + f"\nresult.update(exchanged.dropped({rounds}))\n", timeout=150)
    assert len(found["dropped"]) == 5
    for name, one in found["dropped"].items():
        assert one["wrong"] == 0 and one["rounds"] == rounds, (name, one)
    lenders = {name.partition(" > ")[0] for name, one in found["without"].items() if one["wrong"]}
    assert lenders == {"torch", "cupy", "jax"}, ("the control: by hand each of them goes wrong", found["without"])
    assert found["open"] == 0


def test_eight_threads_hand_over_for_ten_seconds(run: Run) -> None:
    """A deadlock ends the process after a minute, with every thread's traceback."""
    found = run(
        EXCHANGE
        + """
import faulthandler, threading, time
arrays.start("torch", "tensorflow", "jax", "cupy", "numba")
faulthandler.dump_traceback_later(60, exit=True)
import cupy, jax, jax.numpy as jnp, numpy as np, tensorflow as tf, torch
from numba import cuda
twice = jax.jit(lambda v: (v * 2).sum())
shape = (256, 1024)

def ones():
    return torch.ones(shape, device="cuda")

ways = [
    ("torch", "tensorflow", ones, lambda y: tf.linalg.matmul(y, y, transpose_b=True)),
    ("torch", "jax", ones, twice),
    ("cupy", "tensorflow", lambda: cupy.ones(shape, "f4"), lambda y: tf.reduce_sum(y * 2)),
    ("jax", "torch", lambda: jnp.ones(shape), lambda y: (y * 2).sum()),
    ("jax", "cupy", lambda: jnp.ones(shape), lambda y: (y * 2).sum()),
    ("numba", "tensorflow", lambda: cuda.device_array(shape, np.float32), lambda y: y * 2),
    ("numba", "jax", lambda: cuda.device_array(shape, np.float32), twice),
    ("tensorflow", "torch", lambda: tf.ones(shape), lambda y: (y * 2).sum()),
]
counts, errors, ends = {}, [], time.monotonic() + 10

def work(source, target, make, use):
    count = 0
    try:
        while time.monotonic() < ends:
            x = make()
            y = exchange.to(x, target)
            del x
            z = use(y)
            del y
            count += 1
            if count % 50 == 0:
                del z
    except Exception as error:
        errors.append(f"{source} > {target}: {error!r}"[:400])
    counts[f"{source} > {target}"] = count

threads = [threading.Thread(target=work, args=way) for way in ways]
for thread in threads: thread.start()
for thread in threads: thread.join()
result.update(counts=counts, errors=errors, open=exchanged.still_open())
""",
        timeout=150,
    )
    assert not found["errors"]
    assert len(found["counts"]) == 8 and min(found["counts"].values()) > 100
    assert found["open"] == 0


def test_graphs_of_tensorflow_are_fed_from_torch_without_the_host(run: Run) -> None:
    found = run(
        EXCHANGE
        + """
arrays.start("torch", "tensorflow")
import tensorflow as tf, torch
x = torch.arange(1024, dtype=torch.float32, device="cuda").reshape(32, 32) / 1024
y = exchange.to(x, "tensorflow")
seen = []

def look(t):
    seen.append([t.backing_device, arrays.facts(t).address])
    return t

@tf.function
def modern(v):
    with tf.device("/GPU:0"):
        v = tf.py_function(look, [v], tf.float32)
        return tf.linalg.matmul(tf.ensure_shape(v, (32, 32)), tf.ones((32, 32)))

def old(v):
    return tf.compat.v1.matmul(v, v) + tf.compat.v1.ones((32, 32))

wrapped = tf.compat.v1.wrap_function(old, [tf.TensorSpec((32, 32), tf.float32)])
first, second = modern(y), wrapped(y)
back = [exchange.to(out, "torch") for out in (first, second)]
result["address"] = x.data_ptr()
result["seen"] = seen
result["devices"] = [out.backing_device for out in (first, second)]
result["torch devices"] = [str(out.device) for out in back]
wanted = [x @ torch.ones(32, 32, device="cuda"), x @ x + 1]
result["close"] = [bool(torch.allclose(out, one, rtol=1e-2)) for out, one in zip(back, wanted)]

@tf.function
def building(v):
    return exchange.to(v, "torch")

try:
    building(y)
except Exception as error:
    result["symbolic"] = f"{type(error).__name__}: {error}"
"""
    )
    assert found["close"] == [True, True]
    assert all(device.endswith("GPU:0") for device in found["devices"])
    assert found["torch devices"] == ["cuda:0", "cuda:0"]
    assert found["seen"] and all(device.endswith("GPU:0") for device, _ in found["seen"])
    assert {address for _, address in found["seen"]} == {found["address"]}
    assert "graph" in found["symbolic"]


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_of_torchs_in_another_thread_is_not_spoilt(run: Run, mode: str) -> None:
    found = run(
        EXCHANGE
        + f"MODE = {mode!r}\n"
        + """
import threading, time
arrays.start("torch", "cupy")
import cupy, torch
x, c = torch.arange(4096.0, device="cuda"), cupy.arange(4096, dtype="f4")
ready, ended, errors, count = threading.Event(), threading.Event(), [], 0

def hand_over():
    global count
    one, other = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    try:
        with torch.cuda.stream(one), other:
            while not ended.is_set():
                y, z = exchange.to(x, "cupy"), exchange.to(c, "torch")
                del y, z
                count += 1
                if count == 50:
                    ready.set()
                time.sleep(0.0005)
    except Exception as error:
        errors.append(repr(error)[:500])
        ready.set()

thread = threading.Thread(target=hand_over)
total = torch.zeros(16, device="cuda")
torch.cuda.synchronize()
thread.start()
ready.wait(20)
before = count
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph, capture_error_mode=MODE):
        for _ in range(100):
            total.add_(1)
            time.sleep(0.002)
    result["during"] = count - before
    for _ in range(3): graph.replay()
    torch.cuda.synchronize()
    result["total"] = float(total[0])
except Exception as error:
    errors.append("capture: " + repr(error)[:500])
ended.set()
thread.join()
result["errors"] = errors
"""
    )
    assert not found["errors"]
    assert found["during"] > 20 and found["total"] == 300


def test_a_thread_without_a_context_copies_to_the_host(run: Run) -> None:
    found = run(
        """
        import threading
        import torch, cupy, jax.numpy as jnp, numpy as np
        from numba import cuda
        values = np.arange(100_000, dtype=np.float32)
        made = {"torch": torch.from_numpy(values).cuda(), "cupy": cupy.asarray(values), "jax": jnp.asarray(values),
                "numba": cuda.to_device(values)}
        right = {}
        def go(name, x):
            try:
                right[name] = bool((memguard.exchange.to(x, "numpy", copy=True) == values).all())
                if name == "numba":
                    y = memguard.exchange.to(x, "numba", copy=True)
                    right["numba to numba"] = bool((y.copy_to_host() == values).all())
            except Exception as error:
                right[name] = repr(error)
        for name, x in made.items():
            thread = threading.Thread(target=go, args=(name, x))
            thread.start()
            thread.join()
        result["right"] = right
        """,
    )
    assert found["right"] == dict.fromkeys(("torch", "cupy", "jax", "numba", "numba to numba"), True)


def test_a_frameworks_own_array_is_ready_for_the_stream_that_is_named(run: Run) -> None:
    found = run(
        """
        import torch
        busy, side, right = torch.cuda.Stream(), torch.cuda.Stream(), {}
        def go(ready):
            x = torch.zeros(1 << 20, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(busy):
                torch.cuda._sleep(100_000_000)
                x += 7
                ready(x)
            with torch.cuda.stream(side):
                y = x.clone()
            torch.cuda.synchronize()
            return bool((y == 7).all())
        ways = {
            "by hand": lambda x: None,
            "stream": lambda x: memguard.exchange.to(x, "torch", stream=side),
            "stream and device": lambda x: memguard.exchange.to(x, "torch", stream=side, device=0),
        }
        for _ in range(3):  # the first round loads kernels, for which CUDA waits
            right = {name: go(ready) for name, ready in ways.items()}
        result["right"] = right
        """,
    )
    assert found["right"] == {"by hand": False, "stream": True, "stream and device": True}


@TWO_GPUS
def test_a_copy_to_the_other_gpu_is_made_after_the_producers_work(run: Run) -> None:
    found = run(
        """
        import torch, cupy, jax, numpy as np, tensorflow as tf
        from memguard.exchange.adapters import registry
        torch.zeros(1, device="cuda:1")
        cupy.cuda.Device(1).use(); cupy.zeros(1); cupy.cuda.Device(0).use()
        side, stale = torch.cuda.Stream(), {}
        for target in ("torch", "cupy", "jax", "tensorflow", "numba"):
            wrong = 0
            for number in range(10):
                x = torch.zeros(1 << 20, device="cuda:0")
                torch.cuda.synchronize(0)
                with torch.cuda.stream(side):
                    torch.cuda._sleep(20_000_000)
                    x.fill_(number + 1.0)
                    y = memguard.exchange.to(x, target, device=1, copy=True)
                registry.of(y).ready(registry.of(y).offer(y), None)
                back = memguard.exchange.to(y, "numpy", copy=True)
                wrong += not bool((back == number + 1.0).all())
            stale[target] = wrong
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(1 << 20, dtype=cupy.float32)
            with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
                torch.cuda._sleep(50_000_000)
            x.fill(7)
            y = memguard.exchange.to(x, "cupy", device=1, copy=True)
        stale["cupy itself"] = not bool((memguard.exchange.to(y, "numpy", copy=True) == 7).all())
        result["stale"] = stale
        """,
        timeout=200,
    )
    assert not any(found["stale"].values()), found["stale"]


@TWO_GPUS
def test_copies_go_from_one_gpu_to_the_other(run: Run) -> None:
    found = run(EXCHANGE + "\nresult.update(exchanged.peers(1 << 26))\n", timeout=200)
    assert set(found["peers"]) == {"torch", "tensorflow", "cupy", "jax", "pycuda", "numba"}
    for name, one in found["peers"].items():
        assert one.get("right") is True and "cuda:0 to cuda:1" in one["route"], (name, one)
        assert one["without_copy"].startswith("CannotShare"), (name, one)
    assert found["open"] == 0
