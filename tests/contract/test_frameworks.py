"""The contract of `_frameworks/base.py`, over every row: a new framework is tested by its row.

`TestEvery` holds for the real classes without a GPU, `TestWorking` for those that can work here: the simulated
stand-ins, and the real classes on models of their libraries.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from support.capping import AppliedCaps, apply_caps

import memguard
from memguard import _budget
from memguard._base.framework_spec import ArraysName, CacheName, FrameworkName
from memguard._base.types import Enforcement, RefusedRequest, State, TraceEvent
from memguard._base.units import GIB, GRANULE, MIB
from memguard._devices import contexts
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks import driver_pages, registry
from memguard._frameworks.base import Framework
from memguard._frameworks.simulated import adapter
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._frameworks.specs import SPECS
from memguard._guard.guard import Guard
from memguard._runtime import runtime
from memguard.errors import CapNotApplied

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class NotSimulated(SimulatedHost):
    """A host for the real classes; asking it costs nothing and touches no driver."""

    simulated = False


def real(name: str) -> Framework:
    return registry.create(name, NotSimulated(["h200"]))


def loaded_by(code: str, *, without: str = "") -> dict[str, Any]:
    """What `result` holds after running code in a fresh interpreter; `without` names a package that is not there."""
    program = f"""
import importlib.abc, json, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if {without!r} and name.partition(".")[0] == {without!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks import registry
class Host(SimulatedHost):
    simulated = False
host, result = Host(["h200"]), {{}}
(gpu,) = host.devices()
{code}
result["modules"] = sorted(sys.modules)
print("RESULT", json.dumps(result))
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.split("RESULT ", 1)[1])
    return found


def test_signatures_offer_the_names_that_a_budget_may_name() -> None:
    """Type checkers and editors cannot read rows."""
    assert get_args(FrameworkName) == tuple(SPECS)
    assert get_args(ArraysName)[0] == get_args(CacheName)[0] == FrameworkName
    public = [*(getattr(memguard, name) for name in memguard.__all__), memguard.exchange.to, memguard.exchange.attach]
    public += [getattr(Guard, name) for name in vars(Guard) if not name.startswith("_")]
    public += [Guard.resize, Guard.trim]
    named = {
        one.__qualname__: str(parameter.annotation)
        for one in public
        if inspect.isfunction(one)
        for name, parameter in inspect.signature(one).parameters.items()
        if name in ("framework", "frameworks")
    }
    assert len(named) >= 10
    refusing = ("FrameworkName", "ArraysName", "CacheName")
    assert [name for name, said in named.items() if not any(one in said for one in refusing) or "str" in said] == []


def test_the_registry_knows_what_a_budget_may_name() -> None:
    assert set(SPECS) == set(_budget.FRAMEWORKS)
    assert all(0 < row.modules <= row.workspace for row in SPECS.values()), "measured, and a reserve for it"
    assert all(row.allocator in adapter.MODELS for row in SPECS.values()), "a model of each allocator"
    with pytest.raises(KeyError):
        registry.create("theano", NotSimulated(["h200"]))


def test_the_import_contract_lists_every_adapter() -> None:
    """`lint-imports` then proves that no framework sees another: its list in pyproject.toml is written out."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.split('name = "No framework sees another"')[1].split("]")[0]
    for row in SPECS.values():
        assert f'"memguard._frameworks.{row.name}"' in listed


@pytest.mark.parametrize("name", SPECS)
class TestEvery:
    """Without a GPU, and whether the framework is installed or not."""

    def test_it_is_one_class_in_the_folder_of_its_name(self, name: str) -> None:
        framework = real(name)
        cls = type(framework)
        assert framework.name == name and issubclass(cls, Framework) and (cls.__doc__ or "").strip()
        room = f"memguard._frameworks.{name}"
        assert cls.__module__ == f"{room}.adapter"
        assert framework.hook.partition(".")[0] == framework.module
        assert not inspect.isabstract(cls)

    def test_a_simulated_host_gets_its_stand_in(self, name: str) -> None:
        framework = registry.create(name, SimulatedHost(["h200"]))
        assert isinstance(framework, SimulatedFramework) and framework.name == name

    def test_asking_imports_and_initialises_nothing(self, name: str) -> None:
        found = loaded_by(
            f"""
