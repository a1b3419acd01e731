"""memguard in the workers of a real Ray cluster: one node, two GPUs that Ray believes in, simulated in the workers."""

from __future__ import annotations

import functools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import waiting

# Read when Ray is imported: no telemetry, nothing but 127.0.0.1, and no token in the home folder.
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

import ray
import ray.cloudpickle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import memguard
from memguard import api
from memguard._runtime import runtime
from memguard._tools.activation._memguard_environment import MODULES
from memguard.integrations.ray import options, runtime_env

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

GIB = 2**30
BUDGET = {
    "version": 1,
    "device": {"limit": "80GiB", "reserve": "1GiB"},
    "frameworks": {"torch": {"limit": "40GiB"}, "cupy": {"share": "10%"}},
    "monitor": {"interval": "50ms"},
    "metrics": {"prometheus": 9477, "job": "ours"},
}
OWN = {
    "version": 1,
    "device": {"limit": "25%", "reserve": "1GiB"},
    "frameworks": {"torch": {"share": "50%"}},
    "monitor": {"interval": "50ms"},
}
HOOKS = """
import os
seen = []
def job(): seen.append(("job", os.environ.get("CUDA_VISIBLE_DEVICES")))
def own(): seen.append(("own", os.environ.get("CUDA_VISIBLE_DEVICES")))
def broken(): raise ValueError("the hook is broken")
"""
FRAMEWORK = "from memguard._runtime import runtime\nactive = runtime.this.session is not None\n"


