"""PyCUDA's contexts, on its model: who serves `make_context`, the budget's opt-out, what ends well and what is found.

A context that is left on a thread's stack at its end ends the process: the model says so at exit.
"""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.capping import AppliedCaps, apply_caps

from memguard import exchange
from memguard._base.types import Usage
from memguard._base.units import MIB
from memguard._devices import contexts
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks import driver_pages, second_contexts
from memguard._frameworks.pycuda import adapter as pycuda_file
from memguard._frameworks.pycuda.adapter import PyCUDA
from memguard.errors import DeviceError

HERE = Path(__file__).parent
pycuda_contexts: Any = sys.modules["memguard.exchange.pycuda_context"]  # whose name is also that of what is in it


class Setting:
    """The model freshly imported, with a framework over it, and the driver's view of the primary contexts."""

    def __init__(self) -> None:
        self.host = SimulatedHost(["h200", "h200"])
        self.framework = PyCUDA(self.host)
        self.gpu, self.other = self.host.devices()

    def apply(self, **options: Any) -> AppliedCaps:
        importlib.import_module("pycuda.driver")
        return apply_caps(self.framework, {gpu.uuid: 64 * MIB for gpu in self.host.devices()}, options)

    @property
    def drv(self) -> Any:
        return importlib.import_module("pycuda.driver")

    def primary(self, ordinal: int = 0) -> Any:
        self.drv.init()
        return self.drv.Device(ordinal).retain_primary_context()

    @property
    def left(self) -> dict[int, Any]:
        """What lies on the stacks of threads."""
        return dict(self.drv._stacks)


def modelled() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in ("pycuda", "card")]


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    driver_pages.slabs.clear()
    for name in modelled():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(HERE / "fake_pycuda")

    def driver() -> Any:
        return sys.modules.get("pycuda.driver")

    def primary(ordinal: int) -> int | None:
        known = driver()._primary.get(ordinal, {}) if driver() is not None else {}
        return next((context.handle for context in known.values()), None)

    def here(what: str) -> int | None:
        context = driver()._current() if driver() is not None and driver()._initialised else None
        return None if context is None else int(getattr(context, what))

    monkeypatch.setattr(contexts, "primary", primary)
    monkeypatch.setattr(contexts, "current", lambda: here("ordinal"))
    monkeypatch.setattr(contexts, "current_handle", lambda: here("handle"))
    monkeypatch.setattr(pycuda_contexts, "_per_thread", pycuda_contexts._PerThread())
    monkeypatch.setattr(pycuda_contexts, "_keepalive", {})
    yield Setting()
    gc.collect()
    driver_pages.slabs.clear()
    for name in modelled():
        del sys.modules[name]


# without a cap


def test_without_a_cap_what_it_holds_is_unknown_on_the_gpus_where_it_has_a_context(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "ordinals", lambda: {setting.gpu.uuid: 0, setting.other.uuid: 1})

    def rows() -> list[Any]:
        return [setting.framework.usage(gpu) for gpu in (setting.gpu, setting.other)]

    assert rows() == [None, None], "not imported"
    setting.drv.init()
    assert rows() == [None, None], "no context"
    context = setting.drv.Device(1).make_context()
    assert rows() == [None, Usage(None, None)]
    context.pop()
    assert rows() == [None, Usage(None, None)], "it is another thread's now, or nobody's: its memory is there"


def test_without_a_cap_the_context_of_autoinit_is_seen_from_every_thread(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "ordinals", lambda: {setting.gpu.uuid: 0, setting.other.uuid: 1})
    importlib.import_module("pycuda.autoinit")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(map(setting.framework.usage, setting.host.devices())))
    thread.start()
    thread.join()
    assert found == [Usage(None, None), None]


# who serves make_context


