"""The real numba-cuda without a GPU: its memory managers and pending frees, with stand-ins for the driver's calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]

SETUP = """
from numba import cuda
from numba.cuda.cudadrv import driver as module
from memguard._devices import contexts
from memguard._frameworks.numba.adapter import Numba
host = Host()
framework, uuid, gpu = Numba(host), host.uuids[0], host.gpus[0]
def bytes_of(size): return cuda.device_array(size, "u1")
def refused(size):
    try:
        bytes_of(size)
    except module.CudaAPIError as error:
        return [type(error).__name__, int(error.code), error.code.name, str(error)]
def managers(): return [d.primary_context.memory_manager for d in module.driver.devices.values() if d.primary_context]
"""
LIVE = SETUP + "found = numbas(host)\n"


def test_imported_under_the_hook_though_numba_cuda_redirects_the_import(alone: Run) -> None:
    found = alone(
        """
        import importlib.machinery
        from memguard._frameworks.import_hook import ImportHook
        from memguard._frameworks.numba.adapter import Numba
        host = Host()
        framework, hook, seen = Numba(host), ImportHook(), []
        result["before"] = [framework.state().value, [m for m in sys.modules if m.startswith("numba")]]
        hook.watch(framework.hook, lambda: seen.append(apply_caps(framework, {host.uuids[0]: GIB}).enforcement.value))
        import numba
        result["numba"] = [framework.state().value, hook in sys.meta_path, list(seen)]
        from numba import cuda
        from numba.cuda.cudadrv import driver
        result["cuda"] = [framework.state().value, hook in sys.meta_path, seen]
        result["manager"] = driver._memory_manager.__name__
        result["uncounted"] = framework.uncounted()
        result["theirs"] = "numba_cuda" in cuda.__file__
        result["loader"] = type(cuda.__spec__.loader) is importlib.machinery.SourceFileLoader
        """
    )
    assert "cuda.to_device" in found["uncounted"], "numba-cuda no longer copies past its manager? Then say so no more"
    assert found["before"][0] == "importable" and found["before"][1] in ([], ["numba_cuda"])
    assert found["numba"] == ["importable", True, []]
    assert found["cuda"] == ["imported", False, ["enforced"]] and found["manager"] == "MemguardMemoryManager"
    assert found["theirs"] and found["loader"]


def test_a_refusal_comes_out_of_the_import(alone: Run) -> None:
    found = alone(
        """
        os.environ["NUMBA_CUDA_MEMORY_MANAGER"] = "my.pool"
        from memguard._frameworks.import_hook import ImportHook
        from memguard._frameworks.numba.adapter import Numba
        framework, hook, host = Numba(Host()), ImportHook(), Host()
        hook.watch(framework.hook, lambda: apply_caps(framework, {host.uuids[0]: GIB}) and None)
        def bring():
            from numba import cuda
        result["texts"] = [raised(bring), raised(bring)]
        """
    )
    assert "NUMBA_CUDA_MEMORY_MANAGER=my.pool allocates for Numba, past any cap" in found["texts"][0]
    assert found["texts"][0] == found["texts"][1], "a second attempt does not slip through"


@pytest.mark.parametrize("name", ["NUMBA_DISABLE_CUDA", "NUMBA_ENABLE_CUDASIM"])
def test_kept_off_the_gpu_it_is_absent(alone: Run, name: str) -> None:
    found = alone(
        f"""
        os.environ[{name!r}] = "1"
        from memguard._frameworks.numba.adapter import Numba
        framework = Numba(Host())
        states = [framework.state().value]
        from numba import cuda
        states.append(framework.state().value)
        result["states"], result["available"] = states, bool(cuda.is_available())
        result["nothing"] = [framework.usage(framework.host.gpus[0]), framework.trim(framework.host.gpus[0])]
        result["simulator"] = "simulator" in str(cuda.device_array)
        """
    )
    assert found["states"] == ["absent", "absent"] and found["nothing"] == [None, None]
    assert found["simulator"] is False or name == "NUMBA_ENABLE_CUDASIM"


def test_capping_sets_numbas_memory_manager_and_the_undo_takes_it_back(with_numba: Run) -> None:
    found = with_numba(
        SETUP
        + """
