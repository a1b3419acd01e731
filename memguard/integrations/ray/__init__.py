"""Budgets for the tasks and actors of Ray: a `runtime_env` with the budget, and the `num_gpus` that fits it.

    ray.init(runtime_env=runtime_env("budget.yaml"))         # budget of a whole GPU: a worker gets its num_gpus of it
    Trainer.options(**options("trainer.yaml")).remote()      # budget of this actor: its num_gpus follows from it

A worker applies the budget once Ray has set its CUDA_VISIBLE_DEVICES, before the task's code runs. The error of a task
or actor that ran out of GPU memory contains memguard's report. Ray's metrics contain the worker's ledger.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memguard._base.types import Device
    from memguard._runtime.runtime import BudgetLike
    from memguard.integrations.ray.worker import Worker

__all__ = ["node_resources", "options", "runtime_env", "setup"]

_FIELD = "worker_process_setup_hook"
_CONSTANT = "WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""The constant in `ray._private.ray_constants` that names the environment variable of a worker's setup hook. Ray reads
the public field in `ray.init` only, and silently ignores it in the options of a task or an actor."""

armed: Worker | None = None
"""The worker object that `setup` made in this process."""


def runtime_env(budget: BudgetLike, *, simulate: str | Sequence[str] | None = None, **more: Any) -> dict[str, Any]:
    """A `runtime_env` for `ray.init`, `@ray.remote` or `.options`: the budget of a whole GPU, for every worker on it.

    A worker to which Ray assigns a part of a GPU (`num_gpus=0.25`) gets that part of the budget's limits, in percent
    and in bytes. This call reads the budget file, so the workers' machines do not need it. `more` is the rest of the
    runtime_env, such as `env_vars`, `pip` and `working_dir`; name your own `worker_process_setup_hook` as
    "module.function". `simulate` names simulated GPUs for nodes without GPUs: one name for all GPUs of a node, or one
    for each.

    A task or an actor whose worker cannot apply the budget fails with the reason.

    Raises ConfigError, also for a budget with `ranks`; ValueError for an entry of `more` that cannot be merged;
    ImportError without Ray.
    """
    return _environment(budget, True, simulate, more)


def options(
    budget: BudgetLike,
    *,
    num_gpus: float | None = None,
    gpu: str | None = None,
    memory_units: bool = False,
    simulate: str | Sequence[str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Options of a task or an actor: `num_gpus`, and a `runtime_env` whose budget fits it.

    Without `num_gpus` the budget is the worker's own, and its limit gives the part of a GPU that Ray reserves:
    `limit: 25%` is `num_gpus=0.25`. A limit in bytes requires `gpu`, the name of the smallest GPU ("h200", "t4", as for
    `memguard plan`). With `num_gpus` the budget is that of a whole GPU, and the worker gets its part, as with
    `runtime_env`.

    `memory_units=True` also requests MiB of the resource `gpu_memory_mib`, which nodes declare with `node_resources`.
    `more` are other options of Ray; a `runtime_env` among them is merged.

    Raises ConfigError; PlanError for a budget that gives no single part of a GPU, or does not fit the GPU; ValueError
    for options that cannot be merged, and for an invalid `num_gpus`.
    """
    from memguard import _budget
    from memguard.integrations.ray import parts

    whole = _budget.of(budget)
    devices = _devices(gpu) if gpu is not None else ()
    own = whole
    if num_gpus is None:
        amount = parts.gpus_of(whole, devices)
    else:
        amount = num_gpus
        own = parts.part(whole, parts.exact(num_gpus))
    environment = _environment(whole, num_gpus is not None, simulate, more.pop("runtime_env", None) or {})
    found: dict[str, Any] = {**more, "num_gpus": amount, "runtime_env": environment}
    if memory_units:
        found["resources"] = {**more.get("resources", {}), parts.UNITS: parts.units_of(own, devices)}
    return found


def node_resources(simulate: str | Sequence[str] | None = None) -> dict[str, int]:
    """The MiB of GPU memory of this machine, as a resource for `ray start --resources` and `ray.init(resources=...)`.

    `python -m memguard.integrations.ray` prints it as JSON. Ray counts the units of a node, not of each GPU.

    Raises DeviceError.
    """
    from memguard._base.units import MIB
    from memguard._runtime import runtime
    from memguard.integrations.ray.parts import UNITS

    host = runtime.open_host(simulate)
    try:
        return {UNITS: sum(one.usable for one in host.devices()) // MIB}
    finally:
        host.close()


def setup() -> None:
    """The setup hook that Ray runs in each worker process. Applies no budget: the worker has no GPU yet."""
    global armed
    from memguard.integrations.ray.worker import Worker

    if armed is None:
        armed = Worker(os.environ)
        armed.arm()


def _devices(gpu: str) -> tuple[Device, ...]:
    from memguard._devices.simulated import SimulatedHost

    return SimulatedHost((gpu,)).devices()


def _environment(
    budget: BudgetLike, whole: bool, simulate: str | Sequence[str] | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """`more` with the budget and the hook in its `env_vars`."""
    from memguard import _budget
    from memguard._budget.parts import refuse_ranks
    from memguard.integrations.ray.request import HOOK, VARIABLE, WorkerRequest

    if not isinstance(more, Mapping):
        raise TypeError(f"runtime_env is a mapping, found {type(more).__name__}\n    fix: runtime_env=dict(...)")
    variable = _hook_variable()
    found = dict(more)
    variables = dict(found.get("env_vars") or {})
    setup = found.pop(_FIELD, None)
    if variable is not None:  # `more` was passed to ray.init, which wrote the job's hook into it
        setup = setup or variables.pop(variable, None)
    if setup is not None and not (isinstance(setup, str) and "." in setup):
        raise ValueError(
            f"{_FIELD} cannot be {setup!r} beside a budget: Ray runs one hook in a process, and memguard's calls "
            f'yours\n    fix: put it into a module of the workers, {_FIELD}="module.function"'
        )
    if VARIABLE in variables:
        raise ValueError(
            f"env_vars has {VARIABLE}, which memguard sets itself\n"
            "    fix: leave it out: one runtime_env has one budget"
        )
    loaded = _budget.of(budget)
    refuse_ranks(loaded, "Ray's", "as num_gpus says what part of a GPU a worker has")
    request = WorkerRequest.of(loaded, whole=whole, simulate=simulate, setup=None if setup == HOOK else setup)
    variables[VARIABLE] = request.text()
    if variable is None:
        found[_FIELD] = HOOK
    else:
        variables[variable] = HOOK
    return {**found, "env_vars": variables}


def _hook_variable() -> str | None:
    try:
        from ray._private import ray_constants
    except ImportError as error:
        raise ImportError(
            f"memguard.integrations.ray needs Ray ({error})\n    fix: pip install 'ray[default]'"
        ) from None
    found: str | None = getattr(ray_constants, _CONSTANT, None)
    if found is None:
        from memguard._base.logs import log

        log.warning(
            "this version of Ray has no %s: a budget holds in the runtime_env of ray.init alone, and not in that of a "
            "task or an actor",
            _CONSTANT,
        )
    return found