@pytest.mark.parametrize("options", [{}, {"context": "primary"}])
def test_autoinit_and_make_context_are_served_by_the_primary_context(setting: Setting, options: dict[str, str]) -> None:
    setting.apply(**options)
    made = importlib.import_module("pycuda.autoinit").context
    assert made.primary and setting.drv.Device(0).make_context().handle == made.handle
    assert setting.drv.gpus[0].contexts == 1 and second_contexts.find(0, setting.framework.contexts(setting.gpu)) == {}


def test_a_budget_may_leave_make_context_alone(setting: Setting) -> None:
    raw = setting.drv.Device.make_context
    applied = setting.apply(context="own")
    assert setting.drv.Device.make_context is raw
    primary, made = setting.primary(), importlib.import_module("pycuda.autoinit").context
    assert not made.primary and made.handle != primary.handle and setting.drv.gpus[0].contexts == 2
    array = setting.drv.mem_alloc(8 * MIB)
    usage = setting.framework.usage(setting.gpu)
    assert usage is not None and usage.in_use == 8 * MIB, "it counts in whatever context"
    with pytest.raises(setting.drv.MemoryError):
        setting.drv.mem_alloc(60 * MIB)
    del array
    applied.undo()
    assert setting.drv.Device.make_context is raw


def test_only_where_it_is_no_wish_is_a_context_made_before_said_with_its_remedy(setting: Setting) -> None:
    importlib.import_module("pycuda.autoinit")
    assert any("import it after memguard.init()" in note for note in setting.apply().notes)
    assert not any("pycuda.autoinit" in note for note in setting.apply(context="own").notes)


