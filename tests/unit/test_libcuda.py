"""The one door to libcuda: its structures as the driver has them, its table of functions, and nobody beside it."""

from __future__ import annotations

import ast
import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memguard
from memguard._devices import libcuda

ROOT = Path(memguard.__file__).parent
ROOM = ROOT / "_devices"


@pytest.mark.parametrize(
    ("struct", "size", "offsets"),
    [  # printed by a C program compiled with cuda.h of CUDA 13.0, x86-64
        (libcuda.CUmemLocation, 8, {"type": 0, "id": 4}),
        (
            libcuda.CUmemPoolProps,
            88,
            {
                "allocType": 0, "handleTypes": 4, "location": 8, "win32SecurityAttributes": 16, "maxSize": 24,
                "usage": 32, "reserved": 34,
            },
        ),
        (
            libcuda.CUmemAllocationProp,
            32,
            {"type": 0, "requestedHandleTypes": 4, "location": 8, "win32HandleMetaData": 16, "allocFlags": 24},
        ),
        (libcuda.CUmemAccessDesc, 12, {"location": 0, "flags": 8}),
        (libcuda.CUipcMemHandle, 64, {"reserved": 0}),
        (libcuda.CUcheckpointLockArgs, 64, {"timeoutMs": 0, "reserved0": 4, "reserved1": 8}),
        (libcuda.CUcheckpointCheckpointArgs, 64, {"reserved": 0}),
        (
            libcuda.CUcheckpointRestoreArgs,
            64,
            {"gpuPairs": 0, "gpuPairsCount": 8, "reserved": 12, "reserved1": 56},
        ),
        (libcuda.CUcheckpointUnlockArgs, 64, {"reserved": 0}),
    ],
)  # fmt: skip
def test_structures_are_laid_out_as_in_cuda_h(struct: Any, size: int, offsets: dict[str, int]) -> None:
    assert ctypes.sizeof(struct) == size
    assert {name: getattr(struct, name).offset for name, *_ in struct._fields_} == offsets


def names(path: Path) -> set[str]:
    """The driver's functions that a module calls, as attributes or by name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("cu") and node.attr[2:3].isupper():
            found.add(node.attr)
    return found


def test_each_function_that_is_called_has_its_types_and_each_with_types_is_called() -> None:
    called = set().union(*(names(path) for path in ROOM.glob("*.py")))
    assert called <= set(libcuda.SIGNATURES)
    chosen = {"cuCtxGetId", "cuDeviceGetUuid", "cuDeviceGetUuid_v2"}
    assert set(libcuda.SIGNATURES) - called == chosen, "chosen by name"


def test_only_one_module_opens_libraries() -> None:
    """The room's other modules use ctypes for types only; the import contract keeps it out of other rooms."""
    openers = ("CDLL", "PyDLL", "LoadLibrary", "cdll", "pydll", "dlopen")
    found = {
        path.name
        for path in ROOM.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if getattr(node, "attr", getattr(node, "id", getattr(node, "name", None))) in openers
    }
    assert found == {"libcuda.py"}


@pytest.mark.long  # reads the sources
def test_only_the_named_places_load_the_library_or_initialise_cuda() -> None:
    """In a user's process that takes 215 ms and makes CUDA unusable in forked children: only attaching may."""
    found: dict[str, set[str]] = {"load": set(), "cuInit": set()}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and (node.attr == "cuInit" or ast.unparse(node) == "libcuda.load"):
                found[node.attr].add(path.name)
            if isinstance(node, ast.ImportFrom) and node.module == "memguard._devices.libcuda":
                assert "load" not in {alias.name for alias in node.names}
    places = {"checkpoint.py", "cuda_order.py", "survey.py", "shared_memory.py"}
    assert found == {"load": places, "cuInit": places}


class Functions:
    """A library with one function."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        if name != "cuInit":
            raise AttributeError(f"undefined symbol: {name}")
        return lambda flags: flags


def test_a_function_is_bound_once_with_its_types() -> None:
    functions = Functions()
    cuda = libcuda.DriverAPI(functions)  # type: ignore[arg-type]
    assert functions.asked == [], "nothing is bound before its first use"
    first: Any = cuda.cuInit
    assert first is cuda.cuInit and functions.asked == ["cuInit"]
    assert (first.argtypes, first.restype) == (libcuda.SIGNATURES["cuInit"], ctypes.c_int)


def test_a_function_that_the_driver_or_the_table_lacks() -> None:
    cuda = libcuda.DriverAPI(Functions())  # type: ignore[arg-type]
    assert not hasattr(cuda, "cuCtxRecordEvent"), "an older driver"
    with pytest.raises(AttributeError, match=r"cuNobody is not in .*SIGNATURES"):
        _ = cuda.cuNobody


def test_asking_cudas_order_imports_no_framework() -> None:
    """What the child imports."""
    heavy = {"torch", "tensorflow", "jax", "cupy", "pycuda", "numba", "cuda", "pynvml", "pydantic"}
    code = f"from memguard._devices import cuda_order; import sys; print(*{heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_numbers_and_results_are_converted_as_the_driver_reads_them() -> None:
    """Above 32 bits nothing is cut off; what is not a number, or not the right kind of result, is refused."""
    seen: list[tuple[int, ...]] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)

    def attribute(out: int, which: int, address: int) -> int:
        seen.append((which, address))
        ctypes.c_uint64.from_address(out).value = address + 1
        return 700

    function = kind(attribute)
    typed = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(function, ctypes.c_void_p).value)
    library = type("Named", (), {"cuPointerGetAttribute": typed})()
    cuda, found = libcuda.DriverAPI(library), ctypes.c_uint64()
    assert cuda.cuPointerGetAttribute(found, 7, 0x7F00_DEAD_BEEF) == 700
    assert seen == [(7, 0x7F00_DEAD_BEEF)] and found.value == 0x7F00_DEAD_BEF0
    for wrong in ((found, 7.5, 1), (found, 7, 1.5), (1, 7, 1)):
        with pytest.raises(ctypes.ArgumentError):
            cuda.cuPointerGetAttribute(*wrong)
