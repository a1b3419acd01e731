"""The real CuPy without a GPU: its own allocators, errors and limits, as far as they go without CUDA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
CONTRACT = Path(__file__).parents[1] / "contract"
MODEL = [str(CONTRACT / "fake_cupy"), str(CONTRACT)]

SETUP = """
import cupy
from memguard.errors import ConflictingSetting
from memguard._frameworks.cupy.adapter import CuPy
host = Host()
framework, uuid, gpu = CuPy(host), host.uuids[0], host.gpus[0]
default = cupy.cuda.get_allocator()
def conflict():
    try:
        apply_caps(framework, {uuid: GIB})
    except ConflictingSetting as error:
        return [error.framework, error.setting, str(error)]
"""


def test_looking_imports_nothing_and_asks_nothing(alone: Run) -> None:
    found = alone(
        """
        from memguard._frameworks.cupy.adapter import CuPy
        host = Host()
        framework, gpu = CuPy(host), host.gpus[0]
        result["early"] = [framework.state().value, framework.usage(gpu), framework.about()]
        result["imported"] = "cupy" in sys.modules
        import cupy
        asked = []
        cupy.cuda.runtime.getDeviceCount = cupy.cuda.runtime.getDevice = lambda: asked.append(1)
        result["late"] = [framework.state().value, framework.usage(gpu), framework.trim(gpu), framework.about()]
        result["late"] += [drifts(framework), framework.capturing(), framework.record()]
        result["asked"] = asked
        """
    )
    assert found["early"] == ["importable", None, {}] and not found["imported"]
    assert found["late"] == ["imported", None, None, {}, [], False, None]
    assert found["asked"] == []


def test_capped_under_the_hook_and_given_back(alone: Run) -> None:
    found = alone(
        """
        import importlib.machinery
        from memguard._frameworks.cupy.adapter import CuPy
        from memguard._frameworks.import_hook import ImportHook
        host = Host()
        framework, hook, applied = CuPy(host), ImportHook(), []
        hook.watch(framework.hook, lambda: applied.append(apply_caps(framework, {host.uuids[0]: GIB})))
        import cupy
        result["ours"] = cupy.cuda.get_allocator().__module__
        result["applied"] = [[a.enforcement.value, a.permanent, a.notes] for a in applied]
        result["loader"] = type(cupy.__spec__.loader) is importlib.machinery.SourceFileLoader
        result["gone"] = hook not in sys.meta_path
        applied[0].undo()
        result["pool"] = cupy.cuda.get_allocator().__self__ is cupy.get_default_memory_pool()
        """
    )
    assert found == {
        "ours": "memguard._frameworks.cupy.adapter", "applied": [["enforced", None, []]], "loader": True,
        "gone": True,
        "pool": True,
    }  # fmt: skip


def test_an_undo_leaves_the_very_same_allocator(with_cupy: Run) -> None:
    found = with_cupy(
        SETUP
        + """
applied = apply_caps(framework, {uuid: GIB})
ours = cupy.cuda.get_allocator()
result["set"] = [ours is not default, drifts(framework), framework.state().value]
applied.undo()
result["same"], result["drift"] = cupy.cuda.get_allocator() is default, drifts(framework)
apply_caps(framework, {uuid: 2 * GIB}).undo()
result["again"] = cupy.cuda.get_allocator() is default
"""
    )
    assert found == {"set": [True, [], "imported"], "same": True, "drift": [], "again": True}


def test_an_undo_leaves_an_allocator_that_was_set_since(with_cupy: Run) -> None:
    found = with_cupy(
        SETUP
        + """