def test_a_pool_whose_context_was_destroyed_is_not_used_for_another_with_its_handle(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it keeps idle was freed with the context, and may be anybody's by now."""
    card = setting.drv.card
    monkeypatch.setattr(contexts, "buffer", card.buffer)
    setting.apply(context="own")
    setting.drv.init()
    first = setting.drv.Device(0).make_context()
    array = setting.drv.mem_alloc(8 * MIB)
    old = int(array)
    del array
    first.detach()
    setting.drv.gpus[0].clear()
    second = setting.drv.Device(0).make_context()
    second.handle = first.handle
    again = setting.drv.mem_alloc(8 * MIB)
    assert card.buffer(int(again)) is not None, "it lies in memory that there is"
    usage = setting.framework.usage(setting.gpu)
    assert usage is not None and usage.in_use == 8 * MIB and (usage.held or 0) <= 12 * MIB, old
    del again
    (dead,) = pycuda_file._never_freed
    pycuda_file._never_freed.clear()
    dead.own._blocks.free.clear()  # its end would give back what is not there


# what is found beside the primary context


def test_contexts_beside_the_primary_one_are_found_with_who_made_them(setting: Setting) -> None:
    assert second_contexts.find(0) == {}, "nothing is there, and nothing is imported"
    setting.drv.init()
    own = setting.drv.Device(0).make_context()
    assert second_contexts.find(0) == {}, "the first of any kind is no second one"
    setting.primary()
    assert second_contexts.find(0) == {own.handle: "PyCUDA"} and second_contexts.find(1) == {}
    own.pop()
    assert second_contexts.find(0) == {}, "on no stack, it cannot be seen"
    assert second_contexts.find(0, [own.handle]) == {own.handle: "PyCUDA"}, "but for what it holds"
    made = importlib.import_module("pycuda.autoinit").context
    setting.primary(1)
    made.pop()
    assert second_contexts.find(0, [own.handle]) == {own.handle: "PyCUDA", made.handle: "pycuda.autoinit"}
    assert second_contexts.find(1) == {}
    assert setting.left == {}, "looking leaves every stack as it was"


def test_a_context_of_somebody_else_on_this_thread_is_found(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    primary = setting.primary()
    monkeypatch.setattr(contexts, "current", lambda: 0)
    monkeypatch.setattr(contexts, "current_handle", lambda: 4711)
    assert second_contexts.find(0) == {4711: "unknown"} and second_contexts.find(1) == {}
    setting.primary(1)
    assert second_contexts.find(1) == {}, "it is on the other GPU"
    monkeypatch.setattr(contexts, "current_handle", lambda: primary.handle)
    assert second_contexts.find(0) == {}


def test_a_primary_context_that_was_made_anew_is_no_second_one(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handle is remembered elsewhere, and may be another by now."""
    setting.primary()
    monkeypatch.setattr(contexts, "primary_now", lambda ordinal: 4711)
    monkeypatch.setattr(contexts, "current", lambda: 0)
    monkeypatch.setattr(contexts, "current_handle", lambda: 4711)
    assert second_contexts.find(0) == {}


@pytest.mark.parametrize("way", ["current", "pushed", "pool", "autoinit", "a new primary one"])
def test_a_context_is_found_however_it_comes_although_the_primary_one_is_known(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A reading asks the driver for the primary context only if another one is in sight."""
    primary = setting.primary()
    monkeypatch.setitem(contexts._primaries, 0, primary.handle)
    asked = []
    monkeypatch.setattr(contexts, "primary_now", lambda ordinal: asked.append(ordinal) or primary.handle)
    monkeypatch.setattr(contexts, "current", lambda: 0)
    monkeypatch.setattr(contexts, "current_handle", lambda: primary.handle)
    for known in ([], [primary.handle]):
        assert second_contexts.find(0, known) == {} and not asked
    pools: list[int] = []
    expected = {4711: "PyCUDA"}
    if way in ("current", "a new primary one"):
        monkeypatch.setattr(contexts, "current_handle", lambda: 4711)
        expected = {4711: "unknown"}
    elif way == "pushed":
        monkeypatch.setattr(second_contexts.pycuda_contexts, "pushed", lambda: 4711)
        monkeypatch.setattr(second_contexts, "_on", lambda ordinal, context: True)
    elif way == "pool":
        pools = [primary.handle, 4711]
    else:
        made = types.SimpleNamespace(context=types.SimpleNamespace(handle=4711), device=setting.drv.Device(0))
        monkeypatch.setitem(sys.modules, "pycuda.autoinit", made)
        expected = {4711: "pycuda.autoinit"}
    if way == "a new primary one":
        monkeypatch.setattr(contexts, "primary_now", lambda ordinal: asked.append(ordinal) or 4711)
        expected = {}
    assert second_contexts.find(0, pools) == expected and asked == [0]


def test_looking_never_raises(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.primary()

    def lost(*_: object) -> Any:
        raise OSError("the driver is gone")

    for name in ("current_handle", "primary"):
        monkeypatch.setattr(contexts, name, lost)
        assert second_contexts.find(0) == {}


def test_pools_tell_the_contexts_that_they_are_in(setting: Setting) -> None:
    setting.apply(context="own")
    setting.drv.init()
    made = [setting.drv.Device(ordinal).make_context() for ordinal in (0, 1)]
    assert setting.framework.contexts(setting.gpu) == frozenset()
    kept = [setting.drv.mem_alloc(MIB)]
    assert setting.framework.contexts(setting.other) == {made[1].handle}
    made[1].pop()
    kept.append(setting.drv.mem_alloc(MIB))
    assert setting.framework.contexts(setting.gpu) == {made[0].handle}
    del kept


# the primary context for a block


def on_threads(count: int, work: Callable[[int], None]) -> None:
    """Run on as many threads, which are all in `work` at once. What one raises is raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_a_block_is_in_the_primary_context_and_leaves_the_stack_as_it_was(setting: Setting) -> None:
    with exchange.pycuda_context() as context:
        assert context.primary and setting.drv.Context.get_current() is context
        assert context.handle == setting.primary().handle
    assert setting.left == {} and setting.drv.gpus[0].contexts == 1
    with pytest.raises(ValueError, match="the user's"), exchange.pycuda_context():
        raise ValueError("the user's")
    assert setting.left == {}
    own = setting.drv.Device(0).make_context()
    with exchange.pycuda_context(0):
        assert setting.drv.Context.get_current() is context
    assert setting.drv.Context.get_current() is own
    own.pop()


def test_blocks_may_be_nested_and_entered_again(setting: Setting) -> None:
    block, other = exchange.pycuda_context(), exchange.pycuda_context(1)
    with block as one, block as two, other as three:
        assert one is two and three is not one and setting.drv.Context.get_current() is three
        with block:
            assert setting.drv.Context.get_current() is one
        assert setting.drv.Context.get_current() is three
    with block as again:
        assert again is one
    assert setting.left == {} and setting.drv.counters["pushes"] == setting.drv.counters["pops"] == 5


def test_each_thread_has_its_own(setting: Setting) -> None:
    together = threading.Barrier(4)

    def work(number: int) -> None:
        for _ in range(20):
            with exchange.pycuda_context(number % 2) as context:
                together.wait(10)
                assert setting.drv.Context.get_current() is context and context.ordinal == number % 2
                assert context.thread == threading.get_ident(), "what it makes can be freed after the block, here"
        assert setting.drv.Context.get_current() is None

    on_threads(4, work)
    assert setting.left == {} and setting.drv.counters["pushes"] == setting.drv.counters["pops"] == 80
    assert [gpu.contexts for gpu in setting.drv.gpus] == [1, 1]


def test_under_a_budget_all_threads_share_pool_and_cap(setting: Setting) -> None:
    """PyCUDA's pool belongs to the thread that made it, or to whoever has that thread's own object current."""
    setting.apply()
    with exchange.pycuda_context():
        mine = setting.drv.mem_alloc(8 * MIB)
    refused = []

    def work(number: int) -> None:
        with exchange.pycuda_context():
            live = []
            try:
                for _ in range(20):
                    live.append(setting.drv.mem_alloc(8 * MIB))
            except setting.drv.MemoryError:
                refused.append(number)
            del live
            setting.framework.trim(setting.gpu)

    on_threads(4, work)
    assert refused, "together they want more than the cap"
    assert setting.drv.counters["leaked"] == 0 and setting.drv.gpus[0].most <= 64 * MIB and setting.left == {}
    usage = setting.framework.usage(setting.gpu)
    assert usage is not None and usage.in_use == 8 * MIB and usage.held is not None
    assert usage.held <= setting.drv.gpus[0].taken <= usage.held + 2 * MIB
    del mine


def test_a_block_that_its_thread_left_open_is_closed_with_the_thread(setting: Setting) -> None:
    def work(number: int) -> None:
        for _ in range(3):
            exchange.pycuda_context(number).__enter__()
        assert len(setting.left[threading.get_ident()]) == 3

    on_threads(2, work)
    assert setting.left == {}


def test_what_its_user_popped_is_not_popped_again(setting: Setting) -> None:
    with exchange.pycuda_context() as context:
        context.pop()
    assert setting.left == {}


def test_a_block_is_left_where_it_was_entered(setting: Setting) -> None:
    block = exchange.pycuda_context()
    with block, pytest.raises(DeviceError, match="entered on another thread"):
        on_threads(1, lambda _: block.__exit__())
    assert setting.left == {}


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (2, "there is no GPU 2 here\n    fix: CUDA shows this process 2 GPUs, 0 to 1"),
        (-1, "-1 is not the number of a GPU\n    fix: pycuda_context(0)"),
        (True, "True is not the number of a GPU"),
        ("cuda:0", "'cuda:0' is not the number of a GPU"),
        (1 << 40, "1099511627776 is not the number of a GPU"),
    ],
)
def test_a_gpu_that_is_not_there_is_said(setting: Setting, device: Any, said: str) -> None:
    with pytest.raises(DeviceError) as caught, exchange.pycuda_context(device):
        pass
    assert said in str(caught.value) and setting.left == {}


def test_a_driver_that_fails_is_said(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise setting.drv.LogicError("cuInit failed: no CUDA-capable device is detected")

    monkeypatch.setattr(setting.drv, "init", fails)
    with pytest.raises(DeviceError, match="no CUDA-capable device is detected\n    fix: "), exchange.pycuda_context():
        pass


def test_without_pycuda_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    with pytest.raises(DeviceError, match="fix: pip install pycuda"), exchange.pycuda_context():
        pass


# the whole of it: programs that end


def program(code: str) -> subprocess.CompletedProcess[str]:
    """Run on the model, which ends the process where a context is left on a stack."""
    environment = {**os.environ, "FAKE_PYCUDA_ENDS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "fake_pycuda"), *sys.path])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)


def test_the_model_ends_the_process_where_a_context_is_left() -> None:
    """Else the tests below prove nothing."""
    code = "import pycuda.driver as drv\ndrv.init()\ndrv.Device(0).make_context()"
    done = program(code)
    assert done.returncode == -6 and "not empty upon module cleanup" in done.stderr
    assert program(code + ".pop()").returncode == 0


OPEN = "import memguard\nmemguard.exchange.pycuda_context().__enter__()\n"
BUDGET = """
from memguard import api
from memguard._runtime import runtime
from memguard._devices.simulated import SimulatedHost
class Host(SimulatedHost):
    simulated = False
runtime.open_host = lambda simulate: Host(["h200"])
memguard.init({"version": 1, "frameworks": {"pycuda": {"limit": "64MiB"}}})
"""


@pytest.mark.parametrize(("context", "served"), [("primary", True), ("own", False)])
def test_the_budget_decides_and_the_ledger_shows_it(context: str, served: bool) -> None:
    asked = BUDGET.replace('"64MiB"', f'"64MiB", "context": "{context}"')
    done = program(
        f"""
import memguard
{asked}
import pycuda.driver as drv
from memguard._devices import contexts
drv.init()
shared = drv.Device(0).retain_primary_context()
contexts.primary = lambda ordinal: shared.handle if ordinal == 0 else None
import pycuda.autoinit
rows = {{row.name: row.note for row in memguard.ledger().devices[0].rows}}
print(pycuda.autoinit.context.handle == shared.handle, "second context" not in rows, drv.gpus[0].contexts)
print(rows.get("second context", "made by pycuda.autoinit").startswith("made by pycuda.autoinit"))
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(served), str(served), "1" if served else "2", "True"]


@pytest.mark.parametrize(
    "code",
    [
        OPEN,
        OPEN * 3,
        OPEN + "import pycuda.autoinit",
        "import pycuda.autoinit\n" + OPEN,
        OPEN + "import pycuda.autoprimaryctx\n" + OPEN,
        "import memguard\nwith memguard.exchange.pycuda_context(): raise SystemExit(0)",
        "import memguard\nwith memguard.exchange.pycuda_context(): pass\nimport pycuda.autoinit\n" + OPEN,
        OPEN + BUDGET + "import pycuda.autoinit, pycuda.gpuarray as arrays\nkeep = arrays.empty(1 << 20)",
        "import threading\n" + OPEN + "threading.Thread(target=memguard.exchange.pycuda_context().__enter__).start()",
    ],
)
def test_a_block_that_is_open_at_exit_ends_nothing(code: str) -> None:
    done = program(code)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_the_pool_of_a_destroyed_context_is_off_the_books(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    card = setting.drv.card
    monkeypatch.setattr(contexts, "buffer", card.buffer)
    setting.apply(context="own")
    setting.drv.init()
    setting.primary()
    own = setting.drv.Device(0).make_context()
    array = setting.drv.mem_alloc(8 * MIB)
    del array
    assert setting.framework.usage(setting.gpu).held
    own.detach()
    setting.drv.gpus[0].clear()
    usage = setting.framework.usage(setting.gpu)
    assert usage is None or not usage.held
    assert second_contexts.find(0, setting.framework.contexts(setting.gpu)) == {}
    pycuda_file._never_freed.clear()  # here and not at the interpreter's end
