"""Modules of each framework, imported first: under a budget each ends as without one.

All of PyCUDA's here, because its hook runs inside its own circular imports, and some of the others'. `every_module.py`
does it for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import every_module
import pytest
import stub_driver
from every_module import PACKAGES, all_modules, modules, outcomes, sample
from served import Run, serve

from memguard._frameworks.specs import SPECS

SOME = {
    "torch": 12, "functorch": 2, "torchgen": 2, "tensorflow": 8, "keras": 4, "cupy": 16, "cupyx": 10,
    "cupy_backends": 8, "jax": 10, "jaxlib": 6, "numba.cuda": 12, "numba": 6, "numba_cuda": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def with_stub(stub: dict[str, str]) -> Iterator[Run]:
    """Run code where nothing of PyCUDA is imported yet, over the stub of its driver."""
    yield from serve("numpy", stub)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return stub_driver.build(tmp_path_factory.mktemp("cuda"))


def test_every_framework_has_its_packages() -> None:
    assert PACKAGES.keys() == SPECS.keys()
    assert {spec.module for spec in SPECS.values()} <= {name for names in PACKAGES.values() for name in names}
    assert SOME.keys() | {"pycuda"} == {name for names in PACKAGES.values() for name in names}


def test_each_module_of_pycuda_may_be_imported_first(stub: dict[str, str]) -> None:
    names = modules("pycuda")
    assert len(names) > 25 and {"pycuda.gpuarray", "pycuda.tools", "pycuda.cumath", "pycuda.elementwise"} <= {*names}
    found = list(outcomes("pycuda", names, stub))
    assert [outcome.wrong for outcome in found if outcome.wrong] == []
    assert sum(outcome.plain == "imported" for outcome in found) >= 24, [one.plain for one in found]
    capped = [outcome.module for outcome in found if outcome.caps == {"pycuda": "enforced"}]
    assert {"pycuda.autoinit", "pycuda.gpuarray", "pycuda.tools", "pycuda.cumath", "pycuda.driver"} <= {*capped}


@pytest.mark.parametrize("package", SOME)
def test_modules_of_the_others_may_be_imported_first(package: str) -> None:
    framework = next(name for name, packages in PACKAGES.items() if package in packages)
    names = sample(all_modules(framework)[package], SOME[package])
    found = list(outcomes(package, names))
    assert [outcome.wrong for outcome in found if outcome.wrong] == [] and len(found) == len(names)
    assert sum(outcome.plain == "imported" for outcome in found) >= len(found) // 2, [one.plain for one in found]
    if package == SPECS[framework].hook:
        assert any(outcome.caps.get(framework) == "enforced" for outcome in found)


def test_what_differs_is_told() -> None:
    """The comparison itself: a module that fails only under a budget, one that goes uncapped, one that is left over."""
    alike = every_module.Outcome("m", "imported", "imported", {"torch": "enforced"}, [])
    assert alike.wrong is None
    for wrong in (
        every_module.Outcome("m", "imported", "AttributeError: partially initialized module", {}, []),
        every_module.Outcome("m", "ImportError: a", "ImportError: b", {}, []),
        every_module.Outcome("m", "imported", "imported", {"torch": "pending"}, []),
        every_module.Outcome("m", "imported", "imported", {}, ["<ImportHook>"]),
    ):
        assert wrong.wrong is not None and wrong.wrong.startswith("m: ")


ORDERS = [
    ("gpuarray", "autoinit"), ("tools", "autoinit"), ("cumath", "autoinit"), ("elementwise", "autoinit"),
    ("gpuarray", "autoprimaryctx"), ("autoinit", "gpuarray"), ("driver", "autoinit"), ("sparse.operator", "autoinit"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), ORDERS, ids=[first for first, _ in ORDERS])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_pycudas_own_allocators_keep_the_cap_in_every_order(with_stub: Run, first: str, second: str, when: str) -> None:
    """`memguard.init` before, between and after the imports; PyCUDA is real, and only the driver below it is not."""
    found = with_stub(
        f"""
import importlib, gc
from memguard._frameworks.pycuda.adapter import PyCUDA
from memguard._guard.guard import Guard
from memguard._budget import from_mapping
guard = Guard(from_mapping({{"version": 1, "frameworks": {{"pycuda": {{"limit": "64MiB"}}}}}}), Host())
if {when == "before"}: guard.start()
importlib.import_module("pycuda.{first}")
if {when == "between"}: guard.start()
import pycuda.{second}
import pycuda.driver as drv, pycuda.gpuarray as gpuarray, pycuda.tools as tools, numpy
pools = [tools.DeviceMemoryPool()]
if {when == "after"}: guard.start()
pools.append(tools.DeviceMemoryPool())
result["class"] = tools.DeviceMemoryPool is drv.DeviceMemoryPool is type(pools[0])
ways = {{
    "mem_alloc": drv.mem_alloc, "pool before": pools[0].allocate, "pool": pools[1].allocate,
    "array": lambda size: gpuarray.GPUArray(size, numpy.uint8), "empty": lambda size: gpuarray.empty(size, numpy.uint8),
    "with pool": lambda size: gpuarray.empty(size, numpy.uint8, allocator=pools[1].allocate),
}}
def fill(way):
    live = []
    while len(live) < 200:
        try:
            live.append(way(3 * MIB))
        except drv.MemoryError as error:
            result["text"] = str(error)
            break
    return len(live)
result["counts"] = []
for way in ways.values():
    result["counts"].append(fill(way))
    gc.collect()
row = guard.ledger().devices[0].row("pycuda")
result["row"] = [row.enforcement, row.bytes <= 64 * MIB]
result["stays"] = guard.stop()
result["free"] = len([drv.mem_alloc(10 * MIB) for _ in range(20)])
"""
    )
    assert all(15 <= count <= 21 for count in found["counts"]), found
    assert found.pop("counts") and found.pop("text").endswith("of the 64.0 MiB that the memguard budget gives pycuda")
    assert found == {"class": True, "row": ["enforced", True], "stays": [], "free": 20}