before = module._memory_manager
applied = apply_caps(framework, {uuid: GIB})
manager = module._memory_manager
plain = manager(context=None)
result["manager"] = [manager.__name__, issubclass(manager, module.NumbaCUDAMemoryManager), plain.interface_version]
result["nothing"] = [framework.state().value, framework.usage(gpu), framework.trim(gpu), drifts(framework)]
applied.undo()
result["undone"] = [before, module._memory_manager]
"""
    )
    assert found["manager"] == ["MemguardMemoryManager", True, 1]
    assert found["nothing"] == ["imported", None, None, []] and found["undone"] == [None, None]


def test_its_own_code_allocates_waits_flushes_and_refuses(with_numba: Run) -> None:
    found = with_numba(
        LIVE
        + """
apply_caps(framework, {uuid: 64 * MIB})
found.start()
result["live"] = [framework.state().value, type(managers()[0]).__name__]
arrays = [bytes_of(8 * MIB) for _ in range(6)]
small = bytes_of(1000)
result["full"] = framework.usage(gpu)._asdict()
arrays.pop()
result["pending"] = [len(managers()[0].deallocations), len(found.live), framework.usage(gpu)._asdict()["reclaimable"]]
arrays.append(bytes_of(8 * MIB + 1))
result["grown"] = [len(found.freed), framework.usage(gpu).held]
arrays.pop()
arrays.append(bytes_of(20 * MIB))  # only without the ten that are pending
result["flushed"] = [len(managers()[0].deallocations), len(found.freed), framework.usage(gpu).held]
result["refused"] = refused(4 * MIB)
result["after"] = [len(found.live), framework.usage(gpu).held]
arrays.clear()
result["one by one"] = [len(managers()[0].deallocations), len(found.live)]
framework.resize({uuid: GIB})
more = [bytes_of(2 * MIB) for _ in range(6)]
more.clear()
result["eleven"] = [len(managers()[0].deallocations), len(found.live)]
"""
    )
    assert found["live"] == ["live", "MemguardMemoryManager"]
    full = found["full"]
    assert (full["held"], full["in_use"], full["peak"]) == (50 << 20, (48 << 20) + 1000, (48 << 20) + 1000)
    assert found["pending"] == [1, 7, 8 << 20] and found["grown"] == [0, 60 << 20]
    assert found["flushed"] == [0, 2, 62 << 20]
    assert found["refused"][:3] == ["CudaAPIError", 2, "CUDA_ERROR_OUT_OF_MEMORY"]
    assert "holds 62.0 MiB of the 64.0 MiB that the memguard budget gives numba" in found["refused"][3]
    assert found["after"] == [7, 62 << 20] and found["one by one"] == [6, 7]
    assert found["eleven"] == [1, 2], "Numba's own rule: more than ten are flushed"


def test_a_fifth_of_the_card_pending_is_flushed(with_numba: Run) -> None:
    found = with_numba(
        LIVE
        + """
