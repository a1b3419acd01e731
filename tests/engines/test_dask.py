"""memguard in the workers of a real Dask cluster: two processes with nannies, on simulated GPUs."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import dask
import pytest
import waiting
from distributed import Client, LocalCluster, WorkerPlugin

import memguard
from memguard import api
from memguard._runtime import runtime, session
from memguard.integrations import dask as integration
from memguard.integrations.dask import Ledgers, MemguardPlugin, ledgers

cloudpickle.register_pickle_by_value(sys.modules[__name__])

GIB = 2**30
BUDGET = """
version: 1
device: {limit: 8GiB, reserve: 1GiB}
frameworks:
  torch: {limit: 4GiB}
  cupy: {limit: 2GiB}
monitor: {interval: 50ms}
"""
USERS = """
def dask_setup(worker):
    from memguard import api
    from memguard._runtime import runtime
    worker.at_users_preload = dict(api.current().plan.devices[0].caps)
"""
QUICK = {
    "distributed.worker.memory.monitor-interval": "50ms",
    "distributed.comm.timeouts.connect": "20s",
    "distributed.scheduler.allowed-failures": 0,
}


class Users(WorkerPlugin):
    """In the place of dask-cuda's: given to the worker when it is made."""

    name = "users"

    def setup(self, worker: Any) -> None:
        worker.at_users_plugin = runtime.this.session is not None


until = functools.partial(waiting.until, seconds=90.0, pause=0.02)


def torch() -> Any:
    return api.current().frameworks["torch"]


def take(size: int) -> int:
    """As a library that keeps what it allocates."""
    framework = torch()
    block = framework.allocate(size)
    framework.kept = [*getattr(framework, "kept", []), block]
    return os.getpid()


def give() -> None:
    framework = torch()
    for block in getattr(framework, "kept", []):
        framework.free(block)
    framework.kept = []


def in_worker(client: Client, function: Callable[..., Any], *args: Any, address: str | None = None) -> dict[str, Any]:
    """By address, not as tasks: also in a worker that is paused."""
    found: dict[str, Any] = client.run(function, *args, workers=None if address is None else [address])
    return found


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("dask") / "budget.yaml"
    path.write_text(BUDGET)
    return str(path)


def cluster(**given: Any) -> LocalCluster:
    return LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0",
        env={"MEMGUARD_SIMULATE": "h200"}, **given,
    )  # fmt: skip


