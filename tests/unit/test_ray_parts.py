"""What the integration of Ray decides without Ray: parts, what is asked of workers, and one worker of a stand-in."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memguard
from memguard import api
from memguard._base.units import GIB, MIB
from memguard._budget.policy import plan
from memguard._devices.simulated import SimulatedHost
from memguard._oom.classify import ErrorFacts, classify
from memguard._runtime import runtime, session
from memguard.integrations import ray as integration
from memguard.integrations.ray.parts import UNITS, exact, gpus_of, part
from memguard.integrations.ray.request import HOOK, VARIABLE, WorkerRequest
from memguard.integrations.ray.worker import Worker

VALUE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"


def budget(limit: str = "80%", **more: Any) -> memguard.Budget:
    return memguard.Budget.from_mapping(
        {
            "version": 1,
            "device": {"limit": limit, "reserve": "600MiB"},
            "frameworks": {"torch": {"limit": "4GiB"}, "cupy": {"share": "9%"}},
            **more,
        }
    )


@given(
    parts=st.lists(st.integers(1, 10_000), min_size=1, max_size=6).filter(lambda found: sum(found) <= 10_000),
    limit=st.one_of(st.integers(10, 100).map(lambda n: f"{n}%"), st.integers(64, 130).map(lambda n: f"{n}GiB")),
)
def test_the_parts_of_workers_that_ray_puts_on_one_gpu_never_add_up_to_more_than_the_whole(
    parts: list[int], limit: str
) -> None:
    whole, devices = budget(limit), SimulatedHost().devices()
    (large,) = plan(whole, devices).devices
    limits, caps = 0, 0
    for one in parts:
        try:
            (small,) = plan(part(whole, exact(one / 10_000)), devices).devices
        except memguard.PlanError:  # so small a part has no room for its context
            continue
        limits, caps = limits + small.limit, caps + small.caps["torch"]
    assert limits <= large.limit and caps <= large.caps["torch"]


def test_a_part_and_num_gpus_that_cannot_be() -> None:
    assert part(budget(), Fraction(1)) == part(budget(), Fraction(2)) == budget()
    with pytest.raises(
        memguard.PlanError, match=r"torch\.limit: 4.00 GiB, of which num_gpus=0.0001 is less than 2 MiB"
    ):
        part(budget(), exact(0.0001))
    for wrong in (0, -1, 1.5, True, 0.00001, None, "half", "1/0", float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"num_gpus is a whole number, or a part of one GPU.*\n.*fix: num_gpus="):
            exact(wrong)  # type: ignore[arg-type]


@given(limit=st.one_of(st.integers(1, 100).map(lambda n: f"{n}%"), st.integers(8, 139).map(lambda n: f"{n}GiB")))
def test_num_gpus_is_never_less_than_the_limit(limit: str) -> None:
    devices = SimulatedHost().devices()
    whole = memguard.Budget.from_mapping(
        {"version": 1, "device": {"limit": limit, "reserve": "64MiB"}, "frameworks": {"torch": {"share": "10%"}}}
    )
    amount = exact(gpus_of(whole, devices))
    (one,) = plan(whole, devices).devices
    assert one.limit / devices[0].usable <= amount <= 1
    assert amount - Fraction(one.limit, devices[0].usable) < Fraction(2, 10_000)


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_hook_variable", lambda: VALUE)


@pytest.mark.usefixtures("variable")
def test_options_give_num_gpus_and_a_budget_that_fit() -> None:
    own = integration.options(budget("25%"), num_cpus=2, name="a")
    assert (own["num_gpus"], own["num_cpus"], own["name"]) == (0.25, 2, "a")
    asked = WorkerRequest.read(own["runtime_env"]["env_vars"])
    assert not asked.whole and asked.budget.device.limit == Fraction(1, 4)
    share = integration.options(budget(), num_gpus=0.5, gpu="h200", memory_units=True, resources={"disk": 1})
    assert share["num_gpus"] == 0.5 and WorkerRequest.read(share["runtime_env"]["env_vars"]).whole
    usable = SimulatedHost().devices()[0].usable
    assert share["resources"]["disk"] == 1 and abs(share["resources"][UNITS] - 0.4 * usable / MIB) <= 2
    sized = integration.options(budget("35GiB"), gpu="h200", memory_units=True)
    assert 0.25 <= sized["num_gpus"] < 0.2505 and sized["resources"] == {UNITS: 35 * 1024}
    assert integration.options(budget("35GiB"), gpu="b200")["num_gpus"] < 0.2
    with pytest.raises(memguard.PlanError, match=r'35.0* GiB of a GPU whose size is not known\n.*gpu="h200"'):
        integration.options(budget("35GiB"))
    with pytest.raises(memguard.PlanError, match=r'whose size is not known\n.*gpu="h200"'):
        integration.options(budget("25%"), memory_units=True)
    with pytest.raises(memguard.PlanError, match="no one num_gpus follows"):
        integration.options(budget(devices={"0": {"limit": "10GiB"}}))
    assert integration.node_resources(["h200", "t4"]) == {
        UNITS: sum(one.usable for one in SimulatedHost(["h200", "t4"]).devices()) // MIB
    }


@pytest.mark.usefixtures("variable")
def test_a_runtime_env_is_merged_and_what_cannot_be_is_refused() -> None:
    given_env = {"env_vars": {"A": "1"}, "pip": ["x"]}
    found = integration.runtime_env(budget(), worker_process_setup_hook="users.hook", **given_env)
    assert given_env == {"env_vars": {"A": "1"}, "pip": ["x"]} and found["pip"] == ["x"]
    assert found["env_vars"].pop("A") == "1" and found["env_vars"][VALUE] == HOOK
    assert set(found["env_vars"]) == {VARIABLE, VALUE} and WorkerRequest.read(found["env_vars"]).setup == "users.hook"
    assert all(isinstance(value, str) for value in found["env_vars"].values())
    used = integration.runtime_env(budget(), env_vars={VALUE: "users.hook"})  # as ray.init leaves it
    assert WorkerRequest.read(used["env_vars"]).setup == "users.hook"
    for wrong in ({"worker_process_setup_hook": print}, {"env_vars": {VALUE: "ray_runtime_env_func::QUJD"}}):
        with pytest.raises(ValueError, match=r"Ray runs one hook in a process.*\n.*fix: put it into a module"):
            integration.runtime_env(budget(), **wrong)
    with pytest.raises(ValueError, match=r"env_vars has MEMGUARD_RAY.*\n.*fix"):
        integration.runtime_env(budget(), **found)
    with pytest.raises(memguard.ConfigError, match="there is no such file"):
        integration.runtime_env("/nowhere/budget.yaml")


@pytest.mark.usefixtures("variable")
def test_a_budget_for_ranks_is_refused_as_num_gpus_divides_it_already() -> None:
    for written in ("auto", {"per_gpu": 2}):
        for call in (integration.runtime_env, integration.options):
            with pytest.raises(memguard.ConfigError, match=r"(?s)ranks: .*Ray's workers are none.*fix: .*num_gpus"):
                call(budget(ranks=written))


def test_what_is_asked_comes_through_an_environment_variable() -> None:
    whole = budget(metrics={"prometheus": 9477, "job": "train"}, on_busy="raise")
    asked = WorkerRequest.of(whole, whole=True, simulate=["h200", "t4"], setup=None)
    again = WorkerRequest.read({VARIABLE: asked.text()})
    assert again == asked and json.loads(asked.text())
    assert WorkerRequest.read({VARIABLE: replace(asked, source="b.yaml").text()}).budget.source == "b.yaml"
    assert again.budget.monitor is not None and again.budget.metrics is None and again.job == "train"
    assert again.budget.on_busy == "raise" and again.budget.frameworks == whole.frameworks
    assert asked.gpus(["1"]) == ["t4"] and asked.gpus([]) == ["h200", "t4"]
    assert WorkerRequest.of(whole, whole=True, simulate="h200").gpus(["3"]) == ["h200"]
    assert WorkerRequest.of(whole, whole=True, simulate=None).gpus(["0"]) is None
    for wrong in ({}, {VARIABLE: "{"}, {VARIABLE: "[]"}, {VARIABLE: '{"budget": {}, "simulate": [], "new": 1}'}):
        with pytest.raises((ValueError, memguard.ConfigError), match="fix: "):
            WorkerRequest.read(wrong)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray._private", None)
    with pytest.raises(ImportError, match=r"needs Ray.*\n.*pip install 'ray\[default\]'"):
        integration.runtime_env(budget())


def test_an_error_that_came_through_ray_is_not_reported_as_this_process_own() -> None:
    names = ("ray.exceptions.RayTaskError(OutOfMemoryError)", "ray.exceptions.RayTaskError", "torch.OutOfMemoryError")
    facts = ErrorFacts(names[0], names, "CUDA out of memory. Tried to allocate 20.00 GiB", {})
    assert classify(facts).memory == "none"


Info = namedtuple("Info", "function name")


class Context:
    """Ray's, of a worker."""

    def __init__(self) -> None:
        self.gpus: list[str] = []
        self.assigned: dict[str, float] = {}
        self.runtime_env: dict[str, Any] = {}

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        return {"GPU": self.gpus}

    def get_assigned_resources(self) -> dict[str, float]:
        return self.assigned

    def get_task_function_name(self) -> str:
        return "module.Trainer.__init__"