framework = registry.create({name!r}, host)
before = set(sys.modules)
result["state"] = framework.state().value
result["absent"] = framework.why_absent()
result["nothing"] = [framework.usage(gpu), framework.trim(gpu), framework.record()]
result["about"] = framework.about()
framework.forked()
result["grown"] = sorted(set(sys.modules) - before)
"""
        )
        assert found["state"] in ("absent", "importable")
        assert (found["state"] == "absent") is (found["absent"] is not None)
        assert found["nothing"] == [None, None, None] and found["about"] == {}
        for module in found["grown"]:
            assert module.partition(".")[0] != name
        assert name not in found["modules"]

    def test_creating_it_imports_no_other_framework(self, name: str) -> None:
        """Of the others only the rows are read."""
        modules = loaded_by(f"registry.create({name!r}, host)")["modules"]
        others = tuple(f"memguard._frameworks.{other}." for other in SPECS if other != name)
        assert {one for one in modules if one.startswith(others)} == {f"{other}spec" for other in others}
        assert not set(SPECS) & set(modules)

    def test_not_installed_it_is_absent_and_says_so(self, name: str) -> None:
        found = loaded_by(
            f"""
framework = registry.create({name!r}, host)
result["state"], result["why"] = framework.state().value, framework.why_absent()
""",
            without=name,
        )
        assert found["state"] == "absent" and found["why"] == f"{name} is not installed"

    def test_a_broken_installation_is_absent(self, name: str) -> None:
        """`importlib.util.find_spec` raises ValueError where a module of that name has no spec."""
        found = loaded_by(
            f"""
import importlib.util
def broken(name, package=None):
    raise ValueError(f"{{name}}.__spec__ is None")
importlib.util.find_spec = broken
result["state"] = registry.create({name!r}, host).state().value
"""
        )
        assert found["state"] == "absent"

    def test_a_module_that_another_thread_is_importing_is_not_asked(self, name: str) -> None:
        """Half imported it lacks its attributes: readings say nothing, and do not raise."""
        found = loaded_by(
            f"""
import types, importlib.machinery
framework = registry.create({name!r}, host)
for module in dict.fromkeys([framework.module, framework.hook]):
    half = sys.modules[module] = types.ModuleType(module)
    half.__spec__ = importlib.machinery.ModuleSpec(module, None)
    half.__spec__._initializing = True