@pytest.fixture(scope="module")
def preloaded(budget: str) -> Iterator[Client]:
    """The budget by the preload, then the user's own preload and plugin."""
    with (
        dask.config.set(QUICK),
        cluster(preload=["memguard.integrations.dask", USERS], preload_argv=[[budget], []], plugins=[Users()]) as made,
        Client(made) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def plain() -> Iterator[Client]:
    """Workers without memguard."""
    with dask.config.set(QUICK), cluster() as made, Client(made) as client:
        yield client


@pytest.fixture
def plugged(plain: Client, budget: str) -> Iterator[Client]:
    plain.register_plugin(MemguardPlugin(budget))
    yield plain
    if "memguard" in next(iter(in_worker(plain, lambda dask_worker: list(dask_worker.plugins)).values())):
        plain.unregister_worker_plugin("memguard")


def test_the_preload_applies_the_budget_in_each_worker_before_user_code(preloaded: Client) -> None:
    def seen(dask_worker: Any) -> tuple[int, dict[str, int], bool]:
        return os.getpid(), dask_worker.at_users_preload, dask_worker.at_users_plugin

    found = list(in_worker(preloaded, seen).values())
    assert len(found) == 2 and len({pid for pid, *_ in found} | {os.getpid()}) == 3
    for _, caps, active in found:
        assert caps == {"torch": 4 * GIB, "cupy": 2 * GIB} and active
    with pytest.raises(memguard.NotActive):  # not in the process of the nannies
        memguard.ledger()


def test_the_arguments_of_the_preload(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def plugin(*argv: str) -> MemguardPlugin:
        context = integration.dask_setup.make_context("dask_setup", list(argv), allow_extra_args=False)
        given = dict(context.params)
        return integration._of_options(given.pop("budget"), given, os.environ)

    monkeypatch.delenv("MEMGUARD_CONFIG", raising=False)
    with pytest.raises(ValueError, match="was given no budget"):
        plugin("--no-pause")
    half = plugin(budget, "--workers-per-gpu", "2", "--simulate", "h200,t4", "--missing-gpu", "warn")
    assert half.budget.device.limit == 4 * GIB and half.simulate == ["h200", "t4"]
    assert (half.pause, half.missing_gpu) == (True, "warn")
    monkeypatch.setenv("MEMGUARD_CONFIG", budget)
    whole = plugin("--create-cuda-context", "--no-pause")  # dask-cuda gives its own preload's to every one
    assert whole.budget == memguard.Budget.load(budget) and not whole.pause


def test_the_client_of_a_refused_task_gets_the_report_and_so_does_the_scheduler(preloaded: Client) -> None:
    address, about = min(preloaded.scheduler_info()["workers"].items())
    with pytest.raises(Exception, match="out of memory") as caught:
        preloaded.submit(take, 5 * GIB, workers=[address], key="too-much").result(timeout=30)
    (note,) = caught.value.__notes__
    assert "memguard: torch ran out of GPU memory: 5.00 GiB asked for (simulated)" in note and "cap" in note
    assert all(f"\n  {label} " in note for label in ("error", "GPU", "why", "holds", "do")), note

    def reports() -> list[dict[str, Any]]:
        return [event for _, event in preloaded.get_events("memguard") if event["kind"] == "report"]

    (report,) = until(reports)
    assert (report["worker"], report["task"], report["name"]) == (address, "too-much", about["name"])
    assert report["text"] == note
    assert any(event["kind"] == "oom" for _, event in preloaded.get_events("memguard"))

    def too_long() -> None:
        raise MemoryError(f"CUDA out of memory. Tried to allocate 20.00 GiB. {'x' * 20_000}")

    with pytest.raises(MemoryError, match="Long error message") as long:  # Dask's own, in its place
        preloaded.submit(too_long).result(timeout=30)
    assert "memguard: " in long.value.__notes__[0] and "20.00 GiB asked for" in long.value.__notes__[0]
    with pytest.raises(ZeroDivisionError) as other:
        preloaded.submit(lambda: 1 // 0).result(timeout=30)
    assert not hasattr(other.value, "__notes__")


def test_the_ledgers_are_at_the_scheduler_and_on_the_dashboard(preloaded: Client) -> None:
    from bokeh.client import pull_session
    from bokeh.models import DataTable

    pids = {
        preloaded.submit(take, size, workers=[address], pure=False).result(timeout=30): size
        for address, size in zip(sorted(preloaded.scheduler_info()["workers"]), (GIB, 3 * GIB), strict=True)
    }

    def held() -> Ledgers | None:
        found: Ledgers = ledgers(preloaded)
        sizes = {
            one["pid"]: one["devices"][0]["frameworks"].get("torch", {}).get("held")
            for one in found.workers.values()
            if one is not None
        }
        return found if sizes == pids else None

    found = until(held)
    lines = str(found).splitlines()
    assert lines[0] == "simulated GPUs: nothing real is limited"
    assert [line.split()[0] for line in lines[2:]] == ["0", "0", "1", "1"], str(found)
    rows = sorted(line.split()[4:] for line in lines if "torch" in line)
    assert rows == [["torch", *f"{size}.00 GiB {size}.00 GiB 4.00 GiB".split()] for size in (1, 3)], str(found)
    port = int(preloaded.dashboard_link.split(":")[2].split("/")[0])
    page = pull_session(url=f"http://127.0.0.1:{port}/workers")
    try:
        tables = [
            one
            for one in page.document.select({"type": DataTable})
            if "memguard_held" in {c.field for c in one.columns}
        ]
        (table,) = tables
        text = " ".join(map(str, table.source.data["memguard_held"]))
        assert "of 8.00 GiB (simulated)" in text and "ok" in table.source.data["memguard_pressure"], table.source.data
    finally:
        page.close()
    in_worker(preloaded, give)


def test_a_killed_worker_comes_back_with_its_budget(preloaded: Client) -> None:
    pids = in_worker(preloaded, os.getpid)
    victim = min(pids)
    os.kill(pids[victim], signal.SIGKILL)
    until(lambda: victim not in preloaded.scheduler_info()["workers"])
    preloaded.wait_for_workers(2, timeout=20)
    again = until(lambda: now if len(now := in_worker(preloaded, os.getpid)) == 2 else None)
    (address,) = [address for address, pid in again.items() if pid not in pids.values()]
    with pytest.raises(Exception, match="out of memory") as caught:
        preloaded.submit(take, 5 * GIB, workers=[address], pure=False).result(timeout=30)
    assert "memguard: torch ran out of GPU memory" in "".join(caught.value.__notes__)
    until(lambda: (one := ledgers(preloaded).workers.get(address)) is not None and one["active"])


def test_a_worker_is_paused_under_critical_pressure_and_stays_so(plugged: Client) -> None:
    address, other = sorted(plugged.scheduler_info()["workers"])

    def status() -> str:
        return str(plugged.scheduler_info()["workers"][address]["status"])

    assert status() == "running"
    in_worker(plugged, take, 4 * GIB - 64 * 2**20, address=address)
    until(lambda: status() == "paused")
    waiting = plugged.submit(os.getpid, workers=[address], pure=False)
    elsewhere = plugged.submit(os.getpid, workers=[other], pure=False)
    assert elsewhere.result(timeout=30) in in_worker(plugged, os.getpid).values()
    for _ in range(20):  # as many intervals of Dask's memory monitor, which resumes what it did not pause
        time.sleep(0.05)
        assert in_worker(plugged, lambda dask_worker: dask_worker.status.name, address=address) == {address: "paused"}
    assert not waiting.done()
    until(lambda: (one := ledgers(plugged).workers[address]) is not None and one["paused"])

    def resume(dask_worker: Any) -> None:
        dask_worker.status = type(dask_worker.status).running

    in_worker(plugged, resume, address=address)  # somebody else's: it does not last
    until(
        lambda: in_worker(plugged, lambda dask_worker: dask_worker.status.name, address=address) == {address: "paused"}
    )
    in_worker(plugged, give, address=address)
    assert waiting.result(timeout=30) == in_worker(plugged, os.getpid, address=address)[address]

    def said() -> bool:
        kinds = [event["kind"] for _, event in plugged.get_events("memguard") if event["worker"] == address]
        return [kind for kind in kinds if kind in ("paused", "resumed")] == ["paused", "resumed"]

    until(said)


def test_a_pause_of_dasks_own_is_not_undone(plugged: Client) -> None:
    address = min(plugged.scheduler_info()["workers"])

    def status() -> str:
        return str(in_worker(plugged, lambda dask_worker: dask_worker.status.name, address=address)[address])

    def from_now(fraction: float) -> Callable[..., None]:
        def change(dask_worker: Any) -> None:
            dask_worker.memory_manager.memory_pause_fraction = fraction

        return change

    def held() -> bool | None:
        one = ledgers(plugged).workers[address]
        return one and one["paused"]

    in_worker(plugged, take, 4 * GIB - 64 * 2**20, address=address)
    until(lambda: status() == "paused" and held())
    in_worker(plugged, from_now(1e-9), address=address)  # any process has more host memory than that
    try:
        in_worker(plugged, give, address=address)
        until(lambda: held() is False)
        time.sleep(0.2)
        assert status() == "paused"
    finally:
        in_worker(plugged, from_now(0.8), address=address)
    until(lambda: status() == "running")


def state(dask_worker: Any) -> dict[str, Any]:
    import gc
    import threading

    from distributed import worker as module

    gc.collect()
    return {
        "metrics": sorted(dask_worker.metrics),
        "status": dask_worker.status.name,
        "manager": sorted(name for name in vars(dask_worker.memory_manager) if "pause" in name),
        "error_message": type(module.error_message).__name__,
        "hooks": [
            sys.excepthook.__module__ if hasattr(sys.excepthook, "__module__") else "",
            sys.excepthook is sys.__excepthook__,
        ],
        "monitor": [one.name for one in threading.enumerate() if "memguard" in one.name],
        "callbacks": len(session.event_callbacks) + len(session.sample_callbacks),
        "budget": runtime.this.session is not None,
        "plugins": sorted(dask_worker.plugins),
    }


def test_unregistering_leaves_the_workers_as_they_were(plain: Client, budget: str) -> None:
    before = in_worker(plain, state)
    address = min(before)
    plain.register_plugin(MemguardPlugin(budget))
    within = in_worker(plain, state)
    assert all(within[one][key] != before[one][key] for one in before for key in before[one] if key != "status"), within
    in_worker(plain, take, 4 * GIB - 64 * 2**20, address=address)
    until(lambda: in_worker(plain, state)[address]["status"] == "paused")
    plain.unregister_worker_plugin("memguard")
    assert in_worker(plain, state) == before
    assert plain.submit(os.getpid, workers=[address], pure=False).result(timeout=30)
    until(lambda: ledgers(plain).workers[address] is None)


def test_a_budget_that_cannot_be_applied_is_told_and_no_worker_runs_without_it(plain: Client, tmp_path: Any) -> None:
    with pytest.raises(memguard.ConfigError, match="there is no such file"):
        MemguardPlugin(tmp_path / "none.yaml")
    too_large = {"version": 1, "device": {"limit": "900GiB"}, "frameworks": {"torch": {"limit": "4GiB"}}}
    before = in_worker(plain, state)
    small = {"version": 1, "device": {"limit": "1GiB"}, "frameworks": {"torch": {"share": "50%"}}}
    with pytest.raises(memguard.PlanError, match=r"a worker, whose limits are 1/2 of .*workers_per_gpu=2"):
        plain.register_plugin(MemguardPlugin(small, workers_per_gpu=2))
    with pytest.raises(memguard.MemguardError, match="900"):
        plain.register_plugin(MemguardPlugin(too_large))
    assert [{**one, "plugins": []} for one in in_worker(plain, state).values()] == [
        {**one, "plugins": []} for one in before.values()
    ]
    address = min(before)
    os.kill(in_worker(plain, os.getpid)[address], signal.SIGKILL)  # its nanny starts another one
    failed = until(lambda: [event for _, event in plain.get_events("memguard") if event["kind"] == "failed"])
    assert "900" in failed[0]["text"]
    until(lambda: len(plain.scheduler_info()["workers"]) == 1)
    with dask.config.set(QUICK), pytest.raises(RuntimeError, match=r"[Nn]anny|[Ww]orker") as caught:
        cluster(preload=["memguard.integrations.dask"], preload_argv=[[str(tmp_path / "none.yaml")]])
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, memguard.ConfigError):
        error = error.__cause__
    assert error is not None and "there is no such file" in str(error)


def test_workers_that_are_threads_share_one_budget_which_the_last_one_ends(budget: str) -> None:
    from distributed import worker as module

    untouched = module.error_message
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as made,
        Client(made) as client,
    ):
        client.register_plugin(MemguardPlugin(budget, simulate="h200"))
        first, second = sorted(client.scheduler_info()["workers"])
        for address in (first, second):
            with pytest.raises(Exception, match="out of memory") as caught:
                client.submit(take, 5 * GIB, workers=[address], pure=False).result(timeout=30)
            assert "memguard: torch ran out of GPU memory" in "".join(caught.value.__notes__)

        def reporters() -> list[str]:
            return [event["worker"] for _, event in client.get_events("memguard") if event["kind"] == "report"]

        until(lambda: len(reporters()) == 2)
        assert reporters() == [first, second]
        client.retire_workers([first])
        until(lambda: len(client.scheduler_info()["workers"]) == 1)
        until(lambda: len(session.sample_callbacks) == 1)  # the other has left
        assert runtime.this.session is not None and module.error_message is not untouched
        client.unregister_worker_plugin("memguard")
        assert runtime.this.session is None and module.error_message is untouched


def test_a_worker_without_a_budget_says_so(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU, with `missing_gpu="warn"`."""
    monkeypatch.setenv("MEMGUARD_DISABLE", "1")
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as made,
        Client(made) as client,
    ):
        client.register_plugin(MemguardPlugin(budget))
        (address,) = client.scheduler_info()["workers"]
        found: Any = until(lambda: one if (one := ledgers(client)).workers[address] is not None else None)
        assert "no budget" in str(found) and "MEMGUARD_DISABLE is set" in found.workers[address]["why"]
        (about,) = client.scheduler_info()["workers"].values()
        assert about["metrics"]["memguard_held"] == about["metrics"]["memguard_pressure"] == "no budget"
        assert client.submit(os.getpid).result(timeout=30) == os.getpid()
        client.unregister_worker_plugin("memguard")
        assert not session.event_callbacks and not session.sample_callbacks
