"""What a driver asks of its workers: written into their environment, and read there. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memguard import _budget
from memguard._budget import Budget, MonitorConfig

VARIABLE = "MEMGUARD_RAY"
"""The environment variable. It holds the budget itself: a worker's machine need not have the file."""
HOOK = "memguard.integrations.ray.setup"


@dataclass(frozen=True)
class WorkerRequest:
    """`whole`: the budget is that of a whole GPU, of which a worker gets its `num_gpus`. `simulate` names the node's
    GPUs, `job` what metrics call the worker. `setup` is the user's own hook, as `module.function`."""

    budget: Budget
    source: str
    whole: bool = True
    simulate: tuple[str, ...] = ()
    job: str | None = None
    setup: str | None = None

    @classmethod
    def of(
        cls, budget: Budget, *, whole: bool, simulate: str | Sequence[str] | None, setup: str | None = None
    ) -> WorkerRequest:
        """With a monitor, whose samples are Ray's metrics, and without a port: a node has several workers."""
        metrics, source = budget.metrics, budget.source
        job = metrics.job if metrics is not None else None
        if metrics is not None:
            metrics = metrics.model_copy(update={"prometheus": None}) if metrics.opentelemetry else None
        changed: dict[str, Any] = {"metrics": metrics, "monitor": budget.monitor or MonitorConfig()}
        names = (simulate,) if isinstance(simulate, str) else tuple(simulate or ())
        return cls(budget.model_copy(update=changed), source, whole, names, job, setup)

    def text(self) -> str:
        """The value of the variable."""
        more = {"whole": self.whole, "simulate": self.simulate, "job": self.job, "setup": self.setup}
        return json.dumps({"budget": self.budget.model_dump(exclude_none=True), "source": self.source, **more})

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> WorkerRequest:
        """Raises ValueError; ConfigError for a budget that this version of memguard does not know."""
        try:
            found = json.loads(environ[VARIABLE])
            budget, simulate = found.pop("budget"), tuple(found.pop("simulate"))
            return cls(_budget.received(budget, found["source"]), simulate=simulate, **found)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{VARIABLE} is not what memguard.integrations.ray.runtime_env writes: {error}\n"
                "    fix: install the same memguard at the driver and on the workers, and set nothing in it by hand"
            ) from None

    def gpus(self, ids: Sequence[str]) -> list[str] | None:
        """The names of the simulated GPUs that Ray gave to a worker by these numbers; None for real ones."""
        if not self.simulate:
            return None
        if len(self.simulate) == 1:
            return [*self.simulate] * max(len(ids), 1)
        chosen = [self.simulate[int(one)] for one in ids if one.isdecimal() and int(one) < len(self.simulate)]
        return chosen or [*self.simulate]