result["usage"] = framework.usage(gpu)
"""
        )
        assert found["usage"] is None


class Subject(ABC):
    """A framework that can work here: how to bring it along, and to allocate with it."""

    framework: Framework
    host: SimulatedHost
    marks = True
    """Whether the adapter can mark the error itself: torch tells it of a refusal before it makes the error."""

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: B027 (most stand on nothing)
        """Put in place what its model stands on."""

    @abstractmethod
    def bring(self) -> None:
        """Import it, as a program would."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """A live array; it frees itself where nothing holds it."""

    @property
    def gpu(self) -> Any:
        return self.host.devices()[0]

    @abstractmethod
    def own_error(self) -> type[Exception]:
        """What the framework raises where its memory is out."""

    def apply(self, cap: int, **options: Any) -> AppliedCaps:
        return apply_caps(self.framework, {gpu.uuid: cap for gpu in self.host.devices()}, options)


class Array:
    def __init__(self, framework: SimulatedFramework, nbytes: int) -> None:
        self.framework, self.id = framework, framework.allocate(nbytes)

    def __del__(self) -> None:
        if hasattr(self, "id"):
            self.framework.free(self.id)


class Simulated(Subject):
    def __init__(self, name: str) -> None:
        self.host = SimulatedHost(["h200"])
        framework = registry.create(name, self.host)
        assert isinstance(framework, SimulatedFramework)
        self.framework = framework

    def bring(self) -> None:
        assert isinstance(self.framework, SimulatedFramework)
        self.framework.start_importing()

    def allocate(self, nbytes: int) -> Any:
        assert isinstance(self.framework, SimulatedFramework)
        return Array(self.framework, nbytes)

    def own_error(self) -> type[Exception]:
        return adapter.oom_type(self.framework.name)


class PyCUDAOnItsModel(Subject):
    def __init__(self) -> None:
        self.host = NotSimulated(["h200"])
        self.framework = registry.create("pycuda", self.host)

    def bring(self) -> None:
        importlib.import_module("pycuda.driver")

    def allocate(self, nbytes: int) -> Any:
        driver = sys.modules["pycuda.driver"]
        driver.init()
        if driver.Context.get_current() is None:
            driver.Device(0).make_context()
        return driver.mem_alloc(nbytes)

    def own_error(self) -> type[Exception]:
        found: type[Exception] = sys.modules["pycuda.driver"].MemoryError
        return found


class NumbaOnItsModel(Subject):
    def __init__(self) -> None:
        self.host = NotSimulated(["h200"])
        self.framework = registry.create("numba", self.host)

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        others = [finder for finder in sys.meta_path if type(finder).__name__ != "NumbaCudaFinder"]  # its .pth
        monkeypatch.setattr(sys, "meta_path", others)
        monkeypatch.setattr(contexts, "pushed", lambda n: sys.modules["numba.cuda.cudadrv.driver"].pushed(n))

    def bring(self) -> None:
        importlib.import_module("numba.cuda")
        sys.modules["numba.cuda.cudadrv.driver"].Device.uuids = (self.gpu.uuid,)

    def allocate(self, nbytes: int) -> Any:
        return sys.modules["numba.cuda"].device_array(nbytes)

    def own_error(self) -> type[Exception]:
        found: type[Exception] = sys.modules["numba.cuda.cudadrv.driver"].CudaAPIError
        return found


class CuPyOnItsModel(Subject):
    def __init__(self) -> None:
        self.host = NotSimulated(["h200"])
        self.framework = registry.create("cupy", self.host)

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        importlib.import_module("fake_card").stand_in(monkeypatch)
        monkeypatch.delenv("CUPY_GPU_MEMORY_LIMIT", raising=False)

    def bring(self) -> None:
        importlib.import_module("cupy")

    def allocate(self, nbytes: int) -> Any:
        return sys.modules["cupy"].cuda.alloc(nbytes)

    def own_error(self) -> type[Exception]:
        found: type[Exception] = sys.modules["cupy"].cuda.memory.OutOfMemoryError
        return found


class JAXOnItsModel(Subject):
    def __init__(self) -> None:
        self.host = NotSimulated(["h200"])
        self.framework = registry.create("jax", self.host)

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys.modules[type(self.framework).__module__], "permanent_caps", {})
        for name in [name for name in os.environ if name.startswith(("JAX_", "XLA_"))]:
            monkeypatch.delenv(name)

    def bring(self) -> None:
        importlib.import_module("jax")

    def allocate(self, nbytes: int) -> Any:
        return sys.modules["jax"].numpy.empty(nbytes)

    def own_error(self) -> type[Exception]:
        found: type[Exception] = sys.modules["jax"].errors.JaxRuntimeError
        return found


SUBJECTS: dict[str, Callable[[], Subject]] = {
    **{f"simulated {name}": lambda name=name: Simulated(name) for name in SPECS},  # type: ignore[misc]
    "pycuda on its model": PyCUDAOnItsModel,
    "numba on its model": NumbaOnItsModel,
    "cupy on its model": CuPyOnItsModel,
    "jax on its model": JAXOnItsModel,
}
MODELS = {
    ".": ("card",),
    "fake_pycuda": ("pycuda",),
    "fake_numba": ("numba",),
    "fake_cupy": ("cupy", "fake_card", "rmm"),
    "fake_jax/model": ("jax",),
    "fake_jax/plugin": ("jax_plugins",),
}
"""Folders of models, and the modules in them."""


def modelled() -> list[str]:
    names = {name for known in MODELS.values() for name in known}
    return [name for name in sys.modules if name.partition(".")[0] in names]


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    for name in modelled():
        monkeypatch.delitem(sys.modules, name)
    driver_pages.slabs.clear()
    for folder in MODELS:
        monkeypatch.syspath_prepend(HERE / folder)
    subject = SUBJECTS[request.param]()
    subject.prepare(monkeypatch)
    yield subject
    for name in modelled():
        del sys.modules[name]


def fill(subject: Subject, size: int = 8 * MIB) -> list[Any]:
    """Allocate until the framework's own out-of-memory error."""
    live: list[Any] = []
    with pytest.raises(subject.own_error()):
        for _ in range(4000):
            live.append(subject.allocate(size))
    return live


def held(subject: Subject) -> int:
    """What it holds, as it says, or the most that it may."""
    usage = subject.framework.usage(subject.gpu)
    assert usage is not None
    size = usage.held if usage.held is not None else usage.held_at_most
    assert size is not None
    return size


