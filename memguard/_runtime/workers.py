"""Detects processes in which `memguard.init` applies no budget, and defines the inactive guards that it returns there.

Such processes are multiprocessing workers, processes with MEMGUARD_DISABLE, and processes without a GPU.

With the start methods `spawn` and `forkserver` (the default from Python 3.14 on), multiprocessing imports the program's
script in each worker, which runs a `memguard.init` at module level again. If `init` applied the budget there, each
worker could allocate up to the full caps. So `init` applies no budget in a worker unless MEMGUARD_CHILDREN is set.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from memguard._base.advice import Advice
from memguard._base.blocks import End
from memguard._base.types import Device, Event, Plan, Room, Sample, WorkloadReport
from memguard._guard.guard import Guard
from memguard._ledger.types import Ledger
from memguard._oom.refusal import RefusalCounts
from memguard.errors import NotActive

if TYPE_CHECKING:
    from memguard._guard.figures import Reclaimable

CHILDREN = "MEMGUARD_CHILDREN"
"""The environment variable that makes a script's `init` apply its budget in workers too."""
DISABLE, SIMULATE = "MEMGUARD_DISABLE", "MEMGUARD_SIMULATE"
WHY = Advice(
    "no budget is active in this process: it is a worker, and memguard.init does nothing while multiprocessing "
    "imports the script again in it",
    "put this call under `if __name__ == '__main__':`; for a budget in the worker, call memguard.init in the "
    f"function that it runs, or set {CHILDREN}=1 and start workers with spawn: then the script's own applies in each",
)
FROM_FORK_SERVER = Advice(
    "no budget is active in this process: it is a worker of multiprocessing's fork server, which imported the "
    f"script once for all of them, so that {CHILDREN}=1 does not reach them",
    "call memguard.init in the function that the worker runs, or start workers with spawn",
)
# multiprocessing (which torch and joblib use), its fork `multiprocess` (pickles with dill), and Celery's fork.
_POOLS = ("multiprocessing.process", "multiprocess.process", "billiard.process")
_WITHOUT_BUDGET = {"active", "frameworks", "notes", "permanent", "start", "stop", "forked"}


def reimporting(modules: Mapping[str, object]) -> bool:
    """True while multiprocessing imports the program's script in this worker. Imports nothing.

    multiprocessing sets the flag `_inheriting` during that import, to forbid that the script starts processes.
    """
    for name in _POOLS:
        current = getattr(modules.get(name), "current_process", None)
        if callable(current) and getattr(current(), "_inheriting", False):
            return True
    return False


def from_fork_server(modules: Mapping[str, object], command: Sequence[str]) -> bool:
    """True in a forked child of multiprocessing's fork server; False in a forked child of a worker."""
    parent = getattr(modules.get("multiprocessing.process"), "parent_process", None)
    return any("multiprocessing.forkserver" in word for word in command) and callable(parent) and parent() is None


def wanted(reimporting: bool, environ: Mapping[str, str]) -> bool:
    """True if `init` should apply its budget because `reimporting` is False or MEMGUARD_CHILDREN is set."""
    return not reimporting or environ.get(CHILDREN, "") not in ("", "0")


def disabled(environ: Mapping[str, str]) -> bool:
    """True if MEMGUARD_DISABLE is set, and not to 0."""
    return environ.get(DISABLE, "") not in ("", "0")


def simulated(environ: Mapping[str, str]) -> list[str] | None:
    """The GPU models in MEMGUARD_SIMULATE; None if the variable is not set or empty."""
    return [name.strip() for name in environ.get(SIMULATE, "").split(",") if name.strip()] or None


class _Inactive(Guard):
    """A guard without a budget: it applies no caps."""

    def _repr_html_(self) -> str:
        from memguard._base.text import html

        return f"<pre>{html(str(self))}</pre>"

    @property
    def active(self) -> bool:
        return False

    @property
    def frameworks(self) -> Mapping[str, Any]:
        return {}

    def stop(self) -> list[str]:
        return []

    def forked(self) -> None:
        pass


class PassiveGuard(_Inactive):
    """The guard that `init` returns in a worker. It is not active; its methods that need a budget raise NotActive."""

    def __init__(self) -> None:  # does not call `Guard.__init__`, which needs GPUs
        self.notes, self.permanent = [], []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in _WITHOUT_BUDGET:
            return super().__getattribute__(name)
        raise NotActive(WHY)

    def start(self) -> None:
        raise NotActive(WHY)

    def __repr__(self) -> str:
        return "<PassiveGuard, not active: print it for the reason>"

    def __str__(self) -> str:
        return str(WHY)


class IdleGuard(_Inactive):
    """The guard that `init` returns if the program should run without a budget. Its methods do nothing.

    `why`: the reason why no budget is applied. `given`: the budget argument of `init`, which the attribute `budget`
    parses on access. `ledger()` and `sample()` have no GPUs. `device_plan` raises NotActive. Other attributes of an
    active guard, such as `host`, raise AttributeError with the reason.
    """

    plan = Plan(())  # replaces the property of `Guard`, so that `__init__` can set it

    def __init__(self, why: str, given: Any) -> None:  # does not call `Guard.__init__`, which needs GPUs
        self.why, self.given = why, given
        self.notes, self.permanent = [why], []
        self.plan = Plan((), notes=(why,))
        self.sharing, self.trims, self.refusals = None, Counter(), RefusalCounts()

    def __getattr__(self, name: str) -> Any:
        if name != "budget":
            raise AttributeError(f"{name}: {self.why}")
        from memguard import _budget

        return _budget.of(self.given)

    @property
    def undone(self) -> bool:
        return True

    def start(self) -> None:
        pass

    def ledger(self) -> Ledger:
        return Ledger(time.time(), (), notes=(self.why,))

    def sample(self) -> Sample:
        return Sample(time.time(), ())

    def last_sample(self) -> Sample | None:
        return None

    def device_plan(self, uuid: str) -> NoReturn:
        self._refuse()

    @property
    def own_plan(self) -> Plan:
        return self.plan

    def busy(self) -> Iterator[tuple[str, int | None]]:
        return iter(())

    def peaks(self) -> dict[str, dict[str, int]]:
        return {}

    def rebalance(self, sample: Sample) -> Sample:
        return sample

    def take_events(self) -> list[Event]:
        return []

    def make_room(self, framework: str, needed: int, device: Device | None = None) -> Room:
        return Room({}, None, 0, {})  # there is no cap to raise

    def require(self, framework: str, size: int | str, device: Device | None = None) -> None:
        pass

    def begin_workload(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        return WorkloadReport(name, framework), lambda error: None

    async def begin_workload_in_loop(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        return self.begin_workload(name, framework, needs, wait)

    def reserved_not_taken(self, framework: str, uuid: str) -> int:
        return 0

    def reclaimable(self) -> Reclaimable:
        from memguard._guard.figures import Reclaimable

        return Reclaimable(time.time(), ())

    def resize(self, framework: str, size: int | str) -> None:
        pass

    def trim(self, framework: str | None = None) -> int:
        return 0

    def _refuse(self) -> NoReturn:
        raise NotActive(self.why)

    def __repr__(self) -> str:
        return "<IdleGuard, not active: print it for the reason>"

    def __str__(self) -> str:
        return self.why