apply_caps(framework, {uuid: 100 * GIB})
found.start()
array = bytes_of(27 * GIB)
del array
result["few"] = [len(managers()[0].deallocations), framework.usage(gpu).held // GIB]
array = bytes_of(2 * GIB)
del array
result["many"] = [len(managers()[0].deallocations), framework.usage(gpu).held // GIB]
"""
    )
    assert found["few"] == [1, 27] and found["many"] == [0, 0]


def test_the_cards_own_refusal_is_numbas(with_numba: Run) -> None:
    found = with_numba(
        LIVE
        + """
apply_caps(framework, {uuid: GIB})
found.start()
found.total = 100 * MIB
array = bytes_of(80 * MIB)
del array
array = bytes_of(90 * MIB)
result["usage"] = [framework.usage(gpu).held // MIB, framework.usage(gpu).in_use // MIB]
result["text"] = refused(20 * MIB)
"""
    )
    assert found["usage"] == [90, 90] and "memguard" not in found["text"][3] and found["text"][1] == 2


def test_trimmed_resized_and_undone_while_live(with_numba: Run) -> None:
    found = with_numba(
        LIVE
        + """
import contextlib
pushed = []
@contextlib.contextmanager
def push(ordinal):
    pushed.append(ordinal)
    yield True
contexts.pushed = push
applied = apply_caps(framework, {uuid: 64 * MIB})
found.start()
array = bytes_of(64 * MIB)
del array
framework.trim(gpu)
result["trimmed"] = [framework.usage(gpu).held, len(found.freed), pushed]
framework.resize({uuid: 32 * MIB})
result["lower"] = refused(34 * MIB)[1]
kept = bytes_of(32 * MIB)
applied.undo()
result["undone"] = [framework.usage(gpu), module._memory_manager, bytes_of(GIB).nbytes]
again = Numba(host)
applied = apply_caps(again, {uuid: 16 * MIB})
result["again"] = [applied.enforcement.value, again.usage(gpu).held, refused(2 * MIB)[1], again.usage(gpu).in_use]
"""
    )
    assert found["trimmed"] == [0, 1, [0]] and found["lower"] == 2
    assert found["undone"] == [[None] * 6, None, 1 << 30], "its context lives on, and nobody counts"
    assert found["again"] == ["enforced", (1 << 30) + (32 << 20), 2, 32 << 20]


def test_managed_memory_and_events_are_not_counted(with_numba: Run) -> None:
    found = with_numba(
        LIVE
        + """
apply_caps(framework, {uuid: 64 * MIB})
context = found.start()
array, managed = bytes_of(8 * MIB), cuda.managed_array(GIB, "u1")
events = [cuda.event() for _ in range(20)]
del managed
events.clear()
mapped = context.deallocations
result["usage"] = framework.usage(gpu)._asdict()
managers()[0].deallocations.clear()
mapped.clear()
result["after"], result["left"] = framework.usage(gpu).held, len(found.live)
"""
    )
    assert found["usage"]["held"] == found["usage"]["in_use"] == 8 << 20 and found["usage"]["reclaimable"] == 0
    assert found["after"] == 8 << 20 and found["left"] == 1


def test_on_two_gpus_each_has_its_cap(with_numba: Run) -> None:
    found = with_numba(
        LIVE.replace("Host()", 'Host("h200", "h200")')
        + """
apply_caps(framework, {host.uuids[0]: 16 * MIB, host.uuids[1]: 32 * MIB})
counts = []
for number in (0, 1):
    found.start(number)
    live = []
    while len(live) < 100:
        try:
            live.append(bytes_of(4 * MIB))
        except module.CudaAPIError:
            break
    counts.append([len(live), framework.usage(host.gpus[number]).held // MIB])
result["counts"] = counts
"""
    )
    assert found["counts"] == [[4, 16], [8, 32]]


def test_live_before_it_cannot_be_capped(with_numba: Run) -> None:
    found = with_numba(
        LIVE
        + """
found.start()
result["text"] = raised(lambda: apply_caps(framework, {uuid: GIB}))
result["manager"] = module._memory_manager is module.NumbaCUDAMemoryManager
"""
    )
    assert "was live before memguard.init()" in found["text"] and found["manager"]


def test_a_plugin_of_the_users_own_is_a_conflict_and_later_it_is_told(with_numba: Run) -> None:
    found = with_numba(
        LIVE
        + """
class Pool(cuda.HostOnlyCUDAMemoryManager):
    interface_version = 1
    initialize = get_ipc_handle = get_memory_info = lambda self, *args: None
    def memalloc(self, size): raise MemoryError
cuda.set_memory_manager(Pool)
result["text"] = raised(lambda: apply_caps(framework, {uuid: GIB}))
module._memory_manager = None
apply_caps(framework, {uuid: GIB})
cuda.set_memory_manager(Pool)
result["drift"] = drifts(framework)
found.start()
usage = framework.usage(gpu)
result["live"] = [drifts(framework), [usage.held, usage.in_use]]
"""
    )
    assert "set_memory_manager(" in found["text"] and "past any cap" in found["text"]
    assert "replaced after memguard.init (Pool)" in found["drift"][0]
    assert found["live"] == [found["drift"], [None, None]], "unknown, and not 0"


@pytest.mark.parametrize(
    "device",
    [
        "module.driver.devices[0]", "weakref.proxy(module.driver.devices[0])", "binding.CUdevice(0)", "ctypes.c_int(0)",
        "0", "types.SimpleNamespace(id=0)", "types.SimpleNamespace(id=0, uuid=None)",
        "types.SimpleNamespace(uuid=uuid.removeprefix('GPU-'))", "types.SimpleNamespace(uuid=uuid.encode())",
        "object()", "None", "gone()",
    ],
)  # fmt: skip
@pytest.mark.parametrize("already", [True, False])
def test_a_context_that_somebody_else_made_works_and_shares_the_cap(
    with_numba: Run, device: str, already: bool
) -> None:
    """Numba's own tests make one of a `CUdevice`; a library may have made it of anything."""
    found = with_numba(
        LIVE
        + f"""
import ctypes, types, weakref
from cuda.bindings import driver as binding
def gone():
    class Device: pass
    return weakref.proxy(Device())
applied = apply_caps(framework, {{uuid: 64 * MIB}})
contexts.current = lambda: found.current - 1 if found.current else None
found.contexts_of = contexts.ordinals
contexts.ordinals = lambda: {{u: n for n, u in enumerate(host.uuids)}}
if {already}: kept = bytes_of(16 * MIB) if found.start() else None
theirs = module.Context({device}, 1)
found.current = 1
arrays = [theirs.memalloc(8 * MIB) for _ in range(6 if {already} else 8)]
def more(context):
    try:
        context.memalloc(8 * MIB)
    except module.CudaAPIError as error:
        return [error.code.name, str(error)]
result["refused"] = more(theirs)
result["ours"] = more(found.start())
result["usage"] = framework.usage(gpu).held if {already} else None
result["live"] = sum(found.live.values())
arrays.clear()
theirs.memory_manager.reset()
arrays = [found.start().memalloc(8 * MIB) for _ in range(6 if {already} else 8)]
result["anew"] = [framework.usage(gpu).held, more(found.start())[0]]
applied.undo()
result["free"] = more(theirs)
"""
    )
    assert found["refused"][0] == found["ours"][0] == "CUDA_ERROR_OUT_OF_MEMORY" and found["live"] == 64 << 20
    assert "holds 64.0 MiB of the 64.0 MiB that the memguard budget gives numba" in found["refused"][1]
    assert found["usage"] in (None, 64 << 20) and found["anew"] == [64 << 20, "CUDA_ERROR_OUT_OF_MEMORY"]
    assert found["free"] is None


def test_a_memory_manager_set_later_is_held_or_told_at_once(with_numba: Run) -> None:
    found = with_numba(
        LIVE
        + """
import inspect
setters = [cuda.set_memory_manager, module.set_memory_manager]
signature, told = inspect.signature(cuda.set_memory_manager), []
before = module._memory_manager
applied = apply_caps(framework, {uuid: 64 * MIB})
framework.on_change = lambda: told.append(drifts(framework))
result["same"] = inspect.signature(cuda.set_memory_manager) == signature
for manager in (module.NumbaCUDAMemoryManager, module._memory_manager):
    cuda.set_memory_manager(manager)
result["held"] = [module._memory_manager.__name__, list(told)]
class Pool(module.NumbaCUDAMemoryManager): pass
cuda.set_memory_manager(Pool)
result["told"] = told[-1]
cuda.set_memory_manager(module.NumbaCUDAMemoryManager)
result["again"] = told[-1]
found.start()
arrays = [bytes_of(8 * MIB) for _ in range(8)]
result["refused"] = refused(1)[2]
applied.undo()
result["undone"] = module._memory_manager is module.NumbaCUDAMemoryManager
result["back"] = [cuda.set_memory_manager, module.set_memory_manager] == setters
"""
    )
    assert found["held"] == ["MemguardMemoryManager", [[], []]] and found["same"] and found["back"]
    assert "replaced after memguard.init (Pool)" in found["told"][0] and found["again"] == []
    assert found["refused"] == "CUDA_ERROR_OUT_OF_MEMORY" and found["undone"], "what was asked for last"


def test_a_destroyed_context_begins_anew(with_numba: Run) -> None:
    found = with_numba(
        LIVE
        + """
apply_caps(framework, {uuid: 64 * MIB})
context = found.start()
live = [bytes_of(8 * MIB) for _ in range(4)]
context.memory_manager.reset()
module.driver.devices[0].primary_context = None
result["gone"] = framework.usage(gpu)
found.start()
kept = bytes_of(16 * MIB)
live.clear()
result["anew"] = framework.usage(gpu).held
"""
    )
    assert found == {"gone": None, "anew": 16 << 20}


def test_under_the_guard_from_init_to_shutdown(with_numba: Run) -> None:
    found = with_numba(
        LIVE
        + """
from memguard._guard.guard import Guard
from memguard._budget import from_mapping
guard = Guard(from_mapping({"version": 1, "frameworks": {"numba": {"limit": "64MiB"}}}), host)
guard.start()
row = guard.ledger().devices[0].row("numba")
result["before"] = [row.enforcement, row.bytes, row.cap]
found.start()
array = bytes_of(40 * MIB)
row = guard.ledger().devices[0].row("numba")
result["live"] = [row.enforcement, row.bytes, row.in_use]
result["refused"] = refused(30 * MIB)[1]
cuda.set_memory_manager(module.NumbaCUDAMemoryManager)
result["same"] = guard.ledger().devices[0].row("numba").enforcement
class Other(module.NumbaCUDAMemoryManager): pass
cuda.set_memory_manager(Other)
ledger = guard.ledger()
result["drift"] = [ledger.devices[0].row("numba").enforcement, [n for n in ledger.notes if "replaced" in n]]
result["stays"] = guard.stop()
result["manager"] = module._memory_manager is Other
"""
    )
    assert found["same"] == "enforced"
    assert found["before"] == ["enforced", 0, 64 << 20] and found["live"] == ["enforced", 40 << 20, 40 << 20]
    assert found["refused"] == 2 and found["stays"] == [] and found["manager"]
    assert found["drift"][0] == "watched" and len(found["drift"][1]) == 1


def test_the_private_names_that_memguard_uses_exist_in_this_numba(with_numba: Run) -> None:
    found = with_numba(
        SETUP
        + """
import inspect
result["names"] = [n for n in ("set_memory_manager", "NumbaCUDAMemoryManager", "_memory_manager", "_PendingDeallocs",
    "CudaAPIError", "binding", "driver", "config") if not hasattr(module, n)]
result["code"] = int(module.binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
result["chosen"] = module.config.CUDA_MEMORY_MANAGER
result["devices"] = len(module.driver.devices)
result["queue"] = list(inspect.signature(module._PendingDeallocs.add_item).parameters)
"""
    )
    assert found == {
        "names": [], "code": 2, "chosen": "default", "devices": 0, "queue": ["self", "dtor", "handle", "size"],
    }  # fmt: skip
