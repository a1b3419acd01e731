"""Apply a budget in one Ray worker process, once Ray has assigned its GPUs.

The setup hook runs when the process starts, before Ray assigns GPUs. For a task or an actor Ray first sets
CUDA_VISIBLE_DEVICES, in a function of `ray._private.utils`, and then loads the task's function. memguard wraps the
former and applies the budget right after it, before any code of the task. If that fails, memguard replaces the task's
function with one that raises the error, so that the caller receives it.

Ray hides no GPU from a task with `num_gpus=0`. There memguard applies the budget when the task imports a framework. The
same holds for a version of Ray without the wrapped function.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import memguard
from memguard import api
from memguard._base.blocks import Block
from memguard._base.logs import log as _log
from memguard._base.undo import Undo
from memguard._budget.parts import with_part_note
from memguard._tools.activation import _memguard_environment as environment
from memguard.errors import DeviceError, PlanError
from memguard.integrations.ray import reports
from memguard.integrations.ray.metrics import Metrics
from memguard.integrations.ray.parts import exact, part
from memguard.integrations.ray.request import HOOK, WorkerRequest

if TYPE_CHECKING:
    from memguard._guard.guard import Guard

_ASSIGN = "set_visible_accelerator_ids"
"""The function of `ray._private.utils` that sets CUDA_VISIBLE_DEVICES before each task and each actor's creation."""
_FUNCTION = "get_execution_info"
"""The method of Ray's function manager that returns a task's function."""
_LOST = (
    "the job's worker_process_setup_hook, {name}, was given as a function, and would not run: Ray runs one hook in a "
    'process, and this is memguard\'s\n    fix: runtime_env(budget, worker_process_setup_hook="module.function")'
)


