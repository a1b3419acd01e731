"""The budget that a Ray driver passes to its workers in an environment variable. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memguard import _budget
from memguard._budget import Budget, MonitorConfig

VARIABLE = "MEMGUARD_RAY"
"""The environment variable. It contains the budget itself, so a worker's machine does not need the file."""
HOOK = "memguard.integrations.ray.setup"


@dataclass(frozen=True)
class WorkerRequest:
    """The content of the variable.

    `whole`: the budget is that of a whole GPU, and a worker gets the part that its `num_gpus` gives. `simulate` names
    the node's simulated GPUs, `job` is the worker's name in metrics, `setup` the user's own hook (`module.function`).
    """

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
        """Add a monitor for Ray's metrics, and remove the Prometheus port, which a node's workers cannot share."""
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
        """Parse the variable. Raises ValueError; ConfigError for a budget that this memguard does not accept."""
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
        """The names of the simulated GPUs that Ray assigned by the numbers `ids`; None if GPUs are real."""
        if not self.simulate:
            return None
        if len(self.simulate) == 1:
            return [*self.simulate] * max(len(ids), 1)
        chosen = [self.simulate[int(one)] for one in ids if one.isdecimal() and int(one) < len(self.simulate)]
        return chosen or [*self.simulate]
