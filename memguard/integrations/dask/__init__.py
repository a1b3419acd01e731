"""Budgets for the workers of dask.distributed: a worker plugin, a preload, and the workers' ledgers at the client.

    client.register_plugin(MemguardPlugin("budget.yaml"))
    print(ledgers(client))

or `dask worker --preload memguard.integrations.dask ... budget.yaml`. Importing this module imports `distributed`.

The plugin applies the budget in each worker process (not in its nanny) before any task runs. The worker's heartbeats
contain its ledger. The plugin logs memguard's events and out-of-memory reports to the scheduler's topic "memguard", and
pauses the worker while the pressure is critical. All of this is undone when the plugin is unregistered or the worker
ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from memguard.integrations.dask.parts import explained, part_of_worker
from memguard.integrations.dask.tables import Ledgers as Ledgers

try:
    from distributed.diagnostics.plugin import WorkerPlugin
except ImportError as _error:  # `MemguardPlugin.__init__` raises it again
    _missing: str | None = str(_error)
    WorkerPlugin = object
else:
    _missing = None

if TYPE_CHECKING:
    from memguard._runtime.runtime import BudgetLike, MissingGpu
    from memguard.integrations.dask.attach import Attached

__all__ = ["Ledgers", "MemguardPlugin", "ledgers"]

NAME = "memguard"
"""The plugin's name in Dask: registering a second plugin of this name replaces the first, the preload's included."""


class MemguardPlugin(WorkerPlugin):  # type: ignore[misc] # distributed is optional: to mypy its classes are Any
    """Applies a budget in each worker, for `client.register_plugin`.

    The constructor reads the budget file, so the workers' machines do not need it, and an invalid file raises at once.
    `workers_per_gpu` workers share the budget of a GPU in equal parts. `pause` pauses a worker under critical pressure.
    `simulate` and `missing_gpu` are those of `memguard.init`; `missing_gpu="warn"` is for clusters that also have
    workers without a GPU. A budget without `monitor` gets the default monitor, whose samples are published.

    Raises ConfigError; PlanError if a part is too small. `register_plugin` raises the error of a worker that cannot
    apply the budget. A worker that starts later and cannot apply it closes.
    """

    name = NAME
    idempotent = False

    def __init__(
        self,
        budget: BudgetLike,
        *,
        workers_per_gpu: int = 1,
        pause: bool = True,
        simulate: str | Sequence[str] | None = None,
        missing_gpu: MissingGpu = "raise",
    ) -> None:
        if _missing is not None:
            raise ImportError(
                f"memguard.integrations.dask needs dask.distributed ({_missing})\n    fix: pip install distributed"
            )
        from memguard import _budget

        whole = _budget.of(budget)
        if whole.monitor is None:
            whole = whole.model_copy(update={"monitor": _budget.MonitorConfig()})
        self.budget, self._workers = part_of_worker(whole, workers_per_gpu), workers_per_gpu
        self.pause, self.simulate, self.missing_gpu = pause, simulate, missing_gpu
        self._attached: dict[int, Attached] = {}  # several if workers are threads of one process

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_attached": {}}

    def setup(self, worker: Any) -> None:
        """Called by Dask in the worker's process, on its event loop."""
        from memguard.integrations.dask.attach import Attached

        attached = self._attached[id(worker)] = Attached(worker, pause=self.pause)
        try:
            attached.begin(self.budget, self.simulate, self.missing_gpu)
        except BaseException as raised:
            self.teardown(worker)
            error = explained(raised, self._workers)
            if isinstance(error, Exception) and _registering(worker):
                # Dask itself would only log the error and run tasks without a budget.
                worker.log_event(NAME, {"kind": "failed", "text": str(error), "name": worker.name})
                worker.loop.add_callback(worker.close, reason=f"memguard: {str(error).partition(chr(10))[0]}")
            if error is not raised:
                raise error from None
            raise

    def teardown(self, worker: Any) -> None:
        """Called by Dask when the plugin is unregistered or replaced, and when the worker closes."""
        attached = self._attached.get(id(worker))
        if attached is not None:
            attached.end()
            self._attached.pop(id(worker), None)


def _registering(worker: Any) -> bool:
    """Whether the worker is starting: it has received the scheduler's plugins, and its heartbeat does not run yet."""
    heartbeat = worker.periodic_callbacks.get("heartbeat")
    return worker.status.name == "running" and heartbeat is not None and not heartbeat.is_running()


def ledgers(client: Any) -> Any:
    """The ledgers that the workers sent with their last heartbeats: a `Ledgers`, which `print` shows as a table.

    With an asynchronous client, await the result.
    """

    async def received() -> Ledgers:
        return Ledgers.of(await client.scheduler.identity())

    return client.sync(received)


class _Refused(WorkerPlugin):  # type: ignore[misc]
    """Raises the preload's error from `setup`: there it ends the worker, while Dask only logs an error of a preload."""

    name = "memguard-refused"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def setup(self, worker: Any) -> None:
        raise self._error


@click.command()
@click.argument("budget", required=False)
@click.option("--workers-per-gpu", type=click.IntRange(min=1), default=1, help="Workers that share a GPU's budget.")
@click.option("--pause/--no-pause", default=True, help="Whether critical pressure pauses the worker.")
@click.option("--simulate", help="Simulated GPUs instead of real ones: h200, or several with commas.")
@click.option("--missing-gpu", type=click.Choice(["raise", "warn", "simulate"]), default="raise")
@click.option("--create-cuda-context/--no-create-cuda-context", hidden=True)  # dask-cuda passes it to every preload
async def dask_setup(worker: Any, budget: str | None, **options: Any) -> None:
    """The preload. BUDGET is a file, by default MEMGUARD_CONFIG's. A worker that cannot apply it does not start."""
    if not all(hasattr(worker, name) for name in ("memory_manager", "metrics", "plugin_add")):
        raise TypeError("memguard.integrations.dask is a preload of workers: `dask worker --preload`")
    try:
        await worker.plugin_add(_of_options(budget, options, os.environ), name=NAME, catch_errors=False)
    except Exception as error:
        worker.plugins.pop(NAME, None)
        worker._pending_plugins = (*worker._pending_plugins, _Refused(error))
        raise


def _of_options(budget: str | None, options: Mapping[str, Any], environ: Mapping[str, str]) -> MemguardPlugin:
    given = budget or environ.get("MEMGUARD_CONFIG")
    if not given:
        raise ValueError(
            "the preload memguard.integrations.dask was given no budget\n"
            "    fix: --preload-argv budget.yaml, or set MEMGUARD_CONFIG"
        )
    names = options.get("simulate")
    return MemguardPlugin(
        given,
        workers_per_gpu=options["workers_per_gpu"],
        pause=options["pause"],
        simulate=names.split(",") if names else None,
        missing_gpu=options["missing_gpu"],
    )