class Worker:
    """The budget of this worker process, from `arm` to `disarm`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._request: WorkerRequest | None = None
        self._undo, self._applied = Undo(), Undo()
        self._gpus: tuple[str, ...] | None = None
        self._finder: environment._Finder | None = None
        self._refusal: Exception | None = None
        self._function_wrapped = self._ran = self._job_hook_ran = False
        self._pid = os.getpid()

    def arm(self) -> None:
        """The setup hook. Applies no budget. Never raises: Ray would restart the worker endlessly."""
        self._undo.add("the budget", self._end)
        self._undo.add("the wait for a framework", self._stop_waiting)
        try:
            self._wrap_assignment()
            request = WorkerRequest.read(self._environ)
            if request.setup is not None:
                _run(request.setup)
            self._request = request
        except Exception as error:
            self._refuse(error)

    def disarm(self) -> None:
        """Undo all steps. After an interruption the next call runs the remaining ones."""
        self._undo.run()

    def _wrap_assignment(self) -> None:
        from ray._private import utils

        original: Callable[..., Any] | None = getattr(utils, _ASSIGN, None)
        if original is None:
            _log.warning(
                "this version of Ray has no ray._private.utils.%s: the budget is applied when a task imports its first "
                "framework",
                _ASSIGN,
            )
            self._wait_for_import()
            return
        live = [True]

        def assign(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if live and os.getpid() == self._pid:
                self._begin_task()
            return found

        def unwrap() -> None:
            live.clear()
            if getattr(utils, _ASSIGN) is assign:
                setattr(utils, _ASSIGN, original)

        self._undo.add("what Ray does before a task", unwrap)
        setattr(utils, _ASSIGN, assign)

    # before a task, on its thread

    def _begin_task(self) -> None:
        request = self._request
        if request is None:  # `arm` failed, so every task raises its error
            return
        try:
            self._run_hook_of_job(request)
            gpus = _assigned()
            if gpus and gpus != self._gpus:
                self._end()
                self._begin(request, gpus)
            elif not gpus and self._gpus is None:
                self._begin_without(request)
        except Exception as error:
            self._refuse(error)
        else:
            self._refusal, self._ran = None, True

    def _run_hook_of_job(self, request: WorkerRequest) -> None:
        """Run the job's own hook, which memguard's replaced, once. Reading runtime_env in `setup` crashes Ray 2.60."""
        if self._job_hook_ran or request.setup is not None:
            return
        import ray

        self._request = None  # set again below if the hook succeeds
        found = ray.get_runtime_context().runtime_env.get("worker_process_setup_hook")
        if found and found != HOOK:
            if not isinstance(found, str) or "." not in found:
                raise ValueError(_LOST.format(name=found))
            _run(found)
        self._request, self._job_hook_ran = request, True

    def _begin_without(self, request: WorkerRequest) -> None:
        if self._finder is not None:
            return
        if any(name in sys.modules for name in environment.MODULES):
            self._apply_late(request)
        else:
            self._wait_for_import()

    def _begin(self, request: WorkerRequest, gpus: tuple[str, ...]) -> None:
        import ray

        amount = Fraction(1)
        if request.whole and gpus:
            amount = exact(round(ray.get_runtime_context().get_assigned_resources().get("GPU", 1), 4))
        budget = part(request.budget, amount)
        block = memguard.guard(budget, simulate=request.gpus(gpus))
        self._applied.add("the budget", lambda: block.__exit__(None, None, None))
        try:
            self._enter(block, request.job or _name())
        except PlanError as error:
            raise with_part_note(error, amount, f"num_gpus={float(amount):g}") from None
        self._gpus = gpus
        self._stop_waiting()

    def _enter(self, block: Block[Guard], job: str) -> None:
        if not block.__enter__().active:  # MEMGUARD_DISABLE: the log has the reason
            return
        session = api.current_session()
        metrics = Metrics(session, job)
        session.undo.add("the figures in Ray's metrics", metrics.end)  # also if the program ends the budget
        watch = memguard.on_sample(metrics.update)
        self._applied.add("the samples for Ray's metrics", watch.remove)
        reports.begin(self._applied)

    def _end(self) -> None:
        self._applied.run()
        self._gpus = None

    # without a GPU from Ray

    def _wait_for_import(self) -> None:
        self._finder = environment._Finder(self._on_import)
        sys.meta_path = [self._finder, *sys.meta_path]

    def _stop_waiting(self) -> None:
        finder = self._finder
        if finder is not None:
            environment._leave(finder)

    def _on_import(self) -> None:
        """Called on a task's thread when it imports a framework. An error fails this import, and the next one too."""
        request = self._request
        if request is not None and self._gpus is None and os.getpid() == self._pid:
            self._apply_late(request)

    def _apply_late(self, request: WorkerRequest) -> None:
        gpus = _assigned()
        try:
            self._begin(request, gpus)
        except DeviceError as error:
            self._applied.run()
            if gpus or not error.missing:
                raise
            _log.debug("no budget in a task without a GPU: %s", str(error))
        except BaseException:
            self._applied.run()
            raise

    # failures

    def _refuse(self, error: Exception) -> None:
        """Make tasks raise the error in place of their function."""
        from ray._private.worker import global_worker

        self._applied.run()
        self._refusal = error.with_traceback(None)  # its frames would stay alive as long as the worker
        manager: Any = getattr(global_worker, "function_actor_manager", None)
        original: Callable[..., Any] | None = getattr(manager, _FUNCTION, None)
        if self._function_wrapped:
            return
        if original is None or self._ran:  # `_ran`: Ray may have cached functions of earlier tasks
            raise error  # Ray logs it and ends the worker

        def info(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            return found._replace(function=self._or_refused(found.function)) if self._refusal is not None else found

        self._undo.add("the refusal of tasks", lambda: vars(manager).pop(_FUNCTION, None))
        self._function_wrapped = True
        setattr(manager, _FUNCTION, info)

    def _or_refused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if self._refusal is not None:
                raise self._refusal.with_traceback(None)  # its frames are all memguard's
            return function(*args, **kwargs)

        return refused


def _run(name: str) -> None:
    """Run a hook, given as `module.function`."""
    module, _, function = name.rpartition(".")
    getattr(importlib.import_module(module), function)()


def _assigned() -> tuple[str, ...]:
    """The GPUs that Ray assigned to this worker, by their numbers on the node."""
    import ray

    return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


def _name() -> str:
    """The name of the actor's class or the task's function. A worker with a GPU serves only one."""
    import ray

    context = ray.get_runtime_context()
    found = context.get_task_function_name() or ""
    words = [word for word in found.split(".") if not word.startswith(("__", "<"))]
    return words[-1] if words else "worker"
