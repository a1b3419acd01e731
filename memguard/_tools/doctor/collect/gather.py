"""Starts the processes that query the driver, list the packages and probe each framework, and collects the facts."""

from __future__ import annotations

import datetime
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memguard._devices.cuda_order import importable
from memguard._frameworks import specs
from memguard._frameworks.specs import SPECS
from memguard._tools.doctor.bounds import clip, printable
from memguard._tools.doctor.collect import answers, machine
from memguard._tools.doctor.facts import BudgetFacts, Driver, Facts
from memguard._tools.doctor.probes import inventory, main
from memguard.errors import FactsError, PlanError

if TYPE_CHECKING:
    from memguard._budget import Budget
    from memguard._tools.doctor.collect.processes import Ended

ORDER = tuple(sorted(SPECS, key=lambda name: not SPECS[name].examined.brings_cuda))
"""The import order in a process with all frameworks: PyTorch before TensorFlow."""
PROBES: Mapping[str, Any] = {
    "files": {**specs.files("probe"), "inventory": inventory.__file__},
    "modules": {name: SPECS[name].module for name in ORDER},
    "distributions": {name: SPECS[name].examined.distributions or re.escape(name) for name in ORDER},
}
"""The probes' files, modules and distributions, for each probe process."""
_TENSORFLOW_FIRST = ("tensorflow", "torch")
_EACH = 1536 << 20
"""The most GPU memory of one probe, in bytes: context, modules and libraries of all frameworks."""


def facts(
    budget: Budget | None,
    *,
    frameworks: Sequence[str] | None,
    timeout: float,
    this_process: bool = False,
    python: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    script: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Facts:
    """Collect the facts. Each process is stopped after `timeout` seconds; `say` receives a line when one ends.

    `frameworks` limits the probes to some; without it the budget's are probed, and without a budget all that are
    installed. `this_process` adds facts about this one. `python` and `environ` are the interpreter and environment to
    examine, by default this process's. `script` is a program's file, which is parsed. Raises FactsError if that
    interpreter cannot be started, and for an unknown framework.
    """
    if not sys.executable:
        raise FactsError(
            "this Python is embedded in another program and has no executable that could start processes",
            fix="run `memguard doctor` in a shell, with the environment of that program",
        )
    machine.require_linux()
    unknown = [name for name in frameworks or () if name not in ORDER]
    if unknown:
        raise FactsError(f"no framework has the name {unknown[0]!r}", fix=f"one of {', '.join(ORDER)}")
    started = time.monotonic()
    environ = dict(os.environ if environ is None else environ)
    stop = threading.Event()
    runner = _Runner(
        tuple(python or (sys.executable,)),
        machine.probe_environment(environ),
        timeout,
        stop,
        tuple(entry for entry in sys.path if isinstance(entry, str)) if this_process and python is None else (),
        _folder_of(script) if script is not None else None,
        say or (lambda line: None),
    )
    try:
        driver, installed = _query(runner)
        wanted = tuple(frameworks) if frameworks is not None else _budgeted(budget)
        names = [name for name in ORDER if (name in wanted if wanted is not None else installed.path(name))]
        ended = _probe(runner, driver, [name for name in names if installed.path(name)])
    finally:
        stop.set()
    level = machine.tensorflow_log_level(environ)
    found = Facts(
        memguard=str(getattr(sys.modules["memguard"], "__version__", "")),
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        system=machine.system(environ, installed.python, installed.executable),
        environment=machine.environment(environ),
        tools=machine.tools(environ),
        packages=installed.packages,
        driver=driver,
        frameworks={name: answers.framework(installed.frameworks.get(name, {}), ended.get((name,))) for name in names},
        together=tuple(answers.together(order, how, level) for order, how in ended.items() if len(order) > 1),
        namesakes=installed.namesakes,
        process=_this_process(driver) if this_process else None,
        script=_script(script),
        budget=_budget(budget, driver),
        seconds={
            **runner.seconds,
            "total": round(time.monotonic() - started, 3),
        },
    )
    plain = machine.without_home(found.model_dump(mode="json"), machine.homes(environ))
    return Facts.model_validate(clip(plain))


@dataclass
class _Runner:
    """Starts the processes with common settings. `first`: the folder of the examined program."""

    python: tuple[str, ...]
    environ: Mapping[str, str]
    timeout: float
    stop: threading.Event
    path: tuple[str, ...]
    first: str | None
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, probes: Sequence[str], *, name: str, timeout: float | None = None) -> Ended:
        """Run probes in one process of the interpreter to examine."""
        # Many programs only import TensorFlow: that already loads its CUDA runtime.
        until = {"tensorflow": "import"} if tuple(probes) == _TENSORFLOW_FIRST else {}
        spec = {
            **PROBES,
            "probes": list(probes),
            "until": until,
            "path": list(self.path),
            "first": self.first,
        }
        # `-c` would put the current folder first in sys.path: Python 3.13 then imports a linecache.py from it.
        command = (*self.python, main.__file__)
        return self._watched(name, command, spec, timeout or self.timeout)

    def survey(self) -> Ended:
        """Query the driver, in this interpreter, because the query imports memguard."""
        code = (
            "import json, os, signal, sys; spec = json.loads(sys.argv[1]); signal.alarm(int(spec['timeout']) + 10); "
            "sys.path[:] = spec['path']; from memguard._devices import survey; "
            "fd = os.dup(spec['fd']); survey.main(spec['fd'], spec['without']); "
            'os.write(fd, b\'{"done": "driver"}\\n\')'
        )
        spec = {"path": importable(), "without": [os.getpid()]}
        return self._watched("driver", (sys.executable, "-I", "-c", code), spec, self.timeout)

    def _watched(self, name: str, command: Sequence[str], spec: Mapping[str, Any], timeout: float) -> Ended:
        from memguard._tools.doctor.collect.processes import (
            watch,  # on other systems this import fails; `require_linux` has raised before
        )

        try:
            ended = watch(command, spec, self.environ, timeout, self.stop)
        except OSError as error:
            raise FactsError(
                f"{command[0]} cannot be started: {error.strerror or error}",
                fix=f"name an existing Python: `{shlex.quote(command[0])} -c pass` must work",
            ) from None
        self.seconds[name] = ended.seconds
        how = f"stopped after {ended.seconds:.0f} s" if ended.hung else ended.signal or f"{ended.seconds:.1f} s"
        self.say(f"{name}: {how}")
        return ended