applied = apply_caps(framework, {uuid: GIB})
own, raw = cupy.cuda.MemoryPool().malloc, cupy.cuda.memory._malloc
changed = []
framework.on_change = lambda: changed.append(drifts(framework))
cupy.cuda.set_allocator(own)
result["pool"] = [framework._pool is own.__self__, cupy.cuda.get_allocator() is framework._allocate]
cupy.cuda.set_allocator(raw)
cupy.cuda.memory.set_allocator(own)
result["drift"] = changed
applied.undo()
result["own"] = cupy.cuda.get_allocator() is own
applied = apply_caps(framework, {uuid: GIB})
cupy.cuda.set_allocator(None)
applied.undo()
result["raw"] = cupy.cuda.get_allocator() == raw
"""
    )
    assert found["own"] and found["raw"] and found["pool"] == [True, True]
    assert found["drift"][0] == found["drift"][2] == []
    assert "its allocator was replaced after memguard.init (_malloc)" in found["drift"][1][0]


def test_a_pool_of_the_users_own_is_capped(with_cupy: Run) -> None:
    found = with_cupy(
        SETUP
        + """
own = cupy.cuda.MemoryPool()
malloc = own.malloc
cupy.cuda.set_allocator(malloc)
applied = apply_caps(framework, {uuid: GIB})
result["kind"], result["pool"] = applied.enforcement.value, framework._pool is own
applied.undo()
result["same"] = cupy.cuda.get_allocator() is malloc
"""
    )
    assert found == {"kind": "enforced", "pool": True, "same": True}


def test_the_async_pool_is_watched(with_cupy: Run) -> None:
    """Made without asking CUDA for its devices, which there are none of."""
    found = with_cupy(
        SETUP
        + """
malloc = cupy.cuda.MemoryAsyncPool.__new__(cupy.cuda.MemoryAsyncPool).malloc
cupy.cuda.set_allocator(malloc)
applied = apply_caps(framework, {uuid: GIB})
result["kind"], result["notes"] = applied.enforcement.value, applied.notes
applied.undo()
result["same"], result["drift"] = cupy.cuda.get_allocator() is malloc, drifts(framework)
"""
    )
    assert found["kind"] == "watched" and "async pool" in found["notes"][0]
    assert found["same"] and found["drift"] == []


@pytest.mark.parametrize(
    ("allocator", "name"),
    [
        ("None", "_malloc"),
        ("cupy.cuda.malloc_managed", "malloc_managed"),
        ("cupy.cuda.malloc_async", "malloc_async"),
        ("own", "own"),
        ("cupy.cuda.PythonFunctionAllocator(own, own).malloc", "PythonFunctionAllocator.malloc"),
        ("cupy.cuda.CFunctionAllocator(0, 0, 0, None).malloc", "CFunctionAllocator.malloc"),
        ("partial(own, 1)", "functools.partial("),
    ],
)
def test_an_allocator_that_nobody_knows_is_refused_and_breaks_no_reading(
    with_cupy: Run, allocator: str, name: str
) -> None:
    found = with_cupy(
        SETUP
        + f"""
from functools import partial
from memguard._devices import contexts
def own(size, device=0): return size
cupy.cuda.set_allocator({allocator})
before = cupy.cuda.get_allocator()
result["conflict"], result["same"] = conflict(), cupy.cuda.get_allocator() is before
result["asked"] = framework._queried_pool(cupy) is cupy.get_default_memory_pool()
"""
    )
    framework, setting, text = found["conflict"]
    assert framework == "cupy" and setting.startswith(f"cupy.cuda.set_allocator({name}")
    assert "bypasses CuPy's memory pool" in text and found["same"] and found["asked"]


def test_within_using_allocator_nothing_is_set(with_cupy: Run) -> None:
    found = with_cupy(
        SETUP
        + """
with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
    result["text"] = raised(lambda: apply_caps(framework, {uuid: GIB}))
result["same"], result["drift"] = cupy.cuda.get_allocator() is default, drifts(framework)
"""
    )
    assert "leave cupy.cuda.using_allocator first" in found["text"] and found["same"] and found["drift"] == []


@pytest.mark.parametrize(
    ("text", "outcome"),
    [("1073741824", "applied"), ("0", "applied"), ("0.5%", "applied"), ("2147483648", "looser"), ("50%", "looser"),
     ("1GiB", "cannot be read"), ("half", "cannot be read"), ("nan%", "cannot be read"), ("-1", "cannot be read")],
)  # fmt: skip
def test_its_limit_in_the_environment_is_read_as_it_reads_it(with_cupy: Run, text: str, outcome: str) -> None:
    found = with_cupy(
        SETUP
        + f"""
