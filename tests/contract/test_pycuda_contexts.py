"""PyCUDA's contexts, on its model: who serves `make_context`, the budget's opt-out, what ends well and what is found.

A context that is left on a thread's stack at its end ends the process: the model says so at exit.
"""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memguard.devices import contexts
from memguard.devices.simulated import SimulatedHost
from memguard.frameworks import _driver_bytes, _second_contexts
from memguard.frameworks import pycuda as pycuda_file
from memguard.frameworks.pycuda import PyCUDA
from memguard.model import Applied
from memguard.units import MIB

HERE = Path(__file__).parent


class Setting:
    """The model freshly imported, with a framework over it, and the driver's view of the primary contexts."""

    def __init__(self) -> None:
        self.host = SimulatedHost(["h200", "h200"])
        self.framework = PyCUDA(self.host)
        self.gpu, self.other = self.host.devices()

    def apply(self, **options: Any) -> Applied:
        importlib.import_module("pycuda.driver")
        return self.framework.apply({gpu.uuid: 64 * MIB for gpu in self.host.devices()}, options)

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
    _driver_bytes.slabs.clear()
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
    yield Setting()
    gc.collect()
    _driver_bytes.slabs.clear()
    for name in modelled():
        del sys.modules[name]


# who serves make_context


@pytest.mark.parametrize("options", [{}, {"context": "primary"}])
def test_autoinit_and_make_context_are_served_by_the_primary_context(setting: Setting, options: dict[str, str]) -> None:
    setting.apply(**options)
    made = importlib.import_module("pycuda.autoinit").context
    assert made.primary and setting.drv.Device(0).make_context().handle == made.handle
    assert (
        setting.drv.gpus[0].contexts == 1 and _second_contexts.beside(0, setting.framework.contexts(setting.gpu)) == {}
    )


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
    assert applied.undo is not None
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
    (dead,) = pycuda_file._kept
    pycuda_file._kept.clear()
    dead._pool()._blocks.free.clear()  # its end would give back what is not there


# what is found beside the primary context


def test_contexts_beside_the_primary_one_are_found_with_who_made_them(setting: Setting) -> None:
    assert _second_contexts.beside(0) == {}, "nothing is there, and nothing is imported"
    setting.drv.init()
    own = setting.drv.Device(0).make_context()
    assert _second_contexts.beside(0) == {}, "the first of any kind is no second one"
    setting.primary()
    assert _second_contexts.beside(0) == {own.handle: "PyCUDA"} and _second_contexts.beside(1) == {}
    own.pop()
    assert _second_contexts.beside(0) == {}, "on no stack, it cannot be seen"
    assert _second_contexts.beside(0, [own.handle]) == {own.handle: "PyCUDA"}, "but for what it holds"
    made = importlib.import_module("pycuda.autoinit").context
    made.pop()
    assert _second_contexts.beside(0, [own.handle]) == {own.handle: "PyCUDA", made.handle: "pycuda.autoinit"}
    assert _second_contexts.beside(1) == {}
    assert setting.left == {}, "looking leaves every stack as it was"


def test_a_context_of_somebody_else_on_this_thread_is_found(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    primary = setting.primary()
    monkeypatch.setattr(contexts, "current", lambda: 0)
    monkeypatch.setattr(contexts, "current_handle", lambda: 4711)
    assert _second_contexts.beside(0) == {4711: "unknown"} and _second_contexts.beside(1) == {}
    monkeypatch.setattr(contexts, "current_handle", lambda: primary.handle)
    assert _second_contexts.beside(0) == {}


def test_looking_never_raises(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.primary()

    def lost(*_: object) -> Any:
        raise OSError("the driver is gone")

    for name in ("current_handle", "primary"):
        monkeypatch.setattr(contexts, name, lost)
        assert _second_contexts.beside(0) == {}


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