def _query(runner: _Runner) -> tuple[Driver, answers.Installed]:
    """Query the driver and list the packages: both decide what to probe."""
    with ThreadPoolExecutor(2) as pool:
        try:
            survey = pool.submit(runner.survey)
            found = pool.submit(runner.run, ["inventory"], name="inventory")
            return answers.driver(survey.result()), answers.installed(found.result(), runner.python)
        except BaseException:  # Ctrl-C: the pool's exit waits for its threads, which `stop` ends
            runner.stop.set()
            raise


def _folder_of(script: str) -> str | None:
    """The folder of a program; None if its path is relative and the current folder was deleted."""
    try:
        return os.path.dirname(os.path.abspath(script))
    except OSError:
        return None


def _budgeted(budget: Budget | None) -> tuple[str, ...] | None:
    return tuple(budget.frameworks) if budget is not None else None


def _probe(runner: _Runner, driver: Driver, names: Sequence[str]) -> dict[tuple[str, ...], Ended]:
    """Run the probes: each framework alone; with a GPU also all in one process, and PyTorch after TensorFlow."""
    several: list[tuple[str, ...]] = []
    if driver.cuda.devices and len(names) > 1:
        several.append(tuple(names))
        if "torch" in names and "tensorflow" in names:
            several.append(_TENSORFLOW_FIRST)
    orders = [*several, *((name,) for name in sorted(names, key=_longest_first))]
    with ThreadPoolExecutor(concurrency(driver, len(orders), _cpus())) as pool:
        try:
            waiting: dict[tuple[str, ...], Future[Ended]] = {
                order: pool.submit(
                    runner.run,
                    order,
                    name=" then ".join(order),
                    timeout=runner.timeout * (2 if len(order) > 1 else 1),
                )
                for order in orders
            }
            return {order: future.result() for order, future in waiting.items()}
        except BaseException:
            runner.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _longest_first(name: str) -> int:
    """Sort key: start the longest probes first, so that all finish sooner."""
    return -SPECS[name].examined.length


def concurrency(driver: Driver, probes: int, cpus: int) -> int:
    """The number of concurrent probes: limited by the CPUs and by the free memory of the fullest GPU.

    Only one if a GPU allows one process at a time.
    """
    visible = {device.uuid for device in driver.cuda.devices}
    gpus = [device for device in driver.nvml.devices if device.uuid in visible]
    if any(device.mode == "Exclusive_Process" for device in gpus):
        return 1
    room = [device.free // _EACH for device in gpus if device.free is not None]
    return max(1, min([probes, cpus, *room]))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _this_process(driver: Driver) -> Any:
    from memguard._tools.doctor.collect import this_process

    return this_process.process(device.uuid for device in driver.nvml.devices if device.uuid)


def _script(path: str | None) -> Any:
    from memguard._tools.doctor.collect import script

    return None if path is None else script.read(path)


def _budget(budget: Budget | None, driver: Driver) -> BudgetFacts | None:
    from memguard._budget import policy

    if budget is None:
        return None
    limits: dict[str, int] = {}
    errors: tuple[str, ...] = ()
    devices = answers.devices(driver)
    if devices:
        try:
            limits = {part.device.uuid: part.limit for part in policy.plan(budget, devices).devices}
        except PlanError as error:
            errors = tuple(problem.render(error.source) for problem in error.problems)
    return BudgetFacts(
        source=printable(budget.source or "budget"),
        frameworks=tuple(budget.frameworks),
        limits=limits,
        errors=errors,
        suspend=getattr(budget, "suspend", None) is not None,
    )