class TestWorking:
    """Everything that `base.py` promises, from the first look to the undo."""

    def test_it_goes_from_importable_to_imported_to_live(self, subject: Subject) -> None:
        framework = subject.framework
        assert framework.state() is State.IMPORTABLE and framework.why_absent() is None
        assert framework.usage(subject.gpu) is None
        subject.bring()
        assert framework.state() is State.IMPORTED
        assert framework.usage(subject.gpu) is None, "not live: it holds nothing"
        framework.trim(subject.gpu)
        assert framework.state() is State.IMPORTED, "looking makes nothing live"

    def test_capping_makes_nothing_live(self, subject: Subject) -> None:
        subject.bring()
        applied = subject.apply(GIB)
        assert applied.enforcement is Enforcement.ENFORCED
        assert applied.permanent is None
        assert subject.framework.state() is State.IMPORTED
        assert subject.framework.usage(subject.gpu) is None
        array = subject.allocate(1)
        assert subject.framework.state() is State.LIVE and subject.framework.usage(subject.gpu) is not None
        del array

    def test_the_cap_holds_with_its_own_error(self, subject: Subject) -> None:
        subject.bring()
        subject.apply(GIB)
        live = fill(subject)
        assert 8 * MIB * len(live) > GIB * 7 // 10 and held(subject) <= GIB

    def test_a_refused_request_is_told_once_or_the_adapter_says_that_it_cannot(self, subject: Subject) -> None:
        """Also of an error that the program catches. What is served after all is no refusal."""
        subject.bring()
        subject.apply(GIB)
        told: list[RefusedRequest] = []

        def on_refusal(moment: RefusedRequest) -> str:
            told.append(moment)
            return f"1:{len(told)}"

        subject.framework.on_refusal = on_refusal
        live = fill(subject)
        if subject.framework.unseen() is not None:
            assert not told and len(subject.framework.unseen() or "") > 10
            return
        (moment,) = told
        assert (moment.framework, moment.uuid) == (subject.framework.name, subject.gpu.uuid)
        assert moment.requested == 8 * MIB and moment.thread == threading.get_ident()
        with pytest.raises(subject.own_error()) as caught:
            subject.allocate(2 * GIB)
        assert told[1].requested == 2 * GIB
        assert vars(caught.value).get("memguard_refusal") == ("1:2" if subject.marks else None)
        del caught
        live.pop()
        again = subject.allocate(8 * MIB)
        assert len(told) == 2
        del again

    def test_what_a_program_catches_is_in_last_oom_and_in_the_timeline_or_the_adapter_says_that_it_is_not(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        name = subject.framework.name
        monkeypatch.setattr(runtime, "open_host", lambda simulate: subject.host)
        monkeypatch.setattr(registry, "create", lambda *_: subject.framework)
        before = memguard.last_oom()
        subject.bring()
        memguard.init(
            {"version": 1, "frameworks": {name: {"limit": "1GiB"}},
             "monitor": {"interval": "1h", "timeline": str(tmp_path / "run.jsonl")}}
        )  # fmt: skip
        try:
            live = fill(subject, 32 * MIB)  # torch cuts smaller ones from segments
            for _ in range(3):
                fill(subject, 32 * MIB)
            row = memguard.ledger().devices[0].row(name)
            report = memguard.last_oom()
        finally:
            memguard.shutdown()
        (path,) = tmp_path.glob("run*.jsonl")
        events = [event for event in memguard.load_timeline(path).events() if event.kind == "refused"]
        if subject.framework.unseen() is not None:
            assert row.refused is None and report is before and not events
            return
        assert row.refused == 4 and sum(event.times or 0 for event in events) == 4
        assert report is not None and report.caught and (report.requester, report.reason) == (name, "cap")
        assert report.verdict.requested == 32 * MIB and report.moment is not None
        assert (report.moment.in_use or 0) > GIB * 7 // 10 and report.holders[0].name == name
        assert live

    def test_telling_never_takes_the_place_of_the_error_and_holds_no_lock(self, subject: Subject) -> None:
        """Whoever is told may ask the framework, on this thread and on others."""
        subject.bring()
        subject.apply(GIB)
        if subject.framework.unseen() is not None:
            return
        asked: list[Any] = []

        def on_refusal(moment: RefusedRequest) -> str:
            thread = threading.Thread(target=lambda: asked.append(subject.framework.usage(subject.gpu)))
            thread.start()
            thread.join(10)
            raise RuntimeError("not today")

        subject.framework.on_refusal = on_refusal
        live = fill(subject)
        assert len(asked) == 1 and asked[0] is not None and live

    def test_usage_adds_up(self, subject: Subject) -> None:
        subject.bring()
        subject.apply(GIB)
        kept = [subject.allocate(20 * MIB) for _ in range(4)]
        del kept[0]
        usage = subject.framework.usage(subject.gpu)
        assert usage is not None and usage.in_use is not None and 60 * MIB <= usage.in_use <= 80 * MIB
        if usage.held is None:
            assert usage.held_at_least is not None and usage.in_use <= usage.held_at_least
            assert usage.held_at_most is None or usage.held_at_least <= usage.held_at_most
        else:
            assert usage.in_use <= usage.held
            assert 0 <= (usage.reclaimable or 0) <= usage.held - usage.in_use
        assert usage.peak is None or usage.peak >= usage.in_use

    def test_a_trim_returns_what_was_promised_and_hurts_nobody(self, subject: Subject) -> None:
        subject.bring()
        subject.apply(GIB)
        kept, gone = subject.allocate(20 * MIB), subject.allocate(40 * MIB)
        del gone
        before = subject.framework.usage(subject.gpu)
        subject.framework.trim(subject.gpu)
        after = subject.framework.usage(subject.gpu)
        assert before is not None and after is not None and after.in_use == before.in_use
        if before.held is not None and after.held is not None and before.reclaimable is not None:
            assert before.reclaimable <= before.held - after.held + 2 * GRANULE
        subject.framework.trim(subject.gpu)
        del kept

    def test_a_resize_works_or_says_that_it_cannot(self, subject: Subject) -> None:
        subject.bring()
        subject.apply(GIB)
        uuid = subject.gpu.uuid
        try:
            subject.framework.resize({uuid: 2 * GIB})
        except CapNotApplied as error:
            assert error.framework == subject.framework.name and error.reason and error.remedy
            expected = GIB
        else:
            expected = 2 * GIB
        live = fill(subject)
        assert expected * 7 // 10 < 8 * MIB * len(live) <= expected and held(subject) <= expected

    def test_lowering_evicts_nothing(self, subject: Subject) -> None:
        subject.bring()
        subject.apply(GIB)
        live = [subject.allocate(100 * MIB) for _ in range(5)]
        try:
            subject.framework.resize({subject.gpu.uuid: 128 * MIB})
        except CapNotApplied:
            return
        usage = subject.framework.usage(subject.gpu)
        assert usage is not None and usage.in_use == 500 * MIB
        with pytest.raises(subject.own_error()):
            subject.allocate(10 * MIB)
        live.clear()
        subject.framework.trim(subject.gpu)
        live = fill(subject, 4 * MIB)
        assert held(subject) <= 128 * MIB

    def test_undone_it_is_not_capped(self, subject: Subject) -> None:
        subject.bring()
        applied = subject.apply(64 * MIB)
        applied.undo()
        array = subject.allocate(200 * MIB)
        del array

    def test_undone_while_live_it_is_not_capped_or_says_that_it_stays(self, subject: Subject) -> None:
        subject.bring()
        applied = subject.apply(64 * MIB)
        kept = subject.allocate(MIB)
        try:
            applied.undo()
        except CapNotApplied as error:
            assert error.reason and error.remedy
            with pytest.raises(subject.own_error()):
                subject.allocate(200 * MIB)
        else:
            array = subject.allocate(200 * MIB)
            del array
        del kept

    def test_applied_again_the_new_cap_holds(self, subject: Subject) -> None:
        subject.bring()
        first = subject.apply(64 * MIB)
        first.undo()
        second = subject.apply(GIB)
        live = fill(subject)
        assert live and 64 * MIB < held(subject) <= GIB
        assert second.enforcement is Enforcement.ENFORCED

    def test_live_before_it_is_capped_at_once_or_refuses(self, subject: Subject) -> None:
        subject.bring()
        array = subject.allocate(MIB)
        try:
            subject.apply(64 * MIB)
        except CapNotApplied as error:
            assert error.framework == subject.framework.name and error.reason and error.remedy
        else:
            fill(subject)
            assert held(subject) <= 64 * MIB
        del array

    def test_recording_gives_every_allocation_or_none(self, subject: Subject) -> None:
        subject.bring()
        subject.apply(GIB)
        stop = subject.framework.record()
        if stop is None:
            return
        array = subject.allocate(5 * MIB)
        del array
        events = stop()
        assert [(e.framework, e.op, e.bytes) for e in events] == [
            (subject.framework.name, "alloc", 5 * MIB), (subject.framework.name, "free", None),
        ]  # fmt: skip
        assert all(isinstance(e, TraceEvent) for e in events) and events[0].id == events[1].id
        assert stop() == [] or len(stop()) == 2, "stopping twice adds nothing"

    def test_what_it_says_about_itself_is_text(self, subject: Subject) -> None:
        assert all(isinstance(v, str) for pair in subject.framework.about().items() for v in pair)
