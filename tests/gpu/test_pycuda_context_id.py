"""How the driver identifies a new PyCUDA context: the basis of `contexts.id_of_current`.

A reset gives the primary context another ID, and until the next retain it has none. The test also prints the cost of
querying the ID, and of querying a block. The cost of allocations is a measurement of bench.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., dict[str, Any]]
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