class TaskError(Exception):
    """In the place of RayTaskError."""

    def __init__(self, function_name: Any, traceback_str: Any, cause: Any, proctitle: Any = None) -> None:
        self.text, self.cause = traceback_str, cause


class Gauge:
    told: ClassVar[dict[tuple[str, str], float]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name = name

    def set(self, value: float, tags: dict[str, str]) -> None:
        key = self.name, tags.get("framework", "")
        self.told[key] = value
        if value != value:
            del self.told[key]


class Ray:
    """A stand-in for what the integration touches of Ray. `task` runs a function as Ray's worker does."""

    def __init__(self) -> None:
        self.context = Context()
        self.manager = SimpleNamespace()
        self.function: Callable[..., Any] = lambda: None
        self.manager = type("Manager", (), {"get_execution_info": lambda _: Info(self.function, "f")})()
        self.utils: Any = ModuleType("ray._private.utils")
        self.utils.set_visible_accelerator_ids = self.assign

    def assign(self) -> dict[str, str]:
        return {}

    def task(self, function: Callable[..., Any], gpus: list[str], amount: float = 1) -> Any:
        self.function, self.context.gpus, self.context.assigned = function, gpus, {"GPU": amount}
        assign = getattr(self.utils, "set_visible_accelerator_ids", None)
        if assign is not None:
            assign()
        return self.manager.get_execution_info().function()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    made = Ray()
    exceptions, metrics, worker = (ModuleType(name) for name in ("exceptions", "metrics", "worker"))
    monkeypatch.setattr(TaskError, "__init__", TaskError.__init__)
    vars(exceptions)["RayTaskError"], vars(metrics)["Gauge"] = TaskError, Gauge
    vars(worker)["global_worker"] = SimpleNamespace(function_actor_manager=made.manager)
    top, private, util = (ModuleType(name) for name in ("ray", "ray._private", "ray.util"))
    vars(top)["get_runtime_context"] = lambda: made.context
    vars(private).update(utils=made.utils, worker=worker)
    vars(top).update(_private=private, exceptions=exceptions, util=util)
    for name, module in (
        ("ray", top), ("ray._private", private), ("ray._private.utils", made.utils), ("ray._private.worker", worker),
        ("ray.exceptions", exceptions), ("ray.util", util), ("ray.util.metrics", metrics),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("memguard.integrations.ray.metrics._gauges", {})
    yield made
    memguard.shutdown()


def armed(simulate: str | list[str] | None = "h200", of: memguard.Budget | None = None, **more: Any) -> Worker:
    asked = WorkerRequest.of(of or budget("80GiB"), whole=True, simulate=simulate, **more)
    worker = Worker({VARIABLE: asked.text()})
    worker.arm()
    return worker


def limit() -> int | None:
    return runtime.this.session.guard.plan.devices[0].limit if runtime.this.session is not None else None


def test_a_worker_has_its_part_from_its_first_task_on_and_all_of_it_is_undone(ray: Ray) -> None:
    before = ray.utils.set_visible_accelerator_ids, TaskError.__init__, [*sys.meta_path]
    worker = armed()
    assert limit() is None, "the hook runs before Ray says which GPUs there are"
    assert ray.task(limit, ["0"], 0.5) == 40 * GIB and ray.task(limit, ["1"], 0.25) == 20 * GIB
    worker.disarm()
    assert limit() is None and not session.sample_callbacks
    assert (ray.utils.set_visible_accelerator_ids, TaskError.__init__, sys.meta_path) == before


def test_a_report_is_put_into_the_error_once_and_not_into_errors_of_elsewhere(ray: Ray) -> None:
    worker = armed()
    ray.task(limit, ["0"])
    framework = api.current().frameworks["torch"]
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        framework.allocate(5 * GIB)
    text = TaskError("f", "Traceback\nError: out of memory\n", caught.value).text
    assert text.startswith("Traceback\n") and text.count("memguard: torch ran out of GPU memory") == 1
    assert not getattr(caught.value, "__notes__", None), "the caller would see it twice"
    assert TaskError("f", text, caught.value).text == text
    elsewhere = MemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")  # as unpickled: without a traceback
    assert TaskError("f", "as it was", elsewhere).text == "as it was"
    assert TaskError("f", "as it was", ZeroDivisionError()).text == "as it was"
    worker.disarm()


def test_the_figures_are_told_until_the_budget_ends(ray: Ray) -> None:
    worker = armed(of=budget("80GiB", monitor={"interval": "50ms"}))
    ray.task(limit, ["0"])
    end = time.monotonic() + 20
    while not Gauge.told and time.monotonic() < end:  # the monitor's first sample
        time.sleep(0.01)
    assert Gauge.told["memguard_framework_cap_bytes", "torch"] == 4 * GIB
    assert Gauge.told["memguard_process_limit_bytes", ""] == 80 * GIB
    memguard.shutdown()  # the program's own
    assert Gauge.told == {}
    worker.disarm()


def test_what_cannot_be_applied_is_raised_in_the_place_of_the_function(ray: Ray) -> None:
    worker = armed(of=budget("9000GiB"))
    ran: list[int] = []
    for _ in range(2):
        with pytest.raises(memguard.PlanError, match="is more than NVIDIA H200"):
            ray.task(lambda: ran.append(1), ["0"])
    worker.disarm()
    ray.task(lambda: ran.append(1), ["0"])
    assert ran == [1]
    late = armed(["h200", "t4"])
    assert ray.task(limit, ["0"]) == 80 * GIB
    with pytest.raises(memguard.PlanError, match="Tesla T4"):  # Ray has kept the functions: the worker ends
        ray.task(limit, ["1"])
    assert limit() is None
    late.disarm()


def test_a_part_that_does_not_fit_is_said_to_be_a_part_and_names_the_file(ray: Ray) -> None:
    whole = budget("1GiB", frameworks={"torch": {"share": "50%"}})
    asked = replace(WorkerRequest.of(whole, whole=True, simulate="h200"), source="budget.yaml")
    worker = Worker({VARIABLE: asked.text()})
    worker.arm()
    text = r"(?s)^budget\.yaml: device: .*limit 512.*fix: raise .*a worker, whose limits are 1/2 of .*num_gpus=0\.5"
    with pytest.raises(memguard.PlanError, match=text):
        ray.task(limit, ["0"], 0.5)
    worker.disarm()


def test_hooks_that_fail_or_would_be_lost_are_told_by_each_task(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    users: Any = ModuleType("users")
    users.own, users.job, users.broken = (lambda: ran.append("own")), (lambda: ran.append("job")), (lambda: 1 / 0)
    monkeypatch.setitem(sys.modules, "users", users)
    ray.context.runtime_env = {"worker_process_setup_hook": "users.job"}
    worker = armed()
    assert ran == [], "to ask for the runtime_env in the hook crashes Ray"
    ray.task(limit, ["0"])
    ray.task(limit, ["0"])
    worker.disarm()
    assert ran == ["job"]
    own = armed(setup="users.own")
    assert ran == ["job", "own"]
    ray.task(limit, ["0"])
    own.disarm()
    assert ran == ["job", "own"]
    ray.context.runtime_env = {"worker_process_setup_hook": "function"}
    lost = armed()
    with pytest.raises(ValueError, match=r"function, was given as a function, and would not run.*\n.*fix"):
        ray.task(limit, ["0"])
    lost.disarm()
    broken = armed(setup="users.broken")
    with pytest.raises(ZeroDivisionError):
        ray.task(limit, ["0"])
    assert limit() is None
    broken.disarm()


@pytest.mark.parametrize("known", [True, False])
def test_without_a_gpu_or_rays_function_the_first_framework_applies_it(
    ray: Ray, known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    code = "from memguard._runtime.runtime import this\nactive = this.session is not None\n"
    (tmp_path / "cupy.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("torch", "tensorflow", "cupy", "jax", "pycuda.driver", "numba.cuda"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if not known:
        monkeypatch.delattr(ray.utils, "set_visible_accelerator_ids")
    before = [*sys.meta_path]
    worker = armed()
    assert ("has no ray._private.utils.set_visible" in caplog.text) is not known

    def work() -> tuple[int | None, Any]:
        import cupy

        return limit(), cupy.active

    try:
        expected = 80 * GIB if known else 40 * GIB
        assert ray.task(limit, [] if known else ["0"], 0.5) is None
        assert ray.task(work, [] if known else ["0"], 0.5) == (expected, True)
    finally:
        sys.modules.pop("cupy", None)
        worker.disarm()
    assert sys.meta_path == before and limit() is None


def test_a_task_without_a_gpu_on_a_machine_without_one_runs(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*given: Any, **more: Any) -> Any:
        raise memguard.DeviceError("no driver", missing=True)

    monkeypatch.setattr(memguard, "guard", none)
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    worker = armed(simulate=None)
    assert ray.task(limit, []) is None
    with pytest.raises(memguard.DeviceError):  # Ray gave it one
        ray.task(limit, ["0"])
    worker.disarm()


def test_the_hook_reads_the_environment_once(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "armed", None)
    monkeypatch.setitem(os.environ, VARIABLE, WorkerRequest.of(budget("80GiB"), whole=True, simulate="h200").text())
    integration.setup()
    first = integration.armed
    integration.setup()
    assert integration.armed is first and first is not None and ray.task(limit, ["0"]) == 80 * GIB
    first.disarm()
