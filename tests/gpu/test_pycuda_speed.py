"""PyCUDA's allocations under a budget: what they cost, and how the driver tells that a context is another one.

The first test has the bar: µs per allocate + free of 1 KiB, beside PyCUDA's own pool in the same process. The second
holds the driver to what `contexts.id_of_current` relies on: a reset gives the primary context another id, and until
somebody retains it again there is none. It also prints what a question for the id costs, and one for a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
SPEED = """
import statistics, timeit
import pycuda.driver as drv
raw_allocate = drv.DeviceMemoryPool.allocate
share = {fill} / 100
memguard.init({{"version": 1, "device": {{"limit": "4GiB"}}, "frameworks": {{"pycuda": {{"limit": "1GiB"}}}}}})
import pycuda.autoinit
plain, user = drv.DeviceMemoryPool(), drv.DeviceMemoryPool()
kept = [raw_allocate(plain, 1)]  # else its last idle block makes it take and leave the context at each call
ways = {{"plain": lambda: raw_allocate(plain, 1024), "user": lambda: user.allocate(1024),
         "mem_alloc": lambda: drv.mem_alloc(1024)}}
for way in ways.values():
    for _ in range(3):
        way()
del kept[0]
row = lambda: memguard.ledger().devices[0].row("pycuda")
step = 16 * MIB
while row().bytes + step * 17 // 16 + 2 * MIB < share * GIB:
    kept.append(drv.mem_alloc(step))
while row().bytes + 4 * MIB <= share * GIB:
    kept.append(drv.mem_alloc(3 * MIB))
result["filled"] = row().bytes / GIB
found = {{name: [] for name in ways}}
for _ in range(300):
    for name, way in ways.items():
        found[name].append(timeit.timeit(way, number=100) / 100 * 1e6)
result["us"] = {{name: statistics.median(times) for name, times in found.items()}}
result["spread"] = {{name: [sorted(times)[30], sorted(times)[-31]] for name, times in found.items()}}
again = [timeit.timeit(ways["plain"], number=100) / 100 * 1e6 for _ in range(300)]
result["control"] = statistics.median(again) / result["us"]["plain"]
"""


@pytest.mark.parametrize("fill", [10, 90, 99.9])
def test_an_idle_block_costs_little_more_than_without_a_budget(run: Run, fill: float) -> None:
    found = run(SPEED.format(fill=fill))
    print(found)
    assert abs(found["filled"] - fill / 100) < 0.01
    for name in ("user", "mem_alloc"):
        assert found["us"][name] <= max(2.5 * found["us"]["plain"], 2.0), found


RESET = """
import ctypes, timeit
import pycuda.driver as drv
drv.init()
cuda = ctypes.PyDLL("libcuda.so.1")
number = ctypes.c_uint64()
def ask():
    code = cuda.cuCtxGetId(None, ctypes.byref(number))
    return [code, number.value]
handle = lambda: drv.Context.get_current().handle
device = drv.Device(0)
# The control: contexts that are made and destroyed. Their ids must differ, whatever their handles do.
others = []
for _ in range(5):
    context = device.make_context()
    others.append([*ask(), handle()])
    context.detach()
result["others"] = others
context = device.retain_primary_context()
context.push()
block = drv.mem_alloc(1 << 20)
buffer, address = ctypes.c_uint64(), ctypes.c_uint64(int(block))
result["before"] = [*ask(), handle()]
result["alive"] = cuda.cuPointerGetAttribute(ctypes.byref(buffer), 7, address)
out, where, which = ctypes.byref(buffer), address, ctypes.c_int(7)
of = ctypes.byref(number)
ways = {
    "id": lambda: cuda.cuCtxGetId(None, of),
    "block": lambda: cuda.cuPointerGetAttribute(out, which, where),
    "nothing": lambda: None,
}
result["us"] = {name: min(timeit.repeat(way, number=10000, repeat=20)) * 100 for name, way in ways.items()}
result["reset"] = cuda.cuDevicePrimaryCtxReset_v2(0)
result["at once"] = ask()  # the context is still current here, and destroyed
result["gone"] = cuda.cuPointerGetAttribute(out, which, where)
cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
again = ctypes.c_void_p()
result["retained"] = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(again), 0)
cuda.cuCtxPushCurrent_v2(again)
result["after"] = [*ask(), again.value]
print("RESULT " + json.dumps(result), flush=True)
os._exit(0)  # PyCUDA's objects are of a context that is gone
"""


def test_what_a_reset_of_the_primary_context_does_to_its_id(run: Run) -> None:
    """With a control: contexts that are made and destroyed."""
    found = run(RESET)
    print(found)
    assert [code for code, _, _ in found["others"]] == [0] * 5
    assert len({number for _, number, _ in found["others"]}) == 5, "ids are said to be unique"
    assert found["reset"] == found["retained"] == 0 and found["alive"] == 0
    assert found["gone"] != 0, "a block of a context that was reset is known to be gone"
    assert found["at once"][0] != 0, "no hit, though the context is still current"
    assert found["after"][0] == 0 and found["after"][1] != found["before"][1], "the id is another one"