os.environ["CUPY_GPU_MEMORY_LIMIT"] = {text!r}
result["conflict"], result["same"] = conflict(), cupy.cuda.get_allocator() is default
try:
    limit = cupy.cuda.memory._parse_limit_string()
    result["valid"] = 0 <= limit["fraction"] <= 1 if limit["size"] is None else limit["size"] >= 0
except ValueError:
    result["valid"] = False
"""
    )
    assert found["valid"] is (outcome != "cannot be read")
    assert (found["conflict"] is None) is (outcome == "applied") is not found["same"]
    if outcome != "applied":
        assert f"CUPY_GPU_MEMORY_LIMIT={text}" in found["conflict"][1] and outcome in found["conflict"][2]


def test_what_it_raises_without_a_gpu_stays_its_own(with_cupy: Run) -> None:
    found = with_cupy(
        SETUP
        + """
def failing():
    try:
        cupy.empty(3)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return [error.status, str(error)]
before = failing()
apply_caps(framework, {uuid: GIB})
result["same"], result["before"] = failing() == before, before
"""
    )
    assert found["before"] is not None and found["same"]


def test_under_the_guard_from_init_to_shutdown(with_cupy: Run) -> None:
    found = with_cupy(
        SETUP
        + """
from memguard._guard.guard import Guard
from memguard._budget import from_mapping
guard = Guard(from_mapping({"version": 1, "frameworks": {"cupy": {"limit": "3GiB"}}}), host)
guard.start()
row = guard.ledger().devices[0].row("cupy")
result["row"], result["ours"] = [row.enforcement, row.bytes], cupy.cuda.get_allocator() is not default
cupy.cuda.set_allocator(None)
ledger = guard.ledger()
result["drifted"] = [ledger.devices[0].row("cupy").enforcement, list(ledger.notes)]
cupy.cuda.set_allocator(guard.frameworks["cupy"]._allocate)
result["back"] = guard.ledger().devices[0].row("cupy").enforcement
result["stays"], result["same"] = guard.stop(), cupy.cuda.get_allocator() is default
"""
    )
    assert found["row"] == ["enforced", 0] and found["ours"] and found["back"] == "enforced"
    enforcement, notes = found["drifted"]
    assert enforcement == "watched" and any("was replaced after memguard.init (_malloc)" in note for note in notes)
    assert found["stays"] == [] and found["same"]


def test_its_model_has_nothing_that_it_has_not(alone: Run, with_cupy: Run) -> None:
    """`tests/contract/fake_cupy`, by its public names."""
    names = alone(
        f"""
        sys.path[:0] = {MODEL!r}
        import cupy, inspect
        from cupy.cuda import memory, runtime
        for module in (cupy, cupy.cuda, memory, runtime):
            public = [name for name in vars(module) if name[0] != "_" and not inspect.ismodule(vars(module)[name])]
            result[module.__name__] = public
            for name in public:
                if inspect.isclass(vars(module)[name]):
                    result[module.__name__ + "." + name] = [n for n in vars(vars(module)[name]) if n[0] != "_"]
        """
    )
    assert "MemoryPool" in names["cupy.cuda"] and "set_limit" in names["cupy.cuda.memory.MemoryPool"]
    found = with_cupy(
        f"""
import importlib, cupy
lacking = []
for owner, names in {names!r}.items():
    module, _, cls = owner.rpartition(".") if owner.rpartition(".")[2][:1].isupper() else (owner, "", "")
    where = importlib.import_module(module)
    if cls and not hasattr(where, cls):
        continue  # said by its module
    where = getattr(where, cls) if cls else where
    lacking += [owner + "." + name for name in names if not hasattr(where, name)]
result["lacking"] = lacking
"""
    )
    assert found["lacking"] == []