until = functools.partial(waiting.until, seconds=90.0, pause=0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The env_vars that find the modules above in workers. Ray's sockets want a short path."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "ray_hooks.py").write_text(HOOKS)
    (folder / "cupy").mkdir()
    (folder / "cupy" / "__init__.py").write_text(FRAMEWORK)
    root = str(Path(memguard.__file__).parents[1])
    variables = {"PYTHONPATH": os.pathsep.join([str(folder), root])}
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as temporary:
        ray.init(
            num_cpus=8, num_gpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20,
            runtime_env={"env_vars": {**variables}, "worker_process_setup_hook": "ray_hooks.job"}, _temp_dir=temporary,
            _system_config={"metrics_report_interval_ms": 1000},
        )  # fmt: skip
        try:
            yield variables
        finally:
            ray.shutdown()


@pytest.fixture(autouse=True)
def actors(cluster: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Makes actors that end with the test, so that the next one has both GPUs."""
    made: list[Any] = []

    def make(kind: type, given: dict[str, Any], *args: Any) -> Any:
        made.append(ray.remote(num_cpus=0, **given)(kind).remote(*args))
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)
    until(lambda: ray.available_resources().get("GPU") == 2)


def about() -> dict[str, Any]:
    """What a worker knows, in a task."""
    context = ray.get_runtime_context()
    guard = runtime.this.session.guard if runtime.this.session is not None else None
    return {
        "pid": os.getpid(),
        "gpus": context.get_accelerator_ids()["GPU"],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "hooks": sys.modules["ray_hooks"].seen if "ray_hooks" in sys.modules else [],
        "limit": guard.plan.devices[0].limit if guard else None,
        "caps": dict(guard.plan.devices[0].caps) if guard else None,
        "devices": len(guard.plan.devices) if guard else None,
        "name": guard.plan.devices[0].device.name if guard else None,
    }


class Holder:
    """An actor that takes memory of the simulated torch."""

    at_start: dict[str, Any]

    def __init__(self, size: int = 0) -> None:
        self.at_start = about()
        self.blocks: list[Any] = []
        if size:
            self.take(size)

    def about(self) -> dict[str, Any]:
        return self.at_start

    def take(self, size: int) -> int:
        self.blocks.append(api.current().frameworks["torch"].allocate(size))
        return os.getpid()

    def take_in_turns(self, size: int) -> Iterator[int]:
        yield self.take(GIB)
        yield self.take(size)

    def pass_on(self, other: Any, size: int) -> Any:
        return ray.get(other.take.remote(size))

    def divide(self) -> float:
        return 1 / 0

    def shut(self) -> None:
        memguard.shutdown()


class Metered(Holder):
    """Of another name in the metrics."""


class Looping(Holder):
    async def take(self, size: int) -> int:  # type: ignore[override]
        return Holder.take(self, size)

    async def divide(self) -> float:  # type: ignore[override]
        return 1 / 0


def failed(reference: Any) -> Exception:
    with pytest.raises(Exception, match=r".") as caught:
        ray.get(reference, timeout=40)
    return caught.value


def whole_report(error: Exception) -> str:
    """The error's text, which has one report, with all its parts."""
    text = str(error)
    assert text.count("memguard: torch ran out of GPU memory") == 1, text
    assert all(f"\n  {label} " in text for label in ("error", "GPU", "why", "holds", "do")), text
    assert not getattr(error, "__notes__", None)
    return text


def test_the_budget_is_applied_after_ray_set_the_gpus_and_is_the_part_that_num_gpus_says(
    cluster: dict[str, str],
    actors: Callable[..., Any],
) -> None:
    env = runtime_env(BUDGET, simulate=["h200", "b200"], env_vars=cluster)
    quarter, whole = (actors(Holder, {"num_gpus": amount, "runtime_env": env}) for amount in (0.25, 1))
    small, large = ray.get([quarter.about.remote(), whole.about.remote()], timeout=40)
    assert small["pid"] != large["pid"] and {small["visible"], large["visible"]} == {"0", "1"}
    for one in (small, large):
        assert one["hooks"] == [("job", one["visible"])], "the job's own hook runs too"
    assert (small["limit"], small["caps"]["torch"]) == (20 * GIB, 10 * GIB)
    assert (large["limit"], large["caps"]["torch"]) == (80 * GIB, 40 * GIB)
    names = {"0": "NVIDIA H200", "1": "NVIDIA B200"}
    assert all(one["name"] == names[one["visible"]] and one["devices"] == 1 for one in (small, large))
    assert ray.get(quarter.take.remote(9 * GIB), timeout=40) == small["pid"]
    assert "cap 10.00 GiB" in whole_report(failed(quarter.take.remote(2 * GIB)))


def test_num_gpus_follows_from_the_budget_and_two_actors_have_two_budgets(
    cluster: dict[str, str], actors: Callable[..., Any]
) -> None:
    given = options(OWN, simulate="h200", runtime_env={"env_vars": cluster})
    assert given["num_gpus"] == 0.25
    many = [actors(Holder, given) for _ in range(2)]
    found = ray.get([one.about.remote() for one in many], timeout=40)
    assert len({one["pid"] for one in found}) == 2
    assert {one["limit"] for one in found} == {found[0]["limit"]} and 34 * GIB < found[0]["limit"] < 36 * GIB


JOB = """
import json, os, sys
import ray
from memguard.integrations.ray import runtime_env

def limit():
    from memguard import api
    from memguard._runtime import runtime
    return runtime.this.session.guard.plan.devices[0].limit if runtime.this.session is not None else None

budget, address = json.loads(sys.argv[1]), sys.argv[2]
env = runtime_env(budget, simulate="h200", env_vars={"PYTHONPATH": os.environ["PYTHONPATH"]})
ray.init(address, runtime_env=env, log_to_driver=False)
tasks = [ray.remote(num_gpus=part, num_cpus=0)(limit).remote() for part in (0.25, 0.5, 0)]
print(json.dumps([limit(), *ray.get(tasks, timeout=40)]))
ray.shutdown()
"""


def test_a_job_gives_its_budget_to_all_of_its_workers(cluster: dict[str, str]) -> None:
    """Its own driver, which has none: as of `ray.init(runtime_env=...)`."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", JOB, json.dumps(BUDGET), address]
    done = subprocess.run(command, env={**os.environ, **cluster}, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None, 20 * GIB, 40 * GIB, None]


def test_memguards_own_variable_works_too_and_a_runtime_env_wins_over_it(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "budget.yaml").write_text(json.dumps(OWN))
    variables = {**cluster, "MEMGUARD_CONFIG": str(tmp_path / "budget.yaml"), "MEMGUARD_SIMULATE": "t4"}

    def work() -> str:
        import cupy

        assert cupy.active
        return str(about()["name"])

    given = {"num_gpus": 0.1, "num_cpus": 0}
    plain = ray.remote(**given, runtime_env={"env_vars": variables})(work)
    ours = ray.remote(**given, runtime_env=runtime_env(BUDGET, simulate="h200", env_vars=variables))(work)
    assert ray.get([plain.remote(), ours.remote()], timeout=40) == ["Tesla T4", "NVIDIA H200"]


def test_a_bundle_of_a_placement_group_counts_like_num_gpus(cluster: dict[str, str]) -> None:
    group = ray.util.placement_group([{"GPU": 0.25}])
    ray.get(group.ready(), timeout=40)
    within = PlacementGroupSchedulingStrategy(group)
    env = runtime_env(BUDGET, simulate="h200", env_vars=cluster)
    task = ray.remote(num_gpus=0.25, num_cpus=0, runtime_env=env, scheduling_strategy=within)(about)
    assert ray.get(task.remote(), timeout=40)["limit"] == 20 * GIB
    ray.util.remove_placement_group(group)


def test_the_caller_gets_the_report_of_every_kind_of_actor_and_task(
    cluster: dict[str, str], actors: Callable[..., Any]
) -> None:
    given = options(BUDGET, num_gpus=0.1, simulate="h200", runtime_env={"env_vars": cluster})
    sync, looping = actors(Holder, given), actors(Looping, given)
    threaded = actors(Holder, {**given, "max_concurrency": 2})
    dead = actors(Holder, given, 5 * GIB)
    task = ray.remote(**given)(lambda size: api.current().frameworks["torch"].allocate(size)).remote(5 * GIB)
    for actor in (sync, looping, threaded):
        error = failed(actor.take.remote(5 * GIB))
        assert isinstance(error, ray.exceptions.RayTaskError)
        assert "5.00 GiB asked for (simulated)" in whole_report(error)
        other = failed(actor.divide.remote())
        assert isinstance(other, ZeroDivisionError) and "memguard: " not in str(other)
    whole_report(failed(task))
    died = failed(dead.about.remote())
    assert isinstance(died, ray.exceptions.RayActorError)
    whole_report(died)
    turns = sync.take_in_turns.options(num_returns="streaming").remote(5 * GIB)
    ray.get(next(turns), timeout=40)
    whole_report(failed(next(turns)))
    text = whole_report(failed(sync.pass_on.remote(threaded, 5 * GIB)))
    assert "pass_on" in text, "the report is that of the actor whose memory it was, and there is no other"


def test_a_task_without_a_gpu_has_a_budget_from_its_first_framework_on(cluster: dict[str, str]) -> None:
    assert "cupy" in MODULES

    def work() -> tuple[Any, Any]:
        before = about()["limit"]
        import cupy

        return before, (cupy.active, about()["limit"])

    env = runtime_env(BUDGET, simulate="h200", env_vars=cluster)
    assert ray.get(ray.remote(runtime_env=env)(work).remote(), timeout=40) == (None, (True, 80 * GIB))

    def outer() -> Any:
        return about()["limit"], ray.get(ray.remote(num_gpus=0.5, num_cpus=0)(about).remote())

    env = runtime_env(BUDGET, simulate="h200", env_vars={**cluster, "ANOTHER": "process"})
    own, inner = ray.get(ray.remote(runtime_env=env)(outer).remote(), timeout=40)
    assert own is None and inner["limit"] == 40 * GIB, "nested tasks inherit the runtime_env"


def test_a_process_that_is_given_another_gpu_gets_its_budget_there(
    cluster: dict[str, str], actors: Callable[..., Any]
) -> None:
    """Only with `max_calls=0`: Ray else ends a process after one task with a GPU."""
    env = runtime_env(BUDGET, simulate=["h200", "b200"], env_vars={**cluster, "ANOTHER": "pool"})
    one = ray.remote(num_gpus=0.5, num_cpus=0, max_calls=0, runtime_env=env)(about)
    first = ray.get(one.remote(), timeout=40)
    keep = actors(Holder, {"num_gpus": 0.9})
    ray.get(keep.about.remote(), timeout=40)
    for found in (first, ray.get(one.remote(), timeout=40)):
        assert found["name"] == {"0": "NVIDIA H200", "1": "NVIDIA B200"}[found["visible"]], (first, found)
        assert found["limit"] == 40 * GIB


def test_what_cannot_be_applied_is_the_error_of_the_task_and_none_runs_without_it(
    cluster: dict[str, str], actors: Callable[..., Any]
) -> None:
    large = {"version": 1, "device": {"limit": "9000GiB"}, "frameworks": {"torch": {"limit": "4GiB"}}}
    env = runtime_env(large, simulate="h200", env_vars=cluster)
    hook = runtime_env(BUDGET, simulate="h200", env_vars=cluster, worker_process_setup_hook="ray_hooks.broken")
    few = {"num_gpus": 0.1, "num_cpus": 0}
    task = ray.remote(**few, runtime_env=env)(about).remote()
    actor = actors(Holder, {"num_gpus": 0.1, "runtime_env": env})
    real = ray.remote(**few, runtime_env=runtime_env(BUDGET, env_vars=cluster))(about).remote()
    broken = ray.remote(**few, runtime_env=hook)(about).remote()
    for reference, kind, text in (
        (task, memguard.PlanError, "is more than NVIDIA H200"),
        (actor.about.remote(), ray.exceptions.ActorDiedError, "is more than NVIDIA H200"),
        (real, memguard.DeviceError, "no usable NVIDIA driver here"),
        (broken, ValueError, "the hook is broken"),
    ):
        error = failed(reference)
        assert isinstance(error, kind) and text in str(error), error
        assert "_base/blocks.py" not in str(error), "frames of memguard's own"


def test_ray_drops_the_public_field_of_a_task(cluster: dict[str, str]) -> None:
    """Why `runtime_env` sets the variable that stands behind it. If this fails, it may use the field."""
    env = {"worker_process_setup_hook": "ray_hooks.own", "env_vars": cluster}
    assert ("own", None) not in ray.get(ray.remote(runtime_env=env)(about).remote(), timeout=40)["hooks"]
    mine = runtime_env(BUDGET, simulate="h200", **env)
    assert ray.get(ray.remote(runtime_env=mine)(about).remote(), timeout=40)["hooks"] == [("own", None)]


def scraped() -> dict[str, float]:
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    lines = urllib.request.urlopen(url, timeout=10).read().decode().splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith("ray_memguard_"))
    return {series: float(value) for series, _, value in found}


def series(name: str, *labels: str) -> float | None:
    found = [
        value
        for key, value in scraped().items()
        if key.startswith(f"{name}{{") and all(label in key for label in labels)
    ]
    assert len(found) < 2, found
    return found[0] if found else None


def test_the_ledger_is_in_rays_metrics_until_the_budget_ends(
    cluster: dict[str, str], actors: Callable[..., Any]
) -> None:
    assert all(node["NodeManagerAddress"] == "127.0.0.1" for node in ray.nodes())
    budget = {key: value for key, value in BUDGET.items() if key != "metrics"}
    given = options(budget, num_gpus=0.5, simulate="h200", runtime_env={"env_vars": cluster})
    actor = actors(Metered, given)
    ray.get(actor.take.remote(3 * GIB), timeout=40)
    ours = 'job_name="Metered"', 'simulated="true"', 'framework="torch"', 'gpu="0"', "uuid="
    until(lambda: series("ray_memguard_framework_held_bytes", *ours) == 3 * GIB)
    assert series("ray_memguard_framework_cap_bytes", *ours) == 20 * GIB
    assert series("ray_memguard_framework_in_use_bytes", *ours) == 3 * GIB
    assert series("ray_memguard_framework_pressure_level", *ours) == 0
    assert series("ray_memguard_process_limit_bytes", ours[0]) == 40 * GIB
    assert not any("pid=" in one.lower() for one in scraped())
    ray.get(actor.shut.remote(), timeout=40)
    until(lambda: series("ray_memguard_framework_held_bytes", *ours) is None)


def test_nothing_of_ours_is_left_at_the_driver(cluster: dict[str, str]) -> None:
    assert runtime.this.session is None and not [one for one in threading.enumerate() if "memguard" in one.name]
    assert ray.exceptions.RayTaskError.__init__.__module__ == "ray.exceptions"
